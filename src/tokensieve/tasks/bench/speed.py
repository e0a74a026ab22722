"""Speed of methods x budgets against the untouched model and against a fused-attention baseline, in one run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from tokensieve.core.cost import Cost
from tokensieve.engines.export import make_engine
from tokensieve.errors import BudgetError
from tokensieve.models.attach import attach
from tokensieve.models.handle import Handle
from tokensieve.tasks.bench.config import BenchConfig
from tokensieve.tasks.bench.models import build_model, images, twin
from tokensieve.tasks.bench.sdpa import attach_fused
from tokensieve.tasks.bench.timing import check_target, interleave, interval, quartiles, ratio, ratios

__all__ = [
    "KEEP_ALL",
    "SDPA",
    "STOCK",
    "Candidate",
    "candidates_of",
    "measure_speed",
    "speed_rows",
    "target_of",
]

STOCK, SDPA, KEEP_ALL = "stock", "sdpa", "keep-all"
_ON_ENGINES = ("sieve", "tome", "evit")
_SPREAD = ("anchor", "evit", "random", "sieve", "divprune")


@dataclass(frozen=True)
class Candidate:
    """One thing to be timed. handle: None for the untouched model in torch, elsewhere one that says what it costs."""

    method: str
    keep: int | float
    model: nn.Module
    handle: Handle | None

    @property
    def name(self) -> str:
        return f"{self.method} {self.keep}"


def target_of(method: str, keep: int | float, batch: int, engine: str = "torch") -> float | None:
    """What a candidate should reach: keep-all of stock's speed, the others' efficiency. None: nothing set."""
    if engine != "torch":
        known = method in _ON_ENGINES and keep in (0.5, 0.25) and engine in ("onnxruntime", "openvino")
        return (0.95 if batch >= 16 else 0.93) if known else None
    if method == KEEP_ALL:
        return 0.99
    if method == "tome":
        return 0.90
    if method in _SPREAD and keep in (0.5, 0.25):
        return 0.95 if batch >= 16 else 0.90
    return None


def candidates_of(model: nn.Module, config: BenchConfig) -> list[Candidate]:
    """Stock, the SDPA baseline, keep-everything, and every method at every budget; all on the same weights.

    On other engines than torch the baseline is stock alone: SDPA and keep-everything are the same graph there.
    """
    methods = [(method, keep) for method in config.methods for keep in config.keep]
    if config.engine == "torch":
        fused = twin(model)
        out = [Candidate(STOCK, 1.0, model, None), Candidate(SDPA, 1.0, fused, attach_fused(fused))]
        methods = [(KEEP_ALL, 1.0), *methods]
    else:
        out = [Candidate(STOCK, 1.0, model, attach(twin(model), "grid", keep=1.0, mode="analyse"))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # keep-everything reduces nothing, as its name and its row say
        for method, keep in methods:
            copy = twin(model)
            name = "random" if method == KEEP_ALL else method
            handle = attach(copy, name, keep=keep, schedule=config.schedule)
            if not handle.reduces and method != KEEP_ALL:
                raise BudgetError(f"keep {keep}: nothing to measure, the image has {handle.patches} patches")
            out.append(Candidate(method, keep, copy, handle))
    return out


def measure_speed(config: BenchConfig, tick: Callable[[str], None]) -> list[dict[str, Any]]:
    """All rows: models x batches x candidates."""
    rows = []
    if any(isinstance(keep, int) for keep in config.keep) and len(config.models) > 1:
        for name in config.models:  # a count may fit one model and not another: known before hours of measuring
            candidates_of(build_model(name, config.device, config.seed)[0], config)
    for name in config.models:
        model, size = build_model(name, config.device, config.seed)
        candidates = candidates_of(model, config)
        runs = {c.name: _runner(c, config) for c in candidates}
        for batch in config.batches_of(name):
            x = images(batch, size, config.device, config.seed)
            calls = {name: partial(run, x) for name, run in runs.items()}
            times = interleave(calls, config.rounds, config.device, partial(tick, f"speed: {name}, batch {batch}"))
            rows += speed_rows(name, batch, candidates, times, config.engine, config.quantize)
    return rows


def _runner(candidate: Candidate, config: BenchConfig) -> Callable[[Tensor], object]:
    """What is timed: the model, or its engine."""
    if config.engine == "torch":
        return candidate.model
    return make_engine(candidate.model, config.engine, quantize=config.quantize, threads=config.threads)


def speed_rows(
    model: str,
    batch: int,
    candidates: Sequence[Candidate],
    times: Mapping[str, Sequence[float]],
    engine: str = "torch",
    quantize: str | None = None,
) -> list[dict[str, Any]]:
    """A row for each candidate of one group. Every speed-up is a median of per-round ratios.

    The reference is the faster of stock and SDPA, by their medians; both ratios are in the row. The target is of
    gained / possible, of keep-everything the speed against stock.
    """
    reference_cost = next(c.handle.cost() for c in candidates if c.method in (STOCK, SDPA) and c.handle)
    bases = {c.method: times[c.name] for c in candidates if c.method in (STOCK, SDPA)}
    faster = min(bases, key=lambda base: quartiles(bases[base])[1])
    rows = []
    for c in candidates:
        against = {base: ratio(seconds, times[c.name]) for base, seconds in bases.items()}
        cost = c.handle.cost() if c.handle else reference_cost
        gained = [r / cost.possible for r in ratios(bases[faster], times[c.name])]
        checked = ratios(bases[STOCK], times[c.name]) if c.method == KEEP_ALL else gained
        target = None if quantize else target_of(c.method, c.keep, batch, engine)
        low, mid, high = (1e3 * t for t in quartiles(times[c.name]))
        rows.append(
            {"part": "speed", "model": model, "batch": batch, "method": c.method, "keep": c.keep}
            | {"engine": engine, "quantize": quantize}
            | _plan(c.handle, cost)
            | {"ms": mid, "ms_quartiles": [low, high], "ms_rounds": [1e3 * t for t in times[c.name]]}
            | {"images_per_second": 1e3 * batch / mid, "faster_baseline": faster, "speedup": against[faster]}
            | {"speedup_stock": against[STOCK], "speedup_sdpa": against.get(SDPA)}
            | {"gained_of_possible": against[faster] / cost.possible, "gained_interval": interval(gained)}
            | check_target(target, checked)
        )
    return rows


def _plan(handle: Handle | None, cost: Cost) -> dict[str, Any]:
    """What was asked for and what it costs; `reduces` says so where nothing is removed."""
    return {
        "at": list(handle.at) if handle and handle.reduces else [],
        "schedule": handle.schedule if handle and handle.reduces else None,
        "reduces": bool(handle and handle.reduces),
        "tokens_per_layer": list(cost.tokens_per_layer),
        "macs": cost.macs,
        "macs_full": cost.macs_full,
        "possible": cost.possible,
    }
