"""Features of one's own images, without labels, in a file.

reid:  by a model of `tokensieve train reid`
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from tokensieve.cli.parser import Parser
from tokensieve.errors import UnknownNameError, nearest

# word -> the file beside this one that has `add_arguments(parser)`, `run(args)` and EPILOG
PARTS = {"reid": "extract_reid"}
EPILOG = """examples:
  tokensieve extract reid --checkpoint runs/reid/best.safetensors photos/ -o features.npz

`tokensieve extract reid --help` lists its flags."""


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    if not words or words[0].startswith("-"):
        usage = f"tokensieve extract {{{','.join(PARTS)}}} [flags]"
        Parser(prog="tokensieve extract", usage=usage, description=__doc__, epilog=EPILOG).parse(words or ["--help"])
        return 0
    what = words.pop(0)
    if what not in PARTS:
        raise UnknownNameError(f"tokensieve extract does not know {what!r}.{nearest(what, PARTS)}")
    part = importlib.import_module(f"tokensieve.cli.{PARTS[what]}")
    parser = Parser(prog=f"tokensieve extract {what}", description=part.__doc__, epilog=part.EPILOG)
    part.add_arguments(parser)
    code: int = part.run(parser.parse(words))
    return code
