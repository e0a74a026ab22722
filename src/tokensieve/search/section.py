"""The report's section on searches: how they went, the Pareto front, each parameter, what mattered. No Optuna.

Drawn from the record alone, as the other plots are: inside the page, in its colours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from tokensieve.report.charts import Axis, Frame, axis_of, pareto, staircase
from tokensieve.report.page import render
from tokensieve.report.studies import short_names, value_text

__all__ = ["Searches"]

Study = Mapping[str, Any]
_PLAIN, _BEST, _EARLY = 1, 2, 1  # colours and marks: a trial, the best ones, one that ended early (hollow)
_MOST = 12  # parameters that get a plot


@dataclass(frozen=True)
class Mark:
    x: float
    y: float
    index: int
    label: str
    hollow: bool = False


@dataclass(frozen=True)
class Plot(Frame):
    """marks over axes. front: a line of points, what is best so far or at each cost; empty for none."""

    marks: list[Mark]
    front: str = ""


@dataclass(frozen=True)
class Bar:
    name: str
    share: float
    text: str


@dataclass(frozen=True)
class Searches:
    """For each search: history, front, parameters, importances, and its trials in a table."""

    studies: Sequence[Study]
    name: str = "search"
    heading: str = "Search"

    def html(self) -> Markup:
        shown = [_study(study) for study in self.studies]
        return render("search.html.j2", studies=shown) if shown else Markup()


def _study(study: Study) -> dict[str, Any]:
    objectives, trials = study["objectives"], study["trials"]
    done = [trial for trial in trials if trial["state"] == "complete" and trial["values"]]
    plots = [_history(study, number) for number in range(len(objectives))] if done else []
    if len(objectives) == 2 and len(done) > 1:
        plots.insert(0, _front(study, done))
    short = short_names(study["space"])
    names = [name for name in study["space"] if sum(name in trial["params"] for trial in done) > 1]
    return {
        "name": study["name"], "summary": _summary(study, done), "plots": plots,
        "early": any(trial["state"] == "pruned" for trial in trials), "best": len(objectives) == 1,
        "slices": [_slice(study, done, name) for name in names[:_MOST]], "left_out": len(names[_MOST:]),
        "objective": objectives[0]["metric"],
        "importances": [
            (objective["metric"], [Bar(short[name], share, f"{100 * share:.0f} %") for name, share in found.items()])
            for objective, found in zip(objectives, study.get("importances") or [], strict=False) if found
        ],
        "columns": ["trial", *(o["metric"] for o in objectives), *short.values(), "seconds", "note"],
        "rows": [_row(study, trial) for trial in trials],
    }  # fmt: skip


def _summary(study: Study, done: Sequence[Study]) -> str:
    counts = {state: sum(trial["state"] == state for trial in study["trials"]) for state in ("pruned", "failed")}
    words = [f"{len(done)} trial{'' if len(done) == 1 else 's'} ended"]
    words += [f"{counts['pruned']} ended early"] * bool(counts["pruned"])
    words += [f"{counts['failed']} failed"] * bool(counts["failed"])
    if not study["best"]:
        return ", ".join(words) + "."
    aims = " and ".join(
        f"{'large' if o['direction'] == 'maximize' else 'small'} {o['metric']}" for o in study["objectives"]
    )
    if len(study["objectives"]) == 1:
        best = study["trials"][study["best"][0]]
        return f"{', '.join(words)}. Sought: {aims}. Best: trial {best['number']}, {value_text(best['values'][0])}."
    return f"{', '.join(words)}. Sought: {aims}. Trials of the Pareto front: {len(study['best'])}."


def _label(study: Study, trial: Study) -> str:
    pairs = zip(study["objectives"], trial["values"] or [], strict=False)
    short = short_names(study["space"])
    words = [f"trial {trial['number']}", *(f"{o['metric']} {value_text(v)}" for o, v in pairs)]
    return ", ".join([*words, *(f"{short[name]} {value_text(value)}" for name, value in trial["params"].items())])


def _index(study: Study, trial: Study) -> int:
    return _BEST if trial["number"] in study["best"] else _PLAIN


def _history(study: Study, number: int) -> Plot:
    """An objective by trial; of one that ended early, where there is one objective, its last word."""
    objective = study["objectives"][number]
    found: list[tuple[Study, float, bool]] = []
    for trial in study["trials"]:
        if trial["state"] == "complete" and trial["values"]:
            found.append((trial, trial["values"][number], False))
        elif trial["state"] == "pruned" and trial["steps"] and len(study["objectives"]) == 1:
            found.append((trial, trial["steps"][-1][1], True))
    width, height = 480, 300
    x = axis_of([trial["number"] for trial, _, _ in found], 68, width - 16, "")
    x = Axis(x.low, x.high, x.start, x.end, _whole(x))
    y = axis_of([value for _, value, _ in found], height - 48, 14, "")
    marks = [
        Mark(x.place(trial["number"]), y.place(value), _EARLY if early else _index(study, trial),
             _label(study, trial) + (", ended early" if early else ""), early)
        for trial, value, early in found
    ]  # fmt: skip
    sign, best = (1 if objective["direction"] == "maximize" else -1), None
    corners: list[tuple[float, float]] = []
    for trial, value, early in found:
        if early:
            continue
        if best is None or sign * value > sign * best:
            corners += [] if best is None else [(x.place(trial["number"]), y.place(best))]
            best = value
            corners.append((x.place(trial["number"]), y.place(best)))
    corners.append((x.end, corners[-1][1]))
    front = " ".join(f"{a},{b}" for a, b in corners)
    return Plot(f"{objective['metric']} by trial", "trial", objective["metric"], width, height, x, y, marks, front)


def _whole(axis: Axis) -> list[tuple[float, str]]:
    """Ticks of an axis of whole numbers."""
    step = max(1, math.ceil((axis.high - axis.low) / 6))
    first = math.ceil(axis.low / step) * step
    return [(axis.place(n), str(n)) for n in range(first, math.floor(axis.high) + 1, step) if n >= 0]


def _front(study: Study, done: Sequence[Study]) -> Plot:
    """The second objective across, the first upwards; the staircase is what can be had."""
    up, across = study["objectives"]
    width, height = 480, 300
    x = axis_of([trial["values"][1] for trial in done], 68, width - 16, "")
    y = axis_of([trial["values"][0] for trial in done], height - 48, 14, "")
    marks = [Mark(x.place(t["values"][1]), y.place(t["values"][0]), _index(study, t), _label(study, t)) for t in done]
    signs = [1 if o["direction"] == "maximize" else -1 for o in (across, up)]
    points = pareto([(signs[0] * t["values"][1], signs[1] * t["values"][0]) for t in done])
    places = [(x.place(signs[0] * a), y.place(signs[1] * b)) for a, b in points]
    good, bad = (x.end, x.start) if signs[0] > 0 else (x.start, x.end)
    arrow = f"{across['metric']} (better \u2192)" if good == x.end else f"(\u2190 better) {across['metric']}"
    floor = y.start if signs[1] > 0 else y.end
    title = f"{up['metric']} against {across['metric']}: the Pareto front"
    return Plot(title, arrow, up["metric"], width, height, x, y, marks, staircase(places, bad, floor))


def _slice(study: Study, done: Sequence[Study], name: str) -> Plot:
    """The first objective over one parameter: its values on a line, on a log scale, or side by side."""
    objective, parameter = study["objectives"][0], study["space"][name]
    own = [trial for trial in done if name in trial["params"]]
    width, height = 240, 190
    left, right = 46, width - 12
    log = bool(parameter.get("log"))
    places: dict[int, float]
    if parameter["type"] in ("float", "int"):
        values = [math.log10(t["params"][name]) if log else float(t["params"][name]) for t in own]
        x = axis_of(values, left, right, "")
        x = Axis(x.low, x.high, x.start, x.end, _powers(x) if log else _some(x.ticks))
        places = {t["number"]: x.place(value) for t, value in zip(own, values, strict=True)}
    else:
        choices = [value_text(v) for v in parameter.get("choices", (False, True))]
        x = Axis(-0.5, max(len(choices), 1) - 0.5, left, right)
        room = max(2, 22 // len(choices))
        x.ticks.extend(
            (x.place(i), text if len(text) <= room else text[: room - 1] + "\u2026") for i, text in enumerate(choices)
        )
        places = {t["number"]: x.place(choices.index(value_text(t["params"][name]))) for t in own}
    y = axis_of([trial["values"][0] for trial in own], height - 40, 12, "")
    y = Axis(y.low, y.high, y.start, y.end, _some(y.ticks))
    marks = [Mark(places[t["number"]], y.place(t["values"][0]), _index(study, t), _label(study, t)) for t in own]
    return Plot(short_names(study["space"])[name], "", objective["metric"], width, height, x, y, marks)


def _some(ticks: Sequence[tuple[float, str]], most: int = 4) -> list[tuple[float, str]]:
    """At most `most` of them, evenly: the plots are small."""
    return list(ticks)[:: max(1, math.ceil(len(ticks) / most))]


def _powers(axis: Axis) -> list[tuple[float, str]]:
    """Ticks at powers of ten; the ends where there is at most one between them."""
    whole = list(range(math.ceil(axis.low), math.floor(axis.high) + 1))
    if len(whole) < 2:
        return [(axis.place(v), f"{10**v:.2g}") for v in (axis.low, axis.high)]
    return _some([(axis.place(n), f"1e{n}" if abs(n) > 2 else f"{10.0**n:g}") for n in whole], 3)


def _row(study: Study, trial: Study) -> list[dict[str, Any]]:
    """Cells: text, and what they are sorted by."""
    values = trial["values"] or [None] * len(study["objectives"])
    note = {"pruned": "ended early", "failed": trial.get("error") or "failed"}.get(trial["state"], "")
    note = note or {"interrupted": "interrupted, run again"}.get(trial["state"], "")
    if trial["number"] in study["best"]:
        note = "best" if len(study["objectives"]) == 1 else "front"
    cells: list[Any] = [trial["number"], *values, *(trial["params"].get(name) for name in study["space"])]
    return [{"text": value_text(cell), "key": _key(cell)} for cell in [*cells, trial.get("seconds"), note or None]]


def _key(cell: Any) -> Any:
    """A number as it is, anything else as text; nothing for what is not there, which goes to the end."""
    if cell is None:
        return ""
    return cell if isinstance(cell, int | float) and not isinstance(cell, bool) else value_text(cell)
