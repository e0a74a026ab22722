"""Evaluate a LLaVA model with vision tokens taken out, beside the untouched one, on the same questions.

Accuracy by type of question, loyalty to the untouched model's answers, tokens of each layer, MACs, time to the first
token, decoding speed and cache. With no model and no data named: the shipped small LLaVA, and generated questions about
scenes that it has not seen. Your own data is a JSONL file, a line for each question:
{"image": "photos/1.png", "question": "What colour is the car?", "answers": ["red", "dark red"], "type": "colour"}
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokensieve.core.budget import SCHEDULES
from tokensieve.errors import OptionError
from tokensieve.tasks.arguments import Parser, blocks, budget, keep_number, option_pairs, take_pairs
from tokensieve.tasks.config_file import with_file

__all__ = ["EXCLUSIVE", "eval_args", "eval_options", "eval_parser"]

EXCLUSIVE = ({"keep", "keep_average"},)
EPILOG = """examples:
  tokensieve eval vlm --method fastv --keep_average 0.5
  tokensieve eval vlm --method divprune --keep 48 --images 50 -o runs/divprune.json
  tokensieve eval vlm --method pyramiddrop --keep 0.4,0.2 --at 2,5
  tokensieve eval vlm --method cdpruner --keep_average 0.33 fold=True
  tokensieve eval vlm --adapter outputs -o runs/learned.json
  tokensieve eval vlm --model llava-hf/llava-1.5-7b-hf --data mine.jsonl --metric vqa --method visionzip --keep 64
  tokensieve eval vlm --config runs/search-vlm/front/0007.yaml
  tokensieve report runs -o report.html"""


def eval_args(argv: Sequence[str]) -> Namespace:
    """The command line, with the flags of its --config FILE, checked."""
    parser = eval_parser()
    pairs, words = take_pairs(argv, parser)
    args = parser.parse(with_file(parser, words, EXCLUSIVE))
    args.method_option = [*args.method_option, *pairs]
    if args.keep is not None and args.keep_average is not None:
        raise OptionError("--keep and --keep_average cannot be used together: give one")
    return args


def eval_parser() -> Parser:
    parser = Parser(prog="tokensieve eval vlm", description=__doc__, epilog=EPILOG)
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML whose keys are these flags, as a search writes it; what is typed wins")
    add("--model", metavar="DIR", help="a LLaVA of `save_pretrained`, or a name (default: the shipped small one)")
    add("--data", type=Path, metavar="FILE", help="questions, JSONL (default: generated ones)")
    add("--method", metavar="NAME", help="see `tokensieve methods`; none: the untouched model (default: none)")
    add("--keep", type=budget, metavar="K", help="vision tokens that remain at the end: a count, a ratio, or a list")
    add("--keep_average", type=keep_number, metavar="K", help="instead: vision tokens that remain on layer average")
    add("--at", type=blocks, metavar="L", help="decoder layers before which tokens leave, as 2 or 2,4,6")
    add("--schedule", metavar="NAME", help=f"how they leave: {', '.join(SCHEDULES)} (default: the method's)")
    add("--positions", metavar="P", help="of what stage 1 keeps: original, or renumber (default: original)")
    add("--method_option", action="append", default=[], metavar="KEY=VALUE",
        help="an option of the method, as often as needed; also as a bare word KEY=VALUE")  # fmt: skip
    add("--adapter", type=Path, metavar="PATH", help="what `tokensieve train vlm` wrote; the method is two_stage then, "
        "unless merger or pruner is named, with the budget it was trained for")  # fmt: skip
    add("--images", type=int, metavar="N", help="the first N (default: all of --data, 200 generated)")
    add("--metric", default="exact", metavar="M", help="exact, or vqa (agreement with several people; default: exact)")
    add("--prompt", metavar="TEXT", help="template with <image> and {question} (default: LLaVA-1.5's)")
    add("--new_tokens", type=int, default=16, metavar="N", help="longest answer (default: 16)")
    add("--batch_size", type=int, default=16, metavar="B", help="questions at a time (default: 16)")
    add("--samples", type=int, default=6, metavar="N", help="questions with pictures for the report (default: 6)")
    add("--seed", type=int, metavar="S", help="of the generated questions and images")
    add("-o", "--output", type=Path, metavar="FILE", help="the result, for `tokensieve report` (default: only shown)")
    return parser


def eval_options(args: Namespace) -> Any:
    """What `evaluate_vlm` takes."""
    from tokensieve.methods.registry import make_method
    from tokensieve.tasks.vlm.evaluate import VlmEvalOptions

    method, options = args.method, option_pairs(args.method_option)
    if args.adapter is not None:
        method = method or "two_stage"
        if options.setdefault("adapter", str(args.adapter)) != str(args.adapter):
            raise OptionError("--adapter and --method_option adapter=... cannot be used together: give one")
    names = (
        "model", "data", "keep", "keep_average", "schedule", "positions", "images", "batch_size", "metric",
        "new_tokens", "samples",
    )  # fmt: skip
    given = {name: getattr(args, name) for name in names}
    given |= {name: getattr(args, name) for name in ("prompt", "seed") if getattr(args, name) is not None}
    if method not in (None, "none"):
        make_method(method, **options)  # what is wrong with them is said before a model is loaded
    at = None if args.at is None else tuple(args.at)
    return VlmEvalOptions(**given, method=method or "none", at=at, options=options)
