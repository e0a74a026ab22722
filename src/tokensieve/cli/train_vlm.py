"""Train which vision tokens a LLaVA model keeps: a merger before the language model, pruners inside it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path

from tokensieve.utils.progress import bars

EPILOG = """examples:
  tokensieve train vlm                                   the small model, on generated questions
  tokensieve train vlm merge_ratio=0.4 target_merge_tokens=58 -o runs/vlm
  tokensieve train vlm --resume                          go on after an interruption
  tokensieve train vlm --config configs/vision_token_pruning.yaml --dry-run
  tokensieve train vlm mode=optuna n_trials=20 -o runs/search   a search; each trial is such a run
  torchrun --nproc_per_node 2 -m tokensieve.cli train vlm                one run on two devices"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="a setting on top of the file's, as merge_ratio=0.4")
    add("--config", type=Path, metavar="FILE",
        help="YAML, as in configs/ (default: that of the small model, vision_token_pruning_small.yaml)")  # fmt: skip
    add("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    add("--dry-run", "--dry_run", action="store_true", help="check configuration, data and model, print the plan")
    add("--threads", type=int, metavar="N", help="CPU threads (default: as torch chooses)")
    add("-o", "--output", type=Path, metavar="DIR", help="instead of the file's output_dir")


def run(args: Namespace) -> int:
    import torch

    from tokensieve.tasks.vlm.config import load_config
    from tokensieve.tasks.vlm.train import build_task, plan_only, task_plan, train_vlm
    from tokensieve.training.checkpoint import CHECKPOINTS, latest
    from tokensieve.training.distributed import check_free, join, leave, rank

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    more = [*args.overrides, *([f"output_dir={args.output}"] if args.output else [])]
    config = load_config(args.config, more)
    if config.manager_settings.mode != "single" and not args.dry_run:
        return _search(args, more)
    if args.resume:
        latest(Path(config.output_dir) / CHECKPOINTS)  # before data and model are loaded
    join()  # after a search had its turn: torch asks once which GPUs there are
    if args.dry_run:
        if rank() == 0:
            print(plan_only(config))
        return 0
    check_free(Path(config.output_dir))
    task = build_task(config)
    if rank() == 0:
        print(task_plan(task))
    with bars({"training": task.steps}) as shown:
        result = train_vlm(
            config, resume=args.resume, task=task,
            tell=shown.tell, tick=partial(shown.to, "training"),
        )  # fmt: skip
    best = f"best at step {result.best_step}, accuracy_hard {100 * (result.best_score or 0):.1f} %"
    if rank() == 0:
        print(f"{best}; adapter: {Path(config.output_dir) / 'best.safetensors'}")
    leave()
    return 0


def _search(args: Namespace, more: list[str]) -> int:
    """manager_settings.mode optuna or ray: trials, each a run of its own. It goes on by itself where it was."""
    import shlex

    from tokensieve.cli.parts import carry_out
    from tokensieve.tasks.vlm.config import SMALL
    from tokensieve.tasks.vlm.search import vlm_search
    from tokensieve.utils.yaml import read_config

    data = SMALL if args.config is None else read_config(args.config)
    words = ["tokensieve", "train", "vlm", *(["--config", str(args.config)] if args.config else []), *more]
    return carry_out(vlm_search(data, more, shlex.join(words)))
