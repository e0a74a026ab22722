"""The report's section on searches: what it draws is what the record says."""

from __future__ import annotations

import json
import re

import pytest

from helpers.study_records import make_study
from tokensieve.cli.main import main
from tokensieve.report import build_page
from tokensieve.report.studies import short_names
from tokensieve.search import section
from tokensieve.search.section import Searches
from tokensieve.tasks.sections import eval_sections


def places(plot, study):
    """Trial -> (x, y) as drawn."""
    return {int(re.match(r"trial (\d+)", m.label).group(1)): (m.x, m.y) for m in plot.marks}


def test_history_has_every_trial_and_the_best_so_far() -> None:
    study = make_study(1)
    plot = section._history(study, 0)
    found = places(plot, study)
    ended = [t["number"] for t in study["trials"] if t["state"] in ("complete", "pruned")]
    assert sorted(found) == ended
    assert {m.label.split(",")[0] for m in plot.marks if m.hollow} == {"trial 7", "trial 11", "trial 19"}
    best = min(y for number, (_, y) in found.items() if study["trials"][number]["state"] == "complete")
    line = [tuple(map(float, pair.split(","))) for pair in plot.front.split()]
    assert line[-1] == (plot.x.end, best)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert [y for _, y in line] == sorted((y for _, y in line), reverse=True)  # upwards is a smaller y
    assert next(m for m in plot.marks if m.index == 2).label.startswith(f"trial {study['best'][0]},")


def test_the_front_s_staircase_goes_through_its_trials_and_over_all_others() -> None:
    study = make_study(2)
    plot = section._front(study, study["trials"])
    found = places(plot, study)
    corners = {tuple(map(float, pair.split(","))) for pair in plot.front.split()}
    front = set(study["best"])
    assert all(found[number] in corners for number in front)
    for number, (x, y) in found.items():
        if number not in front:
            assert any(fx <= x and fy <= y for fx, fy in (found[other] for other in front))
    assert "better) macs" in plot.x_title


def test_a_slice_puts_values_where_they_are() -> None:
    study = make_study(2)
    for name in study["space"]:
        plot = section._slice(study, study["trials"], name)
        found = places(plot, study)
        own = [t for t in study["trials"] if name in t["params"]]
        assert len(found) == len(own)
        if study["space"][name]["type"] in ("float", "int"):
            order = sorted(own, key=lambda t: t["params"][name])
            xs = [found[t["number"]][0] for t in order]
            assert xs == sorted(xs)
        else:
            assert len({found[t["number"]][0] for t in own}) == len({str(t["params"][name]) for t in own})
    log = section._slice(study, study["trials"], "trainer_settings.dl_settings.optimizers.token_merger.lr")
    assert log.title == "lr"
    assert log.x.ticks[0][1] == "1e-5"


def test_words_are_escaped_and_nothing_comes_from_elsewhere() -> None:
    page = build_page("x", eval_sections([], None, [make_study(1, name="<script>alert(1)</script>")]), 1)
    assert "<script>alert" not in page
    assert "<b>keep 3" not in page
    assert "&lt;b&gt;keep 3 is under the floor" in page
    assert not re.search(r"https?://(?!www\.w3\.org)", page)
    assert "20 trials ended, 3 ended early, 1 failed" in page
    assert "Best: trial 12" in page


def test_names_are_as_short_as_tells_them_apart() -> None:
    names = ["a.merger.lr", "a.pruners.lr", "b.keep", "lr", "a.b.pruners.lr"]
    assert short_names(names) == {
        "a.merger.lr": "merger.lr", "a.pruners.lr": "a.pruners.lr", "b.keep": "keep", "lr": "lr",
        "a.b.pruners.lr": "b.pruners.lr",
    }  # fmt: skip


@pytest.mark.parametrize("trials", [0, 1, 2])
def test_few_trials_are_no_trouble(trials) -> None:
    study = make_study(2, trials)
    study["importances"] = []
    html = Searches([study]).html()
    assert f"{trials} trial" in html
    assert html.count('<svg class="plot"') == (0 if not trials else 2 if trials == 1 else 3 + 5)


def test_the_command_takes_records_of_searches_beside_results(tmp_path, capsys) -> None:
    (tmp_path / "search.json").write_text(json.dumps(make_study(2)))
    out = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "-o", str(out), "--no_pictures"]) == 0
    assert "0 runs, 1 search" in capsys.readouterr().out
    assert "What mattered" in out.read_text()
    assert len(out.read_bytes()) < 200_000
    (tmp_path / "broken.json").write_text('{"format": "tokensieve-search-1", "name": "x"}')
    assert main(["report", str(tmp_path), "-o", str(out), "--no_pictures"]) == 0
    said = capsys.readouterr()
    assert "broken.json is not a whole record of a search: objectives, space, trials, best missing" in said.err
    assert "0 runs, 1 search" in said.out
