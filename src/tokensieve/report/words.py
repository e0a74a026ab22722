"""Numbers as people read them, and the summary in sentences. A leaf, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tokensieve.report import runs as r
from tokensieve.report.runs import Run

__all__ = ["Best", "Scale", "best_at_each_budget", "hardware", "listed", "noise", "scale_of", "times"]


@dataclass(frozen=True)
class Scale:
    """How a metric is written: shares as per cent, anything else as it is."""

    share: bool

    def value(self, x: float) -> float:
        return 100 * x if self.share else x

    def text(self, x: float | None) -> str:
        if x is None:
            return "-"
        return f"{100 * x:.1f} %" if self.share else f"{x:.3g}"

    def change(self, x: float) -> str:
        """A difference with its sign, shares in points of a hundred."""
        size = f"{abs(100 * x):.1f}" if self.share else f"{abs(x):.3g}"
        sign = "" if float(size) == 0 else "\u2212" if x < 0 else "+"
        return sign + size


@dataclass(frozen=True)
class Best:
    """The best of the runs with one budget, in words."""

    budget: str
    methods: str
    accuracy: str
    change: str
    speed: str


def scale_of(runs: Sequence[Run], name: str) -> Scale:
    found = [value for run in runs if (value := r.metric(run, name)) is not None]
    return Scale(all(0 <= value <= 1 for value in found))


def times(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}\u00d7"


def listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def best_at_each_budget(runs: Sequence[Run], name: str) -> list[Best]:
    """For each budget, of the runs that did reduce: the most accurate, all of them where several are equally so."""
    scale = scale_of(runs, name)
    base = next((value for run in runs if r.is_baseline(run) and (value := r.metric(run, name)) is not None), None)
    by_budget: dict[str, list[Run]] = {}
    for run in runs:
        if not r.is_baseline(run) and not r.reduced_nothing(run) and r.metric(run, name) is not None:
            by_budget.setdefault(r.budget(run), []).append(run)
    out = []
    for budget, found in sorted(by_budget.items(), key=lambda item: _least_first(item[1][0])):
        top = max(r.metric(run, name) or 0.0 for run in found)
        best = [run for run in found if r.metric(run, name) == top]
        change = scale.change(top - base) if base is not None else ""
        speed = listed([times(s) for run in best if (s := r.speedup(run)) is not None])
        names = listed(list(dict.fromkeys(r.method(run) for run in best)))
        out.append(Best(budget, names, scale.text(top), change, speed))
    return out


def _least_first(run: Run) -> tuple[float, str]:
    """Budgets from the most tokens to the fewest."""
    average = r.number(run, "tokens_average")
    return (-average if average is not None else math.inf, r.budget(run))


def noise(runs: Sequence[Run], name: str) -> str:
    """How far chance alone moves the baseline's share of right answers (Wilson's 95 % interval), or nothing."""
    base = next((run for run in runs if r.is_baseline(run)), None)
    share = r.metric(base, name) if base else None
    count = r.number(base, "images") if base else None
    if name not in ("acc1", "acc", "lp_acc1") or share is None or not count or not 0 <= share <= 1:
        return ""
    z2 = 1.96**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = 1.96 * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return (
        f"With {count:,.0f} images, the 95 % interval of the unreduced model\u2019s {100 * share:.1f} % is "
        f"{100 * (middle - half):.1f} to {100 * (middle + half):.1f} %: smaller differences may be chance."
    )


def hardware(runs: Sequence[Run]) -> list[str]:
    """Each machine that runs were measured on, in one line."""
    lines = []
    for run in runs:
        parts = [run.get("device"), run.get("cpu")]
        counts = ((run.get("cores"), "core"), (run.get("threads"), "thread"))
        parts += [f"{count} {word}" + "s" * (count != 1) for count, word in counts if count is not None]
        version = run.get("version_torch")
        parts += [f"torch {version}"] if version else []
        lines.append(", ".join(str(part) for part in parts if part))
    return [line for line in dict.fromkeys(lines) if line]
