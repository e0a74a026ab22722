"""What to search and where to run it: `search_settings` and `manager_settings` of every YAML file that has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tokensieve.search.space import Parameter, fault_of
from tokensieve.utils.settings import Count, Positive, Section, Seed

__all__ = ["EvalSearchConfig", "ManagerSettings", "Objective", "SearchSettings", "contradiction"]

# figures of a run that are better when smaller; of all others, more is better
_SMALLER = frozenset(("macs", "gmacs", "gmacs_with_tower", "seconds", "kv_bytes", "first_token_ms", "tokens_average"))


class Objective(Section):
    """A figure of a trial's run, and whether it is to be large or small."""

    metric: str
    direction: Literal["maximize", "minimize"]

    @model_validator(mode="before")
    @classmethod
    def _written_shortly(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = {"metric": data}
        if isinstance(data, Mapping) and "direction" not in data:
            data = {**data, "direction": "minimize" if data.get("metric") in _SMALLER else "maximize"}
        return data

    @property
    def better(self) -> int:
        """1 where more is better, -1 where less is."""
        return 1 if self.direction == "maximize" else -1


class SearchSettings(Section):
    """enable: whether to search; where it is not said, manager_settings.mode says it. n_trials: over all restarts.

    objectives: one or two figures of a run; "accuracy" is a task's own measure, "macs" its cost. Two: the answer is the
    Pareto front. space: by name, see `search.space`. sampler: tpe, or random. study: a file in the output folder,
    SQLite (.db, .sqlite) or a journal (.log, .journal).

    stop_hopeless: with one objective, a trial ends early that is worse than the median of the trials before it at the
    same step, or not among the best stop_percentile per cent of them. stop_after_trials: not before this many have
    ended. stop_after_step: not before that step of a trial. With two objectives Optuna ends no trial early.
    """

    enable: bool | None = None
    n_trials: Positive = 50
    objectives: tuple[Objective, ...] = ()
    space: dict[str, Parameter] = {}  # noqa: RUF012  # pydantic copies it
    sampler: Literal["tpe", "random"] = "tpe"
    sampler_seed: Seed = 0
    stop_hopeless: Literal["median", "percentile", "none"] = "median"
    stop_percentile: Annotated[float, Field(gt=0, lt=100)] = 25.0
    stop_after_trials: Count = 5
    stop_after_step: Count = 0
    study: str = "study.db"

    @model_validator(mode="after")
    def _fits(self) -> SearchSettings:
        fault = fault_of(self.space)
        if fault:
            raise ValueError(fault)
        names = [objective.metric for objective in self.objectives]
        if len(names) > 2 or len(set(names)) != len(names):
            raise ValueError(f"search_settings.objectives {names}: one, or two different ones")
        return self


class ManagerSettings(Section):
    """mode: single, one run; optuna, trials one after another in this process; ray, trials spread over a cluster.

    available_gpus: those of this machine that may be used. gpus_per_subtask, cpus_per_subtask: of each trial, in mode
    ray. ray_address: of a cluster that is there (default: $RAY_ADDRESS, else one is started on this machine).
    """

    mode: Literal["single", "optuna", "ray"] = "single"
    available_gpus: tuple[Count, ...] | None = None
    gpus_per_subtask: Positive | None = None
    cpus_per_subtask: Positive | None = None
    ray_address: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> ManagerSettings:
        if self.available_gpus and self.gpus_per_subtask and self.gpus_per_subtask > len(self.available_gpus):
            raise ValueError(
                f"gpus_per_subtask {self.gpus_per_subtask} is more than the {len(self.available_gpus)} available_gpus"
            )
        return self


class EvalSearchConfig(Section):
    """The file of `tokensieve search`. eval_settings: flags of `tokensieve eval`, and options of a method, that are the
    same in every trial. output_dir: where everything goes."""

    manager_settings: ManagerSettings = ManagerSettings(mode="optuna")
    search_settings: SearchSettings = SearchSettings()
    eval_settings: dict[str, Any] = {}  # noqa: RUF012  # pydantic copies it
    output_dir: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> EvalSearchConfig:
        if self.manager_settings.mode == "single" or self.search_settings.enable is False:
            raise ValueError('a search has manager_settings.mode "optuna" or "ray", and search_settings.enable true')
        return self


def contradiction(manager: ManagerSettings, search: SearchSettings) -> str | None:
    """What is wrong where the two do not agree whether there is a search."""
    if search.enable and manager.mode == "single":
        return 'search_settings.enable is true, but manager_settings.mode is "single": give "optuna" or "ray"'
    if search.enable is False and manager.mode != "single":
        return f'manager_settings.mode is "{manager.mode}", but search_settings.enable is false: give mode "single"'
    return None
