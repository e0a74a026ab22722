"""Train the ReID model: the task that the one loop runs, its plan, and the run as a whole."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tokensieve.errors import DataError
from tokensieve.tasks.reid.config import ReidConfig
from tokensieve.tasks.reid.data import ReidImages, ReidSet, Sample, load_set, split_validation
from tokensieve.tasks.reid.evaluate import evaluate
from tokensieve.tasks.reid.features import extract_all
from tokensieve.tasks.reid.losses import ReidLoss
from tokensieve.tasks.reid.model import ReidModel, save_model
from tokensieve.tasks.reid.sampler import PKSampler
from tokensieve.training import FitConfig, FitResult, Step, Validation, fit
from tokensieve.training.distributed import rank, world_size

__all__ = ["ReidTask", "build_task", "fit_config", "plan", "train_reid"]

_MANAGED = {"manager_settings": True, "search_settings": True}  # how a run was started is nothing of what it is


class ReidTask:
    """Model, optimiser, batches and losses of one configuration on one set. Same seed, same task."""

    def __init__(self, config: ReidConfig, data: ReidSet) -> None:
        self.config, self.data = config, data
        self.size = config.INPUT.SIZE_TRAIN or data.size
        train, self.val_query, self.val_gallery = split_validation(
            data.train, config.DATASETS.VAL_SHARE, config.SOLVER.SEED
        )
        identities = len({sample.pid for sample in train})
        everyone = [*data.train, *data.query, *data.gallery]
        torch.manual_seed(config.SOLVER.SEED)
        self.model = ReidModel(
            config, self.size, data.modalities, identities, max(sample.camera for sample in everyone) + 1
        )
        self.images = ReidImages(
            train, data.modalities, self.size, train=True, seed=config.SOLVER.SEED, mean=self.model.pixel_mean,
            std=self.model.pixel_std,
        )  # fmt: skip
        self.sampler = self._sampler()
        s = config.SOLVER
        self.loss = ReidLoss(s.LABEL_SMOOTH, s.ID_LOSS_WEIGHT, s.TRIPLET_LOSS_WEIGHT)
        self.modules: dict[str, nn.Module] = {"model": self.model}
        self.optimisers: dict[str, torch.optim.Optimizer] = {"reid": self._optimiser()}

    def _sampler(self, own: int = 0, processes: int = 1) -> PKSampler:
        """All of each batch; in training, when it is known how many processes there are, this one's part."""
        labels = [self.images.identities.index(sample.pid) for sample in self.images.samples]
        c = self.config
        return PKSampler(labels, c.SOLVER.IMS_PER_BATCH, c.DATALOADER.NUM_INSTANCE, c.SOLVER.SEED, own, processes)

    def _optimiser(self) -> torch.optim.Optimizer:
        s = self.config.SOLVER
        if s.BACKBONE_LR == 0:
            self.model.backbone.requires_grad_(False)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        rest = [p for name, p in named if not name.startswith("backbone.")]
        backbone = [p for name, p in named if name.startswith("backbone.")]
        groups = [{"params": rest, "lr": s.BASE_LR}]
        groups += [{"params": backbone, "lr": s.BACKBONE_LR}] if backbone else []
        return torch.optim.Adam(groups, weight_decay=s.WEIGHT_DECAY)

    def batches(self, start: int) -> Iterator[dict[str, Any]]:
        for epoch, batches in self._sampler(rank(), world_size()).epochs(start):
            self.images.set_epoch(epoch)  # before the workers start, which copy it
            yield from DataLoader(
                self.images, batch_sampler=batches, num_workers=self.config.DATALOADER.NUM_WORKERS,
                generator=torch.Generator(),  # its own: a loader draws a seed, and must not disturb what a step draws
            )  # fmt: skip

    def step(self, batch: dict[str, Any], step: int) -> Step:
        out = self.model(batch["images"], batch["camera"], batch["present"])
        loss, parts = self.loss(out.feature, out.logits, batch["label"])
        right = (out.logits.argmax(dim=1) == batch["label"]).float().mean()
        return Step({"reid": loss}, {"train/id": parts["id"], "train/triplet": parts["triplet"], "train/right": right})

    def validate(self) -> Validation:
        """mAP on the identities that were held out from training; never on query and gallery."""
        splits = {"query": self.val_query, "gallery": self.val_gallery}
        features = extract_all(self.model, splits, batch_size=self.config.TEST.IMS_PER_BATCH, shared=True)
        metrics = evaluate(
            features["query"], *_pids_and_places(self.val_query, self.data.by_scene),
            features["gallery"], *_pids_and_places(self.val_gallery, self.data.by_scene),
        )  # fmt: skip
        return Validation(metrics.map, {"mAP": metrics.map, "R1": metrics.cmc1})

    def facts(self) -> dict[str, Any]:
        config = self.config.model_dump(
            exclude={"OUTPUT_DIR": True, "DATALOADER": {"NUM_WORKERS"}, "TEST": True, **_MANAGED}
        )
        config["DATASETS"].pop("ROOT_DIR")
        names = "\n".join(f"{s.name} {s.pid} {s.camera}" for s in self.images.samples)
        return {"config": config, "train_images": hashlib.sha256(names.encode()).hexdigest()[:16]}

    def export(self, path: Path) -> None:
        save_model(self.model, path)


def _pids_and_places(samples: Sequence[Sample], by_scene: bool) -> tuple[list[int], list[int]]:
    """Identities, and the cameras or scenes whose own matches do not count."""
    apart = [int(s.scene or 0) if by_scene else s.camera for s in samples]
    return [s.pid for s in samples], apart


def build_task(config: ReidConfig) -> ReidTask:
    """Read and check the data, build the model. Everything that can be wrong is wrong now."""
    root = Path(config.DATASETS.ROOT_DIR)
    if not root.is_dir():
        raise DataError(
            f"DATASETS.ROOT_DIR {root}: there is no such folder; name yours, or make one with "
            "`tokensieve data reid-synthetic`"
        )
    return ReidTask(config, load_set(config.DATASETS.NAMES.lower(), root, skip_broken=config.DATASETS.SKIP_BROKEN))


def fit_config(config: ReidConfig) -> FitConfig:
    s = config.SOLVER
    return FitConfig(
        steps=s.MAX_STEPS, warmup=s.WARMUP_STEPS, clip=s.CLIP_GRAD, validate_every=s.EVAL_PERIOD,
        checkpoint_every=s.CHECKPOINT_PERIOD, seed=s.SEED, precision=s.PRECISION,
    )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What a training run will do: name -> what, to be printed."""

    lines: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.lines)) + 2
        return "\n".join(f"{name + ':':<{width}}{what}" for name, what in self.lines.items())


def plan(task: ReidTask) -> Plan:
    """Tokens, parameters, MACs, steps and images of an identity, before anything is trained."""
    model, s = task.model, task.config.SOLVER
    cost = model.cost()
    images = sorted(Counter(sample.pid for sample in task.images.samples).values())
    batches = len(task.sampler.epoch(0))
    parameters = {
        "all": sum(p.numel() for p in model.parameters()),
        "backbone": sum(p.numel() for p in model.backbone.parameters()),
        "compression": sum(p.numel() for p in model.compressor.parameters()) if model.compressor is not None else 0,
    }
    where = "after the backbone" if model.at is None else f"in block {model.at}"
    chosen = f"{task.config.MODEL.SELECTION} {where}" if model.compressor is not None else "none, all tokens pooled"
    rows, columns = model.backbone.grid
    return Plan(
        {
            "data": f"{task.data.layout}, {', '.join(task.data.modalities)}, {task.size[0]} x {task.size[1]} pixels; "
            + task.data.summary(),
            "training": f"{len(task.images)} images of {model.classes} identities, {images[0]} to {images[-1]} "
            f"(median {images[len(images) // 2]}) images each; {len(task.val_gallery)} held out to choose the best",
            "backbone": f"{task.config.MODEL.TRANSFORMER_TYPE}, {model.backbone.depth} blocks of width "
            f"{model.backbone.width}, {model.cameras} cameras",
            "compression": chosen,
            "tokens": f"{model.backbone.patches} ({rows} x {columns}) -> {model.tokens_out()} of each modality",
            "parameters": ", ".join(f"{name} {count:,}" for name, count in parameters.items()),
            "MACs": f"{cost.macs / 1e6:,.1f} M a sample in the backbone ({cost.macs_full / 1e6:,.1f} M without "
            f"compression, {cost.possible:.2f}x), {model.compressor_macs() / 1e6:,.1f} M in the compression",
            "steps": f"{s.MAX_STEPS} of {s.IMS_PER_BATCH} samples ({task.sampler.identities} identities x "
            f"{task.sampler.instances} images), {s.MAX_STEPS / batches:.1f} epochs of {batches}; "
            f"warm-up {s.WARMUP_STEPS}",
            "learning rates": f"{s.BASE_LR:g}, backbone {s.BACKBONE_LR:g}",
            "output": task.config.OUTPUT_DIR,
        }
    )


def train_reid(
    config: ReidConfig,
    *,
    resume: bool = False,
    task: ReidTask | None = None,
    tell: Callable[[str], None] = lambda line: None,
    tick: Callable[[int], None] = lambda step: None,
) -> FitResult:
    """A whole run, into config.OUTPUT_DIR. Its model is best.safetensors, chosen on held-out training identities."""
    return fit(
        task or build_task(config), fit_config(config), Path(config.OUTPUT_DIR), resume=resume, tell=tell, tick=tick
    )
