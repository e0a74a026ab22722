"""Align an image tower with a text tower, LiT-style: both frozen, two projections and a temperature trained.

The images are CIFAR-10's training images with captions made of their class; tower features are computed once and kept
in shards, so an interrupted run goes on where it stopped, and the training itself takes seconds. Several processes
share the shards out and each batch; the first one writes. Imports zoo and training.distributed.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.errors import MissingMaterialError, OptionError
from tokensieve.records import write_whole
from tokensieve.tasks.clip.default import build_default_clip, default_tokenizer, trained_part
from tokensieve.tasks.clip.state import load_state, refuse_other
from tokensieve.training.distributed import (
    average_gradients,
    first_alone,
    gather_in_turn,
    gather_with_gradient,
    own_part,
    rank,
    shares,
    wait,
    world_size,
)
from tokensieve.utils.files import whole_file
from tokensieve.utils.tensor_files import save_tensors
from tokensieve.zoo import vit_s14
from tokensieve.zoo.cifar10 import CLASSES, cache_folder, load_cifar10

__all__ = ["TEMPLATES", "AlignConfig", "AlignResult", "align", "captions", "contrastive_loss", "tower_features"]

TEMPLATES = (
    "a photo of a {c}.",
    "a small photo of a {c}.",
    "a blurry photo of a {c}.",
    "a low resolution photo of the {c}.",
    "a picture of one {c}.",
    "this is a {c}.",
)
_WORDS = {  # what people also call them, so that the text side learns more than ten sentences
    "airplane": ("airplane", "aeroplane", "plane", "jet"),
    "automobile": ("automobile", "car", "sedan"),
    "bird": ("bird", "small bird", "songbird"),
    "cat": ("cat", "kitten", "house cat"),
    "deer": ("deer", "stag", "doe"),
    "dog": ("dog", "puppy", "hound"),
    "frog": ("frog", "toad", "tree frog"),
    "horse": ("horse", "pony", "stallion"),
    "ship": ("ship", "boat", "vessel"),
    "truck": ("truck", "lorry", "pickup truck"),
}
SHARD = 250


@dataclass(frozen=True)
class AlignConfig:
    """images: of the training set, from its start. held_out: share of them that chooses the epoch."""

    images: int = 10_500
    held_out: float = 0.1
    epochs: int = 40
    batch_size: int = 512
    lr: float = 2e-3
    weight_decay: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 100 <= self.images <= 50_000:
            raise OptionError(f"images={self.images}: CIFAR-10 has 50,000 training images, and 100 are the least")
        if not 0.0 < self.held_out < 1.0:
            raise OptionError(f"held_out={self.held_out}: a share between 0 and 1")
        if self.epochs < 1 or self.batch_size < 2 or not 0 < self.lr < math.inf:
            raise OptionError(
                f"epochs={self.epochs}: at least 1; batch_size={self.batch_size}: at least 2; lr={self.lr}: above 0"
            )


@dataclass(frozen=True)
class AlignResult:
    """The trained tensors, and the zero-shot accuracy on the held-out training images they were chosen by.

    losses: of every step of the run.
    """

    state: dict[str, Tensor]
    held_out_accuracy: float
    epoch: int
    losses: tuple[float, ...] = ()


def captions() -> tuple[list[str], Tensor]:
    """Every caption and the class it belongs to: (C,) int64."""
    texts, owners = [], []
    for index, name in enumerate(CLASSES):
        for word in _WORDS[name]:
            for template in TEMPLATES:
                texts.append(template.format(c=word))
                owners.append(index)
    return texts, torch.tensor(owners)


def tower_features(
    images: np.ndarray, tower: nn.Module, name: str, tick: Callable[[int], None] = lambda n: None
) -> Tensor:
    """CLS features (N, 384) of uint8 images (N, H, W, 3), kept as .npy shards under the cache folder.

    A shard is named by the bytes of its images: another order or set never reads it. tick: called with images done.
    Each shard is made and written by one of the processes of a run.
    """
    folder = cache_folder() / "features" / name
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for start in range(SHARD * rank(), len(images), SHARD * world_size()):
        chunk = np.ascontiguousarray(images[start : start + SHARD])
        path = folder / f"{hashlib.sha256(chunk.tobytes()).hexdigest()[:24]}.npy"
        if not path.is_file():
            with whole_file(path) as part, part.open("wb") as file:
                np.save(file, _encode(chunk, tower).numpy())
        parts.append(torch.from_numpy(np.load(path)))
        tick(len(chunk))
    return torch.cat(gather_in_turn(parts))


@torch.inference_mode()
def _encode(images: np.ndarray, tower: nn.Module, batch: int = 32) -> Tensor:
    prepare = vit_s14.preprocess()
    out = []
    for start in range(0, len(images), batch):
        pixels = torch.stack([prepare(image) for image in images[start : start + batch]])
        out.append(tower(pixels))
    return torch.cat(out)


def contrastive_loss(image: Tensor, text: Tensor, owner: Tensor, scale: Tensor) -> Tensor:
    """CLIP's loss for a batch in which captions repeat: every pair of one class is a positive.

    image, text: (B, E) of unit length, owner: (B,) class of each pair. The target of a row is spread evenly over its
    positives; rows and columns count alike.
    """
    logits = scale * image @ text.T
    same = (owner.unsqueeze(0) == owner.unsqueeze(1)).float()
    target = same / same.sum(dim=1, keepdim=True)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))


def align(
    config: AlignConfig,
    tick: Callable[[int], None] = lambda n: None,
    state: Path | None = None,
    resume: bool = False,
) -> AlignResult:
    """Train the projections of the default CLIP. Same configuration, same result. state, resume: as in `fit`."""
    if state is not None and resume and not state.is_file():
        raise MissingMaterialError(f"{state}: there is no run to resume; leave --resume out to start anew")
    model = build_default_clip()
    images, labels = first_alone(lambda: load_cifar10("train"))
    tower = vit_s14.vit_s14_openclip()
    features = tower_features(images[: config.images], tower, "vit-s14", tick)
    owner = torch.from_numpy(labels[: config.images])
    texts, text_owner = captions()
    with torch.inference_mode():
        proj, model.text.proj = model.text.proj, nn.Identity()  # type: ignore[union-attr]
        text = model.encode_text(default_tokenizer()(texts))  # type: ignore[operator]
        model.text.proj = proj  # type: ignore[union-attr]
    return fit(model, features, owner, text.clone(), text_owner, config, state, resume)


def fit(
    model: nn.Module, features: Tensor, owner: Tensor, text: Tensor, text_owner: Tensor, config: AlignConfig,
    state: Path | None = None, resume: bool = False, tick: Callable[[int], None] = lambda epoch: None,
) -> AlignResult:  # fmt: skip
    """The training proper, on tower features (N, 384) and caption features (C, 384).

    state: a file for what is needed to go on, written after each epoch; resume: go on from it. tick: called with the
    epochs done.
    """
    training = _Training(model, features, owner, text, text_owner, config)
    if resume and state is not None:
        training.go_on(state)
    while training.epoch < config.epochs:
        training.learn()
        if state is not None and rank() == 0:
            buffer = io.BytesIO()
            torch.save(training.state(), buffer)
            write_whole(state, buffer.getvalue())
        wait()
        tick(training.epoch)
    return training.best()


class _Training:
    """Projections, optimiser and draws of a run. Every process draws the same and computes its part of each batch."""

    def __init__(
        self, model: nn.Module, features: Tensor, owner: Tensor, text: Tensor, text_owner: Tensor, config: AlignConfig
    ) -> None:
        self.model, self.config = model, config
        self.features, self.owner, self.text, self.text_owner = features, owner, text, text_owner
        self.generator = torch.Generator().manual_seed(config.seed)
        order = torch.randperm(len(features), generator=self.generator)
        cut = max(1, round(config.held_out * len(features)))
        self.held, self.train = order[:cut], order[cut:]
        self.image_proj: nn.Parameter = model.visual.proj  # type: ignore[assignment,union-attr]
        self.text_proj: nn.Parameter = model.text.proj.weight  # type: ignore[assignment,union-attr]
        self.scale: nn.Parameter = model.logit_scale  # type: ignore[assignment]
        with torch.no_grad():
            for p in (self.image_proj, self.text_proj):
                p.copy_(torch.randn(p.shape, generator=self.generator) * features.shape[1] ** -0.5)
            self.scale.fill_(math.log(1 / 0.07))
        decayed = {"params": [self.image_proj, self.text_proj], "weight_decay": config.weight_decay}
        self.optimiser = torch.optim.AdamW([decayed, {"params": [self.scale], "weight_decay": 0.0}], lr=config.lr)
        steps = config.epochs * math.ceil(len(self.train) / config.batch_size)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimiser, config.lr, total_steps=steps, pct_start=0.1)
        self.of_class = [torch.nonzero(text_owner == c).flatten() for c in range(int(text_owner.max()) + 1)]
        self.epoch = 0
        self.losses: list[float] = []
        self.found: dict[str, Any] = {"state": {}, "held_out_accuracy": -1.0, "epoch": -1}

    def learn(self) -> None:
        """One epoch, and the judgement on the held-out images."""
        shuffled = self.train[torch.randperm(len(self.train), generator=self.generator)]
        for batch in shuffled.split(self.config.batch_size):
            self._step(batch)
        accuracy = _zero_shot(
            self.features[self.held] @ self.image_proj, self.owner[self.held], self.text @ self.text_proj.T,
            self.text_owner,
        )  # fmt: skip
        if accuracy > self.found["held_out_accuracy"]:
            self.found = {"state": trained_part(self.model), "held_out_accuracy": accuracy, "epoch": self.epoch}
        self.epoch += 1

    def _step(self, batch: Tensor) -> None:
        """batch: (B,) images of the whole step; captions are drawn for all of them, features computed of a part."""
        owner = self.owner[batch]
        draws = [torch.randint(len(self.of_class[c]), (), generator=self.generator) for c in owner.tolist()]
        captions = torch.stack([self.of_class[c][draw] for c, draw in zip(owner.tolist(), draws, strict=True)])
        sizes, own = shares(len(batch)), own_part(range(len(batch)))
        mine = slice(own.start, own.stop)  # type: ignore[attr-defined]
        image = F.normalize(self.features[batch[mine]] @ self.image_proj, dim=-1)
        caption = F.normalize(self.text[captions[mine]] @ self.text_proj.T, dim=-1)
        loss = contrastive_loss(
            gather_with_gradient(image, sizes), gather_with_gradient(caption, sizes), owner,
            self.scale.exp().clamp(max=100.0),
        )  # fmt: skip
        value = loss.item()
        if not math.isfinite(value):
            raise OptionError(f"the loss is {value} at step {len(self.losses)}: lower lr={self.config.lr}")
        self.optimiser.zero_grad()
        loss.backward()
        average_gradients([self.image_proj, self.text_proj, self.scale])
        self.optimiser.step()
        self.schedule.step()
        self.losses.append(value)

    def best(self) -> AlignResult:
        return AlignResult(**self.found, losses=tuple(self.losses))

    # -- going on -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "config": asdict(self.config), "epoch": self.epoch, "losses": self.losses, "found": self.found,
            "trained": trained_part(self.model), "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(), "generator": self.generator.get_state(),
        }  # fmt: skip

    def go_on(self, path: Path) -> None:
        """Take up an interrupted run. One of other settings is an error that names them."""
        found = load_state(path)
        refuse_other(path, found["config"], asdict(self.config))
        self.model.load_state_dict(found["trained"], strict=False)
        self.optimiser.load_state_dict(found["optimiser"])
        self.schedule.load_state_dict(found["schedule"])
        self.generator.set_state(found["generator"])
        self.epoch, self.losses, self.found = found["epoch"], list(found["losses"]), found["found"]


@torch.no_grad()
def _zero_shot(image: Tensor, owner: Tensor, text: Tensor, text_owner: Tensor) -> float:
    """Share of images whose nearest class is theirs; a class is the mean of its captions, as clip-benchmark has it."""
    text = F.normalize(text, dim=-1)
    classes = torch.stack([text[text_owner == c].mean(dim=0) for c in range(int(text_owner.max()) + 1)])
    guess = (F.normalize(image, dim=-1) @ F.normalize(classes, dim=-1).T).argmax(dim=1)
    return (guess == owner).float().mean().item()


def save(result: AlignResult, path: Path, config: AlignConfig) -> None:
    """Write the trained tensors as safetensors, whole or not at all, with the recipe in its metadata."""
    recipe = {key: str(value) for key, value in vars(config).items()}
    recipe |= {"held_out_accuracy": f"{result.held_out_accuracy:.4f}", "epoch": str(result.epoch)}
    save_tensors(path, result.state, recipe)
