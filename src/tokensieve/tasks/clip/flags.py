"""The flags of `eval` and `sweep`: ours, the legacy and clip_benchmark's, typed or from a file."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from tokensieve.core.budget import SCHEDULES
from tokensieve.engines.names import ENGINES
from tokensieve.errors import OptionError, UnknownNameError
from tokensieve.tasks.arguments import (
    Blocks,
    Parser,
    blocks,
    budget,
    check_budget,
    keep_number,
    option_pairs,
    take_pairs,
)
from tokensieve.tasks.clip.config import MODES, OUTPUT, SieveConfig
from tokensieve.tasks.config_file import actions_of, hint, table_words
from tokensieve.utils.yaml import read_config

__all__ = [
    "EXCLUSIVE",
    "SEED_FLAGS",
    "add_engine_flags",
    "add_reduction_flags",
    "add_seed_flags",
    "add_shared_flags",
    "eval_parser",
    "parse",
    "refuse_both",
    "sieve_config",
]
# the legacy switches: the mode they stand for, and their flags as options of the anchor method
_SEEDS = {
    "enable_token_selection": (
        "analyse",
        {"token_selection_k": "k", "token_selection_m": "m", "token_selection_alpha": "alpha"},
    ),
    "enable_pruning": ("prune", {"k_anchors": "k", "top_m": "m", "alpha": "alpha"}),
}
SEED_FLAGS = {name for switch, (_, flags) in _SEEDS.items() for name in (switch, *flags)}
_ABOUT = """Run the CLIP benchmark with token reduction: accuracy, and the speed measured in the same run.

Stands on clip_benchmark: all its flags pass through, for all five of its tasks. With no model and no data named it runs
on the embedded ones. `tokensieve eval reid` evaluates re-identification, `tokensieve eval vlm` a LLaVA model; each has
its own flags and --help."""
_EPILOG = """examples:
  tokensieve eval                                           the untouched default model
  tokensieve eval --method sieve --keep 0.5
  tokensieve eval --method sieve --keep 0.25 --engine onnxruntime --quantize int8
  tokensieve eval --dataset cifar10 --model ViT-B-32 --pretrained openai --enable_pruning --k_anchors 10 --top_m 20
  tokensieve eval --dataset wds/mine --dataset_root DIR --model ViT-B-16 --pretrained FILE --method tome --keep 60
  tokensieve eval --stream --dataset wds/mine --dataset_root DIR --method sieve --keep 0.4     shard by shard
  torchrun --nproc_per_node 2 -m tokensieve.cli eval --stream --dataset wds/mine --dataset_root DIR"""
_SWITCHES = {"method", *_SEEDS}
# a flag on the command line takes the others of its group out of the file
EXCLUSIVE = ({"keep", "keep_average"}, {"amp", "no_amp"}, {"val_split", "val_proportion"})
_DEFAULTED = ("model", "pretrained", "dataset", "dataset_root")


def add_reduction_flags(parser: ArgumentParser) -> None:
    """How tokens leave, beside the method and its budget."""
    add = parser.add_argument
    add("--schedule", metavar="NAME", help=f"how the removal is spread: {', '.join(SCHEDULES)} (default: the method's)")
    where: dict[str, Any] = {"dest": "prune_layer", "nargs": "+", "type": blocks, "action": Blocks}
    add("--at", **where, metavar="L", help="blocks where tokens leave, as 3,6,9 (default: the method's)")
    add("--prune_layer", **where, help=SUPPRESS)  # the legacy name
    add("--mode", help=f"{', '.join(MODES)} (default: prune)")
    add(
        "--fuse_weight", type=float, metavar="W", help="with --mode fuse: weight of the selected patches (default: 0.2)"
    )
    add("--method_option", action="append", default=[], metavar="KEY=VALUE",
        help="an option of the method, as often as needed; also as a bare word KEY=VALUE")  # fmt: skip
    add(
        "--adapter",
        metavar="FILE",
        help="= --method_option adapter=FILE, for --method learned; vit-s14: the shipped one",
    )


def add_engine_flags(parser: ArgumentParser, file: bool = False) -> None:
    """Where the image tower runs. file: an exported file is taken too."""
    add = parser.add_argument
    add("--engine", default="torch", metavar="NAME",
        help=f"{', '.join(ENGINES)}{', or a file of `tokensieve export`' if file else ''} (default: torch); speed-ups "
        "are against the untouched model on the same engine")  # fmt: skip
    add("--quantize", metavar="KIND", help="int8, on the engines onnxruntime and openvino (default: float32)")
    add("--threads", type=int, metavar="T", help="threads of the engine (default: as many as it takes)")


def add_shared_flags(parser: ArgumentParser) -> None:
    """Ours that `eval` and `sweep` both have."""
    add_reduction_flags(parser)
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML whose keys are flags of either set; the command line wins")
    add("--amp", action="store_true", help="mixed precision on a CPU too, where it is off otherwise")
    add("--speed_batches", type=int, default=4, metavar="N",
        help="batches that the untouched model encodes too, for the speed-up (default: 4; 0: none)")  # fmt: skip
    add("--images", type=int, metavar="N", help="the first N images of the data alone (default: all)")


def add_seed_flags(parser: ArgumentParser) -> None:
    """The legacy flags."""
    group = parser.add_argument_group("anchor selection, legacy names")
    add = group.add_argument
    add("--enable_token_selection", action="store_true", help="= --method anchor --mode analyse")
    add("--token_selection_k", type=int, metavar="K", help="anchors (default: 10)")
    add("--token_selection_m", type=int, metavar="M", help="other patches (default: 50)")
    add("--token_selection_alpha", type=float, metavar="A", help="importance against diversity (default: 0.5)")
    add("--enable_pruning", action="store_true", help="= --method anchor --mode prune")
    add("--k_anchors", type=int, metavar="K", help="anchors (default: 10)")
    add("--top_m", type=int, metavar="M", help="other patches (default: 50)")
    add("--alpha", type=float, metavar="A", help="importance against diversity (default: 0.5)")


def eval_parser() -> Parser:
    """Our own flags of `tokensieve eval`."""
    parser = Parser(prog="tokensieve eval", description=_ABOUT, epilog=_EPILOG, add_help=False,
                    usage="tokensieve eval [clip|reid|vlm] [flags]")  # fmt: skip
    add = parser.add_argument
    add("--method", metavar="NAME", help="see `tokensieve methods`; none: the untouched model (default: none)")
    add("--keep", type=budget, metavar="K", help="patches that remain: a count, a ratio, or a list as 0.7,0.5")
    add("--keep_average", type=keep_number, metavar="K", help="instead: patches that remain on average over the blocks")
    add("--stream", action="store_true",
        help="read a local webdataset shard by shard: memory stays flat, the same command goes on after an "
        "interruption, and the processes of torchrun share the shards out")  # fmt: skip
    add("--strict", action="store_true", help="with --stream: a sample that cannot be read ends the run")
    add_shared_flags(parser)
    add_engine_flags(parser)
    add_seed_flags(parser)
    return parser


def parse(ours: Parser, argv: Sequence[str]) -> tuple[Namespace, Namespace]:
    """(our arguments, clip_benchmark's), from a command line of both. `--help` shows both and exits."""
    from tokensieve.tasks.clip.upstream import eval_parser as benchmark_parser

    theirs = benchmark_parser(Parser)
    if {"-h", "--help"} & set(argv):
        print(_help(ours, theirs))
        raise SystemExit(0)
    bare, words = take_pairs(argv, ours, theirs)
    file = ours.parse_known_args(words)[0].config
    words = [*(_file_words(file, ours, theirs, words) if file else []), *words]
    own, rest = ours.parse_known_args(words)
    adapter = [] if own.adapter is None else [f"adapter={own.adapter}"]
    own.method_option = [*own.method_option, *bare, *adapter]
    defaults = {name: theirs.get_default(name) for name in _DEFAULTED}
    theirs.set_defaults(**dict.fromkeys(_DEFAULTED), output=OUTPUT)
    found, unknown = theirs.parse_known_args(rest)
    if unknown:
        known = [*_flags(ours), *_flags(theirs)]
        raise UnknownNameError(f"{ours.prog} does not know {unknown[0]!r}.{hint(unknown[0], known)}")
    _settle(own, found, defaults)
    return own, found


def _settle(own: Namespace, found: Namespace, defaults: dict[str, Any]) -> None:
    """Fill in what was not said: the default model and data where none is named, precision by the device."""
    import torch

    from tokensieve.tasks.clip import load

    if found.model is None and found.pretrained is None and not found.pretrained_model:
        found.model, found.pretrained = [load.DEFAULT_MODEL], [load.DEFAULT_PRETRAINED]
    if found.dataset is None and found.dataset_root is None:
        found.dataset, found.dataset_root = [load.DEFAULT_DATASET], load.default_dataset_root()
    for name, value in defaults.items():
        if getattr(found, name) is None:
            setattr(found, name, value)
    if own.amp and not found.amp:
        raise OptionError("--amp and --no_amp cannot be used together")
    found.amp = own.amp or (found.amp and torch.cuda.is_available())
    if own.images is not None:
        found.images = own.images  # beside clip_benchmark's own, so that it is part of what a result is of


def _flags(parser: ArgumentParser) -> list[str]:
    return [flag for flag in parser._option_string_actions if flag.startswith("--")]


def _help(ours: Parser, theirs: ArgumentParser) -> str:
    passed = theirs.format_help().partition("options:")[2]
    return f"{ours.format_help()}\nflags of clip_benchmark, passed through as they are:{passed}"


# -- the configuration file -------------------------------------------------------------------------------------------


def _file_words(file: str, ours: Parser, theirs: ArgumentParser, words: Sequence[str]) -> list[str]:
    """A YAML file as the words of a command line, without what `words` say otherwise."""
    said = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
    dropped = set().union(*(group for group in EXCLUSIVE if group & said))
    if _SWITCHES & said:
        dropped |= _SWITCHES.union(*(flags for _, flags in _SEEDS.values()), {"mode"})
    data = {key: value for key, value in read_config(file).items() if key not in dropped - said}
    return table_words(f"--config {file}", data, actions_of(theirs, ours))


# -- from flags to a configuration ------------------------------------------------------------------------------------


def refuse_both(args: Namespace, one: str, other: str) -> None:
    """Raise where both flags were given."""
    if getattr(args, one) is not None and getattr(args, other) is not None:
        raise OptionError(f"--{one} and --{other} cannot be used together: give one")


def sieve_config(args: Namespace) -> SieveConfig:
    """The configuration that our flags of `eval` ask for. Contradictions are errors that name the flags."""
    options = option_pairs(args.method_option)
    method, mode = args.method, args.mode
    where = {name: getattr(args, name) for name in ("engine", "quantize", "threads") if hasattr(args, "engine")}
    for switch, (its_mode, flags) in _SEEDS.items():
        given = {flag: getattr(args, flag) for flag in flags if getattr(args, flag) is not None}
        if not getattr(args, switch):
            if given:
                raise OptionError(f"--{next(iter(given))} does nothing without --{switch}")
            continue
        if method not in (None, "anchor") or mode not in (None, its_mode):
            other = f"--mode {mode}" if method in (None, "anchor") else f"--method {method}"
            raise OptionError(
                f"--{switch} and {other} cannot be used together: it is --method anchor --mode {its_mode}"
            )
        method, mode = "anchor", its_mode
        for flag, value in given.items():
            if options.setdefault(flags[flag], value) != value:
                raise OptionError(
                    f"--{flag} and --method_option {flags[flag]}={options[flags[flag]]} cannot be used together"
                )
    if args.enable_pruning and args.enable_token_selection:
        raise OptionError("--enable_pruning and --enable_token_selection cannot be used together: give one")
    refuse_both(args, "keep", "keep_average")
    check_budget(method, args.keep is not None or args.keep_average is not None, options)
    if args.fuse_weight is not None and mode != "fuse":
        raise OptionError("--fuse_weight does nothing without --mode fuse")
    if method in (None, "none"):
        budget = ("keep", "keep_average", "schedule", "prune_layer", "mode")
        given_flags = [f"--{name}" for name in budget if getattr(args, name) is not None] + list(options)
        if given_flags:
            raise OptionError(f"{given_flags[0]} does nothing without --method: see `tokensieve methods`")
        return SieveConfig(**where)
    keep = tuple(args.keep) if isinstance(args.keep, list) else args.keep
    return SieveConfig(
        method=method, mode=mode or "prune", keep=keep, keep_average=args.keep_average, schedule=args.schedule,
        at=tuple(sorted(args.prune_layer)) if args.prune_layer else None,
        fuse_weight=0.2 if args.fuse_weight is None else args.fuse_weight, options=options, **where,
    )  # fmt: skip
