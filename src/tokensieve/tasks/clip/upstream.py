"""clip_benchmark as it is installed: how it is imported, its parser, its list of runs, and changes that are put back.

Nothing of it is copied, and nothing in it stays changed: see `patched`.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import json
import sys
import types
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokensieve.errors import DataError, MissingMaterialError, OptionError
from tokensieve.tasks.clip.shards import MOST_SHARDS, check_shard
from tokensieve.utils.files import read_text
from tokensieve.utils.torchvision import declare_missing_schemas

__all__ = [
    "benchmark", "check_dataset", "dataset_names", "dataset_root", "default_task", "eval_parser", "expand",
    "model_type", "patched", "shards", "world",
]  # fmt: skip

_COCO = {
    "tokenizer.ptbtokenizer": "PTBTokenizer", "bleu.bleu": "Bleu", "meteor.meteor": "Meteor", "rouge.rouge": "Rouge",
    "cider.cider": "Cider", "spice.spice": "Spice",
}  # fmt: skip
_UNLISTED = ("winoground", "flickr30k-200", "crossmodal3600", "xtd10", "xtd200", "imagenet-o", "wds/NAME")


def benchmark() -> Any:
    """The module `clip_benchmark.cli`. It imports the caption scorers at once, also for tasks that need none of them:
    where they are not installed, empty ones stand in for the time of the import."""
    declare_missing_schemas()
    found = sys.modules.get("clip_benchmark.cli")
    if found is not None:
        return found
    with _stand_ins() if importlib.util.find_spec("pycocoevalcap") is None else _nothing():
        try:
            return importlib.import_module("clip_benchmark.cli")
        except ImportError as error:
            raise MissingMaterialError(
                f'the CLIP benchmark cannot be imported ({error}): pip install "tokensieve[eval]"'
            ) from None


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _stand_ins() -> Iterator[None]:
    names = ["pycocoevalcap"]
    for path in _COCO:
        names += [f"pycocoevalcap.{path.split('.')[0]}", f"pycocoevalcap.{path}"]
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    for path, scorer in _COCO.items():
        setattr(sys.modules[f"pycocoevalcap.{path}"], scorer, None)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


@contextmanager
def patched(target: Any, **changes: Any) -> Iterator[None]:
    """Set attributes of a module for the time of the block, then put the old ones back, whatever happens.

    A builtin function, such as print, is not the module's own: it is shadowed, and then seen again.
    """
    before = {name: getattr(target, name) for name in changes if not _is_builtin(target, name)}
    try:
        for name, value in changes.items():
            setattr(target, name, value)
        yield
    finally:
        for name in changes:
            if name in before:
                setattr(target, name, before[name])
            else:
                delattr(target, name)


def _is_builtin(target: Any, name: str) -> bool:
    return not hasattr(target, name) and hasattr(builtins, name)


@contextmanager
def model_type(load: Any) -> Iterator[str]:
    """A name for `--model_type` under which clip_benchmark calls `load`, as long as the block lasts."""
    models = importlib.import_module("clip_benchmark.models")
    name = "tokensieve"
    models.TYPE2FUNC[name] = load
    models.MODEL_TYPES.append(name)
    try:
        yield name
    finally:
        del models.TYPE2FUNC[name]
        models.MODEL_TYPES.remove(name)


def eval_parser(parser_class: type[ArgumentParser]) -> ArgumentParser:
    """clip_benchmark's own parser of `eval`, made of `parser_class`, with two changes: `--normalize False` is false,
    and `-o` is `--output`."""
    cli = benchmark()
    makers = types.SimpleNamespace(**vars(argparse) | {"ArgumentParser": parser_class})
    with patched(cli, argparse=makers), patched(sys, argv=["clip_benchmark", "eval"]):
        parser, _ = cli.get_parser_args()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found: ArgumentParser = action.choices["eval"]
            found._option_string_actions["--normalize"].type = _boolean
            output = found._option_string_actions["--output"]  # as in every other command
            output.option_strings = ["-o", *output.option_strings]
            found._option_string_actions["-o"] = output
            return found
    raise MissingMaterialError("this version of clip_benchmark has no `eval`: install clip-benchmark 1.6")


def _boolean(text: str) -> bool:
    word = text.lower()
    if word not in ("true", "false", "1", "0", "yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r}: give True or False")
    return word in ("true", "1", "yes")


def expand(base: Namespace) -> list[Namespace]:
    """The runs that clip_benchmark makes of its arguments: models x datasets x languages, this process's share."""
    cli = benchmark()
    runs: list[Namespace] = []
    try:
        with patched(cli, run=runs.append):
            cli.main_eval(base)
    except (ValueError, OSError) as error:
        raise OptionError(f"clip_benchmark cannot make runs of these flags: {error}") from None
    if not runs and base.pretrained_model:
        raise OptionError(f"--pretrained_model {' '.join(base.pretrained_model)}: no model is named there")
    return runs


def world() -> tuple[int, int]:
    """This process's rank and the number of processes, as torchrun and others tell it."""
    _, rank, size = benchmark().world_info_from_env()
    return rank, size


def default_task(dataset: str) -> str:
    """The task that clip_benchmark takes where none is said."""
    task: str = benchmark().get_dataset_default_task(dataset.removeprefix("wds/"))
    return task


def check_dataset(args: Namespace) -> None:
    """Raise where a run's local webdataset is not there, or where it cannot be split as asked."""
    if not args.dataset.startswith("wds/"):
        return
    root = dataset_root(args)
    if "://" not in root and not Path(root, args.split, "nshards.txt").is_file():
        raise MissingMaterialError(
            f"--dataset {args.dataset}: no webdataset in --dataset_root {root} (there is no {args.split}/nshards.txt)"
        )
    if "://" not in root:
        _check_shards(args, root)
    if args.val_proportion is not None:
        raise OptionError("--val_proportion needs a dataset of known length: for a webdataset give --val_split")


def _check_shards(args: Namespace, root: str) -> None:
    """Raise where a split that a run reads has shards that are not there, or are not whole."""
    splits = {args.split, *((args.train_split, args.val_split) if args.task == "linear_probe" else ())} - {None}
    for split in sorted(splits):
        file = Path(root, split, "nshards.txt")
        text = read_text(file).strip() if file.is_file() else ""
        if not text:
            continue  # webdataset says so
        if not text.isdigit() or not 0 < int(text) <= MOST_SHARDS:
            raise DataError(f"{file}: expected the number of shards, 1 to {MOST_SHARDS:,}, not {text[:40]!r}")
        for number in range(int(text)):
            shard = Path(root, split, f"{number}.tar")
            if not shard.is_file():
                raise MissingMaterialError(f"--dataset {args.dataset}: shard {shard} is not there")
            check_shard(shard)


def dataset_root(args: Namespace) -> str:
    """The folder of a dataset, its name filled in."""
    name = args.dataset.removeprefix("wds/")
    root: str = args.dataset_root.format(dataset=name, dataset_cleaned=name.replace("/", "-"))
    return root


def shards(args: Namespace) -> int | None:
    """The fewest shards among the splits of a local webdataset; None for other datasets.

    A worker of the data loader that gets no shard is an error in webdataset, so there cannot be more workers.
    """
    if not args.dataset.startswith("wds/") or "://" in dataset_root(args):
        return None
    files = [path for path in Path(dataset_root(args)).glob("*/nshards.txt") if path.is_file()]
    counts = [int(text) for text in (path.read_text().strip() for path in files) if text.isdigit()]
    return min(counts, default=None)


def dataset_names() -> set[str]:
    """Names that clip_benchmark is known to have, for a hint; it may have more."""
    builder = importlib.import_module("clip_benchmark.datasets.builder")
    names = set(_UNLISTED)
    for collection, listed in builder.dataset_collection.items():
        names |= {collection, *listed}
    path = Path(str(builder.__file__)).with_name("en_zeroshot_classification_templates.json")
    return names | (set(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else set())
