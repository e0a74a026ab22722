"""`tokensieve COMMAND`. One small file a command beside this one; none imports torch until it has to work."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from tokensieve._version import VERSION
from tokensieve.errors import TokensieveError, UnknownNameError, nearest
from tokensieve.tasks.arguments import Parser

__all__ = ["COMMANDS", "main"]

# name -> one line; the file of the same name has `add_arguments(parser)` and `run(args)`, or `main(argv)`
COMMANDS = {
    "bench": "measure speed-up, selection's share and memory, next to what the MACs make possible",
    "build": "make one CSV of the result files of eval and sweep",
    "check": "run the contract on a method of your own",
    "data": "get, make or check data sets",
    "demo": "see it work: the embedded CLIP untouched and reduced, a table and report.html",
    "eval": "run the CLIP benchmark with token reduction, or evaluate re-identification (reid) or LLaVA (vlm)",
    "export": "write a model, reduced or not, to a file for ONNX Runtime, OpenVINO or torch",
    "extract": "features of your own images, without labels, in a file",
    "models": "list the model families that can be reduced, or say how one class works",
    "methods": "list the token-reduction methods, or show one with its options",
    "new": "write a method of your own, and its test, to start from",
    "plan": "cost on paper: GPU hours and money of a job, with and without token reduction",
    "report": "one HTML page from the records of runs: accuracy against speed, tokens, pictures, a sortable table",
    "search": "search methods, budgets and options by accuracy and MACs: the best, or the Pareto front, as YAML",
    "sweep": "run methods x budgets x models x datasets, the untouched model always among them",
    "train": "train the parts that can be learned (align, reid, select, vlm, vlm-base)",
    "ui": "a page in the browser to try methods on photos and questions, and to look at results",
    "view": "draw what a method keeps of a photo: kept patches, and scores as a heat map",
}

# what only some commands need -> the extra that brings it; a test compares this with pyproject.toml
EXTRAS = {
    "accelerate": "train",
    "braceexpand": "eval",
    "clip_benchmark": "eval",
    "gradio": "ui",
    "jinja2": "eval",
    "markupsafe": "eval",
    "nncf": "openvino",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "open_clip": "eval",
    "openvino": "openvino",
    "optuna": "search",
    "pydantic": "train",
    "pytorch_metric_learning": "train",
    "ray": "ray",
    "requests": "eval",
    "scipy": "eval",
    "sklearn": "eval",
    "tensorboard": "train",
    "timm": "eval",
    "torchvision": "eval",
    "transformers": "transformers",
    "webdataset": "eval",
}

_EPILOG = """commands:
{commands}

examples:
  tokensieve methods
  tokensieve methods anchor
  tokensieve bench --quick
  tokensieve bench --models vit-b16 --batch 16 --methods sieve tome -o runs/bench.json

`tokensieve COMMAND --help` says more about each."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code. What the user did wrong is one line on stderr and code 2."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except TokensieveError as error:
        return _refused(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        return _refused(f'this needs {missing}: pip install "tokensieve[{EXTRAS[missing]}]"')
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno is None:  # a library's own error, not the system's
            raise
        what = error.strerror or str(error)
        return _refused(what if error.filename is None else f"{error.filename}: {what}")
    except MemoryError:
        return _refused("out of memory: give a smaller batch, fewer images or a smaller model")
    except KeyboardInterrupt:
        print("tokensieve: interrupted", file=sys.stderr)
        return 130


def _refused(message: str) -> int:
    """The exit code of what cannot be done, after one line on stderr that says why."""
    print(f"tokensieve: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _run(argv: list[str]) -> int:
    name = argv[0] if argv else ""
    if not name or name.startswith("-"):
        _top_parser().parse(argv or ["--help"])
        return 0
    if name not in COMMANDS:
        raise UnknownNameError(f"unknown command {name!r}.{nearest(name, COMMANDS)}")
    command = importlib.import_module(f"tokensieve.cli.{name}")
    if hasattr(command, "main"):  # passes flags on to another parser
        passed: int = command.main(argv[1:])
        return passed
    parser = Parser(prog=f"tokensieve {name}", description=command.__doc__, epilog=command.EPILOG)
    command.add_arguments(parser)
    code: int = command.run(parser.parse(argv[1:]))
    return code


def _top_parser() -> Parser:
    lines = "\n".join(f"  {name:<10}{line}" for name, line in COMMANDS.items())
    parser = Parser(
        prog="tokensieve",
        usage="tokensieve COMMAND [options]",
        description="Drop the tokens that do not matter in vision transformers, for real wall-clock speed.",
        epilog=_EPILOG.format(commands=lines),
    )
    parser.add_argument("--version", action="version", version=f"tokensieve {VERSION}")
    return parser
