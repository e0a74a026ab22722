"""The shipped LLaVA: real classes, its size, what it can do, and that it needs the image for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokensieve.errors import MissingMaterialError
from tokensieve.tasks.vlm import default
from tokensieve.tasks.vlm.default import load_small_llava, small_llava_folder
from tokensieve.tasks.vlm.packing import Words
from tokensieve.tasks.vlm.processor import PROMPT, build_tokenizer
from tokensieve.tasks.vlm.questions import DESCRIBE, ask, describe
from tokensieve.tasks.vlm.scenes import make_scenes
from tokensieve.tasks.vlm.teach import evaluate_answers


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Any]:
    return load_small_llava()


def test_it_is_a_plain_llava_of_the_promised_size(shipped: tuple[Any, Any]) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaForConditionalGeneration, LlavaProcessor

    model, processor = shipped
    assert type(model) is LlavaForConditionalGeneration
    assert type(processor) is LlavaProcessor
    assert isinstance(model.config.vision_config, CLIPVisionConfig)
    assert isinstance(model.config.text_config, LlamaConfig)
    assert model.config.text_config.num_hidden_layers >= 8
    assert (model.config.vision_config.image_size // model.config.vision_config.patch_size) ** 2 >= 144
    assert sum(file.stat().st_size for file in small_llava_folder().iterdir()) <= 25 * 2**20
    assert processor.tokenizer.get_vocab() == build_tokenizer().get_vocab(), "the generator's words have changed"


def test_it_answers_what_it_was_never_shown(shipped: tuple[Any, Any]) -> None:
    model, processor = shipped
    words = Words(processor.tokenizer.get_vocab())
    found = evaluate_answers(model, make_scenes(64, 31, "test"), words, (1,))
    assert found["colour"] > 0.9
    assert found["shape"] > 0.9
    assert found["all"] > 0.8
    assert found["held-out"] > 0.8


def test_with_another_image_it_fails(shipped: tuple[Any, Any]) -> None:
    import dataclasses

    model, processor = shipped
    words = Words(processor.tokenizer.get_vocab())
    scenes = make_scenes(64, 31, "test")
    mixed = dataclasses.replace(scenes, images=np.roll(scenes.images, 1, axis=0))
    assert evaluate_answers(model, mixed, words, (1,))["all"] < 0.5


def test_it_speaks_through_generate(shipped: tuple[Any, Any]) -> None:
    model, processor = shipped
    scenes = make_scenes(4, 32, "test")
    rng = np.random.default_rng(0)
    asked = [next(ask(scenes, index, rng, ["shape"])) for index in range(4)]
    texts = [PROMPT.format(question=text) for text in (*(q.text for q in asked), DESCRIBE)]
    inputs = processor(images=[*scenes.images, scenes.images[0]], text=texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        told = model.generate(**inputs, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    answers = processor.batch_decode(told, skip_special_tokens=True)
    right = sum(answer == question.answer for answer, question in zip(answers, asked, strict=False))
    assert right >= 3, (answers, asked)
    true = describe(scenes, 0).replace(",", " ,").replace(".", " .").split()
    said = answers[-1].replace(",", " ,").replace(".", " .").split()
    assert np.mean([one == other for one, other in zip(said, true, strict=False)]) > 0.6, (said, true)


def test_without_its_files_it_says_how_to_make_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "SMALL_LLAVA", "nowhere")
    with pytest.raises(MissingMaterialError, match="tokensieve train vlm-base"):
        load_small_llava()
