"""Reduction.apply against a loop over images, patches and channels."""

from __future__ import annotations

import pytest
import torch

from tokensieve.core.reduction import Reduction, complement, take_tokens

CASES = [(seed, prefix, made) for seed in (0, 1) for prefix in (0, 1, 5) for made in (0, 2)]


def draw(seed, prefix, made, n=7, keep=3, batch=2, width=4):
    """Tokens, sizes and a random choice with its folding slots."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, prefix + n + made, width, generator=g, dtype=torch.float64)
    order = torch.stack([torch.randperm(n, generator=g) for _ in range(batch)])
    kept = order[:, :keep].sort(dim=1).values
    gone = order[:, keep:].sort(dim=1).values
    into = torch.randint(keep, gone.shape, generator=g)
    size = torch.randint(1, 6, (batch, n + made), generator=g).double()
    return x, size, kept, gone, into


def naive_apply(x, kept, prefix, made, n, into=None, gone=None, extra=None, size=None):
    """The tokens and sizes of one reduction, one number at a time."""
    tokens, sizes = [], []
    for b in range(len(x)):
        row = [x[b, p].tolist() for p in range(prefix)]
        weigh = [1.0] * (n + made) if size is None else size[b].tolist()
        stands = []
        for slot, i in enumerate(kept[b].tolist()):
            group = [i]
            if into is not None:
                group += [j for j, s in zip(gone[b].tolist(), into[b].tolist(), strict=True) if s == slot]
            total = sum(weigh[j] for j in group)
            row.append([sum(weigh[j] * x[b, prefix + j, c].item() for j in group) / total for c in range(x.shape[2])])
            stands.append(total)
        if extra is None:
            for m in range(n, n + made):
                row.append(x[b, prefix + m].tolist())
                stands.append(weigh[m])
        else:
            for weights in extra[b].tolist():
                columns = x[b, prefix:].T.tolist()
                row.append([sum(w * v for w, v in zip(weights, column, strict=True)) for column in columns])
                stands.append(sum(weigh[j] for j, w in enumerate(weights) if w > 0))
        tokens.append(row)
        sizes.append(stands)
    return torch.tensor(tokens, dtype=torch.float64), torch.tensor(sizes, dtype=torch.float64)


def extra_weights(kept, n, made, seed):
    """Weights of one extra token over all that is not kept."""
    weight = torch.rand(len(kept), n + made, generator=torch.Generator().manual_seed(seed)).double() + 0.1
    weight = weight.scatter(1, kept, 0.0)
    return (weight / weight.sum(1, keepdim=True)).unsqueeze(1)


@pytest.mark.parametrize(("seed", "prefix", "made"), CASES)
@pytest.mark.parametrize("sized", [False, True])
def test_drop(seed, prefix, made, sized):
    x, size, kept, _, _ = draw(seed, prefix, made)
    out, new = Reduction(keep=kept).apply(x, prefix, made, size if sized else None)
    tokens, _ = naive_apply(x, kept, prefix, made, 7)
    _, sizes = naive_apply(x, kept, prefix, made, 7, size=size)
    assert torch.equal(out, tokens)
    assert torch.equal(new, sizes) if sized else new is None


@pytest.mark.parametrize(("seed", "prefix", "made"), CASES)
@pytest.mark.parametrize("sized", [False, True])
def test_fold_is_a_mean_weighted_by_size(seed, prefix, made, sized):
    x, size, kept, gone, into = draw(seed, prefix, made)
    size = size if sized else None
    out, new = Reduction(keep=kept, drop=gone, into=into).apply(x, prefix, made, size)
    tokens, sizes = naive_apply(x, kept, prefix, made, 7, into, gone, size=size)
    torch.testing.assert_close(out, tokens)
    torch.testing.assert_close(new.double(), sizes)
    expected = size.sum(1) if sized else torch.full((2,), 7.0 + made)
    torch.testing.assert_close(new.sum(1).double(), expected.double())


@pytest.mark.parametrize(("seed", "prefix", "made"), CASES)
@pytest.mark.parametrize("sized", [False, True])
def test_extra_token_replaces_what_was_made_earlier(seed, prefix, made, sized):
    x, size, kept, _, _ = draw(seed, prefix, made)
    extra = extra_weights(kept, 7, made, seed)
    out, new = Reduction(keep=kept, extra=extra).apply(x, prefix, made, size if sized else None)
    tokens, sizes = naive_apply(x, kept, prefix, made, 7, extra=extra, size=size)
    assert out.shape[1] == prefix + 3 + 1
    torch.testing.assert_close(out, tokens)
    if not sized:
        assert new is None
        return
    torch.testing.assert_close(new, sizes)
    torch.testing.assert_close(new.sum(1), size.sum(1))


def test_folding_twice_is_the_mean_of_all_that_went_in():
    x = torch.randn(1, 1 + 6, 3, dtype=torch.float64)
    first = Reduction(keep=torch.tensor([[0, 2, 5]]), drop=torch.tensor([[1, 3, 4]]), into=torch.tensor([[0, 1, 1]]))
    out, size = first.apply(x, prefix=1)
    second = Reduction(keep=torch.tensor([[1]]), drop=torch.tensor([[0, 2]]), into=torch.tensor([[0, 0]]))
    out, size = second.apply(out, prefix=1, size=size)
    torch.testing.assert_close(out[0, 1], x[0, 1:].mean(0))
    assert torch.equal(out[0, 0], x[0, 0])
    assert size.tolist() == [[6.0]]


@pytest.mark.parametrize("kind", ["drop", "fold", "extra"])
def test_keep_all_is_the_identity(kind):
    x, size, _, _, _ = draw(0, 1, 2)
    every = torch.arange(7).expand(2, -1)
    none = torch.zeros(2, 0, dtype=torch.int64)
    rest = {"fold": {"drop": none, "into": none}}.get(kind, {})
    if kind == "extra":
        weight = torch.zeros(2, 1, 9, dtype=torch.float64)
        weight[:, 0, 7:] = 0.5
        out, _ = Reduction(keep=every, extra=weight).apply(x, 1, 2, size)
        assert torch.equal(out[:, :8], x[:, :8])
        torch.testing.assert_close(out[:, 8], x[:, 8:].mean(1))
        return
    out, new = Reduction(keep=every, **rest).apply(x, 1, 2, size)
    torch.testing.assert_close(out, x)
    assert torch.equal(new, size)


@pytest.mark.parametrize("seed", range(3))
def test_slots_and_mask(seed):
    _, _, kept, gone, into = draw(seed, 0, 0)
    folded, dropped = Reduction(keep=kept, drop=gone, into=into), Reduction(keep=kept)
    slots, lost = folded.slots(7), dropped.slots(7)
    for b in range(2):
        for i in range(7):
            stays = i in kept[b].tolist()
            assert folded.mask(7)[b, i].item() is stays
            if stays:
                assert slots[b, i] == lost[b, i] == kept[b].tolist().index(i)
            else:
                assert slots[b, i] == into[b, gone[b].tolist().index(i)]
                assert lost[b, i] == -1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["drop", "fold", "extra"])
def test_half_precision_stays_finite_and_near(dtype, kind):
    """Sizes are large enough for size * value to overflow float16 if the mean were taken in it."""
    x, size, kept, gone, into = draw(0, 1, 0)
    x, size = x * 100, size * 500
    rest = {
        "drop": {},
        "fold": {"drop": gone, "into": into},
        "extra": {"extra": extra_weights(kept, 7, 0, 0).to(dtype)},
    }[kind]
    half = x.to(dtype)
    out, new = Reduction(keep=kept, **rest).apply(half, 1, 0, size.float())
    assert out.dtype == dtype
    assert torch.isfinite(out).all()
    assert new.dtype == torch.float32
    tokens, _ = naive_apply(
        half.double(), kept, 1, 0, 7, rest.get("into"), rest.get("drop"), rest.get("extra"), size=size
    )
    near = torch.finfo(dtype).eps * 100
    torch.testing.assert_close(out.double(), tokens, rtol=near / 50, atol=near * 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sizes_count_in_float32_from_the_start(dtype):
    x, _, kept, gone, into = draw(0, 1, 0)
    _, size = Reduction(keep=kept, drop=gone, into=into).apply(x.to(dtype), 1)
    assert size.dtype == torch.float32


@pytest.mark.parametrize("kind", ["drop", "fold", "extra"])
@pytest.mark.parametrize("prefix", [0, 1])
def test_gradients_are_finite_differences(kind, prefix):
    x, size, kept, gone, into = draw(3, prefix, 2)
    weight = extra_weights(kept, 7, 2, 3).requires_grad_()
    x.requires_grad_()
    rest = {"drop": {}, "fold": {"drop": gone, "into": into}}.get(kind)

    def run(tokens, weight):
        chosen = Reduction(keep=kept, extra=weight) if kind == "extra" else Reduction(keep=kept, **rest)
        return chosen.apply(tokens, prefix, 2, size)[0]

    assert torch.autograd.gradcheck(run, (x, weight if kind == "extra" else weight.detach()))


@pytest.mark.parametrize("seed", range(3))
def test_take_tokens_and_complement(seed):
    x, _, kept, gone, _ = draw(seed, 0, 0)
    taken = take_tokens(x, kept)
    for b in range(2):
        for slot, i in enumerate(kept[b].tolist()):
            assert torch.equal(taken[b, slot], x[b, i])
        assert torch.equal(take_tokens(x[b : b + 1], kept[b : b + 1]), taken[b : b + 1])
    assert torch.equal(complement(kept, 7), gone)
    assert complement(torch.arange(7).expand(2, -1), 7).shape == (2, 0)
    assert torch.equal(take_tokens(x.transpose(1, 2), torch.tensor([[3], [0]]))[:, 0], x[[0, 1], :, [3, 0]])


def test_an_index_beyond_the_patches_is_an_error():
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        Reduction(keep=torch.tensor([[0, 9]])).apply(torch.randn(1, 5, 3))


def test_opposite_values_of_half_precision_do_not_overflow():
    """The way from 40,000 to -40,000 is longer than float16 can say; their mean is not."""
    x = torch.tensor([[[40000.0], [-40000.0]]], dtype=torch.float16)
    reduction = Reduction(keep=torch.tensor([[0]]), drop=torch.tensor([[1]]), into=torch.tensor([[0]]))
    assert reduction.apply(x)[0].tolist() == [[[0.0]]]
