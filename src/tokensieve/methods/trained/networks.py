"""What merger and pruner are made of: a keep score for each vision token, read beside the question. Imports torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.errors import OptionError

__all__ = ["QuestionAttention", "ScoreNetwork"]


class QuestionAttention(nn.Module):
    """Vision tokens look at the question's tokens, and at one learned nothing: what matches no word shows as such."""

    def __init__(self, width: int, text_width: int, inner: int, heads: int) -> None:
        super().__init__()
        if inner % heads:
            raise OptionError(f"an internal width of {inner} cannot be split among {heads} heads")
        self.heads = heads
        self.query = nn.Linear(width, inner)
        self.key = nn.Linear(text_width, inner)
        self.value = nn.Linear(text_width, inner)
        self.nothing = nn.Parameter(torch.zeros(2, inner))  # its key and value

    def forward(self, x: Tensor, text: Tensor | None, valid: Tensor | None) -> Tensor:
        """x: (B, N, D), normed; text: (B, T, E), normed, None: nothing is asked; valid: (B, T). -> (B, N, inner)"""
        key, value = (part.expand(x.shape[0], 1, -1) for part in self.nothing)
        bias = x.new_zeros(x.shape[0], 1)
        if text is not None:
            key, value = (torch.cat([a, b], dim=1) for a, b in ((key, self.key(text)), (value, self.value(text))))
            seen = text.new_zeros(text.shape[:2])
            if valid is not None:
                seen = seen.masked_fill(~valid, float("-inf"))
            bias = torch.cat([bias, seen], dim=1)
        q, k, v = (self._split(part) for part in (self.query(x), key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None, None].to(q.dtype))
        return out.transpose(1, 2).flatten(2)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def macs(self, n: int, text: int) -> int:
        inner, width = self.query.weight.shape
        return n * inner * width + 2 * text * self.key.weight.numel() + 2 * n * (text + 1) * inner


class ScoreNetwork(nn.Module):
    """(B, N, D) tokens -> (B, N) keep scores, in float32. text_width: of the question's tokens; 0: it is not read."""

    def __init__(self, width: int, text_width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.width, self.text_width = width, text_width
        self.enter = nn.Linear(width, inner)
        self.asked = QuestionAttention(width, text_width, inner, heads) if text_width else None
        self.middle = nn.Linear(inner, inner)
        self.last = nn.Linear(inner, 1)

    def forward(self, x: Tensor, text: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """text: (B, T, E) or (T, E) for all; valid: (B, T), False where a question is shorter."""
        x = F.layer_norm(x.float(), x.shape[-1:])
        hidden = self.enter(x)
        if self.asked is not None:
            if text is not None:
                text = F.layer_norm(text.float(), text.shape[-1:]).expand(x.shape[0], -1, -1)
            found = self.asked(x, text, valid)
            hidden = hidden + found + hidden * found  # the product says whether token and word agree
        hidden = F.gelu(self.middle(F.layer_norm(hidden, hidden.shape[-1:])))
        score: Tensor = self.last(hidden).squeeze(-1)
        return score.float()

    def macs(self, n: int, text: int) -> int:
        """Multiplications of one image of n tokens and that many of text."""
        own = n * (self.enter.weight.numel() + self.middle.weight.numel() + self.last.weight.numel())
        return own + (self.asked.macs(n, text) if self.asked is not None else 0)
