"""Train which patches to keep, for `--method learned`, by distillation on unlabelled images."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from tokensieve.tasks.arguments import keep_number
from tokensieve.utils.progress import bars

EPILOG = """examples:
  tokensieve train select                                on CIFAR-10 training images, for 2x and 3x
  tokensieve train select --photos DIR --keep 0.25 --steps 1000 -o runs/select.safetensors
  tokensieve train select --resume                       go on after an interruption
  tokensieve eval --method learned --adapter runs/select.safetensors --keep 0.25
  tokensieve eval --method learned --adapter vit-s14 --keep 0.25      the one that ships, for the default model"""

_FIRST = 20_000  # CIFAR-10 training images before this one are for the alignment and for probes


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--photos", type=Path, metavar="FOLDER", help="images of your own, without labels (default: CIFAR-10's)")
    add("--images", type=int, metavar="N", help="that many of them (default: 4000 of CIFAR-10, all of a folder)")
    add("--held_out", type=int, default=96, metavar="N", help="images that choose the best step (default: 96)")
    add("--keep", type=keep_number, nargs="+", default=[], metavar="K",
        help="budgets to train for, in turn (default: those that make 2x and 3x possible)")  # fmt: skip
    add("--steps", type=int, default=200, metavar="S", help="(default: 200)")
    add("--batch_size", type=int, default=16, metavar="B", help="(default: 16)")
    add("--lr", type=float, default=4e-3, help="(default: 0.004)")
    add("--kl", type=float, default=1.0, metavar="W",
        help="weight of the zero-shot logits over CIFAR-10's classes beside the feature (default: 1)")  # fmt: skip
    add("--tau", type=float, default=0.5, metavar="T", help="temperature of the relaxed choice (default: 0.5)")
    add("--every", type=int, default=20, metavar="S", help="steps between evaluations (default: 20)")
    add("--seed", type=int, default=0, metavar="S", help="(default: 0)")
    add("--resume", action="store_true", help="go on where an interrupted run of the same settings last evaluated")
    add("-o", "--output", type=Path, default=Path("runs/select.safetensors"), metavar="FILE")


def run(args: Namespace) -> int:
    from tokensieve.tasks.clip.select import Photos, SelectConfig, default_subject, photos_in, train_select
    from tokensieve.tasks.clip.state import check_start
    from tokensieve.training.distributed import check_free, first_alone, join, leave, rank
    from tokensieve.training.loop import check_installed
    from tokensieve.zoo.cifar10 import load_cifar10

    device = join()
    config = SelectConfig(
        held_out=args.held_out, steps=args.steps, batch_size=args.batch_size, lr=args.lr, kl=args.kl, tau=args.tau,
        keep=tuple(args.keep), every=args.every, seed=args.seed,
    )  # fmt: skip
    check_free(args.output, file=True)
    check_start(args.output, args.resume)
    check_installed()
    files = None if args.photos is None else photos_in(args.photos, args.images)
    subject, transform = default_subject(kl=config.kl)
    if files is not None:
        photos = Photos(files, transform)
    else:
        images, _ = first_alone(lambda: load_cifar10("train"))
        photos = Photos(images[_FIRST : _FIRST + (args.images or 4000)], transform)
    with bars({"training": config.steps}) as shown:
        evaluations, _ = train_select(
            subject, photos, config, args.output, resume=args.resume, device=device,
            tell=shown.tell, tick=partial(shown.to, "training"),
        )  # fmt: skip
    best = min(evaluations, key=lambda j: j.mean)
    if rank() == 0:
        if best.step == 0:
            print("nothing was learned: the untrained networks, that is sieve, are best on the held-out images")
        print(f"best at step {best.step}; adapter: {args.output}")
    leave()
    return 0
