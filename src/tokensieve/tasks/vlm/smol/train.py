"""`tokensieve train smol`: SmolLaVA's projector and LoRA.

    features/           what the frozen tower says of the training pictures, once
    start.safetensors   the projector by ridge regression, patch by patch, without the language model
    pooled/             packed questions, the picture pooled to 64 tokens; single photos first
    full/               the same with all 256 tokens

The last two are runs of the one training loop, whose batches depend on the seed and the step alone; the features go on
where they stopped. So a run that was killed goes on as if nothing had happened. Imports training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokensieve.tasks.vlm.smol.features import Features, cached_features
from tokensieve.tasks.vlm.smol.lessons import QuestionTask
from tokensieve.tasks.vlm.smol.model import build_smol_llava
from tokensieve.tasks.vlm.smol.projector import PatchWords, solve_projector, things_right
from tokensieve.tasks.vlm.smol.recipe import SmolConfig
from tokensieve.training import FitConfig, fit
from tokensieve.training.checkpoint import checkpoints_in
from tokensieve.training.distributed import first_alone, rank, wait
from tokensieve.utils.tensor_files import read_tensors, save_tensors

__all__ = ["train_smol"]

START, TRAINED = "start.safetensors", "smol-llava.safetensors"
Tick = Callable[[str, int], None]


def train_smol(
    config: SmolConfig,
    folder: Path,
    *,
    resume: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    tick: Tick = lambda stage, done: None,
) -> Path:
    """All of it; what ships is in the file that is returned. tick: called with the stage's name and what is done.

    Under torchrun the processes share the questions; features and regression are the first one's.
    """
    stages = config.stages()
    model, processor = build_smol_llava()
    start = first_alone(partial(_start, config, folder, model, processor.tokenizer, tell, tick))
    model.model.vision_tower = torch.nn.Identity()  # its work is done
    train, held_out = (
        Features(folder / "features", split, config.seed, count)
        for split, count in (("train", config.pictures), ("val", config.judge))
    )
    language = model.model.language_model.to(torch.bfloat16)
    language.config._attn_implementation = "eager"  # a third quicker than SDPA with such a mask, on a CPU
    before: QuestionTask | None = None
    for name, settings in stages.items():
        place = folder / name
        task = QuestionTask(settings, model, processor.tokenizer, train, held_out, before)
        if before is None:
            task.load_projector(read_tensors(start)[0])
        fitting = FitConfig(
            steps=settings.steps, warmup=min(20, settings.steps), validate_every=config.every,
            checkpoint_every=config.checkpoint_every, seed=config.seed, device="cpu",
        )  # fmt: skip
        tell(f"{name}: {settings.steps} steps")
        begun = bool(checkpoints_in(place / "checkpoints"))
        fit(task, fitting, place, resume=resume and begun, tell=tell, tick=partial(tick, name))
        before = task
    assert before is not None
    if rank() == 0:
        before.export(folder / TRAINED)
    wait()
    return folder / TRAINED


def _start(
    config: SmolConfig, folder: Path, model: Any, tokenizer: Any, tell: Callable[[str], None], tick: Tick
) -> Path:
    """Features and the projector's start, unless they are there."""
    tower, place = model.model.vision_tower, folder / "features"
    held_out = cached_features(place, "val", config.seed, config.judge, tower)
    train = cached_features(place, "train", config.seed, config.pictures, tower, partial(tick, "features"))
    path = folder / START
    if not path.is_file():
        projector, words = model.model.multi_modal_projector, PatchWords(
            model.model.language_model.embed_tokens.weight.detach(), tokenizer
        )  # fmt: skip
        solve_projector(projector, words, train, config.regression, config.seed, tick=partial(tick, "regression"))
        tell(f"regression: {100 * things_right(projector, words, held_out):.1f} % of held-out things named")
        save_tensors(path, {f"projector.{name}": x for name, x in projector.state_dict().items()}, {"format": "pt"})
    return path
