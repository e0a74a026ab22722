"""A study as plain data: trials, importances, the best. For the table, the report and whoever reads JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tokensieve.records import hardware, versions
from tokensieve.report.studies import STUDY_FORMAT
from tokensieve.search.study import StudyFile, import_optuna

__all__ = ["study_record"]

_ENOUGH = 4  # trials, before a word about importance means anything


def study_record(
    store: StudyFile, name: str, facts: Mapping[str, Any], command: str, *, importances: bool = True
) -> dict[str, Any]:
    """Everything about a study but Optuna's own bookkeeping.

    importances: Optuna's (fANOVA: the share of the variance that a parameter explains), for each objective, over the
    parameters that every trial has. They take a moment, so that the records after each trial go without.
    """
    optuna = import_optuna()
    return {
        "format": STUDY_FORMAT,
        "name": name,
        "objectives": [objective.model_dump() for objective in store.objectives],
        "space": {name: p.model_dump(mode="json", exclude_defaults=True) for name, p in store.space.items()},
        "trials": [_trial(store, trial) for trial in store.trials],
        "best": store.best(),
        "importances": [_importances(store, number) for number in range(len(store.objectives) * importances)],
        "settings": store.settings.model_dump(mode="json", exclude={"space", "objectives", "enable"}),
        "facts": dict(facts),
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **{key: value for key, value in hardware(None, "cpu").items() if key in ("cpu", "cores")},
        **{f"version_{package}": version for package, version in versions().items()},
        "version_optuna": optuna.__version__,
    }  # fmt: skip


def _trial(store: StudyFile, trial: Any) -> dict[str, Any]:
    attrs = trial.user_attrs
    states = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
    state = next((name for name in ("interrupted", "void") if attrs.get(name)), states[trial.state.name])
    found = {
        "number": trial.number,
        "state": state,
        "params": _params(store, trial),
        "values": list(trial.values) if trial.state.name == "COMPLETE" else None,
        "figures": attrs.get("figures", {}),
        "steps": [[step, value] for step, value in sorted(trial.intermediate_values.items())],
        "seconds": attrs.get("seconds"),
    }
    return found | {key: attrs[key] for key in ("error", "twin_of", "retry_of") if key in attrs}


def _params(store: StudyFile, trial: Any) -> dict[str, Any]:
    """The values that were drawn, lists as lists; those of the space that the trial did not get to are left out."""
    labels = trial.params or trial.system_attrs.get("fixed_params", {})
    return {name: p.value_of(labels[name]) for name, p in store.space.items() if name in labels}


def _importances(store: StudyFile, objective: int) -> dict[str, float]:
    optuna = import_optuna()
    ended = [trial for trial in store.trials if trial.state.name == "COMPLETE"]
    if len(ended) < _ENOUGH or len({trial.values[objective] for trial in ended}) < 2:
        return {}
    evaluator = optuna.importance.FanovaImportanceEvaluator(n_trees=32, seed=0)
    found = optuna.importance.get_param_importances(
        store.study, evaluator=evaluator, target=lambda trial: trial.values[objective]
    )
    return {name: float(share) for name, share in found.items()}
