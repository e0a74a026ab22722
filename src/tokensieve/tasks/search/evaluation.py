"""Trials that are evaluations: a trial's values as flags of `tokensieve eval`, so that it can be run again."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tokensieve.errors import OptionError, UnknownNameError, nearest
from tokensieve.methods.registry import method_options
from tokensieve.report.results import main_metric
from tokensieve.search import Found, Objective, Parameter, Report, Search
from tokensieve.search.settings import EvalSearchConfig
from tokensieve.search.space import Space, corners, pinned

__all__ = ["EvalTask", "eval_search", "eval_trial", "figures_of", "task_of"]

IMAGES = 200
_DEFAULT = (Objective(metric="accuracy", direction="maximize"), Objective(metric="macs", direction="minimize"))


class EvalTask(Protocol):
    """The module `tokensieve.tasks.TASK.search_space`.

    SPACE: where the file names none, as YAML has it. ALIASES: other names of flags. EXCLUSIVE: groups of flags that
    cannot be used together. COUNTS: whether there is `--images`. LEFT_OUT: flags of the search, not of what is found.
    """

    SPACE: Mapping[str, Any]
    ALIASES: Mapping[str, str]
    EXCLUSIVE: Sequence[set[str]]
    COUNTS: bool
    LEFT_OUT: Sequence[str]

    def given(self, words: Sequence[str]) -> dict[str, Any]:
        """Flags of `tokensieve eval TASK`, as they were typed, by name; method options among them."""

    def flags(self) -> set[str]:
        """Names of all flags."""

    def check(self, table: Mapping[str, Any]) -> None:
        """Raise what is wrong with a table of flags, as far as that is known before a model is loaded."""

    def evaluated(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """The result of `tokensieve eval TASK` with a table of flags."""


def task_of(name: str) -> EvalTask:
    module: Any = importlib.import_module(f"tokensieve.tasks.{name}.search_space")
    found: EvalTask = module
    return found


def eval_search(
    name: str, config: EvalSearchConfig, fixed: Mapping[str, Any], images: int | None, command: str
) -> Search:
    """What to search: the space without what is fixed, every value in it checked."""
    task, settings = task_of(name), config.search_settings
    flat = _flat(task, fixed)
    if task.COUNTS:
        images = flat.pop("images", None) if images is None else images
        images = IMAGES if images is None else images
        if not isinstance(images, int) or images < 1:
            raise OptionError(f"--images {images}: at least 1")
    space = _space(task, settings.space, flat)
    objectives = settings.objectives or _DEFAULT
    rungs: tuple[int | None, ...] = (images,)
    if images is not None and len(objectives) == 1 and settings.stop_hopeless != "none" and images >= 8:
        rungs = (images // 4, images)
    for params in corners(space):
        task.check(_table(task, {**flat, **params}))

    def final(params: Mapping[str, Any]) -> Mapping[str, Any]:
        table = _table(task, {**flat, **params})
        return {key: value for key, value in table.items() if key not in task.LEFT_OUT}

    return Search(
        name=f"eval {name}", settings=settings, manager=config.manager_settings, objectives=objectives, space=space,
        folder=Path(config.output_dir or f"runs/search-{name}"),
        run=partial(eval_trial, name, flat, rungs, objectives[0].metric), facts={"fixed": flat, "images": images},
        final=final, command=command,
    )  # fmt: skip


def eval_trial(
    name: str, fixed: Mapping[str, Any], rungs: Sequence[int | None], metric: str, params: Mapping[str, Any],
    origin: int, report: Report,
) -> Found:  # fmt: skip
    """One trial: evaluated on the first images of each rung, so that a hopeless one ends after a few."""
    task = task_of(name)
    table = _table(task, {**fixed, **params})
    for images in rungs:
        result = task.evaluated(table if images is None else {**table, "images": images})
        figures = figures_of(result)
        if images != rungs[-1] and images is not None and metric in figures:
            report(images, figures[metric])
    return Found(figures, record=result)


def figures_of(result: Mapping[str, Any]) -> dict[str, float]:
    """All numbers of a result by name: accuracy, its main metric, and macs (G, of one image or prompt) first of all."""
    _, accuracy = main_metric(result)
    found = {"accuracy": accuracy, "macs": result.get("gmacs"), **result["metrics"], **result}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


# -- names -------------------------------------------------------------------------------------------------------------


def _flat(task: EvalTask, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Flags and method options side by side, under one name each."""
    found = {task.ALIASES.get(name, name): value for name, value in fixed.items()}
    options = found.pop("method_option", None) or {}
    if not isinstance(options, Mapping):
        raise OptionError("eval_settings.method_option: give a table of options")
    return {**found, **options}


def _table(task: EvalTask, flat: Mapping[str, Any]) -> dict[str, Any]:
    """As the file of `tokensieve eval --config` has it: flags, and the method's options in a table of their own."""
    flags = task.flags()
    options = {name: value for name, value in flat.items() if name not in flags}
    table = {name: value for name, value in flat.items() if name in flags}
    return {**table, "method_option": options} if options else table


def _space(task: EvalTask, given: Space, fixed: Mapping[str, Any]) -> dict[str, Parameter]:
    """The space under the flags' names; an option is asked for only where the method has it."""
    source = given or {name: Parameter.model_validate(value) for name, value in task.SPACE.items()}
    space = {task.ALIASES.get(name, name): parameter for name, parameter in source.items()}
    excluded = set().union(*(group for group in task.EXCLUSIVE if group & set(fixed)))
    names = sorted((name for name in space if name not in excluded), key=lambda name: name != "method")
    space = {name: space[name] for name in names}  # the method first: options hang on it
    flags, options = task.flags(), _options([*_choices(space), *_choices(fixed)])
    _check_names([*space, *fixed], flags, options)
    if "method" in fixed:  # what is typed must be an option of it; what the file has for other methods need not
        _check_names(fixed, flags, _options(_choices(fixed)))
    for name, parameter in space.items():
        if name not in flags and "method" in space and "method" not in parameter.when:
            has = tuple(method for method, its in options.items() if name in its)
            space[name] = parameter.model_copy(update={"when": {**parameter.when, "method": has}})
    return pinned(space, fixed)


def _check_names(names: Iterable[str], flags: set[str], options: Mapping[str, set[str]]) -> None:
    known = flags.union(*options.values())
    for name in names:
        if name not in known:
            raise UnknownNameError(f"no flag and no option of the methods is named {name!r}.{nearest(name, known)}")


def _choices(settings: Mapping[str, Any]) -> list[str]:
    """The methods that a space may choose, or the one that is fixed."""
    method = settings.get("method")
    found = method.values if isinstance(method, Parameter) else [] if method is None else [method]
    return [str(name) for name in found if name != "none"]


def _options(methods: Sequence[str]) -> dict[str, set[str]]:
    return {method: set(method_options(method)) for method in methods}
