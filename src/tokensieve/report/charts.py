"""Geometry of the plots; the templates draw them. No torch, and no plotting library: colours follow the page's own.

A plot is SVG inside the page, so that it is sharp at any size, follows light and dark, and can be read by a screen
reader. Everything here is in the units of its viewBox.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokensieve.report import runs as r
from tokensieve.report.runs import Run
from tokensieve.report.words import Scale, scale_of, times

__all__ = [
    "Axis", "Frame", "Layers", "Point", "Scatter", "Series", "axis_of", "layers", "pareto", "scatter", "series_of",
    "staircase", "ticks",
]  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """Values low..high over the pixels start..end, with ticks (place, label)."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[tuple[float, str]] = field(default_factory=list)

    def place(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float  # ends of the whisker; both x where no interval is known
    high: float
    label: str
    hollow: bool  # nothing was reduced


@dataclass(frozen=True)
class Series:
    """One method: its number among the methods, which gives colour and marker; 0 is the unreduced model."""

    name: str
    index: int
    points: list[Point]

    @property
    def line(self) -> str:
        return " ".join(f"{p.x},{p.y}" for p in self.points)


@dataclass(frozen=True)
class Frame:
    """A plot before anything is drawn into it."""

    title: str
    x_title: str
    y_title: str
    width: int
    height: int
    x: Axis
    y: Axis


@dataclass(frozen=True)
class Scatter(Frame):
    series: list[Series]
    front: str  # the Pareto front as points of a line
    base: float | None  # where the unreduced model's accuracy lies

    @property
    def whiskers(self) -> bool:
        """Whether a speed-up is drawn with its interval."""
        return any(point.low != point.high for series in self.series for point in series.points)


def series_of(runs: Sequence[Run]) -> dict[str, int]:
    """Method -> its number, the same in every plot of the page."""
    names = dict.fromkeys(r.method(run) for run in runs if not r.is_baseline(run))
    return {"none": 0} | {name: index + 1 for index, name in enumerate(names)}


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values between low and high, 1, 2 or 5 times a power of ten apart, at most `most` of them."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(s * power for s in (1, 2, 5, 10, 20) if (high - low) / (s * power) <= most - 1)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both, x and y both better when larger; by falling x."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points), reverse=True):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front


def scatter(runs: Sequence[Run], name: str, against: str, numbers: dict[str, int]) -> Scatter | None:
    """Accuracy against "speedup" or "gmacs", None where fewer than two runs have both."""
    fast = against == "speedup"
    scale = scale_of(runs, name)
    found: list[tuple[Run, float, float]] = []
    for run in runs:
        x = r.speedup(run) if fast else r.number(run, "gmacs")
        y = r.metric(run, name)
        if x is not None and y is not None:
            found.append((run, x, scale.value(y)))
    if len(found) < 2:
        return None
    spans = [_span(run, x) if fast else (x, x) for run, x, _ in found]
    width, height, left, right, top, bottom = 480, 340, 58, 16, 14, 48
    x_axis = axis_of([end for span in spans for end in span], left, width - right, "\u00d7" if fast else "")
    y_axis = axis_of([y for _, _, y in found], height - bottom, top, "")
    points: dict[str, list[Point]] = {}
    for (run, x, y), (low, high) in zip(found, spans, strict=True):
        point = Point(
            x_axis.place(x), y_axis.place(y), x_axis.place(low), x_axis.place(high), _label(run, name, scale),
            r.reduced_nothing(run),
        )  # fmt: skip
        points.setdefault(r.method(run), []).append(point)
    series = [
        Series(method, index, sorted(points[method], key=lambda p: p.x))
        for method, index in numbers.items()
        if method in points
    ]
    sign = 1 if fast else -1
    front = [(sign * x, y) for x, y in pareto([(sign * x, y) for _, x, y in found])]
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in front]
    base = next((y for run, _, y in found if r.is_baseline(run)), None)
    x_title = "measured speed-up" if fast else _macs_title(found[0][0])
    return Scatter(
        title=f"{name} against {x_title}",
        x_title=f"{x_title} (better \u2192)" if fast else f"(\u2190 better) {x_title}",
        y_title=f"{name}, %" if scale.share else name,
        width=width, height=height, x=x_axis, y=y_axis, series=series,
        front=staircase(places, x_axis.start if fast else x_axis.end, y_axis.start),
        base=None if base is None else y_axis.place(base),
    )  # fmt: skip


def _macs_title(run: Run) -> str:
    """Of a vision-language model the MACs are those of its language model, for a prompt."""
    return "GMACs of one prompt" if run.get("task") == "vlm" else "GMACs for one image"


def _span(run: Run, x: float) -> tuple[float, float]:
    low, high = r.number(run, "speedup_low"), r.number(run, "speedup_high")
    return (min(low, x), max(high, x)) if low is not None and high is not None else (x, x)


def axis_of(values: Sequence[float], start: float, end: float, unit: str) -> Axis:
    """Room of 6 % around the values, and ticks."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    axis = Axis(low - room, high + room, start, end)
    marks = ticks(axis.low, axis.high)
    digits = max(0, -math.floor(math.log10(marks[1] - marks[0]) + 1e-9)) if len(marks) > 1 else 2
    return Axis(axis.low, axis.high, start, end, [(axis.place(v), f"{v:.{digits}f}{unit}") for v in marks])


def staircase(front: Sequence[tuple[float, float]], slow: float, floor: float) -> str:
    """What can be had at each speed or cost: between two points the less accurate one's accuracy, never more.

    Goes from `floor` under the fastest point to `slow`, the edge beyond the most accurate one.
    """
    corners = [(front[0][0], floor)]
    for x, y in front:
        corners += [(x, corners[-1][1]), (x, y)]
    corners.append((slow, corners[-1][1]))
    return " ".join(f"{x},{y}" for x, y in corners)


def _label(run: Run, name: str, scale: Scale) -> str:
    words = [r.method(run) if r.is_baseline(run) else f"{r.method(run)}, {r.budget(run)}"]
    words.append(f"{name} {scale.text(r.metric(run, name))}")
    speed, gmacs = r.speedup(run), r.number(run, "gmacs")
    words += [times(speed)] if speed is not None else []
    words += [f"{gmacs:.2f} GMACs"] if gmacs is not None else []
    words += ["nothing reduced"] if r.reduced_nothing(run) else []
    return ", ".join(words)


@dataclass(frozen=True)
class LayerLine:
    path: str
    label: str  # tokens at the end
    label_y: float
    title: str


@dataclass(frozen=True)
class Layers:
    """Tokens leaving each block, one small plot for each method, all to one scale."""

    name: str
    index: int
    width: int
    height: int
    x: Axis
    y: Axis
    lines: list[LayerLine]
    full: float | None  # where the unreduced model's tokens lie


def layers(runs: Sequence[Run], numbers: dict[str, int]) -> list[Layers]:
    known = [(run, found) for run in runs if (found := r.tokens_per_layer(run))]
    if not known:
        return []
    width, height, left, right, top, bottom = 240, 180, 38, 40, 12, 42
    depth, most = max(len(t) for _, t in known), max(max(t) for _, t in known)
    x_axis = Axis(0, max(1, depth - 1), left, width - right)
    x_axis.ticks.extend((x_axis.place(b), str(b)) for b in sorted({0, depth // 2, depth - 1}))
    y_axis = Axis(0, most * 1.05 or 1, height - bottom, top)
    y_axis.ticks.extend((y_axis.place(v), f"{v:.0f}") for v in ticks(0, most, 4))
    base = next((t for run, t in known if r.is_baseline(run)), None)
    plots = []
    for method, index in numbers.items():
        own = [(run, t) for run, t in known if r.method(run) == method and index]
        if own:
            lines = _layer_lines(own, x_axis, y_axis)
            full = y_axis.place(base[0]) if base else None
            plots.append(Layers(method, index, width, height, x_axis, y_axis, lines, full))
    return plots


def _layer_lines(own: Sequence[tuple[Run, list[int]]], x: Axis, y: Axis) -> list[LayerLine]:
    """Runs with the same tokens are one line; labels of ends are moved apart where they would touch."""
    same: dict[tuple[int, ...], list[Run]] = {}
    for run, tokens in own:
        same.setdefault(tuple(tokens), []).append(run)
    lines, last = [], -math.inf
    for counts, runs in sorted(same.items(), key=lambda item: -item[0][-1]):
        path = " ".join(f"{x.place(block)},{y.place(count)}" for block, count in enumerate(counts))
        last = max(y.place(counts[-1]), last + 14)
        budgets = ", ".join(dict.fromkeys(r.budget(run) for run in runs))
        lines.append(LayerLine(path, str(counts[-1]), last, f"{budgets}: {' '.join(map(str, counts))}"))
    return lines
