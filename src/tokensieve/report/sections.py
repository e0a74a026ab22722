"""The report's sections. A section is any object with a name, a heading and `html()`; a page is a list of them.

Each takes the records it is about when it is made, so that records of other tasks bring sections of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from markupsafe import Markup
from PIL import Image

from tokensieve.report import charts, words
from tokensieve.report import runs as r
from tokensieve.report.page import render
from tokensieve.report.pictures import COLOURS, Selection, draw_kept, draw_photo, draw_scores, jpeg_uri, score_range
from tokensieve.report.runs import Run

__all__ = ["Commands", "Photo", "Pictures", "Plots", "Section", "Summary", "Table"]


class Section(Protocol):
    @property
    def name(self) -> str:
        """The anchor in the page."""

    @property
    def heading(self) -> str: ...

    def html(self) -> Markup:
        """What stands under the heading; empty where there is nothing to show."""


@dataclass(frozen=True)
class Summary:
    """What ran on what, and the best method at each budget."""

    runs: Sequence[Run]
    name: str = "summary"
    heading: str = "Summary"

    def html(self) -> Markup:
        groups = []
        for group in r.grouped(self.runs):
            name = r.accuracy_name(group)
            base = next((run for run in group if r.is_baseline(run)), None)
            methods = list(dict.fromkeys(r.method(run) for run in group if not r.is_baseline(run)))
            values = {
                "where": r.where(group[0]), "metric": name, "methods": words.listed(methods),
                "runs": sum(not r.is_baseline(run) for run in group) or len(group),
                "images": r.number(group[0], "images"), "unit": "queries" if r.is_reid(group[0]) else "images",
                "baseline": base is not None,
                "base_text": words.scale_of(group, name).text(r.metric(base, name)) if base and name else "-",
                "best": words.best_at_each_budget(group, name) if name else [],
                "noise": words.noise(group, name) if name else "",
            }  # fmt: skip
            groups.append(values)
        idle = [run for run in self.runs if r.reduced_nothing(run)]
        return render("summary.html.j2", groups=groups, hardware=words.hardware(self.runs), idle=len(idle))


@dataclass(frozen=True)
class Plots:
    """Accuracy against speed and against MACs with the Pareto front, and tokens for each layer."""

    runs: Sequence[Run]
    name: str = "plots"
    heading: str = "Accuracy, speed and tokens"

    def html(self) -> Markup:
        numbers = charts.series_of(self.runs)
        comparable = r.grouped(self.runs)
        groups = []
        for group in comparable:
            name = r.accuracy_name(group)
            scatters = (
                [charts.scatter(group, name, against, numbers) for against in ("speedup", "gmacs")] if name else []
            )
            plots = [plot for plot in scatters if plot is not None]
            small = charts.layers(group, numbers)
            if plots or small:
                present = {r.method(run) for run in group}
                legend = [(method, index) for method, index in numbers.items() if method in present]
                idle = any(r.reduced_nothing(run) for run in group)
                groups.append(
                    {"where": r.where(group[0]), "plots": plots, "layers": small, "legend": legend, "idle": idle}
                )
        return render("plots.html.j2", groups=groups, named=len(comparable) > 1) if groups else Markup()


@dataclass(frozen=True)
class Photo:
    """A sample photo, and what each method keeps of it."""

    name: str
    image: Image.Image
    selections: Sequence[Selection]


@dataclass(frozen=True)
class Pictures:
    """Photos with kept patches and scores, the methods side by side. notes: methods left out, and why."""

    photos: Sequence[Photo]
    model: str
    budget: str
    notes: Sequence[str] = ()
    name: str = "pictures"
    heading: str = "What each method keeps"

    def html(self) -> Markup:
        if not self.photos and not self.notes:
            return Markup()
        rows = [
            {"name": photo.name, "uri": jpeg_uri(draw_photo(photo.image, photo.selections[0].grid)),
             "shown": [_shown(photo.image, selection) for selection in photo.selections]}
            for photo in self.photos
            if photo.selections
        ]  # fmt: skip
        scale = ", ".join(COLOURS)
        return render(
            "pictures.html.j2", photos=rows, model=self.model, budget=self.budget, notes=self.notes, scale=scale
        )


def _shown(photo: Image.Image, selection: Selection) -> dict[str, Any]:
    scores = selection.scores
    ends = [f"{end:.2g}" for end in score_range(scores)] if scores is not None else []
    return {
        "label": selection.label, "count": selection.count, "block": selection.block, "ends": ends,
        "kept": jpeg_uri(draw_kept(photo, selection.kept)),
        "scores": jpeg_uri(draw_scores(photo, scores)) if scores is not None else None,
        "left": selection.some_left_before,
    }  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and what it is sorted by: a number, or its text; None goes to the end."""

    text: str
    key: float | str | None
    note: str = ""


@dataclass(frozen=True)
class Column:
    title: str
    numeric: bool
    cell: Callable[[Run], Cell]


# settings in the order of their columns, after method and budget; those the same in all runs stand above the table
_SETTINGS = (
    "dataset", "model", "pretrained", "task", "language", "mode", "at", "schedule", "positions", "fuse_weight",
    "images", "batch_size", "amp", "seed", "device", "threads", "cpu", "cores", "speed_batches",
)  # fmt: skip

_RESULTS = (  # key, heading, how to write it
    ("images_per_second", "images / s", "{:.1f}"),
    ("speedup", "speed-up", "{:.2f}\u00d7"),
    ("possible", "MAC ratio", "{:.2f}\u00d7"),
    ("gained", "efficiency", "{:.2f}"),
    ("tokens_average", "tokens, average", "{:.1f}"),
    ("gmacs", "GMACs", "{:.2f}"),
    ("gmacs_with_tower", "GMACs with tower", "{:.2f}"),
    ("kv_bytes", "KV bytes", "{:,.0f}"),
    ("first_token_ms", "ms to first token", "{:.1f}"),
    ("decode_tokens_per_second", "tokens / s, decoding", "{:.0f}"),
    ("overhead_ms", "overhead, ms", "{:.2f}"),
    ("seconds", "seconds", "{:.0f}"),
)


@dataclass(frozen=True)
class Table:
    """Every run with its settings and results, sortable."""

    runs: Sequence[Run]
    name: str = "runs"
    heading: str = "All runs"

    def html(self) -> Markup:
        varied, common = self._settings()
        columns = [
            Column("method", False, _method_cell), Column("budget", True, _budget_cell),
            *self._metrics(), *self._results(), *(_setting(key) for key in varied),
        ]  # fmt: skip
        if any(_options(run) for run in self.runs):
            columns.append(Column("options", False, _options_cell))
        rows = [[column.cell(run) for column in columns] for run in self.runs]
        return render("table.html.j2", columns=columns, rows=rows, common=common) if rows else Markup()

    def _settings(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Those that differ between runs, and those that do not, with their value."""
        versions = sorted({key for run in self.runs for key in run if key.startswith("version_")})
        present = [key for key in (*_SETTINGS, *versions) if any(run.get(key) is not None for run in self.runs)]
        varied = [key for key in present if not r.same_in_all(self.runs, key)]
        common = [(_title(key), r.text(self.runs[0].get(key))) for key in present if key not in varied]
        return varied, common

    def _metrics(self) -> list[Column]:
        names = dict.fromkeys(name for run in self.runs for name in run.get("metrics") or {})
        return [_metric(name, words.scale_of(self.runs, name)) for name in names if self._any_metric(name)]

    def _any_metric(self, name: str) -> bool:
        return any(r.metric(run, name) is not None for run in self.runs)

    def _results(self) -> list[Column]:
        return [
            _result(key, title, form)
            for key, title, form in _RESULTS
            if any(r.number(run, key) is not None for run in self.runs)
        ]


def _title(key: str) -> str:
    return key.removeprefix("version_").replace("_", " ")


def _options(run: Run) -> str:
    lead = "option_"
    given = {key.removeprefix(lead): value for key, value in run.items() if key.startswith(lead) and value is not None}
    return " ".join(f"{name}={r.text(value)}" for name, value in given.items())


def _options_cell(run: Run) -> Cell:
    return Cell(_options(run) or "-", _options(run) or None)


def _method_cell(run: Run) -> Cell:
    return Cell(r.method(run), r.method(run), "nothing reduced" if r.reduced_nothing(run) else "")


def _budget_cell(run: Run) -> Cell:
    keep = run.get("keep") if run.get("keep") is not None else run.get("keep_average")
    last = keep[-1] if isinstance(keep, list) and keep else keep
    key = r.number({"keep": last}, "keep")
    return Cell(r.budget(run).removeprefix("keep "), key)


def _metric(name: str, scale: words.Scale) -> Column:
    def cell(run: Run) -> Cell:
        value = r.metric(run, name)
        return Cell(scale.text(value), value)

    return Column(name.replace("_", " "), True, cell)


def _result(key: str, title: str, form: str) -> Column:
    def cell(run: Run) -> Cell:
        value = r.speedup(run) if key == "speedup" else r.number(run, key)
        low, high = r.number(run, f"{key}_low"), r.number(run, f"{key}_high")
        span = f"{low:.2f} to {high:.2f}" if low is not None and high is not None else ""
        return Cell("-" if value is None else form.format(value), value, span)

    return Column(title, True, cell)


def _setting(key: str) -> Column:
    def cell(run: Run) -> Cell:
        value = r.number(run, key)
        text = r.text(run.get(key))
        return Cell(text, value if value is not None else None if text == "-" else text)

    return Column(_title(key), False, cell)


@dataclass(frozen=True)
class Commands:
    """The command line that repeats each run."""

    runs: Sequence[Run]
    name: str = "commands"
    heading: str = "To repeat these runs"

    def html(self) -> Markup:
        commands = list(dict.fromkeys(str(run["command"]) for run in self.runs if run.get("command")))
        return render("commands.html.j2", commands=commands) if commands else Markup()
