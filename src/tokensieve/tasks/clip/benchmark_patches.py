"""clip_benchmark's metrics for the time of one run: what fails on current versions replaced, what cannot be read named.

- top-k accuracy as a plain number (its own fails on numpy >= 2.4);
- linear probe without CUDA, captions without beam search (`probe`, `captions`);
- class prompts' features handed to methods that select by a text;
- a dataset that cannot be made or an image that cannot be read is an error of one line;
- the first images alone, where that many are asked for.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import PIL.Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tokensieve.errors import MissingMaterialError, OptionError, TokensieveError, UnknownNameError, nearest, one_line
from tokensieve.tasks.clip import captions, probe
from tokensieve.tasks.clip.session import Session
from tokensieve.tasks.clip.upstream import benchmark, dataset_names, patched
from tokensieve.utils.images import MOST_PIXELS

__all__ = ["patched_benchmark"]


# warnings of its libraries, of what is as it should be or cannot be helped where images are few
_CHATTER = (
    "decompression bomb",
    "pin_memory",
    "shardshuffle",
    "worker processes",
    "y_pred contains classes",
    "is ill-defined",
)


@contextmanager
def patched_benchmark(session: Session, dataset: str, images: int | None = None) -> Iterator[None]:
    """clip_benchmark with everything this module is for, as long as the block lasts. images: of each loader."""
    cli = benchmark()
    names = ("zeroshot_classification", "zeroshot_retrieval", "image_caption_selection", "linear_probe", "captioning")
    metrics = {name: importlib.import_module(f"clip_benchmark.metrics.{name}") for name in names}
    own: dict[str, Callable[..., Any]] = {"linear_probe": probe.evaluate, "captioning": _captioning(session)}
    classification = metrics["zeroshot_classification"]
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=f".*({'|'.join(_CHATTER)}).*")
        stack.enter_context(patched(PIL.Image, MAX_IMAGE_PIXELS=MOST_PIXELS // 2))  # Pillow refuses twice as many
        stack.enter_context(patched(cli, build_dataset=_building(cli.build_dataset, dataset), print=_print))
        for name, module in metrics.items():
            stack.enter_context(patched(module, evaluate=_reading(own.get(name, module.evaluate), dataset, images)))
        stack.enter_context(
            patched(
                classification,
                accuracy=probe.top_k_accuracy,
                run_classification=_with_text(classification.run_classification, session),
            )
        )
        yield


def _print(*words: object) -> None:
    """What clip_benchmark says, without its words on a temporary file and on a length that streams do not have."""
    text = " ".join(map(str, words))
    if not text.startswith(("Dump results to:", "IterableDataset has no len()")):
        print(text)


def _captioning(session: Session) -> Callable[..., dict[str, float]]:
    def evaluate(*, model: nn.Module, dataloader: Any, device: str, amp: bool, **_: Any) -> dict[str, float]:
        metrics, left_out = captions.evaluate(model, dataloader, device, amp)
        session.notes["captioning_left_out"] = "; ".join(left_out) or None
        return metrics

    return evaluate


def _with_text(run: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def run_classification(model: nn.Module, classifier: Tensor, *args: Any, **kwargs: Any) -> Any:
        session.set_text(classifier.t())
        return run(model, classifier, *args, **kwargs)

    return run_classification


def _building(build: Callable[..., Any], dataset: str) -> Callable[..., Any]:
    def build_dataset(*args: Any, **kwargs: Any) -> Any:
        try:
            return build(*args, **kwargs)
        except TokensieveError:
            raise
        except (Exception, SystemExit) as error:  # from any of many libraries; some exit where a tool is missing
            if str(error).startswith("Unsupported dataset"):
                name = dataset.removeprefix("wds/")
                hint = nearest(name, dataset_names())
                raise UnknownNameError(f"--dataset {dataset}: no such dataset.{hint}") from None
            reason = one_line(error)
            raise MissingMaterialError(f"--dataset {dataset} cannot be opened: {reason}") from error

    return build_dataset


def _reading(evaluate: Callable[..., Any], dataset: str, images: int | None) -> Callable[..., Any]:
    """`evaluate` with every loader in its arguments replaced by one that names what it cannot read."""

    def wrapped(value: Any) -> Any:
        return _Readable(value, dataset, images) if isinstance(value, DataLoader) else value

    def evaluate_reading(*args: Any, **kwargs: Any) -> Any:
        try:
            return evaluate(*map(wrapped, args), **{name: wrapped(value) for name, value in kwargs.items()})
        except RuntimeError as error:
            if "selected index k out of range" in str(error):
                raise OptionError(f"--recall_k: larger than the number of images or texts in {dataset}") from None
            raise

    return evaluate_reading


class _Readable:
    """A data loader whose every failure to read is a MissingMaterialError, and which ends after that many images."""

    def __init__(self, loader: DataLoader[Any], name: str, images: int | None) -> None:
        self.loader, self.name, self.dataset, self.images = loader, name, loader.dataset, images

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches, left = iter(self.loader), math.inf if self.images is None else self.images
        while left > 0:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:  # decoders and datasets have errors of their own
                raise MissingMaterialError(f"--dataset {self.name}: {_why(error, self.dataset)}") from error
            if len(batch[0]) > left:  # images and what belongs to each of them
                batch = tuple(part[: int(left)] for part in batch)
            left -= len(batch[0])
            yield batch


def _why(error: Exception, dataset: Any) -> str:
    """What could not be read. A worker of the loader loses the name of the sample: it is looked up again here."""
    if type(error).__name__ == "DecodingError":
        if not getattr(error, "key", None):
            try:
                for _ in dataset:
                    pass
            except Exception as again:
                error = again
        sample, kind, file = (getattr(error, name, None) for name in ("key", "k", "url"))
        large = ", too large" if "DecompressionBomb" in f"{error!r} {error.__cause__!r}" else ""
        return f"cannot read {sample}{kind if str(kind).startswith('.') else f'.{kind}'} in {file}{large}"
    if "didn't find ['txt']" in str(error):
        return "it has no captions (a .txt beside each image), which this --task needs"
    if "No samples found" in str(error):
        return "it has no samples, or fewer shards than --num_workers"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"cannot read an image: {lines[-1][:300] if lines else type(error).__name__}"
