"""Train re-identification from several modalities, tokens compressed by SDTPS."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from tokensieve.utils.progress import bars

EPILOG = """examples:
  tokensieve data reid-synthetic --layout rgbnt201 -o data/reid-synthetic
  tokensieve train reid --config configs/synthetic/DeMo_SDTPS.yml
  tokensieve train reid --config configs/synthetic/DeMo_SDTPS.yml MODEL.USE_SDTPS=False -o runs/reid-baseline
  tokensieve train reid --config configs/RGBNT201/DeMo_SDTPS.yml MODEL.PRETRAIN_PATH=FILE --dry-run
  tokensieve train reid --config configs/synthetic/DeMo_SDTPS.yml mode=optuna n_trials=10 -o runs/search   a search
  torchrun --nproc_per_node 2 -m tokensieve.cli train reid --config FILE      one run on two devices"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="a setting on top of the file's, as MODEL.USE_SDTPS=False")
    add("--config", type=Path, required=True, metavar="FILE", help="YAML, as in configs/")
    add("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    add("--dry-run", "--dry_run", action="store_true", help="check configuration, data and model, print the plan")
    add("-o", "--output", type=Path, metavar="DIR", help="instead of the file's OUTPUT_DIR")


def run(args: Namespace) -> int:
    from tokensieve.tasks.reid.config import load_config
    from tokensieve.tasks.reid.train import build_task, plan, train_reid
    from tokensieve.training.checkpoint import CHECKPOINTS, latest
    from tokensieve.training.distributed import check_free, join, leave, rank

    more = [*args.overrides, *([f"OUTPUT_DIR={args.output}"] if args.output else [])]
    config = load_config(args.config, more)
    if config.manager_settings.mode != "single" and not args.dry_run:
        return _search(args, more)
    if args.resume:
        latest(Path(config.OUTPUT_DIR) / CHECKPOINTS)  # before data and model are loaded
    join()  # after a search had its turn: torch asks once which GPUs there are
    if not args.dry_run:
        check_free(Path(config.OUTPUT_DIR))
    task = build_task(config)
    if rank() == 0:
        print(plan(task))
    if args.dry_run:
        return 0
    with bars({"training": config.SOLVER.MAX_STEPS}) as shown:
        result = train_reid(
            config, resume=args.resume, task=task, tell=shown.tell,
            tick=partial(shown.to, "training"),
        )  # fmt: skip
    best = f"best at step {result.best_step}, mAP {100 * (result.best_score or 0):.1f} % on held-out identities"
    if rank() == 0:
        print(f"{best}; model: {Path(config.OUTPUT_DIR) / 'best.safetensors'}")
    leave()
    return 0


def _search(args: Namespace, more: list[str]) -> int:
    """manager_settings.mode optuna or ray: trials, each a run of its own. It goes on by itself where it was."""
    import shlex

    from tokensieve.cli.parts import carry_out
    from tokensieve.tasks.reid.search import reid_search
    from tokensieve.utils.yaml import read_config

    words = ["tokensieve", "train", "reid", "--config", str(args.config), *more]
    return carry_out(reid_search(read_config(args.config), more, shlex.join(words)))
