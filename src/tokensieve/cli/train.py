"""Train the parts that can be learned.

align:  the projections of the embedded CLIP (ViT-S/14 + MiniLM), LiT-style, on captions of CIFAR-10 training images.
reid:   re-identification from RGB, NIR and TIR, tokens compressed by SDTPS.
select: which patches to keep, for `--method learned`, by distillation on unlabelled images.
vlm:    which vision tokens a LLaVA model keeps: a merger before its language model, pruners inside it.
vlm-base: the small LLaVA that is there without downloading one, from nothing, on generated questions.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tokensieve.cli import train_reid, train_vlm, train_vlm_base
from tokensieve.cli.parser import Parser, keep_number
from tokensieve.errors import OptionError, UnknownNameError, nearest

EPILOG = """examples:
  tokensieve train align                                 10,500 images, half an hour on two cores, once
  tokensieve train align --images 20000 -o runs/align.safetensors
  tokensieve train reid --config configs/synthetic/DeMo_SDTPS.yml
  tokensieve train select                                on CIFAR-10 training images, for 2x and 3x
  tokensieve train select --photos DIR --keep 0.25 --steps 1000 -o runs/select.safetensors
  tokensieve train vlm --dry-run                         what would be trained, tokens per layer, FLOPs
  tokensieve train vlm-base                              the small LLaVA from nothing, an hour on one core, once
  tokensieve train select --resume                       go on after an interruption
  torchrun --nproc_per_node 2 -m tokensieve.cli train reid --config FILE    one run on two devices (docs/scaling.md)
  tokensieve eval --method learned --adapter runs/select.safetensors --keep 0.25

`tokensieve train align --help`, and so on, lists the flags of each."""


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    if not words or words[0].startswith("-"):
        usage = f"tokensieve train {{{','.join(sorted(_PARTS))}}} [flags]"
        top = Parser(prog="tokensieve train", usage=usage, description=__doc__, epilog=EPILOG)
        top.parse(words or ["--help"])
        return 0
    what = words.pop(0)
    if what not in _PARTS:
        raise UnknownNameError(f"tokensieve train does not know {what!r}.{nearest(what, _PARTS)}")
    part = _PARTS[what]
    parser = Parser(prog=f"tokensieve train {what}", description=part.about)
    part.add_flags(parser)
    return part.run(parser.parse(words))


# -- align ------------------------------------------------------------------------------------------------------------


def _align_flags(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--images", type=int, default=10500, metavar="N", help="training images, from the first (default: 10500)")
    add("--epochs", type=int, default=40, metavar="E", help="(default: 40)")
    add("--batch_size", type=int, default=512, metavar="B", help="(default: 512)")
    add("--lr", type=float, default=2e-3, help="(default: 0.002)")
    add("--seed", type=int, default=0, metavar="S", help="(default: 0)")
    add("--resume", action="store_true", help="go on after the last epoch of an interrupted run of the same settings")
    add("-o", "--output", type=Path, default=Path("runs/vit-s14-minilm.safetensors"), metavar="FILE")


def _align(args: Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from tokensieve.results.record import check_writable
    from tokensieve.tasks.clip.align import AlignConfig, align, save
    from tokensieve.tasks.clip.state import state_file
    from tokensieve.training.distributed import join, leave, rank

    join(cpu=True)
    config = AlignConfig(images=args.images, epochs=args.epochs, batch_size=args.batch_size, lr=args.lr, seed=args.seed)
    check_writable(args.output)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=rank() > 0 or not console.is_terminal) as progress:
        task = progress.add_task("tower features", total=config.images)
        result = align(config, lambda done: progress.update(task, advance=done), state_file(args.output), args.resume)
    if rank() == 0:
        save(result, args.output, config)
        print(f"zero-shot on held-out training images: {100 * result.held_out_accuracy:.1f} % (epoch {result.epoch})")
        print(f"projections: {args.output}")
    leave()
    return 0


# -- select -----------------------------------------------------------------------------------------------------------

_FIRST = 20_000  # CIFAR-10 training images before this one are for the alignment and for probes


def _select_flags(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--photos", type=Path, metavar="FOLDER", help="images of your own, without labels (default: CIFAR-10's)")
    add("--images", type=int, metavar="N", help="so many of them (default: 2000 of CIFAR-10, all of a folder)")
    add("--held_out", type=int, default=128, metavar="N", help="images that choose the best step (default: 128)")
    add("--keep", type=keep_number, nargs="+", default=[], metavar="K",
        help="budgets to train for, in turn (default: those that make 2x and 3x possible)")  # fmt: skip
    add("--steps", type=int, default=300, metavar="S", help="(default: 300)")
    add("--batch_size", type=int, default=16, metavar="B", help="(default: 16)")
    add("--lr", type=float, default=4e-3, help="(default: 0.004)")
    add("--kl", type=float, default=1.0, metavar="W",
        help="weight of the zero-shot logits over CIFAR-10's classes beside the feature (default: 1)")  # fmt: skip
    add("--tau", type=float, default=0.5, metavar="T", help="temperature of the relaxed choice (default: 0.5)")
    add("--every", type=int, default=50, metavar="S", help="steps between judgements (default: 50)")
    add("--seed", type=int, default=0, metavar="S", help="(default: 0)")
    add("--resume", action="store_true", help="go on where an interrupted run of the same settings last judged")
    add("-o", "--output", type=Path, default=Path("runs/select.safetensors"), metavar="FILE")


def _select(args: Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from tokensieve.results.record import check_writable
    from tokensieve.tasks.clip.select import Photos, SelectConfig, default_subject, photos_in, train_select
    from tokensieve.training.distributed import join, leave, rank
    from tokensieve.zoo.cifar10 import load_cifar10

    device = join()
    config = SelectConfig(
        held_out=args.held_out, steps=args.steps, batch_size=args.batch_size, lr=args.lr, kl=args.kl, tau=args.tau,
        keep=tuple(args.keep), every=args.every, seed=args.seed,
    )  # fmt: skip
    if args.images is not None and args.images < 1:
        raise OptionError(f"--images {args.images}: at least 1")
    check_writable(args.output)
    files = None if args.photos is None else photos_in(args.photos, args.images)
    subject, transform = default_subject(kl=config.kl)
    photos = Photos(
        files if files is not None else load_cifar10("train")[0][_FIRST : _FIRST + (args.images or 2000)], transform
    )
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=rank() > 0 or not console.is_terminal) as progress:
        task = progress.add_task("training", total=config.steps)
        judged, _ = train_select(
            subject, photos, config, args.output, resume=args.resume, device=device,
            tell=progress.console.print if console.is_terminal else print,
            tick=lambda step: progress.update(task, completed=step),
        )  # fmt: skip
    best = min(judged, key=lambda j: j.mean)
    if rank() == 0:
        if best.step == 0:
            print("nothing was learned: the untrained networks, that is sieve, are best on the held-out images")
        print(f"best at step {best.step}; adapter: {args.output}")
    leave()
    return 0


class _Part(NamedTuple):
    about: str
    add_flags: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]


_PARTS = {
    "align": _Part("Train the projections of the embedded CLIP on captions of CIFAR-10.", _align_flags, _align),
    "reid": _Part(train_reid.ABOUT, train_reid.add_flags, train_reid.run),
    "vlm": _Part(train_vlm.ABOUT, train_vlm.add_flags, train_vlm.run),
    "vlm-base": _Part(train_vlm_base.ABOUT, train_vlm_base.add_flags, train_vlm_base.run),
    "select": _Part("Train which patches to keep, by distillation on unlabelled images.", _select_flags, _select),
}
