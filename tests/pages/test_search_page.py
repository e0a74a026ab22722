"""The report's section on searches in a browser: at 360 and 1280 pixels, light and dark, by keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.study_records import make_study
from tokensieve.report import build_page
from tokensieve.tasks.sections import eval_sections


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    studies = [make_study(2), make_study(1, name="<script>console.error('ran')</script>" + "long" * 30)]
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(build_page("A report", eval_sections([], None, studies), len(studies)), encoding="utf-8")
    return path


def test_it_fits_and_nothing_is_drawn_outside(opened: Any) -> None:
    width = opened.viewport_size["width"]
    opened.evaluate("document.querySelectorAll('#search details').forEach(d => d.open = true)")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    boxes = opened.evaluate(
        """[...document.querySelectorAll('#search svg.plot .mark, #search svg.plot text')].map(e => {
             const b = e.getBoundingClientRect(); return [b.left, b.right]; })"""
    )
    assert len(boxes) > 100
    assert min(left for left, _ in boxes) >= 0
    assert max(right for _, right in boxes) <= width


def test_tick_labels_of_one_axis_do_not_touch(opened: Any) -> None:
    touching = opened.evaluate(
        """[...document.querySelectorAll('#search svg.plot')].flatMap(svg => {
             const low = [...svg.querySelectorAll('text.tick[text-anchor=middle]')].map(t => t.getBoundingClientRect());
             return low.slice(1).map((b, i) => [svg.getAttribute('aria-label'), b.left - low[i].right]); })
           .filter(([, gap]) => gap < 1)"""
    )
    assert touching == []


def test_trials_and_best_ones_differ_in_more_than_colour(opened: Any) -> None:
    forms = opened.evaluate(
        """['.legend li:nth-child(1) .mark', '.legend li:nth-child(2) .mark'].map(s => {
             const e = document.querySelector('#search ' + s);
             return [e.firstElementChild.tagName, getComputedStyle(e).fill]; })"""
    )
    assert forms[0][0] != forms[1][0]
    assert forms[0][1] != forms[1][1]


def test_the_trials_open_and_sort_by_keyboard(opened: Any) -> None:
    details = opened.locator("#search details").first
    details.locator("summary").focus()
    opened.keyboard.press("Enter")
    heading = details.locator("thead th").nth(1)
    heading.locator("button").focus()
    opened.keyboard.press("Enter")
    keys = [float(cell.get_attribute("data-key")) for cell in details.locator("tbody tr > :nth-child(2)").all()]
    assert len(keys) == 24
    assert keys in (sorted(keys), sorted(keys, reverse=True))
