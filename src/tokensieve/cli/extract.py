"""Features of one's own images, without labels, in a file.

reid:  by a model of `tokensieve train reid`
"""

from __future__ import annotations

from collections.abc import Sequence

from tokensieve.cli.parser import run_part

# word -> the file beside this one that has `add_arguments(parser)`, `run(args)` and EPILOG
PARTS = {"reid": "extract_reid"}
EPILOG = """examples:
  tokensieve extract reid --checkpoint runs/reid/best.safetensors photos/ -o features.npz

`tokensieve extract reid --help` lists its flags."""


def main(argv: Sequence[str]) -> int:
    return run_part("extract", argv, PARTS, __doc__, EPILOG)
