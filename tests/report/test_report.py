"""The report: what it says is what the records say, anything may be missing, nothing gets through unescaped."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.eval_runs import make_run, make_runs
from tokensieve.report import Photo, Pictures, build_page
from tokensieve.report.charts import layers, pareto, scatter, series_of, ticks
from tokensieve.report.pictures import Selection
from tokensieve.report.runs import grouped, tokens_per_layer
from tokensieve.report.sections import Table
from tokensieve.report.words import best_at_each_budget, listed, noise
from tokensieve.tasks.sections import eval_sections


class _Page(HTMLParser):
    """Tags, attributes and the text of cells, as a browser would see them."""

    VOID = frozenset({"meta", "link", "img", "line", "rect", "circle", "path", "polyline"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._inside: list[str] = []
        self.feed(html)
        assert not self._inside, f"not closed: {self._inside}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._inside.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if "style" not in self._inside and "script" not in self._inside:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def _page(runs: list[dict[str, Any]], **settings: Any) -> _Page:
    return _Page(build_page("A title", eval_sections(runs, **settings), len(runs)))


def _pictures(**names: str) -> Pictures:
    grid = np.arange(16).reshape(4, 4)
    label = names.get("label", "sieve")
    selections = [Selection(label, 11, grid < 6, grid / 16.0), Selection("grid", 5, grid % 3 == 0)]
    return Pictures([Photo(names.get("photo", "dog"), Image.new("RGB", (32, 32)), selections)], "vit-s14", "keep 0.4")


def test_the_page_is_well_formed_and_asks_for_nothing_outside() -> None:
    page = _page(make_runs(), pictures=_pictures())
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "action", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, name, value)
    html = build_page("t", eval_sections(make_runs(), _pictures()), 1)
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html
    assert "url(" not in html
    assert sum(tag == "img" for tag, _ in page.tags) == 4  # photo, kept twice, scores once


def test_names_are_escaped_everywhere() -> None:
    evil = "<script>alert('x')</script>\"'>&<img src=x onerror=alert(1)>"
    run = make_run("sieve", 0.5)
    places = (
        "model",
        "dataset",
        "pretrained",
        "task",
        "language",
        "method",
        "mode",
        "schedule",
        "positions",
        "cpu",
        "device",
    )
    places += ("option_a", "command", "version_torch", "at")
    for place in places:
        bad = run | {place: evil}
        page = _page([make_run(), bad], pictures=_pictures())
        _harmless(page, place)
    metrics = {evil: 0.5, "acc1": 0.4}
    _harmless(_page([make_run() | {"metrics": {evil: 0.4}}, run | {"metrics": metrics}]), "metrics")
    _harmless(_page([run], pictures=_pictures(label=evil, photo=evil)), "pictures")
    _harmless(_Page(build_page(evil, eval_sections([run]), 1)), "title")


def _harmless(page: _Page, where: str) -> None:
    assert sum(tag == "script" for tag, _ in page.tags) == 1, where
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes), where
    assert "alert(1)" in page.words or where == "mode", where


def test_every_run_is_in_the_table_with_its_figures() -> None:
    runs = make_runs()
    html = str(Table(runs).html())
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.S)[1:]
    assert len(rows) == len(runs)
    for row, run in zip(rows, runs, strict=True):
        assert run["method"] in row
        if run["metrics"]:
            assert f"{100 * run['metrics']['acc1']:.1f} %" in row
            assert f'data-key="{run["metrics"]["acc1"]}"' in row
        if run["speedup"]:
            assert f"{run['speedup']:.2f}\u00d7" in row
    assert sum("nothing reduced" in row for row in rows) == 1
    assert "nothing reduced" in rows[-2]
    assert rows[-1].count(">-<") >= 6  # what is missing


def test_settings_that_all_runs_share_stand_above_the_table() -> None:
    html = str(Table([make_run(), make_run("sieve", 0.5)]).html())
    above, _, table = html.partition("<table")
    assert "batch size" in above
    assert "batch size" not in table
    assert "schedule" in table
    html = str(Table([make_run(), make_run("sieve", 0.5, batch_size=1)]).html())
    assert "batch size" in html.partition("<table")[2]


@pytest.mark.parametrize("value", [None, "text", [], {}, float("nan"), True])
def test_anything_may_be_missing_or_odd(value: Any) -> None:
    whole = make_run("sieve", 0.5)
    for key in whole:
        if key == "metrics":
            continue
        for changed in (whole | {key: value}, {k: v for k, v in whole.items() if k != key}):
            page = _page([make_run(), changed])
            assert sum(tag == "html" for tag, _ in page.tags) == 1, key
    for metrics in ({}, {"acc1": value}):
        _page([make_run(), whole | {"metrics": metrics}])
    _page([whole | {"metrics": {"acc1": value}}])


def test_the_summary_names_the_best_at_each_budget() -> None:
    base = make_run(metrics={"acc1": 0.8})
    runs = [
        base,
        make_run("tome", 0.5, metrics={"acc1": 0.78}),
        make_run("sieve", 0.5, metrics={"acc1": 0.79}, speedup=1.5),
        make_run("evit", 0.25, metrics={"acc1": 0.7}, speedup=2.0),
        make_run("tome", 0.25, metrics={"acc1": 0.7}, speedup=1.9),
        make_run("random", 1.0, metrics={"acc1": 0.99}),  # reduced nothing: not in the contest
    ]
    half, quarter = best_at_each_budget(runs, "acc1")
    assert (half.budget, half.methods, half.accuracy, half.change, half.speed) == (
        "keep 0.5", "sieve", "79.0 %", "\u22121.0", "1.50\u00d7",
    )  # fmt: skip
    assert quarter.methods == "evit and tome"
    words = _page(runs).words
    assert "The unreduced model reaches 80.0 % acc1" in words
    assert "1 run reduced nothing" in words
    assert "Example CPU" in words
    assert "not among them" in _page(runs[1:]).words


def test_the_interval_is_wilsons() -> None:
    share, count = 0.872, 500
    shares = np.linspace(0, 1, 100_001)  # those that would give what was seen, within 1.96 deviations
    low, high = shares[np.abs(share - shares) <= 1.96 * np.sqrt(shares * (1 - shares) / count)][[0, -1]]
    text = noise([make_run(metrics={"acc1": share}, images=count)], "acc1")
    assert f"{100 * low:.1f} to {100 * high:.1f} %" in text
    assert noise([make_run("sieve", 0.5)], "acc1") == ""


def test_the_front_holds_what_nothing_else_beats() -> None:
    points = [tuple(p) for p in np.random.default_rng(1).integers(0, 12, (40, 2)).tolist()]
    naive = {p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)}
    assert set(pareto(points)) == naive
    assert pareto([]) == []


def test_plots_put_every_run_where_it_belongs() -> None:
    runs = make_runs()
    for against, better in (("speedup", 1), ("gmacs", -1)):
        plot = scatter(runs, "acc1", against, series_of(runs))
        assert plot is not None
        assert sum(len(s.points) for s in plot.series) == len(runs) - 1  # all but the one without figures
        for series in plot.series:
            for point in series.points:
                assert plot.x.start <= point.low <= point.x <= point.high <= plot.x.end
                assert plot.y.end <= point.y <= plot.y.start
        best = min(point.y for series in plot.series for point in series.points)
        front = [tuple(map(float, p.split(","))) for p in plot.front.split()]
        assert min(y for _, y in front) == best
        for (x0, y0), (x1, y1) in itertools.pairwise(front):  # from the fast end, back and up
            assert (x0 == x1) or (y0 == y1)
            assert better * (x1 - x0) <= 0
            assert y1 <= y0
        # nothing promised that no run reaches: every point of the front lies under or left of a run
        places = [(p.x, p.y) for s in plot.series for p in s.points]
        for x, y in front:
            assert any(better * (px - x) >= 0 and py <= y for px, py in places)
    assert scatter(runs[:1], "acc1", "speedup", series_of(runs)) is None


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.93, 1.72) == [1.0, 1.2, 1.4, 1.6]
    assert ticks(5, 5) == [5]
    for low, high in ((0.001, 0.0017), (1e-9, 1e9), (-3.0, 12.5), (85.01, 85.02)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 7
        assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)


def test_layer_plots_have_one_line_for_each_budget_and_labels_apart() -> None:
    runs = [make_run(), *(make_run("sieve", keep) for keep in (0.5, 0.49, 0.48, 0.2)), make_run("tome", 0.5)]
    sieve, tome = layers(runs, series_of(runs))
    assert (sieve.name, len(sieve.lines), tome.name, len(tome.lines)) == ("sieve", 4, "tome", 1)
    places = [line.label_y for line in sieve.lines]
    assert all(b - a >= 14 for a, b in itertools.pairwise(places))
    assert sieve.lines[0].label == str(tokens_per_layer(runs[1])[-1])
    assert layers([make_run(tokens_per_layer=None)], {"none": 0}) == []


def test_runs_that_cannot_be_compared_are_apart() -> None:
    runs = [make_run(), make_run(dataset="other"), make_run("sieve", 0.5), make_run(model="other")]
    assert [len(group) for group in grouped(runs)] == [2, 1, 1]
    assert _page(runs).words.count("cifar10, vit-s14-minilm") >= 2


def test_listed() -> None:
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


def test_needs_no_torch() -> None:
    code = "import sys, tokensieve.report as r; from tokensieve.tasks.sections import eval_sections"
    code += "; r.build_page('t', eval_sections([]), 0)"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
