"""What a generation has to remember between its steps. It lives on the generation's `past_key_values`.

Layers between two cuts hold equally many keys; each such stretch has its own row of what counts (padding does not), so
a mask can be made for each. Imports stats only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.decoder.stats import Stats

__all__ = ["Memory", "attention_mask", "check_cache", "join_keys", "past_length"]

_NAME = "_tokensieve"


class Memory:
    """One generation: which cached keys count in each stretch of layers and how much, and where its positions stand.

    Rows need not follow a beam search's reordering: beams of one prompt have the same padding, the same count of
    dropped tokens and the same sizes of merged ones, and nothing else is remembered for a row.
    """

    def __init__(self, stats: Stats) -> None:
        self.stats = stats
        self.valid: dict[int, Tensor | None] = {}  # first layer of a stretch -> (B, keys) bool; None: all count
        self.louder: dict[int, Tensor | None] = {}  # the same -> (B, keys) to add to a key's logits; None: nothing
        self.ahead: Tensor | None = None  # (B, 1) how far the next position is past the first layer's cached keys
        self.shift: Tensor | None = None  # (B, 1) how far positions were moved up by renumbering

    @staticmethod
    def of(cache: Any) -> Memory | None:
        """The memory on a cache that holds something, else None."""
        found = getattr(cache, _NAME, None)
        return found if isinstance(found, Memory) and past_length(cache, 0) else None

    def next(self, cache: Any) -> Tensor | None:
        """(B, 1) the position of the next token; None where the cache's length says it. Also after a crop."""
        return None if self.ahead is None else self.ahead + past_length(cache, 0)

    def keep_on(self, cache: Any) -> None:
        """Put it on a cache."""
        setattr(cache, _NAME, self)


def check_cache(cache: Any) -> None:
    """Refuse caches whose layers cannot have different lengths, or do not hold plain keys."""
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())} - {"DynamicLayer"}
    if kinds or getattr(cache, "offloading", False):
        kind = kinds.pop() if kinds else "an offloaded one"
        raise UnsupportedModelError(f"a reduced model needs the plain dynamic cache, this one has {kind}")


def past_length(cache: Any, layer: int) -> int:
    """Keys that a layer's cache holds."""
    return 0 if cache is None else int(cache.get_seq_length(layer))


def join_keys(
    past: Tensor | None, new: Tensor | None, batch: int, before: int, here: int, like: Tensor, fill: bool | float
) -> Tensor | None:
    """(B, before + here) what is known of the cached keys and of the new ones, `fill` where nothing is said; None where
    nothing is said of any."""
    if past is None and new is None:
        return None
    past = torch.full((batch, before), fill, device=like.device) if past is None else past
    new = torch.full((batch, here), fill, device=like.device) if new is None else new
    if past.shape[0] != new.shape[0]:
        raise UnsupportedModelError(f"the cache is of {past.shape[0]} prompts, this step has {new.shape[0]}")
    return torch.cat([past[:, :before], new], dim=1)


def attention_mask(
    kind: str, valid: Tensor | None, queries: int, keys: int, like: Tensor, louder: Tensor | None = None
) -> Tensor | None:
    """The causal mask that an attention implementation wants for the last `queries` of `keys` tokens.

    kind: as transformers names it. valid: (B, keys), False for padding; None: all count. eager: (B, 1, Q, K) float, 0
    or the lowest number. sdpa: bool, or None where causality alone says it. flash: `valid` as it is. louder: (B, keys)
    to add to the logits of each key, which flash cannot do; both others then get floats.
    """
    if "flash" in kind:
        if louder is not None:
            raise UnsupportedModelError(
                f"attention implementation {kind!r} cannot weigh merged tokens by their size: give proportional=0, or "
                "load the model with sdpa"
            )
        return valid
    if kind not in ("sdpa", "eager"):
        raise UnsupportedModelError(f"attention implementation {kind!r}: reduced models know eager, sdpa and flash")
    if kind == "sdpa" and valid is None and louder is None and queries in (1, keys):
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)
    seen = seen.expand(like.shape[0], 1, -1, -1)
    if valid is not None:
        seen = seen & valid[:, None, None, :]
    if kind == "sdpa" and louder is None:
        return seen
    bias = torch.zeros((), device=like.device) if louder is None else louder[:, None, None, :]
    return torch.where(seen, bias.to(like.dtype), torch.finfo(like.dtype).min)
