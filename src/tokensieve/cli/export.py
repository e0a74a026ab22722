"""Write a CLIP's image tower, reduced or not, to a file for ONNX Runtime (.onnx), OpenVINO (.xml) or torch (.pt2).

The file says how its images are prepared and what was reduced, and takes any number of images at once. It is compared
with torch on real photos before it is put in its place, and timed beside the untouched model on the same engine. In
Python `tokensieve.export` does the same for models of timm and transformers. KEY=VALUE are options of the method.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tokensieve.cli.parts import show
from tokensieve.errors import OptionError
from tokensieve.records import check_writable, new_record, write_record
from tokensieve.tasks.arguments import budget, keep_number, take_pairs
from tokensieve.tasks.clip.flags import add_reduction_flags, add_seed_flags, sieve_config

ENDINGS = (".onnx", ".xml", ".pt2")
EPILOG = """examples:
  tokensieve export --method sieve --keep 0.4 -o vit.onnx                   the embedded CLIP
  tokensieve export --model ViT-B-16 --pretrained FILE --method sieve --keep 0.4 -o vit_b16.xml
  tokensieve export --method sieve --keep 0.4 --quantize int8 --calibrate photos/ -o vit_int8.onnx

  tokensieve view dog.jpg --engine vit.onnx             (of a file written --with_kept)
  tokensieve extract clip photos/ --engine vit.onnx -o features/"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("options", nargs="*", metavar="KEY=VALUE", help="options of the method")
    add("-o", "--output", required=True, type=Path, metavar="FILE", help=f"ends in {', '.join(ENDINGS)}")
    add("--model", metavar="NAME", help="of open_clip (default: the embedded one)")
    add("--pretrained", metavar="NAME", help="its weights: a name of open_clip's, or a file")
    add("--method", metavar="NAME", help="see `tokensieve methods`; none: the untouched model (default: none)")
    add("--keep", type=budget, metavar="K", help="patches that remain: a count, a ratio, or a list as 0.7,0.5")
    add("--keep_average", type=keep_number, metavar="K", help="instead: patches that remain on average over the blocks")
    add_reduction_flags(parser)
    add_seed_flags(parser)
    add("--quantize", metavar="KIND", help="int8, or int8-static with ranges of --calibrate (default: float32)")
    add("--calibrate", nargs="+", type=Path, default=(), metavar="PATH",
        help="photos or folders to calibrate and compare on (default: 20 of ImageNet, or 8 of CIFAR-10)")  # fmt: skip
    add("--with_kept", action="store_true", help="a second output: the indices of the patches that remain")
    add("--threads", type=int, metavar="T", help="threads of the engine (default: as many as it takes)")
    add("--batch", nargs="+", type=int, default=(1, 8), metavar="B", help="batch sizes to time (default: 1 8)")
    add("--rounds", type=int, default=7, metavar="R", help="of the timing; 0: none (default: 7)")
    add("--record", metavar="FILE", help="write what was measured here, as JSON")


def run(args: Namespace) -> int:
    if args.output.suffix not in ENDINGS:
        raise OptionError(f"-o {args.output}: give a name that ends in {', '.join(ENDINGS)}")
    if (args.model is None) != (args.pretrained is None):
        raise OptionError("--model and --pretrained go together: give both, or neither for the embedded model")
    pairs, rest = take_pairs(args.options)
    if rest:
        raise OptionError(f"{rest[0]!r} is not KEY=VALUE")
    adapter = [] if args.adapter is None else [f"adapter={args.adapter}"]
    args.method_option = [*args.method_option, *pairs, *adapter]
    reduction = sieve_config(args)
    for path in (args.output, args.record):
        if path is not None:
            check_writable(path)
    from tokensieve.tasks.clip.load import DEFAULT_MODEL, DEFAULT_PRETRAINED
    from tokensieve.tasks.export.run import ExportConfig, export_record, run_export
    from tokensieve.tasks.export.table import export_tables

    config = ExportConfig(
        model=args.model or DEFAULT_MODEL, pretrained=args.pretrained or DEFAULT_PRETRAINED, reduction=reduction,
        output=args.output, quantize=args.quantize, calibrate=tuple(args.calibrate), with_kept=args.with_kept,
        batches=tuple(args.batch), rounds=args.rounds, threads=args.threads,
    )  # fmt: skip
    exported = run_export(config, lambda line: print(f"tokensieve: {line}", file=sys.stderr))
    for line in exported.warnings:
        print(f"tokensieve: warning: {line}", file=sys.stderr)
    show(*export_tables(exported))
    if args.record is not None:
        row = export_record(config, exported)
        write_record(new_record("export", {"rounds": args.rounds}, [row], threads=args.threads), args.record)
        print(f"record: {args.record}")
    return 0
