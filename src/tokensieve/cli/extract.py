"""Features of your own images, without labels, in a file.

clip:  image features of a CLIP model, of shards or folders of any size
reid:  by a model of `tokensieve train reid`
"""

from __future__ import annotations

from collections.abc import Sequence

from tokensieve.cli.parts import run_part

# word -> the file beside this one that has `add_arguments(parser)`, `run(args)` and EPILOG
PARTS = {"clip": "extract_clip", "reid": "extract_reid"}
EPILOG = """examples:
  tokensieve extract clip "shards/{000000..000099}.tar" --method sieve --keep 0.4 -o features/
  tokensieve extract reid --checkpoint runs/reid/best.safetensors photos/ -o features.npz

`tokensieve extract clip --help` and `tokensieve extract reid --help` list their flags."""


def main(argv: Sequence[str]) -> int:
    return run_part("extract", argv, PARTS, __doc__, EPILOG)
