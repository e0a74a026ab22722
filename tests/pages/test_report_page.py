"""The report in a browser: silent, offline, sortable by mouse and keyboard, and as wide as the screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.eval_runs import make_run, make_runs
from tokensieve.report import Photo, Pictures, build_page
from tokensieve.report.pictures import Selection
from tokensieve.tasks.sections import eval_sections


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    grid = np.arange(256).reshape(16, 16)
    kept = [Selection(name, 11, grid % 3 == i, grid / 256.0) for i, name in enumerate(("sieve", "tome", "anchor"))]
    kept.append(Selection("divprune", 5, grid % 5 == 0))
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (224, 224, 3), dtype=np.uint8))
    long = make_run("sieve", 0.5, model="a-model-with-a-very-long-name-" * 4, option_path="x" * 300)
    long["command"] = "tokensieve eval " + "--flag value " * 60
    runs = [*make_runs(), long, make_run("tome", 0.3, model="<script>console.error('ran')</script>")]
    pictures = Pictures([Photo("noise", photo, kept)], "vit-s14", "keep 0.33", ["cdpruner is not drawn: no text"])
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(build_page("A report", eval_sections(runs, pictures), len(runs)), encoding="utf-8")
    return path


@pytest.fixture
def opened(open_page: Any, page_file: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    width, scheme = getattr(request, "param", (1280, "light"))
    with open_page(page_file, width, scheme) as page:
        yield page


def _column(page: Any, number: int) -> list[str]:
    cells = page.locator(f"table[data-sortable] tbody tr > :nth-child({number})").all()
    return [cell.get_attribute("data-key") or "" for cell in cells]


def _heading(page: Any, name: str) -> tuple[Any, int]:
    headings = page.locator("table[data-sortable] thead th").all()
    number = next(i for i, heading in enumerate(headings) if heading.inner_text().strip().startswith(name))
    return headings[number], number + 1


def test_a_click_sorts_numbers_as_numbers_and_missing_ones_stay_last(opened: Any) -> None:
    heading, number = _heading(opened, "images / s")
    before = _column(opened, number)
    missing = before.count("")
    assert missing
    for order, reverse in (("descending", True), ("ascending", False)):
        heading.locator("button").click()
        assert heading.get_attribute("aria-sort") == order
        after = _column(opened, number)
        values = [float(key) for key in after[: len(after) - missing]]
        assert values == sorted(values, reverse=reverse)
        assert after[len(after) - missing :] == [""] * missing
        assert sorted(after) == sorted(before)
    assert opened.locator('table[data-sortable] [aria-sort="ascending"]').count() == 1


def test_the_keyboard_sorts_text(opened: Any) -> None:
    heading, number = _heading(opened, "method")
    other, _ = _heading(opened, "acc1")
    other.locator("button").click()
    for key, order in (("Enter", "ascending"), ("Space", "descending")):
        heading.locator("button").focus()
        opened.keyboard.press(key)
        assert heading.get_attribute("aria-sort") == order
        found = _column(opened, number)
        assert found == sorted(found, reverse=order == "descending")
    assert other.get_attribute("aria-sort") == "none"


def test_equal_rows_keep_their_order(opened: Any) -> None:
    budget, _ = _heading(opened, "budget")
    method, number = _heading(opened, "method")
    budget.locator("button").click()
    method.locator("button").click()
    _, budgets = _heading(opened, "budget")
    sieve = [b for b, m in zip(_column(opened, budgets), _column(opened, number), strict=True) if m == "sieve"]
    assert [float(b) for b in sieve] == sorted(map(float, sieve), reverse=True)


@pytest.mark.parametrize(
    "opened", [(360, "light"), (360, "dark"), (768, "light"), (1280, "light"), (1280, "dark")], indirect=True
)
def test_fits_the_screen(opened: Any) -> None:
    opened.locator("details summary").click()
    width = opened.evaluate("document.documentElement.clientWidth")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    boxes = opened.evaluate(
        """[...document.querySelectorAll("p, h1, h2, h3, figure, dl, .scroll, nav")].map(e => {
             const b = e.getBoundingClientRect(); return [b.left, b.right, b.height]; })"""
    )
    assert all(left >= 0 and right <= width + 0.5 and height > 0 for left, right, height in boxes)
    assert opened.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")


@pytest.mark.parametrize("opened", [(360, "light"), (1280, "light")], indirect=True)
def test_labels_of_plots_do_not_touch_and_can_be_read(opened: Any) -> None:
    plots = opened.evaluate(
        """[...document.querySelectorAll("svg.plot")].map(s => [...s.querySelectorAll("text")].map(t => {
             const b = t.getBoundingClientRect(); return [t.textContent, b.left, b.right, b.top, b.bottom]; }))"""
    )
    assert plots
    for texts in plots:
        for i, (a, left, right, top, bottom) in enumerate(texts):
            assert bottom - top >= 9, a
            for b, other_left, other_right, other_top, other_bottom in texts[i + 1 :]:
                apart = right <= other_left or other_right <= left or bottom <= other_top + 3 or other_bottom <= top + 3
                assert apart, (a, b)


@pytest.mark.parametrize("opened", [(1280, "light"), (1280, "dark")], indirect=True)
def test_text_stands_out_from_the_paper(opened: Any) -> None:
    """WCAG's level AA: contrast of at least 4.5 to 1 for text, 3 to 1 for marks."""
    colours = opened.evaluate(
        """(() => { const of = (s, p) => getComputedStyle(document.querySelector(s))[p];
             return {paper: of("body", "backgroundColor"), body: of("body", "color"), quiet: of(".quiet", "color"),
                     link: of("nav a", "color"), notice: [of(".notice", "color"), of(".notice", "backgroundColor")],
                marks: [...document.querySelectorAll(".legend .mark:not(.c0)")].map(m => getComputedStyle(m).fill)};
           })()"""
    )
    for name in ("body", "quiet", "link"):
        assert _contrast(colours[name], colours["paper"]) >= 4.5, name
    assert _contrast(*colours["notice"]) >= 4.5
    assert all(_contrast(mark, colours["paper"]) >= 3 for mark in colours["marks"])


def _contrast(a: str, b: str) -> float:
    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(a), light(b)))
    return (high + 0.05) / (low + 0.05)
