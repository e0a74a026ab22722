"""What is wrong with a re-identification set: one line for each file, and exit code 2 where there is any.

Checked: names parse, every modality is there, every file decodes to its last row, every training identity was seen by
two cameras, every query has a match from another camera (another scene in msvr310).
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

EPILOG = """examples:
  tokensieve data reid-check data/RGBNT201 --layout rgbnt201
  tokensieve data reid-check data/mine --layout folder"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("root", type=Path, metavar="DIR", help="the set's folder")
    parser.add_argument("--layout", required=True, metavar="L", help="rgbnt201, rgbnt100, msvr310, folder")


def run(args: Namespace) -> int:
    from tokensieve.tasks.reid.data import check_set, load_set

    if problems := check_set(args.layout, args.root):
        print("\n".join(f"{problem.file}: {problem.reason}" for problem in problems))
        print(f"{len(problems)} broken, and not one file was changed")
        print("`eval reid --skip_broken` and `train reid DATASETS.SKIP_BROKEN=True` leave them out")
        return 2
    print(load_set(args.layout, args.root).summary())
    return 0
