"""One HTML page from results of `tokensieve eval` and records of searches: accuracy against speed and MACs, tokens,
pictures, all runs, all trials.

The page opens offline: everything is inside the one file.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve.core.budget import parse_keep
from tokensieve.errors import RecordError, TokensieveError
from tokensieve.records import check_writable, write_whole
from tokensieve.report.results import folders_of_results, is_bench, some_of
from tokensieve.report.runs import budget, number
from tokensieve.report.studies import read_results
from tokensieve.tasks.reid.section import is_reid
from tokensieve.tasks.vlm.section import is_vlm

if TYPE_CHECKING:
    from tokensieve.report import Pictures
    from tokensieve.tasks.viewer import Request

EPILOG = """examples:
  tokensieve report runs -o report.html
  tokensieve report runs/*.json --photos dog.jpg holiday/ --title "CIFAR-10, 500 images"
  tokensieve report runs/search-clip runs/search-clip/trials
  tokensieve report runs --no_pictures"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUNS", help="result files, or folders of them")
    add("-o", "--output", default="report.html", metavar="FILE", help="the page (default: report.html)")
    add("--title", default="Token reduction report", metavar="TEXT", help="the page's title")
    add("--photos", nargs="+", metavar="PATH", help="photos to draw: files, or folders (default: four of ImageNet)")
    add("--model", default="vit-s14", metavar="NAME", help="the model that looks at them (default: vit-s14)")
    add("--pretrained", metavar="FILE", help="the checkpoint of an open_clip model")
    add("--no_pictures", action="store_true", help="leave the pictures out; torch is not needed then")


def run(args: Namespace) -> int:
    problems: list[str] = []
    runs, studies = read_results(args.runs, problems)
    if not runs and not studies:
        raise RecordError(problems[0])
    for line in problems:
        print(f"tokensieve: note: left out: {line}", file=sys.stderr)
    for line in _left_out(args.runs):
        print(f"tokensieve: note: {line}", file=sys.stderr)
    check_writable(args.output)
    from tokensieve.report import build_page
    from tokensieve.tasks.sections import eval_sections

    pictures = None if args.no_pictures else _pictures(runs, args)
    page = build_page(args.title, eval_sections(runs, pictures, studies), len(runs) + len(studies))
    write_whole(args.output, page.encode())
    counts = [(len(runs), "run", "runs"), (len(studies), "search", "searches")]
    said = ", ".join(f"{n} {one if n == 1 else several}" for n, one, several in counts if n or one == "run")
    print(f"{args.output}: {said}, {len(page.encode()) / 2**20:.1f} MiB")
    return 0


def _left_out(places: Sequence[str]) -> list[str]:
    """What lies in and under the folders that were named, and is not in the page."""
    named = [Path(place) for place in places]
    folders = [place for place in named if place.is_dir()]
    known = {(place if place.is_dir() else place.parent).resolve() for place in named}
    deeper = [inner for folder in folders for inner in folders_of_results(folder) if inner.resolve() not in known]
    lines = [f"{some_of(deeper)}: more results, not in this page; name these folders too"] if deeper else []
    records = [path for folder in folders for path in sorted(folder.glob("*.json")) if is_bench(path)]
    return [*lines, f"{some_of(records)}: of `tokensieve bench`, not in this page"] if records else lines


def _pictures(runs: Sequence[Mapping[str, Any]], args: Namespace) -> Pictures | None:
    """What the runs' methods keep of the photos; nothing where no run reduced anything."""
    requests = chosen([run for run in runs if not is_reid(run) and not is_vlm(run)])  # they have their own
    if not requests:
        return None
    from tokensieve.report import Photo, Pictures
    from tokensieve.report.pictures import read_photo
    from tokensieve.tasks.viewer import find_photos, load_viewer, sample_photos

    paths = find_photos(args.photos) if args.photos else sample_photos()
    photos = [read_photo(path) for path in paths]
    viewer = load_viewer(args.model, args.pretrained)
    found, notes = [], []
    for request in requests:
        try:
            looks = viewer.look(photos, request)
        except TokensieveError as error:  # of this method on this model; the page says so
            notes.append(f"{request.method} is not drawn: {error}")
        else:
            found.append([replace(look[max(look)], label=request.method) for look in looks])
    drawn = [
        Photo(path.stem, viewer.shown(photo), [selections[i] for selections in found])
        for i, (path, photo) in enumerate(zip(paths, photos, strict=True))
    ]
    return Pictures(drawn if found else [], viewer.name, requests[0].budget, notes)


def chosen(runs: Sequence[Mapping[str, Any]]) -> list[Request]:
    """What to draw: the budget that most methods ran with (the smallest of several), each method's first run of it."""
    budgets: dict[str, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        if run.get("method") not in (None, "none") and (run.get("reduced") is not False or run.get("mode") != "prune"):
            budgets.setdefault(budget(run), {}).setdefault(run["method"], run)
    if not budgets:
        return []
    most = max(map(len, budgets.values()))
    widest = [list(found.values()) for found in budgets.values() if len(found) == most]
    return [_request(run) for run in min(widest, key=lambda found: number(found[0], "tokens_average") or 0.0)]


def _request(run: Mapping[str, Any]) -> Request:
    """The run's settings as `attach` takes them; the record has lists as text."""
    from tokensieve.tasks.viewer import Request

    keep, at = run.get("keep"), run.get("at")
    lead = "option_"
    return Request(
        method=run["method"],
        keep=parse_keep(keep) if isinstance(keep, str) else keep if run.get("keep_average") is None else None,
        keep_average=run.get("keep_average"),
        at=[int(block) for block in at.split(",")] if at else None,
        schedule=run.get("schedule"),
        mode="analyse" if run.get("mode") == "analyse" else "prune",
        options={name.removeprefix(lead): value for name, value in run.items() if name.startswith(lead)},
    )
