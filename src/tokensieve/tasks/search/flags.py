"""Search the settings of token reduction: method, budget, schedule, layers, any option. Nothing is trained.

With two objectives, accuracy and MACs, which is the default, the answer is the Pareto front: a YAML file for each of
its points, which `tokensieve eval` takes. The study is a file: the same command goes on where it was killed. All flags
of `tokensieve eval clip|vlm|reid` can be given too: a setting that is given is the same in every trial.
Training runs are searched by `tokensieve train vlm|reid` with manager_settings.mode: optuna (docs/search.md).
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve.errors import OptionError, UnknownNameError
from tokensieve.tasks.arguments import Parser
from tokensieve.tasks.config_file import actions_of, hint

if TYPE_CHECKING:
    from tokensieve.search.settings import EvalSearchConfig

__all__ = ["TASKS", "add_ray_flags", "managing", "search_config", "search_parser", "top_parser", "unknown_flag"]

TASKS = ("clip", "vlm", "reid")
EPILOG = """examples:
  tokensieve search clip --trials 5 --images 40                     the embedded model and data
  tokensieve search clip --config configs/search_clip.yaml
  tokensieve search clip --method anchor --objectives accuracy --trials 30 keep=0.4
  tokensieve search vlm --trials 20 --images 50 --ray
  tokensieve search reid --checkpoint runs/reid/best.safetensors --trials 20
  tokensieve report runs/search-clip runs/search-clip/trials -o report.html"""


def top_parser() -> Parser:
    """`tokensieve search` without a task: only its help."""
    usage = f"tokensieve search {{{','.join(TASKS)}}} [flags]"
    return Parser(prog="tokensieve search", usage=usage, description=__doc__, epilog=EPILOG)


def search_parser(task: str) -> Parser:
    """The flags that are the search's own."""
    usage = f"tokensieve search {task} [flags] [flags of tokensieve eval {task}] [KEY=VALUE ...]"
    parser = Parser(prog=f"tokensieve search {task}", usage=usage, description=__doc__, epilog=EPILOG)
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="YAML with search_settings, as in configs/search_*.yaml")
    add("--trials", type=int, metavar="N", help="in all, over restarts (default: 50)")
    add("--objectives", nargs="+", metavar="NAME", help="one or two figures of a run (default: accuracy macs)")
    if task != "reid":
        add("--images", type=int, metavar="N", help="of each trial: the first N (default: 200)")
    else:
        parser.set_defaults(images=None)
    add("--stop-hopeless", "--stop_hopeless", metavar="HOW", help="median, percentile or none (default: median)")
    add("--study", metavar="FILE", help="in the output folder: .db for SQLite, .log for a journal (default: study.db)")
    add("--sampler-seed", "--sampler_seed", type=int, metavar="S", help="(default: 0)")
    add("-o", "--output", type=Path, metavar="DIR", help=f"(default: runs/search-{task})")
    add_ray_flags(parser)
    return parser


def search_config(task: str, args: Namespace) -> EvalSearchConfig:
    """The file's settings with the flags on top."""
    if args.trials is not None and args.trials < 1:
        raise OptionError(f"--trials {args.trials}: at least 1")
    try:
        from tokensieve.search.settings import EvalSearchConfig
        from tokensieve.utils.settings import parse_settings
        from tokensieve.utils.yaml import read_config
    except ImportError as error:
        raise OptionError(f'a search needs Optuna and pydantic ({error}): pip install "tokensieve[search]"') from None

    data = read_config(args.config) if args.config else {}
    flags = {
        "search_settings": {
            "n_trials": args.trials, "objectives": args.objectives, "stop_hopeless": args.stop_hopeless,
            "study": args.study, "sampler_seed": args.sampler_seed,
        },
        "manager_settings": managing(args),
    }  # fmt: skip
    if args.output is not None:
        data = {**data, "output_dir": str(args.output)}
    data = {"output_dir": f"runs/search-{task}", **data}
    for section, values in flags.items():
        said = {name: value for name, value in values.items() if value is not None}
        if said and isinstance(data.get(section) or {}, dict):
            data = {**data, section: {**(data.get(section) or {}), **said}}
    manager = data.get("manager_settings") or {}
    data["manager_settings"] = {"mode": "optuna", **manager} if isinstance(manager, dict) else manager
    return parse_settings(EvalSearchConfig, data)


def add_ray_flags(parser: ArgumentParser) -> None:
    """Where to run."""
    add = parser.add_argument
    add("--ray", action="store_true", help="spread the runs over a Ray cluster, one on this machine unless named")
    add("--ray-address", "--ray_address", metavar="ADDRESS", help="of a Ray cluster (default: $RAY_ADDRESS)")
    add("--cpus", type=int, metavar="N", help="with --ray: CPUs of each run (default: 1)")
    add("--gpus", type=int, metavar="N", help="with --ray: GPUs of each run (default: 0)")


def managing(args: Namespace) -> dict[str, Any]:
    """These flags as manager_settings."""
    if (args.cpus is not None or args.gpus is not None or args.ray_address) and not args.ray:
        raise OptionError("--ray-address, --cpus and --gpus do nothing without --ray")
    for name, least in (("cpus", 1), ("gpus", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise OptionError(f"--{name} {value}: at least {least}")
    found = {"mode": "ray"} if args.ray else {}
    said = {"ray_address": args.ray_address, "cpus_per_subtask": args.cpus, "gpus_per_subtask": args.gpus or None}
    return found | {name: value for name, value in said.items() if value is not None}


def unknown_flag(task: str, word: str, flags: Iterable[str]) -> UnknownNameError:
    """The error of a word that is not a flag of this search, nor one of these names of the evaluation."""
    known = {*(f"--{name}" for name in flags), *actions_of(search_parser(task))}
    return UnknownNameError(f"tokensieve search {task} does not know {word!r}.{hint(word, known)}")
