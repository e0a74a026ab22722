"""`tokensieve train vlm-base`: the small LLaVA from nothing, in two runs of the one training loop.

    tower/    patch labels for the vision tower, projector and word embeddings
    decoder/  packed questions and descriptions for projector and decoder, the tower frozen; terse wordings first

Every batch depends on the seed and its step alone, so a run that was killed goes on as if nothing had happened. Imports
training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tokensieve.errors import MissingMaterialError, OptionError
from tokensieve.records import new_record, write_record
from tokensieve.tasks.vlm.muon import Muon
from tokensieve.tasks.vlm.packing import Words
from tokensieve.tasks.vlm.processor import build_processor
from tokensieve.tasks.vlm.scenes import Scenes, make_scenes
from tokensieve.tasks.vlm.small import SmallSizes, build_small_llava, image_tensor
from tokensieve.tasks.vlm.teach import (
    TowerTeacher,
    answer_logits,
    answer_loss,
    blind_level,
    draw_pack,
    evaluate_answers,
)
from tokensieve.training import FitConfig, Step, Validation, fit
from tokensieve.training.checkpoint import CHECKPOINTS, checkpoints_in
from tokensieve.utils.files import only_run, whole_folder
from tokensieve.utils.tensor_files import save_tensors

__all__ = ["BaseConfig", "DecoderTask", "TowerTask", "final_evaluation", "save_small_llava", "train_base"]

_HELD_OUT, _FINAL = 1_000_000, 1_500_000  # seeds of held-out scenes lie beyond any step's


@dataclass(frozen=True)
class BaseConfig:
    """The recipe. each: questions of each kind about one image. terse_until: share of the decoder's steps with terse
    wordings; from then on they give way to natural ones. judge: held-out images for each validation; final: for the
    last. blind: never show the decoder an image, to see what the wording alone gives away.
    """

    sizes: SmallSizes = field(default_factory=SmallSizes)
    seed: int = 0
    tower_steps: int = 1600
    tower_batch: int = 8
    tower_lr: float = 8e-3
    steps: int = 2500
    batch: int = 8
    each: int = 3
    lr: float = 5e-3
    terse_until: float = 0.3
    judge: int = 128
    every: int = 200
    checkpoint_every: int = 100
    final: int = 1000
    blind: bool = False

    def __post_init__(self) -> None:
        for name in (
            "tower_steps",
            "tower_batch",
            "steps",
            "batch",
            "each",
            "judge",
            "every",
            "checkpoint_every",
            "final",
        ):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: at least 1")
        if not 0 <= self.terse_until <= 1:
            raise OptionError(f"terse_until={self.terse_until}: from 0 to 1")
        for name in ("lr", "tower_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise OptionError(f"{name}={getattr(self, name)}: above 0, and finite")

    def facts(self, *names: str) -> dict[str, Any]:
        """The settings that change what comes out of a stage."""
        return {"sizes": asdict(self.sizes), **{name: getattr(self, name) for name in ("seed", *names)}}


class _SmallTask:
    """What both stages share: one model, one optimiser, scenes by step."""

    def __init__(self, config: BaseConfig, model: Any, words: Words) -> None:
        self.config, self.model, self.words = config, model, words
        self.modules: Mapping[str, nn.Module] = {"model": model}
        self.optimisers: Mapping[str, Optimizer] = {}
        self.held_out = make_scenes(config.judge, _HELD_OUT + config.seed, "test")

    def _optimiser(self, lr: float, taught: Callable[[str], bool], more: Iterable[nn.Parameter] = ()) -> Optimizer:
        """For the model's parameters that a stage teaches, by name, and some of the stage's own."""
        named = [(name, p) for name, p in self.model.named_parameters() if taught(name)]
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        rest = [p for name, p in named if p.ndim != 2 or "embed" in name]
        return Muon(matrices, [*rest, *more], lr, lr / 2)

    def _scenes(self, count: int, step: int, crowded: bool = False) -> Scenes:
        return make_scenes(count, self.config.seed * 2 * _HELD_OUT + step, "train", crowded)

    def export(self, path: Path) -> None:
        tensors = dict(self.model.state_dict())
        tensors.pop("lm_head.weight")  # tied to the embeddings
        save_tensors(path, tensors, {"format": "pt"})


class TowerTask(_SmallTask):
    """Patch labels. Four of five batches are crowded scenes, which show three times as many things."""

    def __init__(self, config: BaseConfig, model: Any, words: Words) -> None:
        super().__init__(config, model, words)
        torch.manual_seed(config.seed)
        self.teacher = TowerTeacher(config.sizes.width, words.vocabulary)
        self.modules = {"model": model, "teacher": self.teacher}
        optimiser = self._optimiser(
            config.tower_lr, lambda name: ".language_model.layers." not in name, self.teacher.parameters()
        )
        self.optimisers = {"tower": optimiser}

    def batches(self, start: int) -> Iterator[Scenes]:
        step = start
        while True:
            yield self._scenes(self.config.tower_batch, step, crowded=step % 5 != 4)
            step += 1

    def step(self, batch: Scenes, step: int) -> Step:
        loss, right = self.teacher(self.model, batch)
        return Step({"tower": loss}, {f"right/{name}": value for name, value in right.items()})

    def validate(self) -> Validation:
        loss, right = self.teacher(self.model, self.held_out)
        return Validation(-float(loss), {"loss": float(loss), **right})

    def facts(self) -> dict[str, Any]:
        return self.config.facts("tower_batch", "tower_lr")


class DecoderTask(_SmallTask):
    """Packed questions and a description of each image, the tower frozen."""

    def __init__(self, config: BaseConfig, model: Any, words: Words) -> None:
        super().__init__(config, model, words)
        model.model.vision_tower.requires_grad_(False)
        self.optimisers = {"decoder": self._optimiser(config.lr, lambda name: ".vision_tower." not in name)}

    def terse(self, step: int) -> float:
        """How often a question is terse: always, then ever less often, down to one in ten."""
        share = step / self.config.steps
        if share < self.config.terse_until:
            return 1.0
        return max(0.1, 0.5 - (share - self.config.terse_until))

    def batches(self, start: int) -> Iterator[tuple[int, Scenes]]:
        step = start
        while True:
            yield step, self._scenes(self.config.batch, self.config.tower_steps + step)
            step += 1

    def step(self, batch: tuple[int, Scenes], step: int) -> Step:
        number, scenes = batch
        seed = (self.config.seed, number)
        packed, _ = draw_pack(scenes, self.words, seed, self.config.each, self.terse(number), caption=True)
        logits = answer_logits(self.model, image_tensor(scenes.images), packed, self.words, self.config.blind)
        return Step({"decoder": answer_loss(logits, packed)})

    def validate(self) -> Validation:
        found = evaluate_answers(self.model, self.held_out, self.words, (_HELD_OUT,), 2, blind=self.config.blind)
        terse = evaluate_answers(self.model, self.held_out, self.words, (_HELD_OUT,), 1, 1.0, self.config.blind)
        return Validation(found["all"], {**found, "terse": terse["all"]})

    def facts(self) -> dict[str, Any]:
        return self.config.facts("tower_steps", "batch", "each", "lr", "terse_until", "blind")


def train_base(
    config: BaseConfig,
    folder: Path,
    *,
    resume: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    tick: Callable[[str, int], None] = lambda stage, step: None,
) -> Any:
    """Both stages; leaves the model with its processor in `folder`/model and returns the model.

    resume: go on in the stage that was interrupted. tick: called with the stage's name and the steps done.
    """
    if resume and not checkpoints_in(folder / "tower" / CHECKPOINTS):
        raise MissingMaterialError(f"{folder}: there is no run to resume; leave --resume out to start anew")
    with only_run(folder):
        return _train_stages(config, folder, resume, tell, tick)


def _train_stages(
    config: BaseConfig, folder: Path, resume: bool, tell: Callable[[str], None], tick: Callable[[str, int], None]
) -> Any:
    processor = build_processor()
    words = Words(processor.tokenizer.get_vocab())
    model = build_small_llava(config.sizes, processor.tokenizer, config.seed)
    stages: tuple[tuple[str, type[TowerTask] | type[DecoderTask], int], ...] = (
        ("tower", TowerTask, config.tower_steps), ("decoder", DecoderTask, config.steps),
    )  # fmt: skip
    for name, task, steps in stages:
        place = folder / name
        begun = bool(checkpoints_in(place / CHECKPOINTS))
        settings = FitConfig(
            steps=steps, warmup=min(steps, 50), validate_every=config.every, checkpoint_every=config.checkpoint_every,
            seed=config.seed, device="cpu",
        )  # fmt: skip
        tell(f"{name}: {steps} steps")
        fit(task(config, model, words), settings, place, resume=resume and begun, tell=tell, tick=partial(tick, name))
    save_small_llava(model, processor, folder / "model")
    found = final_evaluation(config, model, words)
    for row in found:
        figures = [f"{name} {value:.3f}" for name, value in row.items() if name != "who"]
        tell(f"{row['who']}: {', '.join(figures)}")
    write_record(
        new_record("vlm-base", asdict(config), found, seed=config.seed, threads=torch.get_num_threads()),
        folder / "record.json",
    )
    return model


def final_evaluation(config: BaseConfig, model: Any, words: Words) -> list[dict[str, Any]]:
    """Accuracy on held-out images that no validation during training saw, beside what the wording alone gives away."""
    scenes = make_scenes(config.final, _FINAL + config.seed, "test")
    seen = evaluate_answers(model, scenes, words, (_FINAL,), 2, blind=config.blind)
    common = blind_level(make_scenes(2 * config.final, _FINAL + config.seed, "train"), scenes, (_FINAL,))
    return [{"who": "blind model" if config.blind else "model", **seen}, {"who": "commonest answer", **common}]


def save_small_llava(model: Any, processor: Any, folder: Path) -> None:
    """A folder for plain `from_pretrained`: configuration, weights, tokenizer, image processor. Whole or not at all."""
    model.requires_grad_(True).eval()
    with whole_folder(folder) as part:
        model.save_pretrained(part)
        processor.save_pretrained(part)
