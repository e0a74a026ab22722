"""The small LLaVA: real classes, plain from_pretrained, its start, and packs that equal single questions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tokensieve.errors import OptionError
from tokensieve.tasks.vlm.packing import PREFIX, Words, pack
from tokensieve.tasks.vlm.processor import PROMPT
from tokensieve.tasks.vlm.scenes import make_scenes
from tokensieve.tasks.vlm.small import SmallSizes, build_small_llava, image_tensor
from tokensieve.tasks.vlm.teach import answer_logits, answer_loss, draw_pack, evaluate_answers

QUESTIONS = [
    ("What colour is the circle?", "red"),
    ("colour at top-left", "blue"),
    ("Describe the image.", "top red cross."),
]


def test_processor_round_trip(processor: Any, tmp_path: Path) -> None:
    from transformers import AutoProcessor, LlavaProcessor

    processor.save_pretrained(tmp_path)
    again = AutoProcessor.from_pretrained(tmp_path)
    assert isinstance(again, LlavaProcessor)
    scenes = make_scenes(2, 0)
    texts = [PROMPT.format(question=q) for q in ("How many crosses are there?", "Is there a red square?")]
    for one in (processor, again):
        inputs = one(images=list(scenes.images), text=texts, return_tensors="pt", padding=True)
        assert (inputs["input_ids"] == one.image_token_id).sum(1).tolist() == [144, 144]
        torch.testing.assert_close(inputs["pixel_values"], image_tensor(scenes.images), atol=1e-6, rtol=0)
        text = one.tokenizer.decode(inputs["input_ids"][0], skip_special_tokens=True)
        assert text.split() == ["user:", "how", "many", "crosses", "are", "there", "?", "assistant:"]
    unknown = again.tokenizer("zebra", add_special_tokens=False)["input_ids"]
    assert unknown == [again.tokenizer.unk_token_id]


def test_photos_of_any_size_become_144_tokens(processor: Any) -> None:
    photo = Image.fromarray(np.zeros((50, 200, 3), np.uint8)).convert("L")
    inputs = processor(images=[photo], text=[PROMPT.format(question="Is there a circle?")], return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 3, 96, 96)
    assert (inputs["input_ids"] == processor.image_token_id).sum() == 144


def test_saved_and_loaded_gives_the_same_logits(tiny: Any, processor: Any, tmp_path: Path) -> None:
    from transformers import LlavaForConditionalGeneration

    tiny.save_pretrained(tmp_path)
    again = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    inputs = processor(
        images=[make_scenes(1, 0).images[0]], text=[PROMPT.format(question="Where is the digit?")], return_tensors="pt"
    )
    with torch.no_grad():
        assert torch.equal(tiny(**inputs).logits, again(**inputs).logits)
        assert again.generate(**inputs, max_new_tokens=3, do_sample=False).shape[1] > inputs["input_ids"].shape[1]
    assert again.config.vision_feature_layer == -2
    assert again.lm_head.weight is again.model.language_model.embed_tokens.weight


def test_words_are_cut_as_the_tokenizer_cuts_them(processor: Any) -> None:
    words = Words(processor.tokenizer.get_vocab())
    for question, answer in QUESTIONS:
        for text in (question, answer):
            assert words(text) == processor.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_pack_equals_its_questions_asked_alone(tiny: Any, processor: Any) -> None:
    """Through the model's own forward, one question at a time, with the processor's inputs."""
    words = Words(processor.tokenizer.get_vocab())
    scenes = make_scenes(2, 3)
    dialogues = [QUESTIONS, QUESTIONS[::-1][:2]]
    packed = pack(words, dialogues)
    with torch.no_grad():
        logits = answer_logits(tiny, image_tensor(scenes.images), packed, words)
    alone = []
    for image, dialogue in zip(scenes.images, dialogues, strict=True):
        for question, answer in dialogue:
            text = PROMPT.format(question=question)
            whole = processor(images=[image], text=[f"{text} {answer}"], return_tensors="pt")
            asked = processor(images=[image], text=[text], return_tensors="pt")["input_ids"].shape[1]
            with torch.no_grad():
                alone.append(tiny(**whole).logits[0, asked - 1 :])
    torch.testing.assert_close(logits, torch.cat(alone), atol=1e-4, rtol=1e-4)
    spread = torch.cat(alone).std(0).mean()
    assert spread > 0.1, "logits that hardly differ would hide a wrong mask"


def test_targets_are_the_answer_and_the_end(processor: Any) -> None:
    words = Words(processor.tokenizer.get_vocab())
    packed = pack(words, [QUESTIONS])
    told = processor.tokenizer.decode(packed.targets[0][packed.targets[0] >= 0])
    assert told.split() == ["red", "</s>", "blue", "</s>", "top", "red", "cross", ".", "</s>"]
    assert packed.position[packed.segment == 1].tolist() == list(range(PREFIX, PREFIX + 5))


def test_only_answers_teach(tiny: Any, processor: Any) -> None:
    words = Words(processor.tokenizer.get_vocab())
    packed, _ = draw_pack(make_scenes(2, 5), words, [1], 1, 0.5, caption=True)
    asked = packed.targets >= 0
    perfect = 50 * torch.nn.functional.one_hot(packed.targets[asked], len(processor.tokenizer)).float()
    assert answer_loss(perfect, packed) < 1e-6
    assert answer_loss(torch.zeros_like(perfect), packed) == pytest.approx(np.log(len(processor.tokenizer)), rel=1e-4)


def test_evaluation_equals_greedy_generation(tiny: Any, processor: Any) -> None:
    """A model fitted to a few answers for a moment, so that it is right on some questions and wrong on others."""
    words = Words(processor.tokenizer.get_vocab())
    scenes = make_scenes(6, 2, "test")
    packed, asked = draw_pack(scenes, words, [7, 0], 1, 0.0, caption=False)
    optimiser = torch.optim.Adam(tiny.parameters(), lr=3e-3)
    for _ in range(25):
        loss = answer_loss(answer_logits(tiny, image_tensor(scenes.images), packed, words), packed)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    found = evaluate_answers(tiny, scenes, words, [7], 1)
    right: dict[str, list[bool]] = {}
    for image, questions in zip(scenes.images, asked, strict=True):
        for question in questions:
            inputs = processor(images=[image], text=[PROMPT.format(question=question.text)], return_tensors="pt")
            told = tiny.generate(**inputs, max_new_tokens=2, do_sample=False)[0, inputs["input_ids"].shape[1] :]
            right.setdefault(question.kind, []).append(
                processor.tokenizer.decode(told) in (f"{question.answer} </s>", f"{question.answer}</s>")
            )
    assert 0 < sum(map(sum, right.values())) < sum(map(len, right.values()))
    for kind, values in right.items():
        assert found[kind] == pytest.approx(np.mean(values)), kind
    assert found["all"] == pytest.approx(np.mean([np.mean(values) for values in right.values()]))


def test_the_tower_begins_by_looking_at_neighbours(processor: Any) -> None:
    model = build_small_llava(SmallSizes(), processor.tokenizer)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        seen = model.model.vision_tower(torch.zeros(1, 3, 96, 96), output_attentions=True)
    sides = seen.attentions[1][0, :, 1:, 1:]  # (heads, 144, 144), nothing but positions to go by
    here = 5 * 12 + 5
    found = {divmod(int(sides[head, here].argmax()), 12) for head in range(4)}
    assert found == {(4, 5), (6, 5), (5, 4), (5, 6)}


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OptionError, match="multiple"):
        SmallSizes(width=100, heads=8)
    with pytest.raises(OptionError, match="second last"):
        SmallSizes(vision_layers=1)
