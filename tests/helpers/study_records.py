"""Records of searches with made-up trials, for tests only."""

from __future__ import annotations

import math
from typing import Any


def make_study(objectives: int = 2, trials: int = 24, **changes: Any) -> dict[str, Any]:
    """Trials over six parameters, one of them asked for at times; with one objective some ended early, and one failed.

    The best, or the front, is found here by a loop of its own.
    """
    space = {
        "method": {"type": "categorical", "choices": ["sieve", "tome", "anchor"]},
        "keep": {"type": "float", "low": 0.1, "high": 0.9, "step": 0.05},
        "trainer_settings.dl_settings.optimizers.token_merger.lr":
            {"type": "float", "low": 1e-5, "high": 1e-2, "log": True},
        "k": {"type": "int", "low": 2, "high": 20},
        "fold": {"type": "bool"},
        "alpha": {"type": "float", "low": 0.0, "high": 1.0, "when": {"method": ["anchor"]}},
    }  # fmt: skip
    found = [_trial(number, objectives) for number in range(trials)]
    ended = [t for t in found if t["state"] == "complete"]
    if objectives == 1:
        best = [max(ended, key=lambda t: t["values"][0])["number"]]
    else:
        best = [t["number"] for t in ended if not any(_beats(o["values"], t["values"]) for o in ended)]
    names = ["accuracy", "macs"][:objectives]
    record: dict[str, Any] = {
        "format": "tokensieve-search-1", "name": "eval clip",
        "objectives": [{"metric": n, "direction": "minimize" if n == "macs" else "maximize"} for n in names],
        "space": space, "trials": found, "best": best,
        "importances": [{"keep": 0.62, "method": 0.3, "k": 0.06, "fold": 0.02} for _ in names],
        "settings": {"n_trials": trials}, "facts": {}, "command": "tokensieve search clip --trials 24",
        "date": "2026-01-02T03:04:05+00:00", "version_optuna": "5.0.0",
    }  # fmt: skip
    return record | changes


def _beats(one: list[float], other: list[float]) -> bool:
    return one[0] >= other[0] and one[1] <= other[1] and one != other


def _trial(number: int, objectives: int) -> dict[str, Any]:
    method = ("sieve", "tome", "anchor")[number % 3]
    keep = round(0.1 + 0.05 * (7 * number % 17), 2)
    params: dict[str, Any] = {
        "method": method, "keep": keep,
        "trainer_settings.dl_settings.optimizers.token_merger.lr": 10 ** (-5 + 3 * (number * 5 % 11) / 10),
        "k": 2 + number * 3 % 19, "fold": number % 2 == 0,
    }  # fmt: skip
    if method == "anchor":
        params["alpha"] = round(0.1 * (number % 10), 1)
    accuracy = 0.87 - 0.25 * (0.9 - keep) ** 2 - 0.02 * (number % 3) + 0.01 * math.sin(number)
    values = [accuracy, 1.5 + 4.6 * keep + 0.1 * (number % 3)][:objectives]
    trial = {"number": number, "state": "complete", "params": params, "values": values, "figures": {},
             "steps": [[50, accuracy - 0.1]] if objectives == 1 else [], "seconds": 10.0 + number}  # fmt: skip
    if objectives == 1 and number in (7, 11, 19):
        return trial | {"state": "pruned", "values": None}
    if objectives == 1 and number == 13:
        return trial | {"state": "failed", "values": None, "steps": [], "error": "<b>keep 3 is under the floor</b>"}
    return trial
