"""Draw scenes of coloured shapes and digits with questions about them: PNG files and questions.jsonl."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

EPILOG = """examples:
  tokensieve data vqa-synthetic -o data/vqa                            200 held-out scenes, a question of each kind
  tokensieve data vqa-synthetic -o data/vqa --images 1000 --each 3 --seed 7
  tokensieve data vqa-synthetic -o data/vqa-train --split train --images 5000"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("-o", "--output", required=True, metavar="FOLDER", type=Path, help="where to write it")
    add("--images", type=int, default=200, metavar="N", help="(default: 200)")
    add("--each", type=int, default=1, metavar="N", help="questions of each kind about an image (default: 1)")
    add("--split", default="test", choices=["train", "test"],
        help="train never shows the combinations of which every test image has one (default: test)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="S", help="(default: 0)")


def run(args: Namespace) -> int:
    from tokensieve.tasks.vlm.data import write_synthetic

    count = write_synthetic(args.output, args.images, args.seed, args.split, args.each)
    print(f"{args.images} images, {count} questions: {args.output}")
    return 0
