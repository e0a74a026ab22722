"""The report's section on re-identification: what it shows, what it escapes, and what it does without pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.eval_runs import make_run, make_runs, write_runs
from helpers.reid_runs import make_reid_run
from tokensieve.cli.main import main
from tokensieve.report import build_page
from tokensieve.tasks.reid.section import Reid, _kept, _photos, _stacked
from tokensieve.tasks.sections import eval_sections


def html(*runs: dict[str, Any]) -> str:
    return str(Reid(runs).html())


def test_runs_of_other_tasks_bring_no_section() -> None:
    assert html(*make_runs()) == ""


def test_figures_lists_and_patches_are_shown(tmp_path: Path) -> None:
    page = html(make_reid_run(tmp_path))
    assert "rgb + nir" in page
    assert "55.5 \u00b1 1.5" in page
    assert page.count('<li class="query"') == 2
    assert page.count('<li class="right"') == 2 * 2
    assert page.count('<li class="wrong"') == 2 * 3
    assert page.count("patches selected of") == 2 * 3
    assert "3 of 8" in page
    assert "average precision 25 %" in page
    assert "Signal" in page
    assert "not in" not in page


def test_names_are_escaped(tmp_path: Path) -> None:
    run = make_reid_run(tmp_path, name="<img src=x onerror=alert(1)>")
    run["dataset"] = run["method"] = "<script>alert(2)</script>"
    run["rows"][0]["missing"] = ["<u>rgb</u>"]
    page = build_page("t", eval_sections([run]), 1)
    for text in ("<img src=x", "<script>alert(2)", "<u>rgb</u>"):
        assert text not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page


def test_pictures_that_are_gone_leave_their_names(tmp_path: Path) -> None:
    run = make_reid_run(tmp_path)
    for path in tmp_path.rglob("*.jpg"):
        path.unlink()
    page = html(run)
    assert "12 pictures are not in" in page
    assert "data:image" not in page
    assert 'class="gone">person 0' in page


@pytest.mark.parametrize("key", ["rows", "lists", "data", "layout", "queries", "deviation"])
def test_what_a_record_lacks_is_left_out(key: str, tmp_path: Path) -> None:
    run = make_reid_run(tmp_path)
    run.pop(key, None)
    run["rows"] = [{k: v for k, v in row.items() if k != key} for row in run.get("rows", [])]
    assert "people" in html(run)
    run["lists"] = [{"query": {}, "gallery": [{}]}]
    assert "people" in html(run)


def test_a_strip_is_cut_and_stacked(tmp_path: Path) -> None:
    strip = np.zeros((20, 120, 3), dtype=np.uint8)
    strip[:, 40:80], strip[:, 80:] = 120, 240
    Image.fromarray(strip).save(tmp_path / "s.png")
    entry = {"files": dict.fromkeys(("rgb", "nir", "tir"), "s.png"),
             "parts": {"rgb": [0, 3], "nir": [1, 3], "tir": [2, 3]}}  # fmt: skip
    photos = _photos(entry, tmp_path)
    assert [np.asarray(photo).mean() for photo in photos.values()] == [0, 120, 240]
    page = np.asarray(_stacked(photos))
    assert page.shape == (3 * 52, 104, 3)
    assert page[[10, 60, 120], 50, 0].tolist() == [0, 120, 240]


def test_selected_patches_stay_and_the_others_fade() -> None:
    photo = Image.new("RGB", (20, 40), (200, 0, 0))
    (shown,) = _kept({"selected": {"rgb": [0, 7]}, "grid": [4, 2]}, {"rgb": photo})
    assert shown["count"] == "2 of 8"
    assert _kept({"selected": {}}, {"rgb": photo}) == []
    assert _kept({"selected": {"rgb": [0]}, "grid": [4, 2]}, {}) == []


def test_reid_and_clip_runs_stand_in_one_report(tmp_path: Path) -> None:
    """The pictures of methods are for CLIP runs; a reid run does not ask for them, and its figures are in the table."""
    runs = [make_run(), make_reid_run(tmp_path / "set")]
    page = tmp_path / "page.html"
    assert main(["report", str(write_runs(tmp_path / "runs", runs)), "-o", str(page)]) == 0
    text = page.read_text()
    assert '<button type="button">mAP</button>' in text
    assert '<button type="button">acc1</button>' in text
    assert 'id="reid"' in text
    assert 'id="pictures"' not in text
