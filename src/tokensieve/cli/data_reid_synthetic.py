"""Synthetic people of different build, clothing and gait, seen by several cameras in RGB, near and thermal infrared.

Night and glare hide people in RGB, hot days in thermal, and people who look alike in one modality differ in another.
The same flags give the same bytes.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from tokensieve.utils.progress import bars

EPILOG = """examples:
  tokensieve data reid-synthetic --layout rgbnt201 --identities 60 -o data/people
  tokensieve data reid-synthetic --layout msvr310 --identities 20 --cameras 3 --images 2 --seed 7 -o data/small
  tokensieve data reid-synthetic --layout folder --modalities rgb tir -o data/two"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("-o", "--output", required=True, type=Path, metavar="DIR", help="where to write it: a new or empty folder")
    add("--layout", default="rgbnt201", metavar="L", help="rgbnt201, rgbnt100, msvr310, folder (default: rgbnt201)")
    add("--identities", type=int, default=60, metavar="N", help="people (default: 60)")
    add("--cameras", type=int, default=4, metavar="N", help="that see each of them; scenes in msvr310 (default: 4)")
    add("--images", type=int, default=4, metavar="N", help="of each person by each camera (default: 4)")
    add("--test_share", type=float, default=0.4, metavar="P", help="of the people, held for testing (default: 0.4)")
    add(
        "--modalities",
        nargs="+",
        default=["rgb", "nir", "tir"],
        metavar="M",
        help="with --layout folder: some of rgb, nir, tir",
    )
    add("--seed", type=int, default=0, metavar="S", help="(default: 0)")


def run(args: Namespace) -> int:
    from tokensieve.tasks.reid.synthetic import SyntheticConfig, write_synthetic

    config = SyntheticConfig(
        layout=args.layout, identities=args.identities, cameras=args.cameras, images=args.images, seed=args.seed,
        test_share=args.test_share, modalities=tuple(args.modalities),
    )  # fmt: skip
    with bars({"drawing": config.pictures}) as shown:
        write_synthetic(args.output, config, partial(shown.further, "drawing"))
    train = config.identities - config.test_identities
    print(f"{args.output}: {train} people to train on, {config.test_identities} to test on, {config.cameras} cameras, "
          f"{config.pictures} moments in {len(config.modalities)} modalities")  # fmt: skip
    return 0
