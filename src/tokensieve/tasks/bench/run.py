"""The whole benchmark: every part asked for, into one record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from tokensieve.records import Record, new_record
from tokensieve.tasks.bench.config import BenchConfig
from tokensieve.tasks.bench.memory import measure_memory
from tokensieve.tasks.bench.models import check_device, check_model
from tokensieve.tasks.bench.share import measure_share
from tokensieve.tasks.bench.speed import measure_speed
from tokensieve.tasks.bench.vlm import measure_vlm

__all__ = ["run_bench"]

_MEASURES = {"speed": measure_speed, "share": measure_share, "memory": measure_memory, "vlm": measure_vlm}


def run_bench(config: BenchConfig, tick: Callable[[str], None] = lambda _: None) -> Record:
    """Measure, and give back the record; there is none of half a run. `tick(what)` is called `config.steps` times.

    Names and device are checked before anything is measured. The number of threads is put back afterwards.
    """
    check_device(config.device)
    for model in config.models:
        check_model(model)
    before = torch.get_num_threads()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    try:
        threads = torch.get_num_threads()
        rows: list[dict[str, Any]] = []
        for part in config.parts:
            rows += _MEASURES[part](config, tick)
    finally:
        torch.set_num_threads(before)
    device = torch.cuda.get_device_name(config.device) if config.device.startswith("cuda") else config.device
    return new_record("bench", asdict(config), rows, seed=config.seed, threads=threads, device=device)
