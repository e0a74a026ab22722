"""Train the small LLaVA (144 image tokens, 8 decoder layers) from nothing on generated scenes and questions."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tokensieve.utils.progress import bars

EPILOG = """examples:
  tokensieve train vlm-base                              an hour on one core, once
  tokensieve train vlm-base --blind -o runs/blind        what the wording alone gives away
  tokensieve train vlm-base --resume                     go on after an interruption"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--tower_steps", type=int, default=1600, metavar="S", help="steps with patch labels (default: 1600)")
    add("--tower_batch", type=int, default=8, metavar="B", help="images a step with patch labels (default: 8)")
    add("--steps", type=int, default=2500, metavar="S", help="steps with questions (default: 2500)")
    add("--batch_size", type=int, default=8, metavar="B", help="images a step with questions (default: 8)")
    add("--each", type=int, default=3, metavar="N", help="questions of each kind about an image (default: 3)")
    add("--lr", type=float, default=5e-3, help="of the steps with questions (default: 0.005)")
    add("--every", type=int, default=200, metavar="S", help="steps between evaluations (default: 200)")
    add("--blind", action="store_true", help="never show the decoder an image: what the wording alone gives away")
    add("--seed", type=int, default=0, metavar="S", help="(default: 0)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: as torch chooses)")
    add("--resume", action="store_true", help="go on where an interrupted run of the same settings left its checkpoint")
    add("-o", "--output", type=Path, metavar="FOLDER",
        help="checkpoints, logs and the model (default: vlm-base in the cache folder)")  # fmt: skip


def run(args: Namespace) -> int:
    import torch

    from tokensieve.errors import OptionError
    from tokensieve.tasks.vlm.base import BaseConfig, train_base
    from tokensieve.zoo.cifar10 import cache_folder

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise OptionError("train vlm-base trains in one process: start it without torchrun or `accelerate launch`")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    folder = args.output or cache_folder() / "vlm-base"
    config = BaseConfig(
        seed=args.seed, tower_steps=args.tower_steps, tower_batch=args.tower_batch, steps=args.steps,
        batch=args.batch_size, each=args.each, lr=args.lr, every=args.every, blind=args.blind,
    )  # fmt: skip
    with bars({"tower": config.tower_steps, "decoder": config.steps}) as shown:
        train_base(
            config, folder, resume=args.resume,
            tell=shown.tell, tick=shown.to,
        )  # fmt: skip
    print(f"model and processor: {folder / 'model'}")
    return 0
