"""How much a token matters: pure functions on tensors. Imports torch only."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "attention_columns",
    "attention_received",
    "cosine",
    "diversity",
    "image_hash",
    "minmax",
    "query_attention",
    "relevance",
    "unit_noise",
]


def query_attention(q: Tensor, k: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Attention of one query to every key, averaged over heads.

    q: (B, H, d), k: (B, H, L, d), bias: (B, L). Returns (B, L), rows sum to 1. A product and a sum: on CPU three times
    faster than a matmul, which first copies the strided keys.
    """
    logits = (q.unsqueeze(2) * k).sum(-1) * scale
    if bias is not None:
        logits = logits + bias.unsqueeze(1)
    return logits.float().softmax(dim=-1).mean(dim=1)


def attention_columns(q: Tensor, k: Tensor, j: Tensor, scale: float, bias: Tensor | None, log_sum: Tensor) -> Tensor:
    """Columns j of the attention map, averaged over heads.

    q, k: (B, H, N, d), j: (B, J), bias: (B, N), log_sum: (B, H, N). Returns (B, N, J), entry (i, j) the attention of
    token i to token j; rows sum to less than 1.
    """
    heads, d = k.shape[1], k.shape[3]
    index = j[:, None, :, None].expand(-1, heads, -1, d)
    logits = q @ k.gather(2, index).transpose(-1, -2) * scale
    if bias is not None:
        logits = logits + bias.gather(1, j)[:, None, None, :]
    return (logits.float() - log_sum.unsqueeze(-1)).exp().mean(dim=1)


def attention_received(q: Tensor, k: Tensor, scale: float, bias: Tensor | None, log_sum: Tensor) -> Tensor:
    """Mean attention that each token gets from all queries, averaged over heads: (B, L), sums to 1.

    One head at a time: the map of a single head is the most that is ever held.
    """
    batch, heads, length, _ = q.shape
    total = torch.zeros(batch, length, device=q.device)
    for h in range(heads):
        logits = q[:, h] @ k[:, h].transpose(-1, -2) * scale
        if bias is not None:
            logits = logits + bias.unsqueeze(1)
        total = total + (logits.float() - log_sum[:, h].unsqueeze(-1)).exp().mean(dim=1)
    return total / heads


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """(B, N, D), (B, M, D) -> (B, N, M) cosines; 0 for a zero vector."""
    eps = max(1e-12, torch.finfo(a.dtype).tiny)  # 1e-12 is 0 in half precision, and 0 / 0 not a number
    return F.normalize(a, dim=-1, eps=eps) @ F.normalize(b, dim=-1, eps=eps).transpose(-1, -2)


def diversity(x: Tensor, anchors: Tensor) -> Tensor:
    """1 - the largest cosine to any anchor. x: (B, N, D), anchors: (B, K, D). Returns (B, N), in [0, 2]."""
    return 1.0 - cosine(x, anchors).amax(dim=-1)


def relevance(x: Tensor, text: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean cosine of each patch to the text features. x: (B, N, E), text: (T, E) or (B, T, E). Returns (B, N).

    valid: (B, T), False for rows of text that are no part of it.
    """
    if text.dim() == 2:
        text = text.unsqueeze(0).expand(x.shape[0], -1, -1)
    like = cosine(x, text.to(x.dtype))
    if valid is None:
        return like.mean(dim=-1)
    return (like * valid.unsqueeze(1)).sum(dim=-1) / valid.sum(dim=-1).clamp_min(1).unsqueeze(1)


def minmax(s: Tensor) -> Tensor:
    """Scale each row of (B, N) to [0, 1]; 0.5 everywhere where a row is constant, rather than amplified noise."""
    low, high = s.amin(dim=-1, keepdim=True), s.amax(dim=-1, keepdim=True)
    span = high - low
    flat = span <= 1e-6 * torch.maximum(low.abs(), high.abs())
    return torch.where(flat, torch.full_like(s, 0.5), (s - low) / torch.where(flat, torch.ones_like(span), span))


_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio's bits, as a signed 64-bit integer


def _scramble(h: Tensor) -> Tensor:
    """A 64-bit mixer on int64 tensors (products wrap): neighbouring inputs give unrelated outputs."""
    for shift in (30, 27, 31):
        h = (h ^ ((h >> shift) & ((1 << (64 - shift)) - 1))) * _MIX
    return h


def image_hash(tokens: Tensor, groups: int = 8) -> Tensor:
    """One int64 an image from its tokens (B, L, D), the same whether the image comes alone or in a batch.

    Kernels round differently for other batch sizes, so the hash reads coarse numbers only: the means of `groups`
    channel groups in steps of a hundredth of the tokens' root mean square.
    """
    x = tokens.float()
    rms = torch.linalg.vector_norm(x, dim=(1, 2)) / math.sqrt(x.shape[1] * x.shape[2])
    means = F.adaptive_avg_pool1d(x.mean(dim=1, keepdim=True), groups).squeeze(1)
    steps = (means / rms.clamp_min(1e-12).unsqueeze(1) * 100.0).round().to(torch.int64)
    odd = torch.arange(1, groups + 1, device=x.device) * _MIX  # wraps: eight unrelated factors
    return _scramble((steps * odd).sum(dim=1))


def unit_noise(image: Tensor, position: Tensor, seed: int) -> Tensor:
    """Uniform numbers in [0, 1) from (seed, image hash (B,), position (B, N)): no generator. Returns (B, N)."""
    start = (seed * 0x85EBCA6B + 1) % (1 << 63)
    h = _scramble(position * 0x632BE5AB + start + image.unsqueeze(1))
    return ((h >> 40) & 0xFFFFFF).to(torch.float32) / float(1 << 24)
