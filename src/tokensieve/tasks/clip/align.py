"""Align an image tower with a text tower, LiT-style: both frozen, two projections and a temperature trained.

The images are CIFAR-10's training images with captions made of their class; tower features are computed once and kept
in shards, so an interrupted run goes on where it stopped, and the training itself takes seconds. Several processes
share the shards out and each batch. The training loop is `training.fit`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.errors import OptionError
from tokensieve.tasks.clip.default import build_default_clip, default_tokenizer, trained_part
from tokensieve.training import FitConfig, Step, Validation, fit
from tokensieve.training.distributed import (
    first_alone,
    from_first,
    gather_in_turn,
    gather_with_gradient,
    own_part,
    rank,
    shares,
    world_size,
)
from tokensieve.training.loop import BEST
from tokensieve.utils.files import whole_file
from tokensieve.utils.tensor_files import read_tensors, save_tensors
from tokensieve.zoo import vit_s14
from tokensieve.zoo.cifar10 import CLASSES, cache_folder, load_cifar10

__all__ = [
    "TEMPLATES",
    "AlignConfig",
    "AlignResult",
    "AlignTask",
    "align",
    "captions",
    "contrastive_loss",
    "fit_projections",
    "tower_features",
]

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
    folder: Path | None = None,
    resume: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> AlignResult:
    """Train the projections of the default CLIP. Same configuration, same result. tick: called with images encoded;
    folder, resume, tell: as in `fit_projections`.
    """
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
    task = AlignTask(model, features, owner, text.clone(), text_owner, config)
    return fit_projections(task, folder, resume, tell)


def fit_projections(
    task: AlignTask,
    folder: Path | None = None,
    resume: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    tick: Callable[[int], None] = lambda step: None,
) -> AlignResult:
    """The training proper. folder: for checkpoints and logs, None for none that stay; the rest as in `training.fit`."""
    with TemporaryDirectory() as scratch:
        place = Path(scratch) if folder is None else folder
        result = fit(task, task.fit_config(), place, resume=resume, tell=tell, tick=tick)
        state = from_first(dict(read_tensors(place / BEST)[0]) if rank() == 0 else {})
    epoch = (result.best_step or 0) // task.epoch_steps - 1
    losses = tuple(losses["projections"] for losses in result.losses)
    return AlignResult(state, result.best_score or 0.0, epoch, losses)


class AlignTask:
    """What the one loop trains: two projections and a temperature, on tower features (N, 384) of images of the classes
    `owner` (N,) and caption features (C, 384) of the classes `text_owner` (C,).

    Every process draws the same and computes its part of each batch. An epoch's last batch may be smaller.
    """

    def __init__(
        self, model: nn.Module, features: Tensor, owner: Tensor, text: Tensor, text_owner: Tensor, config: AlignConfig
    ) -> None:
        self.model, self.config = model, config
        self.features, self.owner, self.text, self.text_owner = features, owner, text, text_owner
        generator = torch.Generator().manual_seed(config.seed)
        order = torch.randperm(len(features), generator=generator)
        cut = max(1, round(config.held_out * len(features)))
        self.held, self.train = order[:cut], order[cut:]
        self.epoch_steps = math.ceil(len(self.train) / config.batch_size)
        self.image_proj: nn.Parameter = model.visual.proj  # type: ignore[assignment,union-attr]
        self.text_proj: nn.Parameter = model.text.proj.weight  # type: ignore[assignment,union-attr]
        self.scale: nn.Parameter = model.logit_scale  # type: ignore[assignment]
        with torch.no_grad():
            for p in (self.image_proj, self.text_proj):
                p.copy_(torch.randn(p.shape, generator=generator) * features.shape[1] ** -0.5)
            self.scale.fill_(math.log(1 / 0.07))
        parts = nn.ParameterDict({"image": self.image_proj, "text": self.text_proj, "scale": self.scale})
        decayed = {"params": [self.image_proj, self.text_proj], "weight_decay": config.weight_decay}
        optimiser = torch.optim.AdamW([decayed, {"params": [self.scale], "weight_decay": 0.0}], lr=config.lr)
        self.modules: dict[str, nn.Module] = {"projections": parts}
        self.optimisers: dict[str, torch.optim.Optimizer] = {"projections": optimiser}
        self.of_class = [torch.nonzero(text_owner == c).flatten() for c in range(int(text_owner.max()) + 1)]

    def fit_config(self) -> FitConfig:
        """Evaluations and checkpoints after each epoch."""
        steps = self.config.epochs * self.epoch_steps
        return FitConfig(
            steps=steps, warmup=round(0.1 * steps), clip=None, validate_every=self.epoch_steps,
            checkpoint_every=self.epoch_steps, seed=self.config.seed, device="cpu",
        )  # fmt: skip

    # -- what the loop calls ----------------------------------------------------------------------------------------

    def batches(self, start: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(image features (b, 384) and caption features (b, 384) of this process's part, classes (B,) of the batch)."""
        step = start
        while True:
            epoch, place = divmod(step, self.epoch_steps)
            order = torch.randperm(len(self.train), generator=self._generator(2 * epoch))
            batch = self.train[order].split(self.config.batch_size)[place]
            draws, owner = self._generator(2 * step + 1), self.owner[batch]
            captions = [int(self.of_class[c][_below(len(self.of_class[c]), draws)]) for c in owner.tolist()]
            own = own_part(range(len(batch)))
            mine = slice(own.start, own.stop)  # type: ignore[attr-defined]
            yield self.features[batch[mine]], self.text[captions[mine]], owner
            step += 1

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(1_000_003 * self.config.seed + number)

    def step(self, batch: tuple[Tensor, Tensor, Tensor], step: int) -> Step:
        features, text, owner = batch
        sizes = shares(len(owner))
        image = F.normalize(features @ self.image_proj, dim=-1)
        caption = F.normalize(text @ self.text_proj.T, dim=-1)
        loss = contrastive_loss(
            gather_with_gradient(image, sizes), gather_with_gradient(caption, sizes), owner,
            self.scale.exp().clamp(max=100.0),
        )  # fmt: skip
        return Step({"projections": loss})

    def validate(self) -> Validation:
        """Zero-shot accuracy on the held-out images."""
        accuracy = _zero_shot(
            self.features[self.held] @ self.image_proj, self.owner[self.held], self.text @ self.text_proj.T,
            self.text_owner,
        )  # fmt: skip
        return Validation(accuracy, {"held-out accuracy": accuracy})

    def facts(self) -> dict[str, Any]:
        return asdict(self.config)

    def export(self, path: Path) -> None:
        save_tensors(path, trained_part(self.model), {})


def _below(end: int, generator: torch.Generator) -> int:
    return int(torch.randint(end, (), generator=generator))


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
