"""Scores against loops over heads, queries and keys."""

from __future__ import annotations

import math

import pytest
import torch

from tokensieve.core.score import (
    attention_columns,
    attention_log_sum,
    attention_received,
    attention_rows,
    cosine,
    diversity,
    image_hash,
    minmax,
    query_attention,
    relevance,
    unit_noise,
)
from tokensieve.errors import OptionError


def draw(seed, batch=2, heads=3, length=5, d=4):
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch, heads, length, d, generator=g) for _ in range(2))
    return q, k, torch.rand(batch, length, generator=g).mul(6).add(1).log()


def naive_map(q, k, scale, bias):
    """Softmax attention (B, L, L), mean over heads, and the log-sum-exp of each row (B, H, L)."""
    batch, heads, length, d = q.shape
    out, log_sum = torch.zeros(batch, length, length), torch.zeros(batch, heads, length)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                logits = []
                for j in range(length):
                    dot = sum(q[b, h, i, c].item() * k[b, h, j, c].item() for c in range(d))
                    logits.append(dot * scale + (0.0 if bias is None else bias[b, j].item()))
                total = sum(math.exp(v) for v in logits)
                log_sum[b, h, i] = math.log(total)
                for j in range(length):
                    out[b, i, j] += math.exp(logits[j]) / total / heads
    return out, log_sum


def naive_cosine(a, b):
    dot = sum(p * q for p, q in zip(a, b, strict=True))
    norm = math.sqrt(sum(p * p for p in a)) * math.sqrt(sum(q * q for q in b))
    return dot / norm if norm else 0.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("biased", [False, True])
def test_attention_rows_columns_and_means(seed, biased):
    q, k, bias = draw(seed)
    bias = bias if biased else None
    full, log_sum = naive_map(q, k, 0.5, bias)
    torch.testing.assert_close(query_attention(q[:, :, 0], k, 0.5, bias), full[:, 0])
    torch.testing.assert_close(query_attention(q[:, :, 3], k, 0.5, bias), full[:, 3])
    j = torch.tensor([[4, 0], [2, 1]])
    columns = attention_columns(q, k, j, 0.5, bias, log_sum)
    for b in range(2):
        torch.testing.assert_close(columns[b].mean(dim=0).T, full[b][:, j[b]])
        one = slice(b, b + 1)
        alone = attention_columns(q[one], k[one], j[one], 0.5, None if bias is None else bias[one], log_sum[one])
        torch.testing.assert_close(alone, columns[one])
    received = attention_received(q, k, 0.5, bias, log_sum)
    torch.testing.assert_close(received, full.mean(dim=1))
    torch.testing.assert_close(received.sum(1), torch.ones(2))


@pytest.mark.parametrize("seed", range(3))
def test_cosine_and_diversity(seed):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 5, 4, generator=g), torch.randn(2, 3, 4, generator=g)
    like, diverse = cosine(a, b), diversity(a, b)
    for i in range(2):
        for p in range(5):
            expected = [naive_cosine(a[i, p].tolist(), b[i, q].tolist()) for q in range(3)]
            assert like[i, p].tolist() == pytest.approx(expected, abs=1e-6)
            assert diverse[i, p].item() == pytest.approx(1 - max(expected), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_cosine_of_a_zero_vector_is_zero(dtype):
    x = torch.tensor([[[0.0, 0.0], [3.0, 4.0]]], dtype=dtype)
    assert torch.allclose(cosine(x, x).float(), torch.tensor([[[0.0, 0.0], [0.0, 1.0]]]), atol=1e-2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shared", [False, True])
def test_relevance(seed, shared):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, 4, generator=g)
    text = torch.randn(3, 4, generator=g) if shared else torch.randn(2, 3, 4, generator=g)
    got = relevance(x, text)
    for b in range(2):
        rows = text if shared else text[b]
        for i in range(5):
            expected = sum(naive_cosine(x[b, i].tolist(), t.tolist()) for t in rows) / 3
            assert got[b, i].item() == pytest.approx(expected, abs=1e-6)


def test_relevance_wants_features_of_one_space():
    with pytest.raises(OptionError, match="text features are 5 wide, the model's joint space has 4"):
        relevance(torch.randn(1, 3, 4), torch.randn(2, 5))
    with pytest.raises(OptionError, match="for 3 images, 1 came"):
        relevance(torch.randn(1, 3, 4), torch.randn(3, 2, 4))


@pytest.mark.parametrize("seed", range(3))
def test_minmax(seed):
    s = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)) * 1e-4
    got = minmax(s)
    for b in range(3):
        low, high = min(s[b].tolist()), max(s[b].tolist())
        assert got[b].tolist() == pytest.approx([(v - low) / (high - low) for v in s[b].tolist()], abs=1e-5)
    assert got.min() == 0
    assert got.max() == 1


def test_minmax_of_a_constant_row_amplifies_no_noise():
    s = torch.tensor([[0.3, 0.3, 0.3 + 3e-8], [0.0, 0.0, 0.0], [0.0, 1.0, 0.5]])
    assert minmax(s).tolist() == [[0.5] * 3, [0.5] * 3, [0.0, 1.0, 0.5]]


def test_image_hash_is_the_images_own():
    x = torch.randn(16, 10, 32, generator=torch.Generator().manual_seed(0))
    hashes = image_hash(x)
    assert len(set(hashes.tolist())) == 16
    assert torch.equal(hashes, torch.cat([image_hash(x[i : i + 1]) for i in range(16)]))
    assert torch.equal(hashes[[3, 1]], image_hash(x[[3, 1]]))


def test_images_that_are_alike_have_hashes_of_their_own():
    """As in a trained encoder: all means near one vector, so that their coarse steps are small whole numbers."""
    g = torch.Generator().manual_seed(3)
    x = 3.0 * torch.randn(1, 1, 64, generator=g) + 0.3 * torch.randn(300, 1, 64, generator=g)
    parts = x.mean(dim=1).view(300, 8, 8).mean(dim=2)
    steps = (parts * 100 / x.mean(dim=1).square().mean(dim=1, keepdim=True).sqrt()).round()
    assert len({tuple(row) for row in steps.tolist()}) == len(set(image_hash(x).tolist())) == 300


def test_unit_noise_is_uniform_and_depends_on_all_three():
    image = image_hash(torch.randn(20, 4, 16, generator=torch.Generator().manual_seed(1)))
    place = torch.arange(500).expand(20, -1)
    noise = unit_noise(image, place, 0)
    assert noise.min() >= 0
    assert noise.max() < 1
    share = torch.histc(noise, bins=10, min=0, max=1) / noise.numel()
    assert (share - 0.1).abs().max() < 0.012  # four standard deviations of 10,000 draws
    other = unit_noise(image, place, 1)
    for a, b in [(noise, other), (noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:])]:
        assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].abs() < 0.04


@pytest.mark.parametrize("seed", [-1, 2**31, 2**40, 2**64 + 5])
def test_unit_noise_takes_any_seed(seed):
    place = torch.arange(9).unsqueeze(0)
    noise = unit_noise(torch.zeros(1, dtype=torch.int64), place, seed)
    assert not torch.equal(noise, unit_noise(torch.zeros(1, dtype=torch.int64), place, 0))


def softmax_map(q, k, scale, bias):
    """(B, H, L, L), all at once; bias broadcasts against it."""
    return (torch.einsum("bhid,bhjd->bhij", q, k) * scale + bias).softmax(-1)


@pytest.mark.parametrize("shape", ["B1L", "1HLL", "B1LL", "none"])
def test_attention_in_blocks_of_rows_is_the_whole_map(shape, monkeypatch):
    """Blocks of 4 rows of 11, the last one short; a bias for all rows, by head or by row."""
    monkeypatch.setattr("tokensieve.core.score._ENTRIES", 1)
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, 3, 11, 2, generator=g) for _ in range(2))
    shapes = {"B1L": (2, 11), "1HLL": (1, 3, 11, 11), "B1LL": (2, 1, 11, 11)}
    bias = None if shape == "none" else torch.randn(shapes[shape], generator=g)
    whole = torch.zeros(()) if bias is None else bias[:, None, None, :] if bias.dim() == 2 else bias
    full = softmax_map(q, k, 0.7, whole)
    assert [len(range(*rows.indices(11))) for rows, _ in attention_rows(q, k, 0.7, bias)] == [4, 4, 3]
    log_sum = attention_log_sum(q, k, 0.7, bias)
    torch.testing.assert_close(log_sum, (torch.einsum("bhid,bhjd->bhij", q, k) * 0.7 + whole).logsumexp(-1))
    for known in (None, log_sum):
        torch.testing.assert_close(attention_received(q, k, 0.7, bias, known), full.mean(dim=(1, 2)))
    j = torch.tensor([[3, 7, 1], [0, 10, 4]])
    columns = attention_columns(q, k, j, 0.7, bias, log_sum)  # (B, H, J, N)
    for b in range(2):
        torch.testing.assert_close(columns[b], full[b][:, :, j[b]].transpose(-1, -2))
    row = None if bias is None else bias if bias.dim() == 2 else bias[:, :, 5]
    torch.testing.assert_close(query_attention(q[:, :, 5], k, 0.7, row), full[:, :, 5].mean(1))
