"""Configurations: a YAML file of sections with KEY=VALUE on top, checked by pydantic. No torch.

What is wrong is one line that names the key and, where it is unknown, the nearest right one. A leaf: imports errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tokensieve.errors import OptionError, UnknownNameError, nearest
from tokensieve.utils.yaml import safe_yaml

__all__ = ["Count", "Positive", "Ratio", "Section", "Seed", "keys_of", "parse_settings"]

Ratio = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Section(BaseModel):
    """A part of a configuration; unknown keys are refused, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Whole = TypeVar("Whole", bound=Section)


def parse_settings(kind: type[Whole], data: Any, overrides: Sequence[str] = ()) -> Whole:
    """Plain data (None and {} are all defaults) with SECTION.KEY=VALUE on top, checked.

    A key that only one section has may be given without it: merge_ratio=0.4.
    """
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise OptionError(
            f"a configuration is a mapping of sections such as {' and '.join(list(kind.model_fields)[:2])}"
        )
    tree = _copied(data)
    for pair in overrides:
        _override(kind, tree, pair)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise _explained(kind, error) from None


def _copied(value: Any) -> Any:
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


def _override(kind: type[Section], tree: dict[str, Any], pair: str) -> None:
    key, equals, value = pair.partition("=")
    known = keys_of(kind)
    if not equals or not key:
        raise OptionError(f"{pair!r} is not KEY=VALUE, such as {known[0]}=...")
    whole = [name for name in known if name.endswith(f".{key}")]
    *sections, name = (whole[0] if len(whole) == 1 else key).split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise OptionError(f"{pair!r}: {section} is not a section")
    tree[name] = safe_yaml(value, pair)


def keys_of(section: type[Section], before: str = "") -> list[str]:
    """Every key with its sections, as it is written in KEY=VALUE."""
    found = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found += keys_of(kind, f"{before}{name}.")
        else:
            found.append(f"{before}{name}")
    return found


def _explained(kind: type[Section], error: ValidationError) -> Exception:
    """The first fault, in one line, with the nearest right name where a key is unknown."""
    fault = error.errors()[0]
    place = [str(part) for part in fault["loc"]]
    key = ".".join(place)
    if fault["type"] == "extra_forbidden":
        return UnknownNameError(f"unknown configuration key {key!r}.{nearest(key, _near(kind, place))}")
    message = fault["msg"].removeprefix("Value error, ")
    where = f"{key}={fault['input']!r}: " if key and fault["type"] != "value_error" else ""
    return OptionError(f"configuration: {where}{message}")


def _near(kind: type[Section], place: list[str]) -> list[str]:
    """The keys that could have been meant: those of the same section; of none, the sections and every last name."""
    before = ".".join(place[:-1])
    here: Any = kind
    for name in place[:-1]:
        if isinstance(here, type) and issubclass(here, Section):
            here = here.model_fields[name].annotation
        else:  # names of the user's own, as in dict[str, Section]; or the places of a list
            here = next((part for part in reversed(get_args(here)) if part is not Ellipsis), None)
    if not before:
        return sorted({*here.model_fields, *(key.rsplit(".", 1)[-1] for key in keys_of(kind))})
    return [f"{before}.{name}" for name in getattr(here, "model_fields", ())]
