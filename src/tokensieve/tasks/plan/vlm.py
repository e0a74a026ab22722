"""A LLaVA over many questions: prefill, decoding, cache, the batch that fits. Builds the model without weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tokensieve.errors import BudgetError, MissingMaterialError, OptionError, UnknownNameError, nearest
from tokensieve.models.attach import attach
from tokensieve.models.decoder import VlmAttachment
from tokensieve.models.families.vlm import vlm_parts
from tokensieve.tasks.plan.rates import Rates

__all__ = ["VLMS", "is_vlm_name", "plan_vlm"]

HALF = 2  # bytes of a number in fp16 or bf16: weights and cache
# of the language model; the tower is CLIP ViT-L/14 at 336 pixels in all of them, as transformers' default is
VLMS: dict[str, dict[str, int]] = {
    "llava-1.5-7b": {"vocab_size": 32064},
    "llava-1.5-13b": {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 40, "head_dim": 128, "vocab_size": 32064,
    },
}  # fmt: skip


def is_vlm_name(name: str) -> bool:
    """A LLaVA by name, or a folder with a model's configuration. One that sounds like a LLaVA but is not known: an
    error with the known ones.
    """
    if name in VLMS or Path(name).is_dir():
        return True
    if "llava" in name.lower():
        raise UnknownNameError(f"unknown model {name!r}.{nearest(name, VLMS)[:-1]}, or a folder with a config.json.")
    return False


def empty_vlm(name: str) -> Any:
    """The model without weights."""
    import transformers as hf

    if name in VLMS:
        config: Any = hf.LlavaConfig()
        for key, value in VLMS[name].items():
            setattr(config.text_config, key, value)
    else:
        try:
            config = hf.AutoConfig.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            first = (str(error).strip().splitlines() or ["?"])[0]
            raise MissingMaterialError(f"--model {name}: no configuration of a model there ({first[:160]})") from None
    with torch.device("meta"):
        try:
            model: Any = hf.AutoModelForImageTextToText.from_config(config).eval()
        except ValueError:
            raise OptionError(f"--model {name} is a {config.model_type} model, not a vision-language model") from None
    if vlm_parts(model) is None:
        raise OptionError(f"--model {name} is a {config.model_type} model, which has no vision tokens to reduce")
    return model


class _Job:
    """One model on one GPU; each question has one image, `text` tokens beside it and an answer of `answer` tokens."""

    def __init__(self, model: Any, rates: Rates, text: int, answer: int, batch: int | None) -> None:
        self.rates, self.text, self.answer, self.batch = rates, text, answer, batch
        parts = vlm_parts(model)
        assert parts is not None
        _, inner, family = parts
        language_model = family.language_model(inner)
        words = inner.config.text_config
        head_dim = getattr(words, "head_dim", None) or words.hidden_size // words.num_attention_heads
        self.kv_token = 2 * words.num_key_value_heads * head_dim * HALF  # bytes of one token in one layer
        self.width = words.num_attention_heads * head_dim
        self.weights = HALF * sum(p.numel() for p in model.parameters())
        table = language_model.embed_tokens.weight.numel()  # decoding looks one row of it up
        language = sum(p.numel() for p in language_model.parameters()) - table
        self.decoded = language + model.lm_head.weight.numel()  # weights that one decoding step reads; MACs a token

    def kv_bytes(self, vision: Sequence[float], answered: float) -> float:
        """Of one question's cache, when that many tokens of its answer are there."""
        return sum(self.kv_token * (tokens + self.text + answered) for tokens in vision)

    def row(self, which: str, questions: float, vision: Sequence[float], macs: int, macs_full: int) -> dict[str, Any]:
        """vision: its tokens, layer by layer. macs: of tower and prefill, the time to the first token."""
        whole = self.kv_bytes(vision, self.answer)
        fits = int((self.rates.room - self.weights) // whole)
        if fits < 1:
            raise BudgetError(
                f"{self.weights / 1e9:.1f} GB of weights in fp16 and the cache of a question do not fit into "
                f"{self.rates.room / 1e9:.1f} GB of a {self.rates.gpu.name}: name a larger --gpu"
            )
        batch = fits if self.batch is None else min(self.batch, fits)
        prefill = self.rates.reduced_seconds(macs, macs_full)
        step = self._step_seconds(vision, batch)
        steps = self.answer - 1  # the prefill gives the first token
        return {
            "part": "vlm", "reduction": which, "vision_tokens": sum(vision) / len(vision), "prefill_tmacs": macs / 1e12,
            "prefill_ms": 1e3 * prefill, "kv_mb": whole / 1e6, "batch_fits": fits, "batch": batch,
            "decode_ms": 1e3 * step, "decode_tokens_per_second": batch / step,
            **self.rates.hours_and_dollars(questions * (prefill + steps * step / batch)),
        }  # fmt: skip

    def _step_seconds(self, vision: Sequence[float], batch: int) -> float:
        """One token of each of `batch` answers: the slower of reading weights and caches, and the arithmetic."""
        answered = self.answer / 2  # on average over the answer
        read = self.rates.read_seconds(self.decoded * HALF + batch * self.kv_bytes(vision, answered))
        attention = sum(2 * self.width * (tokens + self.text + answered) for tokens in vision)
        return max(read, self.rates.compute_seconds(batch * (self.decoded + attention)))


def plan_vlm(
    name: str, questions: float, rates: Rates, reduction: dict[str, Any], *, text: int, answer: int, batch: int | None
) -> list[dict[str, Any]]:
    """Two rows, without and with. batch: questions decoded together, as many as fit where None."""
    for flag, value in (("--text", text), ("--answer", answer), ("--batch", 1 if batch is None else batch)):
        if value < 1:
            raise OptionError(f"{flag} {value}: at least 1")
    model = empty_vlm(name)
    with attach(model, **reduction) as handle:
        assert isinstance(handle, VlmAttachment)
        cost, patches = handle.cost(text), handle.patches
    job, both, left = _Job(model, rates, text, answer, batch), cost.with_tower, cost.vision_tokens_per_layer
    rows = [
        job.row("without", questions, [patches] * len(left), both.macs_full, both.macs_full),
        job.row("with", questions, left, both.macs, both.macs_full),
    ]
    for row in rows:
        row["speedup"] = rows[0]["gpu_hours"] / row["gpu_hours"]
    return rows
