"""`tokensieve search`: see tasks/search/flags.py for its flags."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tokensieve.cli.parts import carry_out
from tokensieve.errors import UnknownNameError, nearest
from tokensieve.tasks.arguments import option_pairs, take_pairs
from tokensieve.tasks.search.flags import TASKS, search_config, search_parser, top_parser


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    if not words or words[0].startswith("-"):
        top_parser().parse(words or ["--help"])
        return 0
    task = words.pop(0)
    if task not in TASKS:
        raise UnknownNameError(f"tokensieve search does not know {task!r}.{nearest(task, TASKS)}")
    args, rest = search_parser(task).parse_known_args(words)
    pairs, rest = take_pairs(rest)
    config = search_config(task, args)  # first: it names the extra that a search needs

    from tokensieve.tasks.search.evaluation import eval_search, task_of

    fixed = {**config.eval_settings, **task_of(task).given(rest), **option_pairs(pairs)}
    command = shlex.join(["tokensieve", "search", *argv])
    return carry_out(eval_search(task, config, fixed, args.images, command))
