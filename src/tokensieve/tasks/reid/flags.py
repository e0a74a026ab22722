"""Evaluate re-identification: mAP, CMC and mINP of a trained model on a set, or of features that were written before.

Features are compared by the distance of their unit vectors; a match of the query's own camera (scene in msvr310) does
not count. Several checkpoints of other seeds give mean and deviation.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokensieve.errors import OptionError
from tokensieve.tasks.arguments import Parser
from tokensieve.tasks.config_file import with_file

__all__ = ["EXCLUSIVE", "eval_args", "eval_options", "eval_parser"]

EXCLUSIVE = ({"checkpoint", "features"},)
EPILOG = """examples:
  tokensieve eval reid --checkpoint runs/reid/best.safetensors
  tokensieve eval reid --checkpoint runs/reid/best.safetensors --data data/people --layout rgbnt201 --rerank --flip
  tokensieve eval reid --checkpoint runs/seed*/best.safetensors --missing all -o runs/reid.json
  tokensieve eval reid --checkpoint runs/reid/best.safetensors --export features.npz
  tokensieve eval reid --features features.npz --rerank
  tokensieve eval reid --config runs/search-reid/front/0007.yaml
  tokensieve report runs/reid.json -o report.html"""


def eval_args(argv: Sequence[str]) -> Namespace:
    """The command line, with the flags of its --config FILE, checked."""
    parser = eval_parser()
    args = parser.parse(with_file(parser, argv, EXCLUSIVE))
    if bool(args.checkpoint) == bool(args.features):
        raise OptionError("give either --checkpoint FILE or --features FILE (see `tokensieve eval reid --help`)")
    if args.export and (args.features or len(args.checkpoint) > 1):
        raise OptionError("--export writes the features of one --checkpoint")
    if args.lists < 0 or args.batch_size < 1 or args.workers < 0:
        raise OptionError("--lists and --workers are 0 or more, --batch_size is 1 or more")
    return args


def eval_parser() -> Parser:
    parser = Parser(prog="tokensieve eval reid", description=__doc__, epilog=EPILOG)
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML whose keys are these flags, as a search writes it; what is typed wins")
    add("--checkpoint", nargs="+", type=Path, metavar="FILE", help="of `tokensieve train reid`; several: other seeds")
    add("--features", type=Path, metavar="FILE", help="instead: features written by --export or `extract reid`")
    add("--data", metavar="DIR", help="the set (default: what the checkpoint was trained on)")
    add("--layout", metavar="L", help="rgbnt201, rgbnt100, msvr310, folder (default: the checkpoint's)")
    add("--skip_broken", action="store_true", help="leave out what is broken in the set")
    add("--rerank", action="store_true", help="k-reciprocal re-ranking as well")
    add("--flip", action="store_true", help="average the features of each image and its mirror image")
    add("--after_neck", action="store_true", help="compare the features after the BNNeck (default: before it)")
    add(
        "--no_cameras", action="store_true", help="do not tell the model which camera saw an image, as for unknown ones"
    )
    add("--missing", default="", metavar="LIST", help="modalities to leave out, in query and gallery alike: "
        "r, n, t, rn, rt, nt, several as r,rn; all: each of them")  # fmt: skip
    add("--sparse_ratio", type=float, metavar="R", help="of SDTPS: patches selected (default: as it was trained)")
    add("--beta", type=float, metavar="B", help="of SDTPS: weight of the attention scores (default: as trained)")
    add("--formula", metavar="F", help="of SDTPS: paper, or convex (default: as trained)")
    add("--lists", type=int, default=6, metavar="N", help="ranked lists for the report, worst to best (default: 6)")
    add("--export", type=Path, metavar="FILE", help="write the features, .npz or .safetensors")
    add("--batch_size", type=int, default=64, metavar="B", help="(default: 64)")
    add("--num_workers", dest="workers", type=int, default=0, metavar="N",
        help="processes that read images (default: 0, none beside this)")  # fmt: skip
    add("--workers", dest="workers", type=int, default=0, help=argparse.SUPPRESS)  # its name in 0.1
    add("-o", "--output", type=Path, metavar="FILE", help="the result, for `tokensieve report` (default: only shown)")
    return parser


def eval_options(args: Namespace) -> Any:
    """What `evaluate_checkpoints` takes."""
    from tokensieve.tasks.reid.runs import EvalOptions

    names = ("data", "layout", "rerank", "flip", "after_neck", "missing", "lists", "batch_size", "workers",
             "skip_broken", "sparse_ratio", "beta", "formula")  # fmt: skip
    return EvalOptions(**{name: getattr(args, name) for name in names}, cameras=not args.no_cameras)
