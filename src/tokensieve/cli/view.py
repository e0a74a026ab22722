"""Draw what a method keeps of one photo: the photo as the model sees it, the kept patches, and the scores.

A method that removes patches block by block is shown after the last block where any leave; --blocks shows others.
KEY=VALUE are options of the method; `tokensieve methods NAME` lists them.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokensieve.core.budget import SCHEDULES
from tokensieve.errors import OptionError
from tokensieve.records import check_writable, write_whole
from tokensieve.tasks.arguments import add_budget_flags, blocks, keep_number, keep_or_default, option_pairs

if TYPE_CHECKING:
    from PIL import Image

    from tokensieve.report.pictures import Panel, Selection
    from tokensieve.tasks.viewer import Request, Viewer

EPILOG = """examples:
  tokensieve view dog.jpg
  tokensieve view dog.jpg --method sieve --keep 0.25 --blocks 2,6,10 -o dog-sieve.png
  tokensieve view dog.jpg --method sieve --compare 0.7 0.4 0.2        three budgets, with the speed-up of each
  tokensieve view dog.jpg --engine vit.onnx -o dog-file.png
  tokensieve view dog.jpg --method anchor --at 5 k=8 m=24 -o dog-anchor.png
  tokensieve view dog.jpg --model ViT-B-32 --pretrained vit_b_32.pt --method evit --keep 20"""


_DEFAULTS = {"method": "anchor"}


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("image", metavar="IMAGE", help="the photo; or a GIF or a folder of frames, of which each is drawn")
    add("options", nargs="*", metavar="KEY=VALUE", help="options of the method")
    add("--method", default="anchor", metavar="NAME", help="see `tokensieve methods` (default: anchor)")
    add_budget_flags(parser)
    add("--at", type=blocks, metavar="BLOCKS", help="where patches leave, such as 5 or 3,6,9 (default: the method's)")
    add("--schedule", metavar="NAME", help=f"{', '.join(SCHEDULES)} (default: the method's)")
    add("--mode", choices=("prune", "analyse"), default="prune", help="analyse: every block scores the whole photo")
    add("--model", default="vit-s14", metavar="NAME", help="vit-s14, or a model of open_clip (default: vit-s14)")
    add("--pretrained", metavar="FILE", help="the checkpoint of an open_clip model")
    add("--engine", metavar="FILE", help="instead of model and method: a file of `tokensieve export --with_kept`")
    add("--blocks", type=blocks, metavar="BLOCKS", help="show these, such as 2,6,10 (default: the last of --at)")
    add("--compare", nargs="+", type=keep_number, metavar="K",
        help="these budgets side by side, each with its measured speed-up over the untouched model")  # fmt: skip
    add("--frames", type=int, default=8, metavar="N", help="at most N frames, evenly spaced (default: 8)")
    add("-o", "--output", default="view.png", metavar="FILE", help="a PNG file (default: view.png)")


def run(args: Namespace) -> int:
    if Path(args.output).suffix.lower() != ".png":
        raise OptionError(f"-o {args.output}: give a name that ends in .png")
    options = option_pairs(args.options)
    check_writable(args.output)
    if args.engine is not None:
        return _run_file(args)
    from tokensieve.report.pictures import png_bytes, read_photo, sheet
    from tokensieve.tasks.viewer import Request, load_viewer, read_frames

    if args.compare and (args.keep is not None or args.keep_average is not None or args.blocks or args.mode != "prune"):
        raise OptionError("--compare takes the budgets itself, and shows what is kept at the end: leave out --keep, "
                          "--keep_average, --blocks and --mode")  # fmt: skip
    if args.frames < 1:
        raise OptionError(f"--frames {args.frames}: at least 1")
    frames = [("", read_photo(args.image))] if args.compare else read_frames(args.image, args.frames)
    photo = frames[0][1]
    request = Request(
        args.method, keep_or_default(args, options), args.keep_average, args.at, args.schedule, args.mode, options
    )
    viewer = load_viewer(args.model, args.pretrained)
    if args.compare:
        return _compare(args, photo, request, viewer)
    if len(frames) > 1:
        return _frames(args, frames, request, viewer)
    found = viewer.look([photo], request)[0]
    shown = args.blocks or [max(found)]
    if missing := sorted(set(shown) - set(found)):
        raise OptionError(f"--blocks {missing[0]}: patches leave at block(s) {', '.join(map(str, sorted(found)))}")
    rows = _rows(viewer.shown(photo), [found[block] for block in shown])
    title = f"{request.label}  \u00b7  {args.model}  \u00b7  {Path(args.image).name}"
    write_whole(args.output, png_bytes(sheet(rows, title)))
    print(f"{args.output}: {request.label}, {found[shown[-1]].count} patches after block {shown[-1]}")
    return 0


def _compare(args: Namespace, photo: Image.Image, request: Request, viewer: Viewer) -> int:
    """The photo and what each budget of --compare keeps of it, side by side."""
    from tokensieve.report.pictures import Panel, draw_kept, draw_photo, png_bytes, sheet
    from tokensieve.tasks.viewer import compare

    found = compare(viewer, photo, [replace(request, keep=keep) for keep in args.compare])
    shown = viewer.shown(photo)
    panels: list[Panel | None] = [Panel("all patches: 1x", draw_photo(shown, found[0].selection.grid))]
    for keep, one in zip(args.compare, found, strict=True):
        panels.append(Panel(f"keep {keep}: {one.speedup:.2f}x as fast", draw_kept(shown, one.selection.kept)))
        print(f"keep {keep}: {one.selection.count} patches, {one.speedup:.2f}x as fast, MAC ratio {one.mac_ratio:.2f}")
    write_whole(args.output, png_bytes(sheet([panels], f"{args.method}  \u00b7  {args.model}")))
    print(f"{args.output}: speed-ups of batches of 8 on this machine, against the untouched model in the same run")
    return 0


def _run_file(args: Namespace) -> int:
    """The same of an exported file."""
    given = ("method", "keep", "keep_average", "at", "schedule", "pretrained", "blocks", "compare")
    if said := [f"--{name}" for name in given if getattr(args, name) not in (None, _DEFAULTS.get(name))] + args.options:
        raise OptionError(f"{said[0]} and --engine cannot be used together: the file has its model and method")
    from tokensieve.report.pictures import png_bytes, read_photo, sheet
    from tokensieve.tasks.viewer import FileViewer

    photo = read_photo(args.image)
    viewer = FileViewer(args.engine)
    found = viewer.look(photo)
    title = f"{viewer.label}  \u00b7  {viewer.engine.about.model}  \u00b7  {Path(args.image).name}"
    write_whole(args.output, png_bytes(sheet(_rows(viewer.shown(photo), [found]), title)))
    print(f"{args.output}: {viewer.label}, {found.count} patches at the end")
    return 0


def _frames(args: Namespace, frames: Sequence[tuple[str, Image.Image]], request: Request, viewer: Viewer) -> int:
    """Each frame and what remains of it: a column a frame."""
    from tokensieve.report.pictures import Panel, draw_kept, draw_photo, png_bytes, sheet

    if args.blocks:
        raise OptionError("--blocks: of several frames the last block is shown")
    top: list[Panel | None] = []
    below: list[Panel | None] = []
    for (name, frame), by_block in zip(frames, viewer.look([frame for _, frame in frames], request), strict=True):
        last, shown = by_block[max(by_block)], viewer.shown(frame)
        top.append(Panel(name, draw_photo(shown, last.grid)))
        below.append(Panel(f"kept: {last.count}", draw_kept(shown, last.kept)))
    title = f"{request.label}  \u00b7  {args.model}  \u00b7  {Path(args.image).name}"
    write_whole(args.output, png_bytes(sheet([top, below], title)))
    print(
        f"{args.output}: {request.label}, {len(frames)} frames, {last.count} patches of each after block {last.block}"
    )
    return 0


def _rows(photo: Image.Image, selections: Sequence[Selection]) -> list[list[Panel | None]]:
    """One block: photo, kept and scores in a row. Several: a row of kept and one of scores, a column a block."""
    from tokensieve.report.pictures import Panel, draw_kept, draw_photo, draw_scores, score_range

    first: Panel | None = Panel("photo", draw_photo(photo, selections[0].grid))
    kept = [Panel(f"kept after block {s.block}: {s.count}", draw_kept(photo, s.kept)) for s in selections]
    scores = [
        Panel(
            f"scores at block {s.block}" + " (grey: had left)" * s.some_left_before,
            draw_scores(photo, s.scores),
            score_range(s.scores),
        )
        for s in selections
        if s.scores is not None
    ]
    if len(selections) == 1:
        return [[first, *kept, *scores]]
    return [[first, *kept], [None, *scores]] if scores else [[first, *kept]]
