"""A decoder layer that may be a cut, of whatever class: it takes the arguments that transformers 5 hands every layer.

Queries and keys of a few of its tokens are worked out from the layer's own parts and its module's own rotation; an
`AttentionForm` says how, and attach verifies it by numbers against the layer. Imports memory and verify.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.decoder.memory import attention_mask
from tokensieve.models.verify import module_key, random_like, verification_copy, verify_forms

if TYPE_CHECKING:
    from tokensieve.models.decoder.forward import Pass
    from tokensieve.models.decoder.handle import VlmAttachment

__all__ = ["AttentionForm", "SievedDecoderLayer", "attention_forms", "layer_window"]

Rotary = tuple[Tensor, Tensor]
_PARTS = ("input_layernorm", "self_attn.o_proj", "mlp")


@dataclass(frozen=True)
class AttentionForm:
    """How a layer's attention is made of its parts. window: how far back it looks, None: to the beginning.

    rotates: whether queries and keys are rotated by position. softcap: logits are softcap * tanh(logits / softcap).
    """

    rotates: bool = True
    softcap: float | None = None
    window: int | None = None

    def heads(self, attn: Any, x: Tensor, which: str) -> Tensor:
        """(B, R, D) normed input -> (B, H, R, d) queries ("q"), keys ("k") or values ("v"), not rotated."""
        if hasattr(attn, "q_proj"):
            out = getattr(attn, f"{which}_proj")(x)
        else:
            groups = attn.config.num_key_value_heads * attn.head_dim
            queries = attn.config.num_attention_heads * attn.head_dim
            out = attn.qkv_proj(x).split([queries, groups, groups], dim=-1)["qkv".index(which)]
        norm = getattr(attn, f"{which}_norm", None)
        flat = norm is not None and norm.weight.shape[-1] == out.shape[-1]
        out = norm(out) if flat and norm is not None else out
        out = out.view(*out.shape[:2], -1, attn.head_dim)
        out = norm(out) if norm is not None and not flat else out
        return cast(Tensor, out.transpose(1, 2))

    def rotated(self, attn: Any, x: Tensor, rotary: Rotary, which: str) -> Tensor:
        """The same, rotated by (cos, sin) of the tokens (B, R, d)."""
        out = self.heads(attn, x, which)
        if not self.rotates:
            return out
        return cast(Tensor, _rotation(attn)(out, out, *rotary)[0])


def _rotation(attn: nn.Module) -> Any:
    """The function that the attention's own module rotates with."""
    module = sys.modules[type(attn).__module__]
    found = getattr(module, "apply_rotary_pos_emb", None)
    if found is None:
        raise UnsupportedModelError(f"{type(attn).__name__} rotates by no function that is known here")
    return found


def layer_window(layer: Any) -> int | None:
    """How many tokens back a layer's attention looks, itself included; None: to the beginning."""
    attn = layer.self_attn
    if hasattr(attn, "sliding_window"):
        return cast("int | None", attn.sliding_window)
    kinds = getattr(attn.config, "layer_types", None)
    index = getattr(attn, "layer_idx", None)
    if kinds is not None and index is not None:
        return cast("int | None", attn.config.sliding_window) if kinds[index] == "sliding_attention" else None
    return cast("int | None", getattr(attn.config, "sliding_window", None))


def attention_forms(model: nn.Module, layers: list[Any], rotary_width: int | None = None) -> list[AttentionForm]:
    """The form of each layer's attention, each kind of layer verified against its own forward.

    UnsupportedModelError names a layer whose attention is not computed as its parts suggest.
    """
    forms, known = [], {}
    for layer in layers:
        if any(_part(layer, path) is None for path in _PARTS):
            raise UnsupportedModelError(
                f"a language model of {type(layer).__name__} is not supported: it has no {' and no '.join(_PARTS)}"
            )
        window = layer_window(layer)
        key = module_key(layer, window is not None, getattr(layer.self_attn, "use_rope", None))
        if key not in known:
            known[key] = _verified(model, layer, window, key)
        forms.append(replace(known[key], window=window))
    return forms


def _part(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _verified(model: nn.Module, layer: Any, window: int | None, key: Any) -> AttentionForm:
    """The form that gives what the layer's own attention gives on random tokens."""
    attn = layer.self_attn
    kind = str(attn.config._attn_implementation)
    softcap = getattr(attn, "attn_logit_softcapping", None)
    if kind == "sdpa":
        softcap = None  # torch's attention has none, and the layer runs without
    rotates = bool(getattr(attn, "use_rope", True))
    if type(attn).__name__ == "Cohere2Attention":
        rotates = window is not None
    form = AttentionForm(rotates, softcap, window)
    if any(p.device.type == "meta" for p in layer.parameters()) or "flash" in kind:
        return form
    copy, tokens = verification_copy(layer), 7
    x = random_like(layer, 1, tokens, int(attn.config.hidden_size)).float()
    width = _rotary_width(attn)
    rotary = (
        random_like(layer, 1, tokens, width, seed=2).float(),
        random_like(layer, 1, tokens, width, seed=3).float(),
    )
    mask = attention_mask(kind, None, tokens, tokens, x, torch.zeros(1, tokens, device=x.device))
    verify_forms(
        f"{type(layer).__name__} in {type(model).__name__}", partial(_own_attention, copy, rotary, mask),
        partial(_our_attention, copy, form, rotary), [x], key=("attention", key),
    )  # fmt: skip
    return form


def _rotary_width(attn: Any) -> int:
    parameters = getattr(attn.config, "rope_parameters", None) or {}
    shares = [found.get("partial_rotary_factor") for found in (parameters, *_nested(parameters))]
    share = next((s for s in shares if s), None) or getattr(attn.config, "partial_rotary_factor", None) or 1.0
    return int(attn.head_dim * share)


def _nested(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [value for value in parameters.values() if isinstance(value, dict)]


def _own_attention(layer: Any, rotary: Rotary, mask: Tensor | None, x: Tensor) -> Tensor:
    """What the layer's own attention gives when the layer runs: (1, L, D)."""
    seen: list[Tensor] = []
    hook = layer.self_attn.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    try:
        layer(x, attention_mask=mask, position_embeddings=rotary, position_ids=None, past_key_values=None)
    finally:
        hook.remove()
    return seen[0]


def _our_attention(layer: Any, form: AttentionForm, rotary: Rotary, x: Tensor) -> Tensor:
    attn = layer.self_attn
    normed = layer.input_layernorm(x)
    q, k = (form.rotated(attn, normed, rotary, which) for which in "qk")
    v = form.heads(attn, normed, "v")
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    logits = q @ k.transpose(-1, -2) * float(attn.scaling)
    if form.softcap is not None:
        logits = form.softcap * (logits / form.softcap).tanh()
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    out = logits.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ v
    return cast(Tensor, attn.o_proj(out.transpose(1, 2).flatten(2)))


class SievedDecoderLayer:
    """Any decoder layer that may be a cut."""

    if TYPE_CHECKING:  # transformers resolves the annotations of a model's class when it is made
        _sieve_index: int
        _sieve_attachment: VlmAttachment
        input_layernorm: Any
        self_attn: Any

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: Rotary | None = None,
        sieve: Pass | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if sieve is None or position_embeddings is None:
            raise UnsupportedModelError(
                "a decoder layer of a reduced model was called by itself: call the whole model, or remove this"
            )
        kind = self.self_attn.config._attn_implementation
        index = self._sieve_index
        entered, stretch = sieve.enter(index, hidden_states, position_embeddings, past_key_values, kind)
        rotary = stretch.turned(position_embeddings)
        out = cast(nn.Module, super()).forward(
            entered,
            attention_mask=sieve.mask_of(index, stretch, attention_mask, entered, past_key_values, kind),
            # positions with gaps look like packed sequences to FlashAttention; cos and sin carry them
            position_ids=None if sieve.layout.gaps or stretch.base is not None else position_ids,
            past_key_values=past_key_values,
            position_embeddings=rotary,
            **kwargs,
        )
        sieve.leave(index, self, entered, rotary, past_key_values)
        return sieve.with_streams(index, stretch, cast(Tensor, out))

    @property
    def sieve_form(self) -> AttentionForm:
        return self._sieve_attachment.forms[self._sieve_index]

    def sieve_scale(self) -> float:
        """What logits are multiplied by."""
        return float(self.self_attn.scaling)

    def sieve_queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Block input (B, R, D) and its rotation (B, R, d) -> (B, H, R, d)."""
        return self.sieve_form.rotated(self.self_attn, self.input_layernorm(x), (cos, sin), "q")

    def sieve_keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Block input (B, L, D) -> (B, G, L, d), of G groups of heads."""
        return self.sieve_form.rotated(self.self_attn, self.input_layernorm(x), (cos, sin), "k")
