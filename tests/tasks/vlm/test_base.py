"""The recipe of the small LLaVA: two stages, interrupted and gone on with, and what they must not touch."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tokensieve.errors import OptionError
from tokensieve.tasks.vlm.base import BaseConfig, DecoderTask, TowerTask, train_base
from tokensieve.tasks.vlm.packing import Words
from tokensieve.tasks.vlm.scenes import make_scenes
from tokensieve.tasks.vlm.small import SmallSizes, build_small_llava
from tokensieve.tasks.vlm.teach import blind_level

TINY = SmallSizes(width=32, heads=2, vision_layers=3, text_layers=2, vision_mlp=48, text_mlp=48)
FEW = BaseConfig(
    sizes=TINY, tower_steps=4, tower_batch=2, steps=4, batch=2, each=1, judge=2, every=4, checkpoint_every=2, final=4
)


class KilledError(Exception):
    pass


@pytest.mark.parametrize("when", [("tower", 3), ("decoder", 3)])
def test_an_interrupted_run_gone_on_with_is_the_same_run(tmp_path: Path, when: tuple[str, int]) -> None:
    whole = train_base(FEW, tmp_path / "whole")

    def kill(stage: str, step: int) -> None:
        if (stage, step) == when:
            raise KilledError

    with pytest.raises(KilledError):
        train_base(FEW, tmp_path / "cut", tick=kill)
    told: list[str] = []
    again = train_base(FEW, tmp_path / "cut", resume=True, tell=told.append)
    assert any("going on from step 2" in line for line in told)
    for (name, one), other in zip(whole.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    rows = json.loads((tmp_path / "cut" / "record.json").read_text())["rows"]
    assert [row["who"] for row in rows] == ["model", "commonest answer"]


def test_a_finished_folder_or_another_recipe_is_not_overwritten(tmp_path: Path) -> None:
    train_base(FEW, tmp_path)
    with pytest.raises(OptionError, match="--resume"):
        train_base(FEW, tmp_path)
    with pytest.raises(OptionError, match=r"lr was 0\.005, is 0\.01"):
        train_base(dataclasses.replace(FEW, lr=0.01), tmp_path, resume=True)


def test_each_stage_trains_its_own_parts(processor: Any) -> None:
    words = Words(processor.tokenizer.get_vocab())
    model = build_small_llava(TINY, processor.tokenizer)
    stages = (
        (TowerTask, ("vision_tower", "multi_modal_projector", "embed_tokens", "lm_head", "language_model.norm")),
        (DecoderTask, ("language_model", "multi_modal_projector", "lm_head")),
    )
    for task_type, moved in stages:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        task: Any = task_type(FEW, model, words)
        (name, optimiser), *_ = task.optimisers.items()
        task.step(next(task.batches(0)), 0).losses[name].backward()
        optimiser.step()
        changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
        assert changed
        assert all(any(part in n for part in moved) for n in changed)
        assert all(any(part in n for n in changed) for part in moved)


def test_wordings_go_from_terse_to_natural(processor: Any) -> None:
    task = DecoderTask(FEW, build_small_llava(TINY, processor.tokenizer), Words(processor.tokenizer.get_vocab()))
    shares = [task.terse(step) for step in range(FEW.steps)]
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < 0.5


def test_blind_training_is_blind(processor: Any) -> None:
    """Another image, the same questions: the same logits, and no gradient into the projector."""
    words = Words(processor.tokenizer.get_vocab())
    blind = dataclasses.replace(FEW, blind=True)
    task = DecoderTask(blind, build_small_llava(TINY, processor.tokenizer), words)
    number, scenes = next(task.batches(0))
    other = dataclasses.replace(scenes, images=scenes.images[:, ::-1].copy())
    losses = [task.step((number, s), 0).losses["decoder"] for s in (scenes, other)]
    assert losses[0] == losses[1]
    task = DecoderTask(FEW, build_small_llava(TINY, processor.tokenizer), words)
    losses = [task.step((number, s), 0).losses["decoder"] for s in (scenes, other)]
    assert losses[0] != losses[1]


def test_the_blind_level_is_the_share_of_the_commonest_answer() -> None:
    found = blind_level(make_scenes(400, 1), make_scenes(200, 2, "test"), (0,))
    assert 0.45 < found["exists"] < 0.55
    assert 0.1 < found["colour"] < 0.3
    assert found["all"] < 0.4


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": 0.0}, {"terse_until": 1.5}, {"each": 0}])
def test_wrong_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        dataclasses.replace(FEW, **wrong)
