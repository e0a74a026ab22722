"""`tokensieve eval vlm`. Its flags are in tasks/vlm/flags.py."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from tokensieve.cli.parts import show
from tokensieve.tasks.vlm.flags import eval_args, eval_options
from tokensieve.utils.progress import bars


def main(argv: Sequence[str]) -> int:
    args = eval_args(argv)
    if args.output:
        from tokensieve.records import check_writable

        check_writable(args.output)
    result = _result(args, shlex.join(["tokensieve", "eval", "vlm", *argv]))
    _show(result)
    if args.output:
        from tokensieve.report.results import write_eval

        write_eval(result, args.output)
        print(f"result: {args.output}")
    return 0


def _result(args: Namespace, command: str) -> dict[str, Any]:
    from transformers.utils.logging import disable_progress_bar

    from tokensieve.tasks.vlm.evaluate import evaluate_vlm

    disable_progress_bar()  # of loading weights; the one below counts questions
    with bars({"questions": None}) as shown:
        return evaluate_vlm(eval_options(args), command=command, progress=partial(shown.to, "questions"))


def _show(result: dict[str, Any]) -> None:
    from tokensieve.tasks.vlm.table import vlm_tables

    show(*vlm_tables(result))
