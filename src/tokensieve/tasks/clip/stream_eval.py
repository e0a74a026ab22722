"""Zero-shot classification of a local webdataset, shard by shard: `tokensieve eval --stream`.

The classifier and the metrics are clip_benchmark's; what is kept of a shard are counts for each class, in a file beside
the result, so that memory does not grow with the images and a run goes on where it was interrupted. Several processes
share the shards out; the one that finds all of them done writes the result.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.errors import DataError, OptionError
from tokensieve.records import check_writable, read_json, write_whole
from tokensieve.tasks.clip.benchmark_patches import patched_benchmark
from tokensieve.tasks.clip.config import run_facts
from tokensieve.tasks.clip.load import Loader
from tokensieve.tasks.clip.run import Job, finish
from tokensieve.tasks.clip.session import Session
from tokensieve.tasks.clip.shards import Shard, find_shards
from tokensieve.tasks.clip.stream import Parts, Tally, own_shards, pieces, this_device
from tokensieve.tasks.clip.upstream import benchmark, dataset_root

__all__ = ["check_streamed", "run_streamed"]

ENDING = ".counts"
_BEST = 5  # of acc5


def check_streamed(job: Job) -> None:
    """Raise where a run cannot be streamed."""
    args = job.args
    if job.task != "zeroshot_classification":
        raise OptionError(f"--stream is for zero-shot classification, not for {job.task}")
    if not args.dataset.startswith("wds/") or "://" in dataset_root(args):
        raise OptionError(f"--stream reads webdatasets of this machine: --dataset wds/NAME, not {args.dataset}")
    if args.distributed:
        raise OptionError("--stream and --distributed cannot be used together: a streamed run shares its shards out")
    for name in ("save_clf", "load_clfs", "images"):
        if getattr(args, name, None):
            raise OptionError(f"--stream makes the classifier of the prompts and reads all images: leave --{name} out")


def run_streamed(
    job: Job,
    loader: Loader,
    *,
    strict: bool = False,
    say: Callable[[str], None] = lambda line: None,
    tick: Callable[[int], None] = lambda images: None,
) -> dict[str, Any] | None:
    """Run this process's shards; the result, when all shards are done, else None: other processes are still at work."""
    check_streamed(job)
    check_writable(job.output)
    start = time.perf_counter()
    shards = _shards(job)
    parts = Parts(
        job.output.with_name(f"{job.output.name}.parts"),
        {"reduction": job.config.plain(), "benchmark": run_facts(job.args)}, ENDING,
    )  # fmt: skip
    session = Session(job.config, loader, job.args.model_type, job.speed_batches)
    device = this_device()
    torch.manual_seed(job.args.seed)
    model, transform, tokenizer = session.load(job.args.model, job.args.pretrained, job.args.model_cache_dir, device)
    with patched_benchmark(session, job.args.dataset):
        names, classifier = _classifier(job, model, transform, tokenizer, device)
    session.set_text(classifier.t())
    parts.begin()
    pending = [shard for shard in own_shards(shards) if not parts.finished(shard, _mark)]
    tally = Tally(strict, say=say)
    _count(job, pending, parts, tally, model, transform, classifier, device, tick)
    done = sum(parts.path(shard).exists() for shard in shards)
    tally.end(done, len(shards))
    if done < len(shards):
        return None
    theirs = {name: getattr(job.args, name) for name in ("dataset", "model", "pretrained", "language")}
    theirs |= {"task": job.task} | _metrics([read_json(parts.path(shard), "count of a shard") for shard in shards])
    theirs |= {"classnames": names} if job.args.dump_classnames else {}
    return finish(job, session, theirs, start)


def _shards(job: Job) -> list[Shard]:
    """Those that clip_benchmark would read: as many as nshards.txt says."""
    folder = Path(dataset_root(job.args), job.args.split)
    text = (folder / "nshards.txt").read_text(encoding="utf-8").strip()
    if not text.isdigit() or int(text) < 1:
        raise DataError(f"{folder / 'nshards.txt'} says {text[:40]!r}, expected the number of shards")
    return find_shards([str(folder / f"{number}.tar") for number in range(int(text))])


def _classifier(job: Job, model: Any, transform: Any, tokenizer: Any, device: str) -> tuple[list[str], Tensor]:
    """Class names, and clip_benchmark's own zero-shot classifier of them (E, C)."""
    args, cli = job.args, benchmark()
    data = cli.build_dataset(
        dataset_name=args.dataset, root=dataset_root(args), transform=transform, split=args.split,
        annotation_file=args.annotation_file, download=True, language=args.language, task=job.task,
        custom_template_file=args.custom_template_file, custom_classname_file=args.custom_classname_file,
        wds_cache_dir=args.wds_cache_dir,
    )  # fmt: skip
    names, templates = getattr(data, "classes", None), getattr(data, "templates", None)
    if not names or not templates:
        raise DataError(f"--dataset {args.dataset} has no class names or no prompts: it cannot be classified zero-shot")
    if "nllb-clip" in args.model:
        importlib.import_module("clip_benchmark.models.nllb_clip").set_language(tokenizer, args.language)
    zero_shot = importlib.import_module("clip_benchmark.metrics.zeroshot_classification")
    classifier: Tensor = zero_shot.zero_shot_classifier(
        model, tokenizer, names, templates, torch.device(device).type, amp=args.amp
    )
    return names, classifier.to(device)


@torch.no_grad()
def _count(
    job: Job, pending: list[Shard], parts: Parts, tally: Tally, model: Any, transform: Any, classifier: Tensor,
    device: str, tick: Callable[[int], None],
) -> None:  # fmt: skip
    """For each shard and class: images, those whose best guess is right, those right among the best five."""
    args, classes = job.args, classifier.shape[1]
    open_: dict[int, tuple[Tensor, list[tuple[str, str]]]] = {}
    for piece in pieces(
        pending, transform, batch_size=args.batch_size, workers=args.num_workers, classes=classes
    ):  # fmt: skip
        counts, bad = open_.setdefault(piece.place, (torch.zeros(3, classes, dtype=torch.int64), []))
        shard = pending[piece.place]
        tally.note(piece, shard)
        bad += piece.bad
        if piece.pixels is not None:
            with torch.autocast(torch.device(device).type, enabled=args.amp):
                feature = F.normalize(model.encode_image(piece.pixels.to(device)), dim=-1)
                logits = 100.0 * feature @ classifier
            counts += _right(logits.float().cpu(), torch.tensor(piece.labels))
            tick(len(piece.keys))
        if piece.cut or piece.last:
            del open_[piece.place]
        if piece.last:
            found = {"mark": shard.mark, "counts": counts.tolist(), "bad": bad}
            write_whole(parts.path(shard), json.dumps(found).encode())


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    """(3, C) counts by true class: all, best right, right among the best five (none with fewer classes)."""
    classes = logits.shape[1]
    found = torch.zeros(3, classes, dtype=torch.int64)
    found[0] = labels.bincount(minlength=classes)
    found[1] = labels[logits.argmax(dim=1) == labels].bincount(minlength=classes)
    if classes >= _BEST:
        hit = (logits.topk(_BEST, dim=1).indices == labels.unsqueeze(1)).any(dim=1)
        found[2] = labels[hit].bincount(minlength=classes)
    return found


def _mark(path: Path) -> str:
    found = read_json(path, "count of a shard")
    return str(found["mark"])


def _metrics(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """clip_benchmark's metrics from the counts of all shards, and what could not be read."""
    images, first, five = torch.tensor([part["counts"] for part in parts]).sum(dim=0)
    total = int(images.sum())
    if not total:
        raise DataError("not one sample of these shards could be read")
    shown = images > 0
    metrics = {
        "acc1": int(first.sum()) / total,
        "acc5": int(five.sum()) / total if len(images) >= _BEST else math.nan,
        "mean_per_class_recall": float((first[shown].double() / images[shown]).mean()),
    }
    bad = [f"{key}: {why}" for part in parts for key, why in part["bad"]]
    return {
        "metrics": metrics, "streamed_images": total, "shards": len(parts), "bad_samples": len(bad),
        "bad_names": "; ".join(bad[:20]) or None,
    }  # fmt: skip
