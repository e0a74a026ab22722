"""Linear probe on image features, on any device: clip_benchmark's own needs CUDA.

Same recipe: AdamW, cosine learning rate to 0 without warm-up, cross-entropy on minibatches; with a validation split the
weight decay is searched on a logarithmic grid and the final fit is on train + validation; without one it is 0.
Features are cached for each configuration, whole or not at all.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.errors import MissingMaterialError, OptionError
from tokensieve.records import write_whole

__all__ = ["Fit", "Split", "cached", "collect", "evaluate", "top_k_accuracy"]

_GRID = [10 ** (-6 + 8 * i / 96) for i in range(97)]  # weight decays, 1e-6 to 1e2


class Split(NamedTuple):
    """Features (N, E) and class numbers (N,)."""

    features: Tensor
    targets: Tensor


class Fit(NamedTuple):
    """How one probe is fitted."""

    lr: float
    epochs: int
    batch_size: int
    seed: int
    device: str
    amp: bool


def top_k_accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[float]:
    """Share of rows of logits (N, C) whose class (N,) is among the k highest, for each k."""
    best = output.topk(max(topk), dim=1).indices
    hits = best == target.to(best.dtype).unsqueeze(1)
    return [hits[:, :k].any(dim=1).sum().item() / len(target) for k in topk]


def evaluate(
    model: nn.Module,
    train_dataloader: Iterable[Any],
    dataloader: Iterable[Any],
    fewshot_k: int,
    batch_size: int,
    num_workers: int,
    lr: float,
    epochs: int,
    model_id: str,
    seed: int,
    feature_root: str,
    device: str,
    val_dataloader: Iterable[Any] | None = None,
    normalize: bool = True,
    amp: bool = True,
    verbose: bool = False,
) -> dict[str, Any]:
    """As clip_benchmark calls its probe. `feature_root` is of this configuration alone; model_id is in it already."""
    loaders = {"train": train_dataloader, "val": val_dataloader, "test": dataloader}
    splits = {
        name: _features(model, loader, Path(feature_root, f"{name}.pt"), device, normalize, amp)
        for name, loader in loaders.items()
        if loader is not None
    }
    return _score(splits, Fit(lr, epochs, batch_size, seed, device, amp), fewshot_k, normalize)


def cached(feature_root: str, fit: Fit, fewshot_k: int, normalize: bool) -> dict[str, Any]:
    """The same from cached features, without a model."""
    paths = {name: Path(feature_root, f"{name}.pt") for name in ("train", "val", "test")}
    missing = [name for name in ("train", "test") if not paths[name].is_file()]
    if missing:
        raise MissingMaterialError(
            f"--skip_load: no cached features of {' and '.join(missing)} for this configuration in {feature_root}: "
            "run it once without --skip_load"
        )
    return _score({name: _read(path) for name, path in paths.items() if path.is_file()}, fit, fewshot_k, normalize)


def _features(model: nn.Module, loader: Iterable[Any], path: Path, device: str, normalize: bool, amp: bool) -> Split:
    if path.is_file():
        return _read(path)
    split = collect(model, loader, device, normalize, amp)
    buffer = io.BytesIO()
    torch.save(split._asdict(), buffer)
    write_whole(path, buffer.getvalue())
    return split


def _read(path: Path) -> Split:
    try:
        return Split(**torch.load(path, weights_only=True))
    except Exception as error:  # torch.load has many
        raise MissingMaterialError(f"cached features {path} cannot be read ({error}): delete the file") from None


def collect(model: nn.Module, loader: Iterable[Any], device: str, normalize: bool, amp: bool) -> Split:
    """Encode every image of a loader once."""
    features, targets = [], []
    with torch.no_grad(), torch.autocast(torch.device(device).type, enabled=amp):
        for images, target in loader:
            feature = model.encode_image(images.to(device))  # type: ignore[operator]
            features.append((F.normalize(feature, dim=-1) if normalize else feature).float().cpu())
            targets.append(target)
    if not features:
        raise MissingMaterialError("linear probe: a split without images")
    split = Split(torch.cat(features), torch.cat(targets))
    if split.targets.dim() != 1:
        raise OptionError("--task linear_probe: takes one class for each image, this dataset has several")
    return split


def _score(splits: dict[str, Split], fit: Fit, fewshot_k: int, normalize: bool) -> dict[str, Any]:
    """Choose, fit, and measure on the test split; the keys are clip_benchmark's."""
    from sklearn.metrics import balanced_accuracy_score

    torch.manual_seed(fit.seed)
    train, test, val = _few(splits["train"], fewshot_k), splits["test"], splits.get("val")
    classes = int(splits["train"].targets.max()) + 1
    decay = 0.0
    if val is not None:
        decay = _best_decay(train, val, classes, fit)
        if fewshot_k < 0:
            train = Split(torch.cat([train.features, val.features]), torch.cat([train.targets, val.targets]))
    logits = _logits(_train(train, classes, decay, fit), test, fit)
    top1, *top5 = top_k_accuracy(logits, test.targets, (1, 5) if classes >= 5 else (1,))
    return {
        "lp_acc1": top1,
        "lp_acc5": top5[0] if top5 else None,
        "lp_mean_per_class_recall": float(balanced_accuracy_score(test.targets, logits.argmax(dim=1))),
        "weight_decay": decay,
        "epochs": fit.epochs,
        "seed": fit.seed,
        "fewshot_k": fewshot_k,
        "normalized": normalize,
    }


def _few(split: Split, k: int) -> Split:
    """k random examples of each class; all of them where k is negative."""
    if k < 0:
        return split
    order = torch.randperm(len(split.targets))
    chosen = []
    for number in split.targets.unique().tolist():
        found = order[split.targets[order] == number][:k]
        if len(found) < k or k == 0:
            raise OptionError(f"--fewshot_k {k}: class {number} has {len(found)} examples")
        chosen.append(found)
    index = torch.cat(chosen)
    return Split(split.features[index], split.targets[index])


def _best_decay(train: Split, val: Split, classes: int, fit: Fit) -> float:
    """Seven points over the whole grid first, then steps of 8, 4, 2 and 1 around the best one."""
    found: dict[int, float] = {}

    def best(places: list[int]) -> int:
        for place in places:
            if place not in found:
                logits = _logits(_train(train, classes, _GRID[place], fit), val, fit)
                found[place] = top_k_accuracy(logits, val.targets)[0]
        return max(places, key=lambda place: found[place])

    peak = best(list(range(0, 97, 16)))
    for step in (8, 4, 2, 1):
        peak = best([max(peak - step, 0), peak, min(peak + step, 96)])
    return _GRID[peak]


def _train(split: Split, classes: int, decay: float, fit: Fit) -> nn.Linear:
    torch.manual_seed(fit.seed)
    probe = nn.Linear(split.features.shape[1], classes).to(fit.device)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=fit.lr, weight_decay=decay)
    batches = math.ceil(len(split.targets) / fit.batch_size)
    features, targets = split.features.to(fit.device), split.targets.to(fit.device)
    for epoch in range(fit.epochs):
        for i, index in enumerate(torch.randperm(len(targets), device="cpu").split(fit.batch_size)):
            done = (epoch * batches + i) / (fit.epochs * batches)
            optimizer.param_groups[0]["lr"] = 0.5 * (1 + math.cos(math.pi * done)) * fit.lr
            optimizer.zero_grad()
            with torch.autocast(torch.device(fit.device).type, enabled=fit.amp):
                loss = F.cross_entropy(probe(features[index.to(fit.device)]), targets[index.to(fit.device)])
            loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
            optimizer.step()
    return probe


def _logits(probe: nn.Linear, split: Split, fit: Fit) -> Tensor:
    with torch.no_grad():
        return torch.cat([probe(part.to(fit.device)).float().cpu() for part in split.features.split(4096)])
