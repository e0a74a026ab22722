"""The search space, as YAML says it: a name, and the values that it may take. Pydantic, no Optuna.

space:
  method: [anchor, sieve, tome]                   # one of these; lists may be among them, as in [[5], [3, 6, 9]]
  keep: {low: 0.2, high: 0.8, step: 0.05}         # a number; whole where low and high are, unless type says float
  lr: {low: 1e-5, high: 1e-2, log: true}
  fold: bool                                      # true or false
  alpha: {low: 0, high: 1, type: float, when: {method: anchor}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import model_validator

from tokensieve.utils.settings import Section

__all__ = ["Parameter", "Space", "Suggester", "corners", "draw", "fault_of", "label_of", "pinned"]

Kind = Literal["float", "int", "categorical", "bool"]


class Suggester(Protocol):
    """The part of Optuna's trial that draws values."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int: ...

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float: ...


class Parameter(Section):
    """What one name may be.

    type: float, int, categorical or bool; guessed where it is not said. low, high: both belong to the range. step: the
    grid, from low on. log: drawn evenly on a log scale. choices: of a categorical one, plain values or lists of them.
    when: asked for only where those other names have that value, or one of those values.
    """

    type: Kind
    low: float | None = None
    high: float | None = None
    step: float | None = None
    log: bool = False
    choices: tuple[Any, ...] = ()
    when: dict[str, tuple[Any, ...]] = {}  # noqa: RUF012  # pydantic copies it

    @model_validator(mode="before")
    @classmethod
    def _written_shortly(cls, data: Any) -> Any:
        if isinstance(data, list | tuple):
            return {"type": "categorical", "choices": list(data)}
        if data == "bool":
            return {"type": "bool"}
        if not isinstance(data, Mapping):
            raise ValueError(f"{data!r} is not a range: give a list of values, bool, or {{low: 0.1, high: 0.9}}")
        found = dict(data)
        if "type" not in found:
            found["type"] = _guessed(found)
        when = found.get("when")
        if isinstance(when, Mapping):
            found["when"] = {name: value if isinstance(value, list) else [value] for name, value in when.items()}
        return found

    @property
    def values(self) -> tuple[Any, ...]:
        """All values of a categorical or bool parameter; none of the others."""
        return (False, True) if self.type == "bool" else self.choices

    def examples(self) -> tuple[Any, ...]:
        """Values that the rest of the configuration can be checked with: all of a list, the ends of a range."""
        if self.values:
            return self.values
        assert self.low is not None
        assert self.high is not None
        ends = (self.low, self.high)
        return tuple(int(end) for end in ends) if self.type == "int" else ends

    def suggested(self, trial: Suggester, name: str) -> Any:
        """A trial's value. Lists go to Optuna as JSON text, since its choices are plain values."""
        if self.values:
            return self.value_of(trial.suggest_categorical(name, [label_of(value) for value in self.values]))
        assert self.low is not None
        assert self.high is not None
        if self.type == "int":
            step = 1 if self.step is None else int(self.step)
            return self.value_of(trial.suggest_int(name, int(self.low), int(self.high), step=step, log=self.log))
        if self.step is None:
            return self.value_of(trial.suggest_float(name, self.low, self.high, log=self.log))
        # Optuna warns of a last step that is cut short, and never draws from it
        high = round(self.low + math.floor((self.high - self.low) / self.step + 1e-9) * self.step, 12)
        return self.value_of(trial.suggest_float(name, self.low, high, step=self.step))

    def value_of(self, label: Any) -> Any:
        """What Optuna's value stands for; on a grid of steps without the dust of adding them up."""
        if self.values:
            return next(value for value in self.values if _same(label_of(value), label))
        if self.type == "int":
            return int(label)
        return float(label) if self.step is None else round(float(label), 12)


Space = Mapping[str, Parameter]


def _guessed(data: Mapping[str, Any]) -> Kind:
    if "choices" in data:
        return "categorical"
    ends = (data.get("low"), data.get("high"), data.get("step", 1))
    return "int" if all(isinstance(end, int) and not isinstance(end, bool) for end in ends) else "float"


def label_of(value: Any) -> Any:
    """A plain value as it is, a list as JSON text."""
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value


def _same(one: Any, other: Any) -> bool:
    """Equal, and of one kind: 1, 1.0 and True are three choices."""
    return type(one) is type(other) and bool(one == other)


def fault_of(space: Space) -> str | None:
    """The first thing that is wrong with a space, in words that name it; None where nothing is."""
    before: list[str] = []
    for name, parameter in space.items():
        fault = _range_fault(parameter) if parameter.type in ("float", "int") else _choice_fault(parameter)
        for other, values in parameter.when.items():
            if other not in before:
                fault = fault or f"when: {other} is not in the space before it"
            elif space[other].values:
                odd = [v for v in values if not any(_same(label_of(v), label_of(c)) for c in space[other].values)]
                fault = fault or (f"when: {other} is never {odd[0]!r}" if odd else None)
        if fault:
            return f"search_settings.space.{name}: {fault}"
        before.append(name)
    return None


def _range_fault(p: Parameter) -> str | None:
    if p.choices:
        return f"choices are for a categorical one, this is {p.type}"
    if p.low is None or p.high is None:
        return "give low and high"
    if not p.low < p.high:
        return f"low {p.low:g} is not below high {p.high:g}"
    if p.log and p.low <= 0:
        return f"log: low {p.low:g} must be above 0"
    if p.log and p.step is not None:
        return "log and step cannot be used together: give one"
    if p.step is not None and not 0 < p.step <= p.high - p.low:
        return f"step {p.step:g} must be above 0, and no more than high - low"
    if p.type == "int" and any(v is not None and v != int(v) for v in (p.low, p.high, p.step)):
        return "low, high and step of an int are whole numbers; give type: float otherwise"
    return None


def _choice_fault(p: Parameter) -> str | None:
    if any(v is not None for v in (p.low, p.high, p.step)) or p.log:
        return f"low, high, step and log are for numbers, this is {p.type}"
    if p.type == "bool":
        return "a bool has no choices: it is true or false" if p.choices else None
    if not p.choices:
        return "give at least one value in choices"
    labels = [(type(label_of(value)).__name__, label_of(value)) for value in p.choices]
    if len(set(labels)) != len(labels):
        return "the same value is there twice"
    return None


def draw(space: Space, trial: Suggester) -> dict[str, Any]:
    """Values of one trial, by name, in the space's order; names whose `when` does not hold are left out."""
    found: dict[str, Any] = {}
    for name, parameter in space.items():
        if all(_holds(found, other, values) for other, values in parameter.when.items()):
            found[name] = parameter.suggested(trial, name)
    return found


def _holds(found: Mapping[str, Any], name: str, values: Sequence[Any]) -> bool:
    return name in found and any(_same(label_of(found[name]), label_of(value)) for value in values)


def corners(space: Space) -> Iterator[dict[str, Any]]:
    """Few points of the space that have every value of each list and the ends of each range at least once."""
    for name, parameter in space.items():
        for value in parameter.examples():
            wanted = {name: value}
            for other in reversed(list(space)[: list(space).index(name)]):  # what must hold for it to be asked for
                for child in wanted:
                    if other in space[child].when:
                        wanted = {**wanted, other: space[child].when[other][0]}
                        break
            yield draw(space, _Fixed(space, wanted))


class _Fixed:
    """Suggests what is wanted, and the first example of everything else."""

    def __init__(self, space: Space, wanted: Mapping[str, Any]) -> None:
        self._values = {name: wanted.get(name, parameter.examples()[0]) for name, parameter in space.items()}

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return label_of(self._values[name])

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        return int(self._values[name])

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        return float(self._values[name])


def pinned(space: Space, fixed: Mapping[str, Any]) -> dict[str, Parameter]:
    """The space without what is fixed, and without what is then never asked for."""
    left: dict[str, Parameter] = {}
    for name, parameter in space.items():
        if name in fixed:
            continue
        known = [other for other in parameter.when if other in fixed]
        if not all(_holds(fixed, other, parameter.when[other]) for other in known):
            continue
        if any(other not in fixed and other not in left for other in parameter.when):
            continue
        when = {other: values for other, values in parameter.when.items() if other not in fixed}
        left[name] = parameter.model_copy(update={"when": when})
    return left
