"""A search as a whole: study, trials here or on a cluster, the record after each trial, the best as YAML."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tokensieve.errors import OptionError
from tokensieve.records import write_whole
from tokensieve.report.studies import short_names, value_text, write_study
from tokensieve.search.local import Run, run_here
from tokensieve.search.ray import connected, run_on_cluster
from tokensieve.search.record import study_record
from tokensieve.search.settings import ManagerSettings, Objective, SearchSettings
from tokensieve.search.space import Space, fault_of
from tokensieve.search.study import Asked, StudyFile, open_study

__all__ = ["RECORD", "Outcome", "Search", "run_search"]

RECORD = "search.json"


@dataclass(frozen=True)
class Search:
    """What to search.

    name: for people. run: one trial; Ray sends it to other machines, so it must be picklable. facts: plain data that
    say what is searched, beside objectives and space; a study is not gone on with where they differ. final: a trial's
    values -> the configuration that `eval` or `train` takes, as plain data; flags or sections. notes: told at first.
    """

    name: str
    settings: SearchSettings
    manager: ManagerSettings
    objectives: Sequence[Objective]
    space: Space
    folder: Path
    run: Run
    facts: Mapping[str, Any]
    final: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    command: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """record: the study as plain data. files: the configurations written, best first. new: trials that ended now."""

    record: dict[str, Any]
    files: list[Path]
    new: int


def run_search(search: Search, tell: Callable[[str], None] = lambda line: None) -> Outcome:
    """Go on until n_trials have ended, over all restarts. tell: called with a line for each trial.

    Leaves in the folder: the study's file; search.json, for `tokensieve report`; trials/, each with its result; and
    best.yaml, or with two objectives front/NNNN.yaml for each trial of the Pareto front.
    """
    if not search.space:
        raise OptionError("nothing is left to search: every name of the space is fixed; give search_settings.space")
    fault = fault_of(search.space)
    if fault:
        raise OptionError(fault)
    folder = search.folder.resolve()
    facts = {
        "objectives": [objective.model_dump() for objective in search.objectives],
        "space": {name: p.model_dump(mode="json", exclude_defaults=True) for name, p in search.space.items()},
        **search.facts,
    }
    total, count = search.settings.n_trials, 0
    with open_study(folder / search.settings.study, search.settings, search.objectives, search.space, facts) as store:
        for line in (*search.notes, _opening(store, total)):
            tell(line)

        def after(asked: Asked) -> None:
            nonlocal count
            count += 1
            tell(_line(store, asked, total))
            _write(store, search, folder, importances=False)

        if search.manager.mode == "ray":
            with connected(search.manager) as cluster:
                run_on_cluster(cluster, store, search.run, total, folder, after)
        else:
            if search.manager.available_gpus is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, search.manager.available_gpus))
            run_here(store, search.run, total, folder, after)
        record = _write(store, search, folder)
        return Outcome(record, _configurations(record, search, folder), count)


def _opening(store: StudyFile, total: int) -> str:
    spent = store.spent
    waiting = sum(trial.state.name == "WAITING" for trial in store.trials)
    words = [f"{spent} of {total} trials have ended" if spent else f"{total} trials"]
    words += [f"{waiting} that {'was' if waiting == 1 else 'were'} interrupted run{'s' * (waiting == 1)} again"] * bool(
        waiting
    )
    if len(store.objectives) > 1 and store.settings.stop_hopeless != "none":
        words.append("with two objectives Optuna ends no trial early")
    return "; ".join(words)


def _line(store: StudyFile, asked: Asked, total: int) -> str:
    trial = store.trials[asked.number]
    short = short_names(asked.params)
    values = ", ".join(f"{short[name]} {value_text(value)}" for name, value in asked.params.items())
    if trial.state.name == "COMPLETE":
        pairs = zip(store.objectives, trial.values, strict=True)
        how = ", ".join(f"{objective.metric} {value_text(value)}" for objective, value in pairs)
        how += f" (as trial {trial.user_attrs['twin_of']})" if "twin_of" in trial.user_attrs else ""
    else:
        how = "ended early" if trial.state.name == "PRUNED" else f"failed: {trial.user_attrs.get('error')}"
    return f"trial {asked.number} ({store.spent} of {total}): {values}: {how}"


def _write(store: StudyFile, search: Search, folder: Path, importances: bool = True) -> dict[str, Any]:
    record = study_record(store, search.name, search.facts, search.command, importances=importances)
    write_study(record, folder / RECORD)
    return record


def _configurations(record: dict[str, Any], search: Search, folder: Path) -> list[Path]:
    """The best trials' configurations as YAML; those of fronts that are none any more are removed."""
    best = record["best"]
    if len(search.objectives) == 1:
        paths = dict(zip([folder / "best.yaml"], best, strict=False))
    else:
        paths = {folder / "front" / f"{number:04d}.yaml": number for number in best}
        for old in (folder / "front").glob("[0-9]*.yaml"):
            if old not in paths:
                old.unlink()
    for path, number in paths.items():
        trial = record["trials"][number]
        values = ", ".join(
            f"{objective.metric} {value_text(value)}"
            for objective, value in zip(search.objectives, trial["values"], strict=True)
        )
        text = yaml.safe_dump(_plain(search.final(trial["params"])), sort_keys=False, allow_unicode=True)
        write_whole(path, f"# trial {number} of {search.name}: {values}\n{text}".encode())
    return list(paths)


def _plain(value: Any) -> Any:
    """What YAML's safe kinds can say: tuples as lists, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
