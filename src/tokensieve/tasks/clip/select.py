"""Train a selection by distillation: the reduced model shall give the untouched model's image feature.

No labels: any images will do. The model is frozen; what trains is `methods.learned`'s scoring networks, through
`models.encoder.soft`. Every draw depends on the seed and the step alone, so an interrupted run that goes on is the run
that was never interrupted. Several processes share each batch. The training loop is `training.fit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core.reduction import Reduction
from tokensieve.core.view import TokenView
from tokensieve.errors import MissingMaterialError, OptionError
from tokensieve.methods.sieve import SieveMethod
from tokensieve.methods.trained.learned import Learned, ScoringNetworks, adapter_bytes
from tokensieve.models.attach import attach, find_tower
from tokensieve.models.encoder.soft import attach_soft
from tokensieve.records import write_whole
from tokensieve.tasks.clip.state import check_start, state_folder
from tokensieve.training import FitConfig, Step, Validation, fit
from tokensieve.training.distributed import (
    gather_in_turn,
    only_run_of_all,
    own_part,
    rank,
    world_size,
)
from tokensieve.utils.images import ENDINGS, image_files, read_image

__all__ = ["Evaluation", "Photos", "SelectConfig", "SelectTask", "Subject", "default_subject", "distillation_loss",
           "keep_for", "photos_in", "state_folder", "train_select"]  # fmt: skip

CPU = torch.device("cpu")
SPEEDS = (2.0, 3.0)
PRICE = 0.05  # of the learning rate, for what changes the choice


@dataclass(frozen=True)
class SelectConfig:
    """held_out: of the images, those that choose the best step. keep: budgets to train for, in turn; none: what makes
    2x and 3x possible. kl: weight of the zero-shot logits beside the feature's cosine. every: steps between
    evaluations.
    """

    held_out: int = 96
    steps: int = 200
    batch_size: int = 16
    lr: float = 4e-3
    weight_decay: float = 0.01
    kl: float = 1.0
    tau: float = 0.5
    keep: tuple[int | float, ...] = ()
    every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("held_out", "steps", "batch_size", "every"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: at least 1")
        if not (0 < self.lr < math.inf and 0 < self.tau < math.inf and 0 <= self.kl < math.inf):
            raise OptionError(f"lr={self.lr}, tau={self.tau}: above 0; kl={self.kl}: at least 0; all of them finite")


@dataclass(frozen=True)
class Subject:
    """The model to train for. encode: images (B, 3, H, W) -> features (B, E).

    classes: (C, E) of unit length, the zero-shot classifier; None where there is none (then kl must be 0).
    scale: its inverse temperature.
    """

    model: nn.Module
    encode: Callable[[Tensor], Tensor]
    name: str
    classes: Tensor | None = None
    scale: float = 100.0


class Photos:
    """Images to train on: arrays (H, W, 3) or files, opened when they are needed."""

    def __init__(self, items: Sequence[np.ndarray | Path] | np.ndarray, transform: Callable[..., Tensor]) -> None:
        self.items, self.transform = items, transform

    def __len__(self) -> int:
        return len(self.items)

    def pixels(self, index: Sequence[int]) -> Tensor:
        """(B, 3, H, W)."""
        return torch.stack([self.transform(self._open(self.items[i])) for i in index])

    @staticmethod
    def _open(item: np.ndarray | Path) -> Any:
        if not isinstance(item, Path):
            return item
        return read_image(item)


def photos_in(folder: Path, most: int | None = None) -> list[Path]:
    """The image files in a folder and below, by name."""
    if not folder.is_dir():
        raise MissingMaterialError(f"--photos {folder}: there is no such folder")
    found = image_files(folder, below=True)
    if not found:
        raise MissingMaterialError(f"--photos {folder}: no {', '.join(ENDINGS)} files in it")
    return found[:most]


def default_subject(kl: float) -> tuple[Subject, Callable[..., Tensor]]:
    """The embedded CLIP with CIFAR-10's classes, and its transform; without a use for texts its image tower alone."""
    from tokensieve.tasks.clip.align import TEMPLATES
    from tokensieve.tasks.clip.default import MODEL, load_default_clip
    from tokensieve.zoo import vit_s14
    from tokensieve.zoo.cifar10 import CLASSES

    if not kl:
        tower = vit_s14.vit_s14_openclip()
        return Subject(tower, tower, "vit-s14"), vit_s14.preprocess()
    model, transform, tokenizer = load_default_clip()
    clip: Any = model
    with torch.no_grad():
        text = clip.encode_text(tokenizer([template.format(c=name) for name in CLASSES for template in TEMPLATES]))
        text = F.normalize(text, dim=-1).view(len(CLASSES), len(TEMPLATES), -1).mean(dim=1)
        subject = Subject(model, clip.encode_image, MODEL, F.normalize(text, dim=-1), float(clip.logit_scale.exp()))
    return subject, transform


def distillation_loss(
    feature: Tensor, wanted: Tensor, classes: Tensor | None = None, scale: float = 1.0, kl: float = 0.0
) -> Tensor:
    """1 - cosine of the features (B, E), plus kl times KL(wanted || feature) of the zero-shot logits; mean over B."""
    feature, wanted = F.normalize(feature, dim=-1), F.normalize(wanted, dim=-1)
    loss = 1.0 - (feature * wanted).sum(dim=-1).mean()
    if kl and classes is not None:
        said, right = ((scale * x @ classes.T).log_softmax(dim=-1) for x in (feature, wanted))
        loss = loss + kl * F.kl_div(said, right, reduction="batchmean", log_target=True)
    return loss


def keep_for(model: nn.Module, method: Learned, possible: float) -> int:
    """The largest budget whose MACs make such a speed-up possible."""
    low, high = 1, math.prod(_grid(model)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        with attach(model, method, keep=middle) as handle:
            enough = handle.cost().possible >= possible
        low, high = (middle, high) if enough else (low, middle - 1)
    return low


def _grid(model: nn.Module) -> tuple[int, int]:
    tower, family = find_tower(model)
    return family.grid(tower)


def new_networks(model: nn.Module, seed: int) -> ScoringNetworks:
    """Untrained networks that fit a model's encoder."""
    tower, family = find_tower(model)
    blocks = list(family.blocks(tower).children())
    return ScoringNetworks(len(blocks), family.shape(blocks[0]).attention_width, seed=seed)


class _Watch(SieveMethod):
    """sieve that notes how long tokens are."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.found = torch.ones(depth)

    def spacing(self) -> int:
        return 1  # where learned cuts

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        self.found[round(view.depth * len(self.found))] = view.x.float().square().mean().sqrt().clamp_min(1e-6)
        return super().reduce(view, keep)


@dataclass(frozen=True)
class Evaluation:
    """How well the held-out features are kept after that many steps, by hard selection; one number a budget each."""

    step: int
    loss: tuple[float, ...]
    cosine: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.loss) / len(self.loss)

    def metrics(self, keep: Sequence[int | float]) -> dict[str, float]:
        """By name, as the training loop logs and keeps them."""
        figures = {"held-out loss": self.mean}
        for number, (budget, loss, cosine) in enumerate(zip(keep, self.loss, self.cosine, strict=True), start=1):
            figures |= {f"loss {number} (keep {budget})": loss, f"cosine {number} (keep {budget})": cosine}
        return figures

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Evaluation:
        """Back from the loop's result."""
        losses, cosines = (
            tuple(value for name, value in found.items() if name.startswith(f"{kind} ")) for kind in ("loss", "cosine")
        )
        return cls(found["step"], losses, cosines)


class SelectTask:
    """What the one loop trains: the scoring networks alone, of a subject that is frozen meanwhile."""

    def __init__(self, subject: Subject, photos: Photos, config: SelectConfig, device: torch.device) -> None:
        if config.kl and subject.classes is None:
            raise OptionError(f"kl={config.kl}: {subject.name} has no zero-shot classifier; give kl=0")
        if len(photos) < config.held_out + config.batch_size:
            raise OptionError(
                f"{len(photos)} images are too few for {config.held_out} held-out ones and a batch of "
                f"{config.batch_size}"
            )
        self.photos, self.config, self.device = photos, config, device
        subject.model.to(device)
        self.subject = replace(subject, classes=None if subject.classes is None else subject.classes.to(device))
        self.networks = new_networks(subject.model, config.seed).to(device)
        self.method = Learned(adapter=self.networks)
        self.keep = config.keep or tuple(keep_for(subject.model, self.method, speed) for speed in SPEEDS)
        optimiser = torch.optim.AdamW(self._groups(), lr=config.lr, weight_decay=config.weight_decay)
        self.modules: dict[str, nn.Module] = {"networks": self.networks}
        self.optimisers: dict[str, torch.optim.Optimizer] = {"networks": optimiser}
        self.done = 0
        self.latest: Evaluation | None = None  # of the held-out images
        order = self._shuffled(-1, len(photos))
        self.held, self.train = order[: config.held_out], order[config.held_out :]
        self._held_wanted: dict[tuple[int, ...], Tensor] = {}  # of the batches of held-out images, each seen again
        self.networks.unit.copy_(self._units())

    def _groups(self) -> list[dict[str, Any]]:
        """What corrects merged tokens takes steps of one size, by exact gradients. Prices take smaller ones (PRICE):
        the
        gradient of a choice is a rough guess, and at full speed it undoes what it gains. Among theirs the step
        is smaller where many weights add up, larger for three exponents."""
        net, lr = self.networks, self.config.lr
        speeds = dict.fromkeys((net.scale, net.shift, net.lead), 1.0)
        speeds |= {net.first: PRICE * 10 / net.width, net.bias: PRICE, net.last: PRICE, net.exponents: PRICE * 4.0}
        return [{"params": [part], "lr": lr * speed} for part, speed in speeds.items()]

    @torch.no_grad()
    def _units(self) -> Tensor:
        """(depth,) root mean square of the tokens at each block's cut, over a few held-out images."""
        watch = _Watch(self.networks.depth)
        with attach(self.subject.model, watch, keep=min(self.keep)):
            self.subject.encode(self.photos.pixels(self.held[:8]).to(self.device))
        return watch.found

    def _shuffled(self, epoch: int, n: int) -> list[int]:
        seed = 1_000_003 * self.config.seed + epoch + 1
        return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()

    def batch(self, step: int) -> list[int]:
        """The images of a step: epoch after epoch, each in an order of its own."""
        size, n = self.config.batch_size, len(self.train)
        places = range(step * size, (step + 1) * size)
        orders = {epoch: self._shuffled(epoch, n) for epoch in {place // n for place in places}}
        return [self.train[orders[place // n][place % n]] for place in places]

    @torch.no_grad()
    def wanted(self, pixels: Tensor) -> Tensor:
        """The untouched model's features of a batch. They are computed anew each time: an image's feature differs in
        its last bit with the batch it is in, and a resumed run must see what the interrupted one would have.
        """
        return self.subject.encode(pixels)

    def loss(self, feature: Tensor, wanted: Tensor) -> Tensor:
        return distillation_loss(feature, wanted, self.subject.classes, self.subject.scale, self.config.kl)

    # -- what the loop calls ----------------------------------------------------------------------------------------

    def batches(self, start: int) -> Iterator[Tensor]:
        """Pixels (B, 3, H, W) of this process's part of each step."""
        self.done = step = start
        while True:
            yield self.photos.pixels(list(own_part(self.batch(step), "--batch_size")))
            step += 1

    def step(self, pixels: Tensor, step: int) -> Step:
        """On the budget whose turn it is."""
        wanted = self.wanted(pixels)
        with attach_soft(self.subject.model, self.method, keep=self.keep[step % len(self.keep)], tau=self.config.tau):
            loss = self.loss(self.subject.encode(pixels), wanted)
        self.done = step + 1
        return Step({"networks": loss})

    def validate(self) -> Validation:
        """The held-out images by exact selection, as in inference; each batch of them by one process."""
        size = self.config.batch_size
        batches = [self.held[start : start + size] for start in range(0, len(self.held), size)]
        losses, cosines = [], []
        for keep in self.keep:
            parts = gather_in_turn([self._evaluate(batch, keep) for batch in batches[rank() :: world_size()]])
            losses.append(sum(loss for loss, _ in parts) / len(self.held))
            cosines.append(sum(cosine for _, cosine in parts) / len(self.held))
        self.latest = Evaluation(self.done, tuple(losses), tuple(cosines))
        return Validation(-self.latest.mean, self.latest.metrics(self.keep))

    def _evaluate(self, index: list[int], keep: int | float) -> tuple[float, float]:
        """Sums over these images of the loss and of the cosine."""
        pixels = self.photos.pixels(index).to(self.device)
        if tuple(index) not in self._held_wanted:
            self._held_wanted[tuple(index)] = self.wanted(pixels)
        wanted = self._held_wanted[tuple(index)]
        with attach(self.subject.model, self.method, keep=keep):
            feature = self.subject.encode(pixels)
        return len(index) * self.loss(feature, wanted).item(), F.cosine_similarity(feature, wanted).sum().item()

    def facts(self) -> dict[str, Any]:
        return asdict(self.config) | {"images": len(self.photos), "model": self.subject.name}

    def export(self, path: Path) -> None:
        """The adapter, with its recipe and, where it was evaluated just now, its figures."""
        recipe = asdict(self.config) | {"keep": self.keep, "images": len(self.photos)}
        about: dict[str, Any] = {"model": self.subject.name, "recipe": recipe}
        if self.latest is not None:
            recipe["step"] = self.latest.step
            about["held_out"] = asdict(self.latest)
        write_whole(path, adapter_bytes(self.networks, about))


def fit_config(config: SelectConfig, device: torch.device) -> FitConfig:
    return FitConfig(
        steps=config.steps, warmup=round(0.05 * config.steps), validate_every=config.every, validate_first=True,
        checkpoint_every=config.every, seed=config.seed, precision="no", device=device.type,
    )  # fmt: skip


def train_select(
    subject: Subject,
    photos: Photos,
    config: SelectConfig,
    output: Path,
    *,
    resume: bool = False,
    device: torch.device = CPU,
    tell: Callable[[str], None] = lambda line: None,
    tick: Callable[[int], None] = lambda step: None,
) -> tuple[list[Evaluation], list[float]]:
    """Train, and write the best adapter so far to `output` and the run's checkpoints to a folder beside it.

    Returns the evaluations (the first is of the untrained networks, that is of sieve) and the loss of every step.
    tell: called with a line an evaluation; tick: with the steps done so far. Several processes train together.
    """
    check_start(output, resume)
    with only_run_of_all(output, file=True), _frozen(subject.model):
        check_start(output, resume)  # again: another run may have ended since
        task = SelectTask(subject, photos, config, device)
        result = fit(
            task, fit_config(config, device), state_folder(output), resume=resume, tell=tell, tick=tick, best=output
        )
    return [Evaluation.of(found) for found in result.validations], [losses["networks"] for losses in result.losses]


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """In eval mode and without gradients of its weights; everything as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    wanting = [p for p in model.parameters() if p.requires_grad]
    model.eval()
    for p in wanting:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for p in wanting:
            p.requires_grad_(True)
