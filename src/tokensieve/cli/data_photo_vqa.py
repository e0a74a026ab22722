"""Put pictures together from photos of CIFAR-10 and fruit, with questions about them: PNG files and questions.jsonl."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

EPILOG = """examples:
  tokensieve data photo-vqa -o data/photo-vqa                          200 pictures of test photos
  tokensieve data photo-vqa -o data/unseen --combinations unseen       a class where training never shows it in each
  tokensieve data photo-vqa -o data/photo-train --split train --images 5000"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("-o", "--output", required=True, metavar="FOLDER", type=Path, help="where to write it")
    add("--images", type=int, default=200, metavar="N", help="(default: 200)")
    add("--each", type=int, default=1, metavar="N", help="questions of each kind about a picture (default: 1)")
    add("--split", default="test", choices=["train", "val", "test"],
        help="whose photos; no photo is in two of them (default: test)")  # fmt: skip
    add("--combinations", choices=["seen", "unseen", "all"],
        help="pairs of class and place: those of training, one that training never shows in each picture, or all "
        "(default: seen, for test all)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="S", help="(default: 0)")


def run(args: Namespace) -> int:
    from tokensieve.tasks.vlm.smol.data import write_photo_vqa

    combinations = args.combinations or ("all" if args.split == "test" else "seen")
    count = write_photo_vqa(args.output, args.images, args.seed, args.split, combinations, args.each)
    print(f"{args.images} pictures, {count} lines: {args.output}")
    return 0
