"""`manager_settings.mode: optuna | ray` of `tokensieve train vlm`: a search whose trials are training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tokensieve.search import Found, Parameter, Report, Search
from tokensieve.tasks.search.training import SINGLE, pairs_of, training_search, trial_folder, watched
from tokensieve.tasks.vlm.config import VlmConfig, parse_config

__all__ = ["default_space", "vlm_search", "vlm_trial"]


def default_space(config: VlmConfig) -> dict[str, Parameter]:
    """Where the file names none: both learning rates around its own, and what the losses weigh."""
    rates = config.dl.optimizers
    around = {
        "trainer_settings.dl_settings.optimizers.token_merger.lr": rates.token_merger.lr,
        "trainer_settings.dl_settings.optimizers.layer_pruners.lr": rates.layer_pruners.lr,
    }
    found = {name: Parameter(type="float", low=lr / 10, high=lr * 10, log=True) for name, lr in around.items()}
    found["method_settings.adv_loss_weight"] = Parameter(type="float", low=0.0, high=2.0)
    found["method_settings.temperature_min"] = Parameter(
        type="float", low=config.method.temperature / 20, high=config.method.temperature / 2, log=True
    )
    return found


def trial_config(data: Any, pairs: Sequence[str], params: Mapping[str, Any], folder: Path) -> VlmConfig:
    """The configuration of one trial. merge_ratio in the space stands for itself: a count in the file gives way."""
    names = {name.rsplit(".", 1)[-1] for name in params}
    alone = ["method_settings.target_merge_tokens=null"] if "merge_ratio" in names else []
    alone = [] if "target_merge_tokens" in names else alone
    return parse_config(data, [*pairs, *SINGLE, *alone, *pairs_of(params), f"output_dir={folder}"])


def vlm_search(data: Any, pairs: Sequence[str] = (), command: str = "") -> Search:
    """What to search, from the file's data and KEY=VALUE on top; everything of it that can be checked is checked."""
    config = parse_config(data, pairs)
    run = partial(vlm_trial, data, tuple(pairs), Path(config.output_dir).resolve())
    made = partial(trial_config, data, pairs)
    return training_search(
        f"train vlm, {config.backbone_settings.name}", config, "output_dir", default_space(config), made, run, command
    )


def vlm_trial(
    data: Any, pairs: Sequence[str], folder: Path, params: Mapping[str, Any], origin: int, report: Report
) -> Found:
    """One run. Its figures: accuracy (hard), macs (the share of the prefill's that is left), and its validation's."""
    from tokensieve.tasks.vlm.train import build_task, train_vlm

    config = trial_config(data, pairs, params, trial_folder(folder, origin))
    task = build_task(config)
    found = watched(task, partial(train_vlm, config, task=task), Path(config.output_dir), report)
    return replace(found, figures={**found.figures, "macs": 1.0 - found.figures["flops_saved"]})
