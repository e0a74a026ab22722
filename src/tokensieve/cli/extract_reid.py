"""Re-identification features of your own images, without labels.

A folder with one folder for each modality (rgb, nir, tir, or what the model was trained on): files of the same name are
one image. A modality that an image lacks is a zero block of its feature. With --modality, plain files and folders of
images of that one modality.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path

from tokensieve.errors import MissingMaterialError, OptionError

EPILOG = """examples:
  tokensieve extract reid --checkpoint runs/reid/best.safetensors photos/ -o features.npz
  tokensieve extract reid --checkpoint runs/reid/best.safetensors --modality rgb a.jpg b.jpg -o features.safetensors

The file holds features (images, width), names, the modalities of the blocks, and pids, cameras and scenes of -1."""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("images", nargs="+", type=Path, metavar="PATH", help="a folder with a folder for each modality, or image files")
    add("--checkpoint", required=True, type=Path, metavar="FILE", help="of `tokensieve train reid`")
    add("-o", "--output", required=True, type=Path, metavar="FILE", help=".npz or .safetensors")
    add("--modality", metavar="M", help="that plain image files are of")
    add("--flip", action="store_true", help="average the features of each image and its mirror image")
    add("--after_neck", action="store_true", help="the features after the BNNeck (default: before it)")
    add("--batch_size", type=int, default=64, metavar="B", help="(default: 64)")


def run(args: Namespace) -> int:
    from tokensieve.records import check_writable
    from tokensieve.tasks.reid.features import check_ending, extract, save_features, table_of
    from tokensieve.tasks.reid.layouts import scan_images
    from tokensieve.tasks.reid.model import load_checkpoint

    if args.batch_size < 1:
        raise OptionError(f"--batch_size {args.batch_size}: 1 or more")
    for path in args.images:
        if not path.exists():
            raise MissingMaterialError(f"{path}: there is no such file or folder")
    check_writable(check_ending(args.output))
    model, _ = load_checkpoint(args.checkpoint)
    if args.modality and args.modality not in model.modalities:
        raise OptionError(f"--modality {args.modality}: the model looks at {', '.join(model.modalities)}")
    samples = scan_images(args.images, (args.modality,) if args.modality else model.modalities)
    if not samples:
        raise MissingMaterialError(f"no image in {', '.join(map(str, args.images))}")
    features = extract(model, samples, flip=args.flip, after_neck=args.after_neck, batch_size=args.batch_size)
    about = {"checkpoint": str(args.checkpoint), "flip": args.flip, "after_neck": args.after_neck}
    save_features(args.output, table_of({"images": features}, {"images": samples}, model, False, about))
    lacking = Counter(name for sample in samples for name in model.modalities if name not in sample.paths)
    for name, count in lacking.items():
        note = f"{count} of {len(samples)} images have no {name}: their features are zero there"
        print(f"tokensieve: note: {note}", file=sys.stderr)
    print(f"{args.output}: {len(samples)} images, features {features.shape[1]} wide, {' + '.join(model.modalities)}")
    return 0
