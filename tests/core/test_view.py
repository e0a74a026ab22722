"""TokenView against the whole attention map, built query by query."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tokensieve.core.view import TokenView

CASES = pytest.mark.parametrize(
    ("seed", "heads", "prefix", "made", "biased"),
    [(0, 1, 1, 0, False), (1, 3, 1, 2, True), (2, 2, 5, 0, True), (3, 3, 0, 0, True), (4, 2, 5, 1, False)],
)


def draw(seed, heads, prefix, made, biased, n=6, batch=2, d=4, **rest):
    g = torch.Generator().manual_seed(seed)
    length = prefix + n + made
    tokens = torch.randn(batch, length, heads * d, generator=g)
    q, k = (torch.randn(batch, heads, length, d, generator=g) for _ in range(2))
    bias = torch.randint(1, 9, (batch, length), generator=g).float().log() if biased else None
    rest = {"has_cls": prefix > 0} | rest
    return TokenView(tokens, q, k, scale=0.37, prefix=prefix, made=made, bias=bias, **rest)


def naive_map(view):
    """(B, L, L), softmax over all keys, mean over heads."""
    out = torch.zeros(view.batch, view.q.shape[2], view.q.shape[2])
    for b in range(view.batch):
        for h in range(view.q.shape[1]):
            for i, query in enumerate(view.q[b, h]):
                logits = torch.stack([query @ key * view.scale for key in view.k[b, h]])
                if view.bias is not None:
                    logits = logits + view.bias[b]
                out[b, i] += logits.exp() / logits.exp().sum() / view.q.shape[1]
    return out


@CASES
def test_cls_attention_and_importance(seed, heads, prefix, made, biased):
    view = draw(seed, heads, prefix, made, biased)
    full = naive_map(view)
    if prefix:
        expected = full[:, 0, prefix:]
        torch.testing.assert_close(view.cls_attention(), expected[:, :6])
        torch.testing.assert_close(view.cls_attention(made=True), expected)
    else:
        expected = full.mean(dim=1)[:, prefix:]
    torch.testing.assert_close(view.importance(), expected[:, :6])
    torch.testing.assert_close(view.importance(made=True), expected)


@CASES
def test_registers_without_cls_give_the_attention_received(seed, heads, prefix, made, biased):
    view = draw(seed, heads, prefix, made, biased, has_cls=False)
    expected = naive_map(view).mean(dim=1)[:, prefix:]
    torch.testing.assert_close(view.importance(made=True), expected)
    torch.testing.assert_close(view.importance(), expected[:, :6])


@CASES
def test_attention_to(seed, heads, prefix, made, biased):
    view = draw(seed, heads, prefix, made, biased)
    j = torch.tensor([[5, 0, 2], [1, 3, 4]])
    got, full = view.attention_to(j), naive_map(view)
    assert got.shape == (2, 6, 3)
    for b in range(2):
        for i in range(6):
            for slot, column in enumerate(j[b].tolist()):
                torch.testing.assert_close(got[b, i, slot], full[b, prefix + i, prefix + column])
    torch.testing.assert_close(view.mean_attention_to(j), got.mean(dim=-1))


@CASES
def test_log_sum_computed_equals_log_sum_given(seed, heads, prefix, made, biased):
    view = draw(seed, heads, prefix, made, biased)
    logits = torch.einsum("bhid,bhjd->bhij", view.q, view.k) * view.scale
    if biased:
        logits = logits + view.bias[:, None, None, :]
    exact = logits.exp().sum(-1).log()
    torch.testing.assert_close(view.log_sum, exact)
    given = draw(seed, heads, prefix, made, biased, log_sum=exact)
    assert given.log_sum is exact
    j = torch.tensor([[0, 3], [2, 5]])
    torch.testing.assert_close(given.attention_to(j), view.attention_to(j))
    shifted = draw(seed, heads, prefix, made, biased, log_sum=exact + 1)
    torch.testing.assert_close(shifted.attention_to(j), view.attention_to(j) / torch.e)


@CASES
def test_patches_keys_and_counts(seed, heads, prefix, made, biased):
    view = draw(seed, heads, prefix, made, biased)
    assert (view.batch, view.n) == (2, 6)
    assert torch.equal(view.x, view.tokens[:, prefix : prefix + 6])
    mean = sum(view.k[:, h, prefix : prefix + 6] for h in range(heads)) / heads
    torch.testing.assert_close(view.keys, mean)


def test_size_and_origin_have_defaults():
    view = draw(0, 2, 1, 2, False)
    assert view.size.tolist() == [[1.0] * 6] * 2
    assert view.origin.tolist() == [list(range(6))] * 2
    size, origin = torch.rand(2, 8), torch.arange(12).view(2, 6)
    view = draw(0, 2, 1, 2, False, size=size, origin=origin)
    assert torch.equal(view.size, size[:, :6])
    assert view.origin is origin


def test_joint_projects_the_patches():
    view = draw(0, 1, 1, 1, False)
    assert torch.equal(view.joint, view.x)
    view = draw(0, 1, 1, 1, False, project=lambda x: x[..., :2] * 3)
    assert torch.equal(view.joint, view.tokens[:, 1:7, :2] * 3)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_bare_features_are_their_own_queries_and_keys(heads):
    x = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0))
    view = TokenView.of(x, heads=heads)
    d = 8 // heads
    assert view.scale == d**-0.5
    for h in range(heads):
        assert torch.equal(view.q[:, h], x[:, :, h * d : (h + 1) * d])
        assert torch.equal(view.k[:, h], x[:, :, h * d : (h + 1) * d])
    torch.testing.assert_close(view.cls_attention(), naive_map(view)[:, 0, 1:])


def test_heads_must_divide_the_width():
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        TokenView.of(torch.randn(1, 3, 8), heads=3)


def test_cls_attention_without_cls_is_an_error():
    with pytest.raises(TypeError, match="no CLS token"):
        draw(0, 1, 0, 0, False).cls_attention()


class Largest(TorchDispatchMode):
    """The most numbers that any tensor has that an operation makes."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, torch.Tensor):
                self.found = max(self.found, made.numel())
        return out


@pytest.mark.parametrize("ask", ["importance", "columns"])
def test_no_map_of_a_long_sequence_is_made_without_cls(ask) -> None:
    heads, n, d = 2, 3000, 4
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, n, d, generator=g) for _ in range(2))
    view = TokenView(torch.randn(1, n, 8), q, k, scale=0.5, prefix=0, has_cls=False)
    with Largest() as largest:
        got = view.importance() if ask == "importance" else view.mean_attention_to(torch.tensor([[5, 9]]))
    assert largest.found <= heads * n * 43  # 43 rows of 3,000 are the 2 ** 17 entries that may be held
    if ask == "importance":
        full = (q @ k.transpose(-1, -2) * 0.5).softmax(-1)
        torch.testing.assert_close(got, full.mean(dim=(1, 2)))
