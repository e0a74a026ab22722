"""Features that come out of a merger, a pixel shuffle or a packing of tiles: stage 1 chooses among them afterwards.

The tower's attention is of patches, of which several make one feature. What a score may look at (CLS row, attention
received, keys) is pooled as the features are, with the family's own `pool`. Imports base and core.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensieve.core.score import attention_received, query_attention
from tokensieve.core.view import TokenView
from tokensieve.errors import UnsupportedModelError
from tokensieve.models.families.vlm.base import Encoded, feature_list, packed_like

__all__ = ["Attention", "PooledImages", "Watched", "tower_heads", "watch"]

Pool = Callable[[Tensor], Tensor]  # (T, N, C) what is known of the patches of T tiles -> (n, C) of the features


@dataclass
class Watched:
    """What entered a block of the tower: hidden states, and the arguments that came with them."""

    states: Tensor
    arguments: dict[str, Any]


def watch(block: nn.Module, call: Callable[[], Any]) -> tuple[Any, Watched]:
    """Run `call`; its result, and what entered the block meanwhile."""
    seen: list[Watched] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = args[0] if args else kwargs["hidden_states"]
        seen.append(Watched(first, kwargs))

    hook = block.register_forward_pre_hook(look, with_kwargs=True)
    try:
        result = call()
    finally:
        hook.remove()
    if not seen:
        raise UnsupportedModelError(f"{type(block).__name__} did not run while the images were encoded")
    return result, seen[-1]


def _first_of(module: Any, *names: str) -> Any:
    for name in names:
        found = getattr(module, name, None)
        if found is not None:
            return found
    raise UnsupportedModelError(f"{type(module).__name__} has no {' or '.join(names)}")


def tower_heads(block: Any, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor, float]:
    """Block input (..., S, D) -> queries and keys (..., H, S, d) as the block's attention has them, and its scale."""
    attn = _first_of(block, "attn", "self_attn", "attention")
    attn = attn if hasattr(attn, "q_proj") or hasattr(attn, "qkv") else attn.attention
    normed = _first_of(block, "norm1", "layer_norm1", "attention_norm", "layernorm_before")(x)
    heads = int(getattr(attn, "num_heads", None) or attn.num_attention_heads)
    if hasattr(attn, "qkv"):
        q, k, _ = attn.qkv(normed).unflatten(-1, (3, heads, -1)).unbind(-3)
    else:
        q, k = (_first_of(attn, f"{name[0]}_proj", name)(normed) for name in ("query", "key"))
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        q, k = q.unflatten(-1, (heads, -1)), k.unflatten(-1, (heads, -1))
    if rotary is not None:
        names = ("apply_rotary_pos_emb_vision", "apply_rotary_pos_emb")
        turn = next((f for n in names if (f := getattr(sys.modules[type(attn).__module__], n, None))), None)
        if turn is None:
            raise UnsupportedModelError(f"{type(attn).__name__} rotates by no function that is known here")
        across = {} if turn.__name__ == names[0] else {"unsqueeze_dim": -2}
        q, k = turn(q, k, *rotary, **across)
    scale = getattr(attn, "scaling", None) or getattr(attn, "scale", None) or q.shape[-1] ** -0.5
    return q.transpose(-2, -3), k.transpose(-2, -3), float(scale)


class Attention:
    """Attention of one image's patches in one block. q, k: (T, H, P+N, d) of T tiles or frames that do not see each
    other; prefix: P tokens before the patches, CLS first where `has_cls`."""

    def __init__(self, q: Tensor, k: Tensor, scale: float, prefix: int, has_cls: bool, pool: Pool) -> None:
        self.q, self.k, self.scale, self.prefix, self.has_cls, self.pool = q, k, scale, prefix, has_cls, pool

    @cached_property
    def weight(self) -> Tensor:
        """(n,) attention that CLS pays to each feature's patches, or that these receive on average; their mean."""
        if self.has_cls:
            found = query_attention(self.q[:, :, 0], self.k, self.scale, None)
        else:
            log_sum = (self.q @ self.k.transpose(-1, -2) * self.scale).float().logsumexp(dim=-1)
            found = attention_received(self.q, self.k, self.scale, None, log_sum)
        return self.pool(found[:, self.prefix :].float().unsqueeze(-1)).squeeze(-1)

    def pooled(self, x: Tensor) -> Tensor:
        """(T, H, P+N, d) -> (H, n, d), the mean of each feature's patches."""
        patches = x[:, :, self.prefix :].transpose(1, 2)
        heads = patches.shape[2]
        return self.pool(patches.flatten(2)).unflatten(-1, (heads, -1)).transpose(0, 1)


class _PooledView(TokenView):
    """Features with what the tower's attention says of their patches."""

    def __init__(self, tokens: Tensor, attentions: list[Attention], allowed: list[Tensor | None], **rest: Any) -> None:
        self._attentions, self._allowed = attentions, allowed
        super().__init__(
            tokens, lambda _: self._stacked(lambda a: a.pooled(a.q)), lambda _: self._stacked(lambda a: a.pooled(a.k)),
            scale=attentions[0].scale, prefix=0, has_cls=attentions[0].has_cls, **rest,
        )  # fmt: skip

    def _stacked(self, of: Callable[[Attention], Tensor]) -> Tensor:
        """(..., n, d) of each image -> (I, ..., n, d), of what may be chosen."""
        found = [of(attention) for attention in self._attentions]
        return torch.stack([
            part if allowed is None else part[..., allowed.to(part.device), :]
            for part, allowed in zip(found, self._allowed, strict=True)
        ])  # fmt: skip

    @property
    def _weights(self) -> Tensor:
        if "weights" not in self._seen:
            self._seen["weights"] = self._stacked(lambda a: a.weight.unsqueeze(-1)).squeeze(-1)
        return self._seen["weights"]

    @property
    def _cls_row(self) -> Tensor:
        return self._weights

    @property
    def _received(self) -> Tensor:
        return self._weights


class PooledImages(Encoded):
    """Images whose features are made already; `attention` works out, when asked for, what the tower says of one."""

    def __init__(self, own: Any, attention: Callable[[int], Attention], depth: float) -> None:
        self.own, self.attention, self.depth = own, attention, depth
        self.made = feature_list(own.pooler_output)
        self._attentions: dict[int, Attention] = {}
        super().__init__([len(feature) for feature in self.made])

    def _attention(self, image: int) -> Attention:
        if image not in self._attentions:
            self._attentions[image] = self.attention(image)
        return self._attentions[image]

    def view(self, images: list[int], text: Tensor | None, valid: Tensor | None, following: bool = False) -> TokenView:
        allowed = [self.choosable(image) for image in images]
        tokens = torch.stack([
            self.made[image] if which is None else self.made[image][which.to(self.made[image].device)]
            for image, which in zip(images, allowed, strict=True)
        ])  # fmt: skip
        attentions = [self._attention(image) for image in images]
        return _PooledView(
            tokens, attentions, allowed, depth=self.depth, text=text, text_valid=valid, stage="projector"
        )

    def joined(self, groups: list[list[int]]) -> Encoded:
        order, found = self.order(), copy.copy(self)
        tiles = [[order[place] for place in group] for group in groups]

        def attention(image: int) -> Attention:
            parts = [self._attention(tile) for tile in tiles[image]]
            first = parts[0]
            q, k = torch.cat([part.q for part in parts]), torch.cat([part.k for part in parts])
            return Attention(q, k, first.scale, first.prefix, first.has_cls, first.pool)

        found.made = [torch.cat([self.made[tile] for tile in group]) for group in tiles]
        found.attention, found._attentions = attention, {}
        Encoded.__init__(found, [len(feature) for feature in found.made])
        return found

    def features(self, tokens: Tensor) -> Tensor:
        return tokens

    def output(self, features: list[Tensor]) -> Any:
        found = packed_like(self.own, features)
        streams = getattr(self.own, "deepstack_features", None)
        if streams is not None:  # the same images, in the prompts' order
            found.deepstack_features = [[stream[image] for image in self.order()] for stream in streams]
        return cast(Any, found)
