"""`tokensieve eval reid`. Its flags are in tasks/reid/flags.py."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from tokensieve.cli.parts import show
from tokensieve.tasks.reid.flags import eval_args, eval_options
from tokensieve.utils.progress import bars


def main(argv: Sequence[str]) -> int:
    args = eval_args(argv)
    from tokensieve.records import check_writable

    for path in (args.output, args.export):
        if path:
            check_writable(path)
    result = _result(args, shlex.join(["tokensieve", "eval", "reid", *argv]))
    _show(result)
    if args.export:
        print(f"features: {args.export}")
    if args.output:
        from tokensieve.report.results import write_eval

        write_eval(result, args.output)
        print(f"result: {args.output}")
    return 0


def _result(args: Namespace, command: str) -> dict[str, Any]:
    import sys

    from tokensieve.tasks.reid.features import check_ending
    from tokensieve.tasks.reid.runs import evaluate_checkpoints, evaluate_features

    options = eval_options(args)
    if args.features:
        return evaluate_features(args.features, options, command=command)
    if args.export:
        check_ending(args.export)
    with bars({"images": None}) as shown:
        return evaluate_checkpoints(
            args.checkpoint, options, command=command, export=args.export,
            tell=lambda line: print(f"tokensieve: note: {line}", file=sys.stderr),
            progress=partial(shown.to, "images"),
        )  # fmt: skip


def _show(result: dict[str, Any]) -> None:
    from tokensieve.tasks.reid.table import reid_table

    show(reid_table(result))
