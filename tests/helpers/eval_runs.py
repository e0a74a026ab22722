"""Results of `tokensieve eval` with made-up figures, for tests only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_OPTIONS: dict[str, dict[str, Any]] = {
    "anchor": {"alpha": 0.5, "fold": False}, "sieve": {}, "tome": {}, "evit": {"fuse": True}, "random": {"seed": 0},
}  # fmt: skip
_LOSS = {"sieve": 0.004, "tome": 0.012, "anchor": 0.02, "evit": 0.03, "random": 0.06}
_OVERHEAD = {"sieve": 0.95, "tome": 0.88, "anchor": 0.9, "evit": 0.97, "random": 0.99}


def make_run(method: str = "none", keep: float | None = None, **changes: Any) -> dict[str, Any]:
    """One result. Fewer tokens cost more accuracy and gain more speed, as one would expect."""
    share = 1.0 if keep is None else keep
    tokens = [round(257 - (257 - 257 * share) * (i + 1) / 12) for i in range(12)]
    average = sum(tokens) / 12
    possible = 257 / average
    speed = possible * _OVERHEAD.get(method, 1.0) if keep is not None else None
    accuracy = 0.872 - _LOSS.get(method, 0.0) * (1 / share - 0.6 if keep else 1)
    run: dict[str, Any] = {
        "format": "tokensieve-eval-1", "dataset": "cifar10", "model": "vit-s14-minilm", "pretrained": "tokensieve",
        "task": "zeroshot_classification", "language": "en",
        "metrics": {"acc1": accuracy, "acc5": min(1.0, accuracy + 0.11), "mean_per_class_recall": accuracy - 0.001},
        "method": method, "mode": None if keep is None else "prune", "keep": keep, "keep_average": None,
        "schedule": None if keep is None else "constant",
        "at": None if keep is None else ",".join(map(str, range(12))),
        **{f"option_{name}": value for name, value in _OPTIONS.get(method, {}).items()},
        "fuse_weight": None, "reduced": keep is not None and keep < 1, "images": 500, "patches": 256,
        "tokens_per_layer": " ".join(map(str, tokens)), "tokens_average": average, "gmacs": 6.1 * average / 257,
        "gmacs_full": 6.1, "possible": possible, "images_per_second": 9.3 * (speed or 1.0),
        "images_per_second_low": 9.1 * (speed or 1.0), "images_per_second_high": 9.5 * (speed or 1.0),
        "speedup": speed, "speedup_low": speed and 0.97 * speed, "speedup_high": speed and 1.03 * speed,
        "gained": speed and speed / possible, "speed_batches": 8, "seed": 0, "batch_size": 16, "amp": False,
        "device": "cpu", "threads": 2, "cpu": "Example CPU", "cores": 2, "version_torch": "2.13.0",
        "date": "2026-01-02T03:04:05+00:00", "seconds": 61.5,
        "command": f"tokensieve eval --method {method}" + (f" --keep {keep}" if keep else ""), "config": "{}",
    }  # fmt: skip
    return run | changes


def make_runs() -> list[dict[str, Any]]:
    """The unreduced model, five methods at three budgets, one that reduced nothing, one with nearly all missing."""
    runs = [make_run()]
    runs += [make_run(method, keep) for keep in (0.7, 0.5, 0.25) for method in _LOSS]
    runs.append(make_run("sieve", 1.0))
    missing = ("images_per_second", "speedup", "speedup_low", "speedup_high", "gained", "gmacs", "tokens_per_layer")
    runs.append(make_run("tome", 0.1) | {"metrics": {}} | dict.fromkeys(missing))
    return runs


def write_runs(folder: Path, runs: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index, run in enumerate(runs):
        (folder / f"{index:02}.json").write_text(json.dumps(run))
    return folder
