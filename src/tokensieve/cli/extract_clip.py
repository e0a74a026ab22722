"""Image features of a CLIP model, reduced or not, of webdataset shards or folders of images.

One safetensors file for each shard: `features` (images, width) and, in its header, the images' keys and what could not
be read. A file is written when its shard is at its end, so memory does not grow with the images, and the same command
after an interruption repeats no finished shard. The processes of torchrun share the shards out. A folder of images
counts as shards of 1,000 files.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from tokensieve.engines.names import ENDINGS
from tokensieve.errors import DataError, MissingMaterialError, OptionError
from tokensieve.records import cores
from tokensieve.tasks.arguments import budget, keep_number, take_pairs
from tokensieve.tasks.clip.flags import add_engine_flags, add_reduction_flags, add_seed_flags, sieve_config
from tokensieve.utils.progress import bars

EPILOG = """examples:
  tokensieve extract clip photos/ -o features/                          the default model, untouched
  tokensieve extract clip "shards/{000000..000099}.tar" --model ViT-B-16 --pretrained FILE --method sieve --keep 0.4 \\
      -o features/ --merge features.npy
  tokensieve extract clip photos/ --engine vit.onnx -o features/        a file of `tokensieve export`
  torchrun --nproc_per_node 4 -m tokensieve.cli extract clip shards/ -o features/

In Python: `tokensieve.tasks.clip.extract.load_features(Path("features"))`."""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "data", nargs="+", metavar="PATH", help=".tar files, patterns as {000..099}.tar, folders of either or of images"
    )
    add("-o", "--output", required=True, type=Path, metavar="DIR", help="a folder for one file a shard")
    add("--model", metavar="NAME", help="of open_clip (default: the embedded one)")
    add("--pretrained", metavar="NAME", help="its weights: a name of open_clip's, or a file")
    add("--method", metavar="NAME", help="see `tokensieve methods`; none: the untouched model (default: none)")
    add("--keep", type=budget, metavar="K", help="patches that remain: a count, a ratio, or a list as 0.7,0.5")
    add("--keep_average", type=keep_number, metavar="K", help="instead: patches that remain on average over the blocks")
    add_reduction_flags(parser)
    add_engine_flags(parser, file=True)
    add_seed_flags(parser)
    add("--normalize", action="store_true", help="features of length 1")
    add("--dtype", default="float32", metavar="TYPE", help="of the files: float32 or float16 (default: float32)")
    add("--amp", action="store_true", help="mixed precision")
    add("--batch_size", type=int, default=64, metavar="B", help="(default: 64)")
    add("--num_workers", type=int, metavar="N", help="processes that read, a shard each (default: 4, or fewer cores)")
    add("--strict", action="store_true", help="a sample that cannot be read ends the run (default: it is counted)")
    add("--merge", type=Path, metavar="FILE.npy",
        help="afterwards, all features in one array, their keys beside it in FILE.keys.jsonl")  # fmt: skip


def _engine_file(args: Namespace) -> Path | None:
    """The file of --engine, which takes the place of model and method; None where it names an engine."""
    path = Path(args.engine)
    if path.suffix not in ENDINGS:
        return None
    args.engine = "torch"  # so that no other is asked for
    for name in ("model", "pretrained", "method", "keep", "keep_average", "quantize", "schedule", "mode"):
        if getattr(args, name) is not None:
            raise OptionError(
                f"--{name} and --engine {path} cannot be used together: the file has its model and method"
            )
    if args.amp:
        raise OptionError(f"--amp and --engine {path} cannot be used together: the file has its precision")
    if not path.is_file():
        raise MissingMaterialError(f"--engine {path}: there is no such file")
    return path


def run(args: Namespace) -> int:
    from tokensieve.tasks.clip.extract import ExtractConfig, extract_clip, merge_features, totals
    from tokensieve.tasks.clip.load import DEFAULT_MODEL, DEFAULT_PRETRAINED
    from tokensieve.tasks.clip.shards import find_shards

    if (args.model is None) != (args.pretrained is None):
        raise OptionError("--model and --pretrained go together: give both, or neither for the embedded model")
    if args.merge is not None and args.merge.suffix != ".npy":
        raise OptionError(f"--merge {args.merge}: a name that ends in .npy")
    pairs, data = take_pairs(args.data)
    adapter = [] if args.adapter is None else [f"adapter={args.adapter}"]
    args.method_option = [*args.method_option, *pairs, *adapter]
    if not data:
        raise OptionError("no data is named: give .tar files, a pattern or a folder")
    file = _engine_file(args)
    config = ExtractConfig(
        model=args.model or DEFAULT_MODEL, pretrained=args.pretrained or DEFAULT_PRETRAINED,
        reduction=sieve_config(args), normalize=args.normalize, dtype=args.dtype, amp=args.amp,
        batch_size=args.batch_size, workers=min(4, cores()) if args.num_workers is None else args.num_workers,
        engine_file=file,
    )  # fmt: skip
    shards = find_shards(data)
    with bars({"images": None}) as shown:
        found = extract_clip(
            config, shards, args.output, strict=args.strict, tick=partial(shown.further, "images"),
            say=lambda line: print(f"tokensieve: note: {line}", file=sys.stderr),
        )  # fmt: skip
    for line in found.warnings:
        print(f"tokensieve: warning: {line}", file=sys.stderr)
    print(f"{found.images} images of this run, {found.done} of {found.shards} shards done: {args.output}")
    if found.done < found.shards:
        return 0
    images, bad = totals(args.output, shards)
    if not images:
        raise DataError(
            f"none of the {bad} samples could be read: each file in {args.output} has the reasons in its header"
        )
    print(f"all shards: {images} images" + (f", {bad} samples could not be read" if bad else ""))
    if args.merge is not None:
        print(f"{args.merge}: {merge_features(args.output, shards, args.merge)} rows")
    return 0
