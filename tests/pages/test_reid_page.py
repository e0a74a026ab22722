"""The report's section on re-identification in a browser: at 360 and 1280 pixels, light and dark, by keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.reid_runs import make_reid_run
from tokensieve.report import build_page
from tokensieve.tasks.sections import eval_sections


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    runs = [
        make_reid_run(folder / "a"),
        make_reid_run(folder / "b", name="<script>console.error('ran')</script>" + "long" * 30),
    ]
    path = folder / "report.html"
    path.write_text(build_page("A report", eval_sections(runs), len(runs)), encoding="utf-8")
    return path


def test_the_section_fits_and_its_pictures_are_there(opened: Any) -> None:
    width = opened.viewport_size["width"]
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    opened.evaluate("document.querySelectorAll('#reid details').forEach(d => d.open = true)")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    sizes = opened.evaluate(
        "[...document.querySelectorAll('#reid img')].map(i => [i.naturalWidth, i.getBoundingClientRect().width])"
    )
    assert len(sizes) == 2 * 2 * (6 + 3)
    assert all(natural > 0 and shown >= 40 for natural, shown in sizes)


def test_right_and_wrong_differ_in_more_than_colour(opened: Any) -> None:
    style = opened.evaluate(
        """['right', 'wrong'].map(k => { const s = getComputedStyle(document.querySelector(`.ranked .${k} img`));
             return [s.borderTopStyle, s.borderTopColor]; })"""
    )
    assert style[0][0] == "solid"
    assert style[1][0] == "dashed"
    assert style[0][1] != style[1][1]
    assert "\u2713" in opened.locator(".ranked .right").first.inner_text()
    assert "\u2717" in opened.locator(".ranked .wrong").first.inner_text()


def test_selected_patches_stand_side_by_side_in_one_row(opened: Any) -> None:
    boxes = opened.evaluate(
        """[...document.querySelector('.patches').querySelectorAll('img')].map(i => {
             const b = i.getBoundingClientRect(); return [b.left, b.right, b.top]; })"""
    )
    assert len(boxes) == 3
    assert len({round(top) for _, _, top in boxes}) == 1
    assert boxes[0][1] <= boxes[1][0]
    assert boxes[1][1] <= boxes[2][0]
    assert boxes[2][1] <= opened.viewport_size["width"]


def test_lists_open_by_keyboard(opened: Any) -> None:
    details = opened.locator("#reid details")
    assert details.count() == 2
    assert details.nth(0).get_attribute("open") is not None
    assert details.nth(1).get_attribute("open") is None
    details.nth(1).locator("summary").focus()
    opened.keyboard.press("Enter")
    assert details.nth(1).get_attribute("open") is not None
