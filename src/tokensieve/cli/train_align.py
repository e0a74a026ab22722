"""Train the projections of the embedded CLIP on captions of CIFAR-10."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from tokensieve.utils.progress import bars

EPILOG = """examples:
  tokensieve train align                                 10,500 images, half an hour on two cores, once
  tokensieve train align --images 20000 -o runs/align.safetensors
  torchrun --nproc_per_node 2 -m tokensieve.cli train align              on two devices"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--images", type=int, default=10500, metavar="N", help="training images, from the first (default: 10500)")
    add("--epochs", type=int, default=40, metavar="E", help="(default: 40)")
    add("--batch_size", type=int, default=512, metavar="B", help="(default: 512)")
    add("--lr", type=float, default=2e-3, help="(default: 0.002)")
    add("--seed", type=int, default=0, metavar="S", help="(default: 0)")
    add("--resume", action="store_true", help="go on after the last epoch of an interrupted run of the same settings")
    add("-o", "--output", type=Path, default=Path("runs/vit-s14-minilm.safetensors"), metavar="FILE")


def run(args: Namespace) -> int:
    from tokensieve.records import check_writable
    from tokensieve.tasks.clip.align import AlignConfig, align, save
    from tokensieve.tasks.clip.state import check_start, state_folder
    from tokensieve.training.distributed import join, leave, only_run_of_all, rank
    from tokensieve.training.loop import check_installed

    join(cpu=True)
    config = AlignConfig(images=args.images, epochs=args.epochs, batch_size=args.batch_size, lr=args.lr, seed=args.seed)
    check_writable(args.output)
    check_start(args.output, args.resume)
    check_installed()
    with only_run_of_all(args.output, file=True), bars({"tower features": config.images}) as shown:
        tick = partial(shown.further, "tower features")
        check_start(args.output, args.resume)  # again: another run may have ended since
        result = align(config, tick, state_folder(args.output), args.resume, shown.tell)
        if rank() == 0:
            save(result, args.output, config)
    if rank() == 0:
        print(f"zero-shot on held-out training images: {100 * result.held_out_accuracy:.1f} % (epoch {result.epoch})")
        print(f"projections: {args.output}")
    leave()
    return 0
