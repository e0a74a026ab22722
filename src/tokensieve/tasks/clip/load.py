"""Models for the benchmark: open_clip's through clip_benchmark's loaders, the default one, and errors that help."""

from __future__ import annotations

import copy
import difflib
import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from tokensieve.errors import MissingMaterialError, TokensieveError, UnknownNameError, one_line
from tokensieve.utils.hub import quiet_hub
from tokensieve.utils.torchvision import declare_missing_schemas

__all__ = ["DEFAULT_DATASET", "DEFAULT_MODEL", "DEFAULT_PRETRAINED", "Loaded", "Loader", "check_model",
           "default_dataset_root"]  # fmt: skip

DEFAULT_MODEL = "vit-s14-minilm"
DEFAULT_PRETRAINED = "tokensieve"
DEFAULT_DATASET = "wds/cifar10-sample"
_NO_CHECKPOINT = ("UnpicklingError", "SafetensorError", "EOFError", "BadZipFile")
_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors", ".npz", ".ckpt")


class Loaded(NamedTuple):
    """What clip_benchmark's loaders return."""

    model: nn.Module
    transform: Any
    tokenizer: Any


def default_dataset_root() -> str:
    """The folder of the embedded webdataset."""
    return str(_default().default_dataset_root())


def _default() -> Any:
    try:
        return importlib.import_module("tokensieve.tasks.clip.default")
    except ImportError as error:
        raise MissingMaterialError(
            f"the default model and data are not in this installation ({error}): name --model, --pretrained, --dataset"
        ) from None


def check_model(args: Namespace) -> None:
    """Raise where a run's model or weights cannot be: unknown names with the nearest ones, files that are not there."""
    name, pretrained = args.model, args.pretrained
    if args.model_type != "open_clip" or ":" in name or (name, pretrained) == (DEFAULT_MODEL, DEFAULT_PRETRAINED):
        return
    declare_missing_schemas()
    import open_clip

    if open_clip.get_model_config(name) is None:
        known = [DEFAULT_MODEL, *open_clip.list_models()]
        raise UnknownNameError(f"--model {name}: no such model in open_clip.{_hint(name, known)}")
    tags = open_clip.list_pretrained_tags_by_model(name)
    if not pretrained or pretrained in tags or Path(pretrained).is_file():
        return
    if "/" in pretrained or pretrained.endswith(_SUFFIXES):
        raise MissingMaterialError(f"--pretrained {pretrained}: there is no such checkpoint file")
    raise UnknownNameError(
        f"--pretrained {pretrained}: no such weights for {name}, and no such file.{_hint(pretrained, tags)}"
        f" Known: {', '.join(tags) or 'none'}, or a checkpoint file."
    )


def _hint(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _why_not(name: str, pretrained: str, error: Exception) -> str:
    """What is wrong with these weights, and what to do."""
    what = f"model {name} with weights {pretrained} cannot be loaded"
    if type(error).__name__ in _NO_CHECKPOINT or "PytorchStreamReader" in str(error):
        # in words of our own: torch's advise to load it unsafely
        return f"{what}: the file is truncated or not a checkpoint of weights alone, of torch or safetensors"
    step = "; give a checkpoint file, or leave --model and --pretrained out for the embedded model"
    return f"{what}: {one_line(error)}" + ("" if Path(pretrained).is_file() else step)


class Loader:
    """Loads models, and keeps the last one: a sweep runs many configurations on it. Nobody may change what it gives."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._loaded: Loaded | None = None

    def load(self, model_type: str, name: str, pretrained: str, cache_dir: str | None, device: str) -> Loaded:
        """The model in eval mode. Whatever goes wrong on the way is an error of one line."""
        key = (model_type, name, pretrained, device)
        if self._loaded is None or key != self._key:
            self._key, self._loaded = None, None  # let the old one go first
            self._loaded = self._fresh(model_type, name, pretrained, cache_dir, device)
            self._key = key
        loaded = self._loaded
        return loaded._replace(transform=copy.deepcopy(loaded.transform))  # some datasets insert steps into it

    def _fresh(self, model_type: str, name: str, pretrained: str, cache_dir: str | None, device: str) -> Loaded:
        if (name, pretrained) == (DEFAULT_MODEL, DEFAULT_PRETRAINED):
            model, transform, tokenizer = _default().load_default_clip(device)
        else:
            models = importlib.import_module("clip_benchmark.models")
            try:
                with quiet_hub():
                    model, transform, tokenizer = models.TYPE2FUNC[model_type](
                        model_name=name, pretrained=pretrained, cache_dir=cache_dir, device=device
                    )
            except TokensieveError:
                raise
            except Exception as error:  # from any of several libraries, each with errors of its own
                raise MissingMaterialError(_why_not(name, pretrained, error)) from error
        return Loaded(model.eval(), transform, tokenizer)
