"""Where vision tokens stand in a language model's sequence, and what the layer before them says of them.

A `TokenView` inside a language model holds one. Imports torch only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Sentence"]


class Sentence:
    """A prompt of L tokens at one cut, N of them vision tokens, and the attention of the layer that comes before.

    Or that of the next layer on all the tokens that are still there: a method's `reads_next_layer`. Queries
    are worked out for the rows that are asked for: one row for the last token, never a map of L x L.
    """

    def __init__(
        self,
        queries: Callable[[Tensor], Tensor],
        keys: Callable[[], Tensor],
        *,
        scale: float,
        vision: Tensor,
        last: Tensor,
        text: Tensor | None = None,
        text_valid: Tensor | None = None,
        valid: Tensor | None = None,
        past: int = 0,
        states: Callable[[Tensor], Tensor] | None = None,
        came: Callable[[Tensor], Tensor] | None = None,
        key_bias: Tensor | None = None,
        softcap: float | None = None,
        seen: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """queries: (B, R) places -> (B, H, R, d), rotated. keys: () -> (B, G, S, d), rotated; H is a multiple of G.

        S = past + L: `past` keys of an earlier turn come first. vision: (B, N) and text: (B, T) places in 0..L-1;
        text_valid: (B, T), False where a row of the batch has fewer; last: (B,) the place of the last token.
        valid: (B, S), False for padding. None: all count. states: (B, R) places -> (B, R, D), the residual stream.
        came: the same as it entered the layer before the cut.
        key_bias: (B, S) what the layer added to the logits of each key, for the tokens it stands for.
        softcap: the layer's logits are softcap * tanh(logits / softcap). seen: (B, R) places -> (B, R, S) bool, for a
        layer with a window or with tokens that see each other both ways; None: a token sees all before it.
        """
        self._queries, self._keys, self.scale = queries, keys, scale
        self.vision, self.last, self.text, self.text_valid = vision, last, text, text_valid
        self.valid, self.past, self._states, self.key_bias = valid, past, states, key_bias
        self._came, self.softcap, self._seen = came, softcap, seen

    @property
    def keys(self) -> Tensor:
        """(B, G, S, d) keys of that layer, of G groups of heads."""
        return self._keys()

    def queries(self, rows: Tensor) -> Tensor:
        """(B, H, R, d) queries of the tokens at `rows` (B, R)."""
        return self._queries(rows)

    def states(self, rows: Tensor) -> Tensor:
        """(B, R, D) the residual stream of the tokens at `rows` (B, R), as it is at the cut."""
        if self._states is None:
            raise ValueError("this sentence was made without its tokens' states")
        return self._states(rows)

    def states_before(self, rows: Tensor) -> Tensor:
        """(B, R, D) the same tokens as they entered the layer before the cut."""
        if self._came is None:
            raise ValueError("this sentence was made without its tokens' states before the layer")
        return self._came(rows)

    def attention(self, rows: Tensor) -> Tensor:
        """(B, R, N) attention that the tokens at `rows` (B, R) pay to each vision token in that layer.

        Softmax over all keys that a row may see, mean over heads; rows sum to less than 1.
        """
        q, k = self._queries(rows), self._keys()
        batch, heads, count, d = q.shape
        groups, length = k.shape[1], k.shape[2]
        logits = (q.reshape(batch, groups, -1, d) @ k.transpose(-1, -2)).view(batch, heads, count, length)
        logits = logits.float() * self.scale
        if self.softcap is not None:
            logits = self.softcap * (logits / self.softcap).tanh()
        if self.key_bias is not None:
            logits = logits + self.key_bias[:, None, None, :]
        if self._seen is None:
            seen = torch.arange(length, device=k.device) <= (rows + self.past).unsqueeze(-1)  # (B, R, S)
        else:
            seen = self._seen(rows)
        if self.valid is not None:
            seen = seen & self.valid.unsqueeze(1)
        weight = logits.masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(dim=-1).mean(dim=1)
        return weight.gather(2, (self.vision + self.past).unsqueeze(1).expand(-1, count, -1))
