"""How much a token matters: pure functions on tensors. Imports torch and errors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve.errors import OptionError

__all__ = [
    "GROUPS",
    "MIX",
    "attention_columns",
    "attention_log_sum",
    "attention_received",
    "attention_rows",
    "cosine",
    "diversity",
    "image_hash",
    "minmax",
    "noise_start",
    "query_attention",
    "relevance",
    "unit",
    "unit_noise",
]

_ENTRIES = 1 << 17  # of one image's and head's attention map, that may always be held


def query_attention(q: Tensor, k: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Attention of one query to every key, averaged over heads.

    q: (B, H, d), k: (B, H, L, d), bias: (B, L), or (B, 1 or H, L) by head. Returns (B, L), rows sum to 1. A product
    and a sum in the order in which the projection left the keys: on CPU faster than a matmul, which first copies them.
    """
    logits = ((q * scale).unsqueeze(1) * k.transpose(1, 2)).sum(-1)  # (B, L, H)
    if bias is not None:
        logits = logits + (bias.unsqueeze(-1) if bias.dim() == 2 else bias.transpose(1, 2))
    return logits.float().softmax(dim=1).mean(dim=-1)


def attention_columns(q: Tensor, k: Tensor, j: Tensor, scale: float, bias: Tensor | None, log_sum: Tensor) -> Tensor:
    """Columns j of the attention map, by head.

    q, k: (B, H, N, d), j: (B, J), log_sum: (B, H, N). bias: (B, N), or (B, 1 or H, 1 or N, N). Returns (B, H, J, N),
    entry (j, i) the attention of token i to token j; sums over j are less than 1.
    """
    heads, d = k.shape[1], k.shape[3]
    index = j[:, None, :, None].expand(-1, heads, -1, d)
    # few rows times many columns: narrow products are far faster this way round
    logits = (k.gather(2, index) * scale) @ q.transpose(-1, -2)  # (B, H, J, N)
    if bias is not None and bias.dim() == 2:
        logits = logits + bias.gather(1, j)[:, None, :, None]
    elif bias is not None:
        columns = j[:, None, None, :].expand(-1, bias.shape[1], bias.shape[2], -1)
        logits = logits + bias.expand(j.shape[0], -1, -1, -1).gather(3, columns).transpose(-1, -2)
    return (logits.float() - log_sum.unsqueeze(2)).exp_()


def attention_rows(q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """The logits of attention, some rows at a time: which rows, and (B, H, R, L) of them, float32.

    q, k: (B, H, L, d). bias: (B, L), or (B, 1 or H, 1 or L, L). At most 2 d rows of a long sequence at once: half as
    many numbers as the hidden layer of the MLP that follows.
    """
    length, d = q.shape[2], q.shape[3]
    step = max(2 * d, _ENTRIES // length)
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        logits = (q[:, :, rows] * scale) @ k.transpose(-1, -2)
        if bias is not None and bias.dim() == 2:
            logits = logits + bias[:, None, None, :]
        elif bias is not None:
            logits = logits + (bias[:, :, rows] if bias.shape[2] > 1 else bias)
        yield rows, logits.float()


def attention_log_sum(q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """(B, H, L) log of each row's denominator. Arguments as in `attention_rows`."""
    return torch.cat([logits.logsumexp(dim=-1) for _, logits in attention_rows(q, k, scale, bias)], dim=-1)


def attention_received(
    q: Tensor, k: Tensor, scale: float, bias: Tensor | None, log_sum: Tensor | None = None
) -> Tensor:
    """Mean attention that each token gets from all queries, averaged over heads: (B, L), sums to 1.

    log_sum: (B, H, L) of each row, where it is known. Arguments as in `attention_rows`, and never more of the map than
    it gives at a time.
    """
    total = torch.zeros(q.shape[0], q.shape[2], device=q.device)
    for rows, logits in attention_rows(q, k, scale, bias):
        if log_sum is None:
            weight = logits.softmax(dim=-1)
        else:
            weight = (logits - log_sum[:, :, rows].unsqueeze(-1)).exp()
        total = total + weight.sum(dim=(1, 2))
    return total / (q.shape[1] * q.shape[2])


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """(B, N, D), (B, M, D) -> (B, N, M) cosines; 0 for a zero vector."""
    one = unit(a)
    other = one if b is a else unit(b)  # one copy where both are the same
    return one @ other.transpose(-1, -2)


def unit(x: Tensor) -> Tensor:
    """(..., D) each vector at length 1; a zero vector stays one."""
    eps = max(1e-12, torch.finfo(x.dtype).tiny)  # 1e-12 is 0 in half precision, and 0 / 0 not a number
    return F.normalize(x, dim=-1, eps=eps)


def diversity(x: Tensor, anchors: Tensor) -> Tensor:
    """1 - the largest cosine to any anchor. x: (B, N, D), anchors: (B, K, D). Returns (B, N), in [0, 2]."""
    nearest = (unit(anchors) @ x.transpose(1, 2)).amax(dim=1)  # (B, N), times the length of x
    length: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return 1.0 - nearest / length.clamp_min(max(1e-12, torch.finfo(x.dtype).tiny))


def relevance(x: Tensor, text: Tensor, valid: Tensor | None = None) -> Tensor:
    """Mean cosine of each patch to the text features. x: (B, N, E), text: (T, E) or (B, T, E). Returns (B, N).

    valid: (B, T), False for rows of text that are not part of it.
    """
    if text.shape[-1] != x.shape[-1]:
        raise OptionError(f"text features are {text.shape[-1]} wide, the model's joint space has {x.shape[-1]}")
    if text.dim() == 2:
        text = text.unsqueeze(0).expand(x.shape[0], -1, -1)
    elif text.shape[0] != x.shape[0]:
        raise OptionError(f"text of shape {tuple(text.shape)} is for {text.shape[0]} images, {x.shape[0]} came")
    like = cosine(x, text.to(x.dtype))
    if valid is None:
        return like.mean(dim=-1)
    return (like * valid.unsqueeze(1)).sum(dim=-1) / valid.sum(dim=-1).clamp_min(1).unsqueeze(1)


def minmax(s: Tensor) -> Tensor:
    """Scale each row of (..., N) to [0, 1]; 0.5 everywhere where a row is constant, rather than amplified noise."""
    low, high = torch.aminmax(s, dim=-1, keepdim=True)
    span = high - low
    flat = span <= 1e-6 * torch.maximum(-low, high)
    return ((s - low) / span.masked_fill(flat, 1.0)).masked_fill(flat, 0.5)


MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio's bits, as a signed 64-bit integer
PLACE = 0x632BE5AB  # keeps equal numbers at different places apart, before they are scrambled
GROUPS = 8  # of channels, in the hash of an image


def _scramble(h: Tensor) -> Tensor:
    """A 64-bit mixer on int64 tensors (products wrap): neighbouring inputs give unrelated high bits."""
    for shift in (30, 27):
        h = (h ^ (h >> shift)) * MIX  # invertible: no two inputs meet
    return h


def image_hash(tokens: Tensor, groups: int = GROUPS) -> Tensor:
    """One int64 an image from its tokens (B, L, D), the same whether the image comes alone or in a batch.

    Kernels round differently for other batch sizes, so the hash reads coarse numbers only: the mean token, averaged
    over `groups` parts of its channels, in steps of a hundredth of its root mean square.
    """
    mean = tokens.mean(dim=1, dtype=torch.float32)  # (B, D)
    parts = F.adaptive_avg_pool1d(mean.unsqueeze(1), groups).squeeze(1)
    length: Tensor = torch.linalg.vector_norm(mean, dim=1, keepdim=True)
    steps = (parts * (100.0 * math.sqrt(mean.shape[1]) / length.clamp_min(1e-12))).round().to(torch.int64)
    place = (torch.arange(groups, device=mean.device) & 0xFFFFFFFF) * PLACE  # masked: see unit_noise
    # scrambled each, or different steps would have the same sum; added one by one: ONNX Runtime rounds a sum of int64
    found, *others = _scramble(steps + place).unbind(1)
    for other in others:
        found = found + other
    return found


def unit_noise(image: Tensor, position: Tensor, seed: int) -> Tensor:
    """Uniform numbers in [0, 1) from (seed, image hash (B,), position (B, N)): no generator. Returns (B, N)."""
    # masked: torch.compile takes the bare product of a range and a number for an index, and computes it in 32 bits
    h = _scramble((position & 0xFFFFFFFF) * PLACE + noise_start(seed) + image.unsqueeze(1))
    return ((h >> 40) & 0xFFFFFF).to(torch.float32) / float(1 << 24)


def noise_start(seed: int) -> int:
    """Where a seed's numbers begin, as a positive 64-bit integer."""
    return (seed * 0x85EBCA6B + 1) % (1 << 63)
