"""A question about a photo, answered with all vision tokens and with fewer. Imports no Gradio."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from tokensieve.errors import OptionError
from tokensieve.report.pictures import draw_kept
from tokensieve.tasks.viewer import Request

__all__ = ["Answer", "Asking", "load_asking", "sample_scene"]

_MOST_LETTERS = 300
_NEW_TOKENS = 16


@dataclass(frozen=True)
class Answer:
    """The answers before and after, what each stage kept, and the cost of the prompt.

    kept: (label, picture) for each cut; stage 1 first. tokens: vision tokens on layer average, full ones beside.
    """

    before: str
    after: str
    kept: list[tuple[str, Image.Image]]
    tokens: float
    tokens_full: int
    milliseconds: float
    milliseconds_full: float
    saved: float


class Asking:
    """One vision-language model, shared by all who ask: calls take turns."""

    def __init__(self, name: str, model: Any, processor: Any, prompt: str) -> None:
        self.name, self.model, self.processor, self.prompt = name, model, processor, prompt
        self._lock = threading.Lock()

    def ask(self, photo: Image.Image, question: str, request: Request) -> Answer:
        """The question, answered by the untouched model and with the method attached."""
        question = " ".join(question.split())
        if not question:
            raise OptionError("question: write one")
        if len(question) > _MOST_LETTERS:
            raise OptionError(f"question: at most {_MOST_LETTERS} letters, this one has {len(question)}")
        inputs = self.processor(images=[photo], text=[self.prompt.format(question=question)], return_tensors="pt")
        with self._lock, torch.inference_mode():
            before, full_ms = self._generate(inputs)
            with request.attach(self.model) as handle:
                after, ms = self._generate(inputs)
                kept, grid = dict(handle.kept), (handle.grid[0], handle.grid[1])
                tokens, full = float(handle.stats.vision_tokens_average), int(handle.patches)
                cost: Any = handle.cost()  # a language model's: its MACs are the prompt's
                saved = float(cost.saved)
        shown = photo.convert("RGB").resize((grid[1] * 28, grid[0] * 28), Image.Resampling.LANCZOS)
        pictures = [(_label(cut, int((index[0] >= 0).sum())), _picture(shown, grid, index[0].tolist()))
                    for cut, index in sorted(kept.items())]  # fmt: skip
        return Answer(before, after, pictures, tokens, full, ms, full_ms, saved)

    def _generate(self, inputs: Any) -> tuple[str, float]:
        start = time.perf_counter()
        out = self.model.generate(**inputs, max_new_tokens=_NEW_TOKENS, do_sample=False)
        spent = 1000 * (time.perf_counter() - start)
        length = inputs["input_ids"].shape[1]
        return self.processor.batch_decode(out[:, length:], skip_special_tokens=True)[0].strip(), spent


def _label(cut: int, count: int) -> str:
    return f"before the language model: {count}" if cut < 0 else f"from layer {cut} on: {count}"


def _picture(shown: Image.Image, grid: tuple[int, int], kept: list[int]) -> Image.Image:
    mask = np.zeros(grid[0] * grid[1], dtype=np.bool_)
    mask[[index for index in kept if 0 <= index < mask.size]] = True
    return draw_kept(shown, mask.reshape(grid))


def load_asking() -> Asking:
    """The model of the questions page: the small LLaVA that ships with the package."""
    from tokensieve.tasks.vlm.default import SMALL_LLAVA, load_small_llava
    from tokensieve.tasks.vlm.processor import PROMPT

    model, processor = load_small_llava()
    return Asking(SMALL_LLAVA, model, processor, PROMPT)


def sample_scene(seed: int = 3) -> Image.Image:
    """A picture of the kind that the small LLaVA was trained on."""
    from tokensieve.tasks.vlm.scenes import make_scenes

    pixels = make_scenes(1, seed, split="test").images[0]
    return Image.fromarray(np.asarray(pixels, dtype=np.uint8))
