"""`manager_settings.mode: optuna | ray` of `tokensieve train reid`: a search whose trials are training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tokensieve.search import Found, Parameter, Report, Search
from tokensieve.tasks.reid.config import ReidConfig, parse_config
from tokensieve.tasks.search.training import SINGLE, pairs_of, training_search, trial_folder, watched

__all__ = ["default_space", "reid_search", "reid_trial"]


def default_space(config: ReidConfig) -> dict[str, Parameter]:
    """Where the file names none: the learning rate around its own, and SDTPS's three figures where it is on."""
    lr = config.SOLVER.BASE_LR
    found = {"SOLVER.BASE_LR": Parameter(type="float", low=lr / 10, high=lr * 10, log=True)}
    if config.MODEL.USE_SDTPS and config.MODEL.SELECTION == "sdtps":
        found["MODEL.SDTPS_SPARSE_RATIO"] = Parameter(type="float", low=0.3, high=0.8, step=0.1)
        found["MODEL.SDTPS_AGGR_RATIO"] = Parameter(type="float", low=0.2, high=0.8, step=0.1)
        found["MODEL.SDTPS_BETA"] = Parameter(type="float", low=0.0, high=0.5, step=0.05)
    return found


def trial_config(data: Any, pairs: Sequence[str], params: Mapping[str, Any], folder: Path) -> ReidConfig:
    return parse_config(data, [*pairs, *SINGLE, *pairs_of(params), f"OUTPUT_DIR={folder}"])


def reid_search(data: Any, pairs: Sequence[str] = (), command: str = "") -> Search:
    """What to search, from the file's data and KEY=VALUE on top; everything of it that can be checked is checked."""
    config = parse_config(data, pairs)
    run = partial(reid_trial, data, tuple(pairs), Path(config.OUTPUT_DIR).resolve())
    made = partial(trial_config, data, pairs)
    return training_search(
        f"train reid, {config.DATASETS.NAMES}", config, "OUTPUT_DIR", default_space(config), made, run, command
    )


def reid_trial(
    data: Any, pairs: Sequence[str], folder: Path, params: Mapping[str, Any], origin: int, report: Report
) -> Found:
    """One run. Its figures: accuracy (mAP on held-out identities), R1, and macs (G, of a sample, SDTPS counted)."""
    from tokensieve.tasks.reid.train import build_task, train_reid

    config = trial_config(data, pairs, params, trial_folder(folder, origin))
    task = build_task(config)
    found = watched(task, partial(train_reid, config, task=task), Path(config.OUTPUT_DIR), report)
    macs = (task.model.cost().macs + task.model.compressor_macs()) / 1e9
    return replace(found, figures={**found.figures, "macs": macs})
