"""Train SmolLaVA: the projector between ViT-S/14 and SmolLM2-135M, and a LoRA, on questions about photos."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from tokensieve.utils.progress import bars

EPILOG = """examples:
  tokensieve train smol                                  features, then two runs; hours on one core, once
  tokensieve train smol --resume                         go on after an interruption
  tokensieve train smol --pictures 400 --pooled_steps 20 --full_steps 5 -o runs/try
  torchrun --nproc_per_node 6 -m tokensieve.cli train smol     six processes share each step's pictures"""


def add_arguments(parser: ArgumentParser) -> None:
    from tokensieve.tasks.vlm.smol.recipe import SmolConfig

    add, usual = parser.add_argument, SmolConfig()
    add("--pictures", type=int, default=usual.pictures, metavar="N", help="for training (default: %(default)s)")
    add("--regression", type=int, default=usual.regression, metavar="N",
        help="how many of them the projector starts from (default: %(default)s)")  # fmt: skip
    add("--batch_size", type=int, default=usual.batch, metavar="B", help="pictures a step (default: %(default)s)")
    add("--pooled_steps", type=int, default=usual.pooled_steps, metavar="S",
        help="steps with the picture pooled to 64 tokens (default: %(default)s)")  # fmt: skip
    add("--full_steps", type=int, default=usual.full_steps, metavar="S",
        help="steps with all 256 tokens (default: %(default)s)")  # fmt: skip
    add("--lr", type=float, default=usual.lr, help="of the pooled steps (default: %(default)s)")
    add("--every", type=int, default=usual.every, metavar="S", help="steps between validations (default: %(default)s)")
    add("--seed", type=int, default=usual.seed, metavar="S", help="(default: %(default)s)")
    add("--threads", type=int, metavar="N", help="CPU threads of each process (default: as torch chooses)")
    add("--resume", action="store_true", help="go on where an interrupted run of the same settings left its checkpoint")
    add("-o", "--output", type=Path, metavar="FOLDER",
        help="features, checkpoints, logs and what ships (default: smol in the cache folder)")  # fmt: skip


def run(args: Namespace) -> int:
    import torch

    from tokensieve.errors import OptionError
    from tokensieve.tasks.vlm.smol.recipe import SmolConfig
    from tokensieve.tasks.vlm.smol.train import train_smol
    from tokensieve.training.distributed import join, leave, rank
    from tokensieve.zoo.cifar10 import cache_folder

    if args.threads is not None:
        if args.threads < 1:
            raise OptionError(f"--threads {args.threads}: at least 1")
        torch.set_num_threads(args.threads)
    join(cpu=True)
    config = SmolConfig(
        seed=args.seed, pictures=args.pictures, regression=min(args.regression, args.pictures), batch=args.batch_size,
        pooled_steps=args.pooled_steps, full_steps=args.full_steps, lr=args.lr, every=args.every,
    )  # fmt: skip
    totals = {
        "features": config.pictures, "regression": config.regression, "pooled": config.pooled_steps,
        "full": config.full_steps,
    }  # fmt: skip
    with bars(totals) as shown:
        path = train_smol(
            config, args.output or cache_folder() / "smol", resume=args.resume, tell=shown.tell, tick=shown.to
        )
    if rank() == 0:
        print(f"projector and LoRA: {path}")
    leave()
    return 0
