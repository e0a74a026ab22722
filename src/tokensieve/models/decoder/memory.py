"""What a generation has to remember between its steps. It lives on the generation's `past_key_values`.

Layers between two cuts hold equally many keys; each such stretch has its own row of what counts (padding does not), so
a mask can be made for each. Imports stats only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.decoder.stats import Stats

__all__ = ["Memory", "Reach", "attention_mask", "check_cache", "join_keys", "past_length"]

_NAME = "_tokensieve"


class Memory:
    """One generation: which cached keys count in each stretch of layers and how much, and where its positions stand.

    Rows need not follow a beam search's reordering: beams of one prompt have the same padding, the same count of
    dropped tokens and the same sizes of merged ones, and nothing else is remembered for a row.
    """

    def __init__(self, stats: Stats) -> None:
        self.stats = stats
        self.valid: dict[int, Tensor | None] = {}  # first layer of a stretch -> (B, keys) bool; None: all count
        self.key_bias: dict[int, Tensor | None] = {}  # the same -> (B, keys) to add to a key's logits; None: nothing
        self.place: dict[int, Tensor] = {}  # the same -> (B, keys) where each stood before any left; only for windows
        self.shift: Tensor | None = None  # (B, 1) how far positions were moved up by renumbering
        self._following: Tensor | None = None  # (B or 1, 1) the next position, when the first layer held `_held` keys
        self._columns = 0  # tokens so far, dropped ones and padding included, at the same time
        self._held = 0

    @staticmethod
    def of(cache: Any) -> Memory | None:
        """The memory on a cache that holds something, else None."""
        found = getattr(cache, _NAME, None)
        return found if isinstance(found, Memory) and past_length(cache, 0) else None

    def next(self, cache: Any) -> Tensor | None:
        """(B, 1) the position of the next token; None where the cache's length says it. Also after a crop."""
        return None if self._following is None else self._following + (past_length(cache, 0) - self._held)

    def columns(self, cache: Any) -> int:
        """Tokens so far, dropped ones and padding included. Also after a crop."""
        return self._columns + past_length(cache, 0) - self._held

    def note_end(self, cache: Any, columns: int, following: Tensor | None) -> None:
        """After a forward: `columns` tokens so far, of which the last had position `following` - 1."""
        self._columns, self._held, self._following = columns, past_length(cache, 0), following

    def keep_on(self, cache: Any) -> None:
        """Put it on a cache."""
        setattr(cache, _NAME, self)


def check_cache(cache: Any) -> None:
    """Refuse caches whose layers cannot have different lengths, or do not hold plain keys."""
    kinds = {type(layer).__name__ for layer in getattr(cache, "layers", ())}
    kinds -= {"DynamicLayer", "DynamicSlidingWindowLayer"}
    if kinds or getattr(cache, "offloading", False):
        kind = kinds.pop() if kinds else "an offloaded one"
        raise UnsupportedModelError(f"a reduced model needs the plain dynamic cache, this one has {kind}")


def past_length(cache: Any, layer: int) -> int:
    """Keys that a layer has seen; one with a window may have let go of the first of them."""
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


@dataclass(frozen=True)
class Reach:
    """What bounds or widens a causal mask. place: (B, keys) where each key stood before any left, the queries last.

    window: a query sees keys that stood fewer than that many places before it. blocks: (B, queries); tokens of the same
    number from 0 on see each other in both directions. bounded: the window bounds blocks too.
    """

    window: int | None = None
    place: Tensor | None = None
    blocks: Tensor | None = None
    bounded: bool = True

    def seen(self, causal: Tensor, queries: int) -> Tensor:
        """(Q, K) what causality shows -> (B or 1, Q, K) what is seen."""
        seen = causal.unsqueeze(0)
        near = None
        if self.window is not None:
            columns = torch.arange(causal.shape[1], device=causal.device).unsqueeze(0)
            place = columns if self.place is None else self.place
            near = place[:, -queries:].unsqueeze(2) - place.unsqueeze(1) < self.window
        if near is not None and not self.bounded:
            seen = seen & near
        if self.blocks is not None:
            same = (self.blocks.unsqueeze(2) == self.blocks.unsqueeze(1)) & (self.blocks >= 0).unsqueeze(2)
            past = torch.zeros(*same.shape[:2], causal.shape[1] - queries, dtype=torch.bool, device=causal.device)
            seen = seen | torch.cat([past, same], dim=2)
        return seen & near if near is not None and self.bounded else seen


def attention_mask(
    kind: str, valid: Tensor | None, queries: int, keys: int, like: Tensor, key_bias: Tensor | None = None,
    reach: Reach | None = None,
) -> Tensor | None:  # fmt: skip
    """The causal mask that an attention implementation wants for the last `queries` of `keys` tokens.

    kind: as transformers names it. valid: (B, keys), False for padding; None: all count. eager: (B, 1, Q, K) float, 0
    or the lowest number. sdpa: bool, or None where causality alone says it. flash: `valid` as it is.
    key_bias: (B, keys) to add to the logits of each key, which flash cannot do; both others then get floats.
    reach: windows, and blocks that see each other both ways.
    """
    if "flash" in kind:
        if key_bias is not None:
            raise UnsupportedModelError(
                f"attention implementation {kind!r} cannot weigh merged tokens by their size: give proportional=0, or "
                "load the model with sdpa"
            )
        if reach is not None:
            raise UnsupportedModelError(
                f"attention implementation {kind!r} counts a sliding window in the tokens that are left: load the "
                "model with sdpa"
            )
        return valid
    if kind not in ("sdpa", "eager"):
        raise UnsupportedModelError(f"attention implementation {kind!r}: reduced models know eager, sdpa and flash")
    if kind == "sdpa" and valid is None and key_bias is None and reach is None and queries in (1, keys):
        return None
    causal = torch.ones(queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)
    seen = causal.unsqueeze(0) if reach is None else reach.seen(causal, queries)
    seen = seen.expand(like.shape[0], -1, -1).unsqueeze(1)
    if valid is not None:
        seen = seen & valid[:, None, None, :]
    if kind == "sdpa" and key_bias is None:
        return seen
    bias = torch.zeros((), device=like.device) if key_bias is None else key_bias[:, None, None, :]
    return torch.where(seen, bias.to(like.dtype), torch.finfo(like.dtype).min)
