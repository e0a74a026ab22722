"""A LLaVA's prefill and decoding with tokens taken out, against the untouched model; random weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from tokensieve.models.attach import attach
from tokensieve.models.decoder import VlmAttachment
from tokensieve.tasks.bench.config import BenchConfig
from tokensieve.tasks.bench.models import twin
from tokensieve.tasks.bench.timing import Times, check_target, interleave, interval, quartiles, ratio, ratios

__all__ = ["build_llava", "measure_vlm", "vlm_rows"]

WIDTH, LAYERS, HEADS, MLP = 512, 8, 8, 1376
SIDE, PATCH, TEXT, IMAGE, VOCAB = 336, 14, 64, 999, 1000
STEPS = 16  # decoding steps that are timed together
STOCK, KEEP_ALL = "stock", "keep-all"
_TARGETS = {KEEP_ALL: 0.99, "fastv": 0.95, "pyramiddrop": 0.95, "two_stage": 0.95}
_ROUGHNESS = 0.01  # two runs of the same decoding differ by this much


def build_llava(device: str = "cpu", seed: int = 0) -> Any:
    """576 vision tokens from a slight tower, into eight Llama layers of width 512. Random weights, eval mode."""
    import transformers as hf

    torch.manual_seed(seed)
    vision = hf.CLIPVisionConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, image_size=SIDE,
        patch_size=PATCH,
    )  # fmt: skip
    text = hf.LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        intermediate_size=MLP, vocab_size=VOCAB, max_position_embeddings=2048,
    )  # fmt: skip
    options: dict[str, Any] = {"vision_config": vision, "text_config": text, "image_token_id": IMAGE}
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(**options)).eval().to(cast(Any, device))


def prompts_of(batch: int, device: str, seed: int) -> dict[str, Tensor]:
    """`batch` prompts of 16 words, one image, and 48 words."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, IMAGE, (batch, TEXT), generator=generator)
    image = torch.full((batch, (SIDE // PATCH) ** 2), IMAGE)
    pixels = torch.randn(batch, 3, SIDE, SIDE, generator=generator)
    ids = torch.cat([words[:, :16], image, words[:, 16:]], dim=1)
    return {"input_ids": ids.to(device), "pixel_values": pixels.to(device)}


@dataclass(frozen=True)
class Candidate:
    """One thing to be timed. handle: None for the untouched model."""

    method: str
    keep: float | int
    model: Any
    handle: VlmAttachment | None

    @property
    def name(self) -> str:
        return f"{self.method} {self.keep}"


def candidates_of(model: Any, config: BenchConfig) -> list[Candidate]:
    """The untouched model, keep-everything, and every method at every budget; all on the same weights."""
    out = [Candidate(STOCK, 1.0, model, None)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # keep-everything reduces nothing, as its name and its row say
        for method, keep in [(KEEP_ALL, 1.0), *((m, k) for m in config.vlm_methods for k in config.keep)]:
            copy = twin(model)
            options: dict[str, Any] = {}
            if method == "two_stage":  # half of the reduction, as a ratio, at each stage
                options["merge_keep"] = math.sqrt(keep if isinstance(keep, float) else keep / (SIDE // PATCH) ** 2)
            name = "fastv" if method == KEEP_ALL else method
            handle = attach(copy, name, keep=keep, schedule=config.schedule, **options)
            out.append(Candidate(method, keep, copy, cast(VlmAttachment, handle)))
    return out


def measure_vlm(config: BenchConfig, tick: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows of batches x candidates: the prefill as one forward, tower and projector included, and then decoding."""
    rows = []
    model = build_llava(config.device, config.seed)
    candidates = candidates_of(model, config)
    for batch in config.vlm_batches:
        prompts = prompts_of(batch, config.device, config.seed)
        calls = {c.name: partial(_prefill, c.model, prompts) for c in candidates}
        prefill = interleave(calls, config.rounds, config.device, partial(tick, f"vlm: prefill, batch {batch}"))
        with torch.inference_mode():
            caches = {c.name: _timed_prefill(c, prompts) for c in candidates}
        bytes_ = {name: _kv_bytes(cache) for name, cache in caches.items()}
        calls = {c.name: partial(_decode, c.model, caches[c.name], batch) for c in candidates}
        decode = interleave(calls, config.rounds, config.device, partial(tick, f"vlm: decoding, batch {batch}"))
        rows += vlm_rows(batch, candidates, prefill, decode, bytes_)
    return rows


def _prefill(model: Any, prompts: dict[str, Tensor]) -> Any:
    return model(**prompts, logits_to_keep=1).past_key_values


def _timed_prefill(candidate: Candidate, prompts: dict[str, Tensor]) -> Any:
    """With the clocks of `stats`, which the rounds go without: they wait for the device."""
    if candidate.handle is not None:
        candidate.handle.timing = True
    try:
        return _prefill(candidate.model, prompts)
    finally:
        if candidate.handle is not None:
            candidate.handle.timing = False


def _decode(model: Any, cache: Any, batch: int) -> None:
    """STEPS tokens, one after the other; then the cache is as it was."""
    token = torch.full((batch, 1), 5, device=next(model.parameters()).device)
    for _ in range(STEPS):
        model(input_ids=token, past_key_values=cache)
    cache.crop(-STEPS)


def _kv_bytes(cache: Any) -> list[int]:
    return [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]


def vlm_rows(
    batch: int, candidates: Sequence[Candidate], prefill: Times, decode: Times, held: Mapping[str, list[int]]
) -> list[dict[str, Any]]:
    """A row for each candidate. Every speed-up is a median of per-round ratios against the untouched model.

    possible: MACs of tower, projector and language model without / with, the method's own not counted. `kv_exact`: each
    layer's cache holds what the schedule says, to the byte. A target is met only if decoding is not slower either.
    """
    stock = next(c for c in candidates if c.handle is None)
    rows = []
    for c in candidates:
        cost = c.handle.cost() if c.handle else None
        possible = cost.with_tower.possible if cost else 1.0
        speedup, decoding = ratio(prefill[stock.name], prefill[c.name]), ratio(decode[stock.name], decode[c.name])
        planned = _planned_bytes(c, batch)
        gained = [r / possible for r in ratios(prefill[stock.name], prefill[c.name])]
        checked = check_target(_TARGETS.get(c.method), gained)
        if checked["target"] is not None:  # and decoding may not be slower
            second = check_target(1.0 - _ROUGHNESS, ratios(decode[stock.name], decode[c.name]))
            lost = any(half["sure"] and not half["met"] for half in (checked, second))
            checked["sure"] = lost or bool(checked["sure"] and second["sure"])
            checked["met"] = bool(checked["met"] and second["met"])
        low, mid, high = (1e3 * t for t in quartiles(prefill[c.name]))
        rows.append(
            {"part": "vlm", "model": f"llava-{WIDTH}x{LAYERS}", "batch": batch, "method": c.method, "keep": c.keep}
            | {"at": list(c.handle.at) if c.handle else [], "reduces": bool(c.handle and c.handle.reduces)}
            | {"tokens_per_layer": list(cost.tokens_per_layer) if cost else [TEXT + (SIDE // PATCH) ** 2] * LAYERS}
            | {"vision_tokens_average": cost.vision_tokens_average if cost else float((SIDE // PATCH) ** 2)}
            | {"macs": cost.with_tower.macs if cost else None, "possible": possible, "speedup": speedup}
            | {"ms": mid, "ms_quartiles": [low, high], "ms_rounds": [1e3 * t for t in prefill[c.name]]}
            | {"gained_of_possible": speedup / possible, "gained_interval": interval(gained)}
            | {"overhead_ms": _overhead(c), "decode_speedup": decoding}
            | {"decode_ms": 1e3 * quartiles(decode[c.name])[1] / STEPS, "kv_bytes": sum(held[c.name])}
            | {"kv_exact": held[c.name] == planned}
            | checked
        )
    return rows


def _planned_bytes(c: Candidate, batch: int) -> list[int]:
    """Keys and values of each layer, from its tokens."""
    full = [TEXT + (SIDE // PATCH) ** 2] * LAYERS
    if c.handle is not None:
        full = [round(n) + TEXT for n in c.handle.cost(text_tokens=0).vision_tokens_per_layer]
    each = next(c.model.parameters()).element_size() * 2 * WIDTH * batch
    return [n * each for n in full]


def _overhead(c: Candidate) -> float | None:
    return None if c.handle is None else 1e3 * c.handle.stats.overhead_seconds
