"""The contract's rules on tensors: a method sees random views of the stages where it works. Imports core, methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.core.prompt import Sentence
from tokensieve.core.reduction import Reduction, take_tokens
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Method

__all__ = ["TENSOR_RULES"]

Make = Callable[[], Method]
BATCH, WIDTH, HEADS = 3, 32, 2
PATCHES = 24


# -- views --------------------------------------------------------------------------------------------------------


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _view(kind: str, n: int = PATCHES, seed: int = 0, dtype: torch.dtype = torch.float32) -> TokenView:
    """A random view: "cls" (one prefix token), "registers" (CLS and three), "bare" (no prefix), "merged" (sizes).

    "sentence": between three words and five in a language model's prompt.
    """
    if kind == "sentence":
        tokens, q, k = (_random(BATCH, n + 8, WIDTH, seed=seed + i).to(dtype) for i in range(3))
        q, k = (t.view(BATCH, n + 8, HEADS, -1).transpose(1, 2) for t in (q, k))
        return _spoken(tokens, q, k, n)
    prefix = {"cls": 1, "registers": 4, "bare": 0, "merged": 1}[kind]
    length = prefix + n
    tokens, q, k = (_random(BATCH, length, WIDTH, seed=seed + i) for i in range(3))
    heads = [t.view(BATCH, length, HEADS, -1).transpose(1, 2).to(dtype) for t in (q, k)]
    rest: dict[str, Any] = {"text": _random(2, WIDTH, seed=seed + 4)}
    if kind == "merged":
        size = 1.0 + _random(BATCH, n, seed=seed + 3).abs().round()
        rest |= {"size": size, "bias": nn.functional.pad(size.log(), (prefix, 0))}
        rest["origin"] = (2 * torch.arange(n)).expand(BATCH, -1)
    scale = (WIDTH // HEADS) ** -0.5
    return TokenView(tokens.to(dtype), *heads, scale=scale, prefix=prefix, has_cls=prefix > 0, depth=0.25, **rest)


def _spoken(tokens: Tensor, q: Tensor, k: Tensor, n: int) -> TokenView:
    """A view of the n tokens after the first three of a prompt (B, L, D) with queries and keys (B, H, L, d)."""
    batch, length = tokens.shape[:2]

    def queries(rows: Tensor) -> Tensor:
        return q.gather(2, rows[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))

    place = torch.arange(length).expand(batch, -1)
    scale = (WIDTH // HEADS) ** -0.5
    sentence = Sentence(
        queries, lambda: k, scale=scale, vision=place[:, 3 : 3 + n], last=place[:, -1], text=place[:, 3 + n :],
        states=lambda rows: take_tokens(tokens, rows), came=lambda rows: take_tokens(tokens.tanh(), rows),
    )  # fmt: skip
    here = slice(3, 3 + n)
    view = TokenView(
        tokens[:, here], q[:, :, here], k[:, :, here], scale=scale, prefix=0, has_cls=False, depth=0.25,
        text=tokens[:, 3 + n :].detach(), sentence=sentence,
    )  # fmt: skip
    view.prompt = (tokens, q, k)  # type: ignore[attr-defined]  # for `_part`
    return view


KINDS = ("cls", "registers", "bare", "merged", "sentence")


def _kinds(method: Method) -> tuple[str, ...]:
    """The views that a method meets at its stages."""
    inside = {"encoder", "projector"} & set(method.stages)
    return (KINDS[:4] if inside else ()) + (KINDS[4:] if "decoder" in method.stages else ())


def _part(view: TokenView, rows: Tensor | slice, order: Tensor | None = None, grad: bool = False) -> TokenView:
    """The images `rows` of a view, the patches in another order (positions stay where they are)."""
    if view.sentence is not None:
        tokens, q, k = (t[rows] for t in view.prompt)  # type: ignore[attr-defined]
        if order is not None:
            place = torch.arange(tokens.shape[1])
            place[3 : 3 + view.n] = order + 3
            tokens, q, k = tokens[:, place], q[:, :, place], k[:, :, place]
        tokens, q, k = (t.detach().requires_grad_(grad) for t in (tokens, q, k))
        return _spoken(tokens, q, k, view.n)

    def pick(x: Tensor | None, axis: int, prefix: int) -> Tensor | None:
        if x is None:
            return None
        x = x[rows]
        if order is not None:
            x = x.index_select(axis, torch.cat([torch.arange(prefix), order + prefix]))
        return x.detach().requires_grad_(grad) if x.is_floating_point() else x

    p = view.prefix
    tokens, q, k = pick(view.tokens, 1, p), pick(view.q, 2, p), pick(view.k, 2, p)
    assert tokens is not None
    assert q is not None
    assert k is not None
    merged = view.bias is not None
    return TokenView(
        tokens, q, k, scale=view.scale, prefix=p, has_cls=view.has_cls, depth=view.depth,
        size=pick(view.size, 1, 0) if merged else None, bias=pick(view.bias, 1, p),
        origin=view.origin[rows] if merged else None, text=view.text,
    )  # fmt: skip


def _budgets(method: Method, n: int, prefix: int) -> list[int]:
    """Budgets that the method says it can reach: its floor, the middle, one less than all."""
    low = max(1, method.floor(n, prefix))
    return sorted({low, (low + n) // 2, n - 1} & set(range(low, n)))


def _cases(make: Make) -> Iterator[tuple[str, TokenView, int]]:
    for kind in _kinds(make()):
        view = _view(kind)
        for keep in _budgets(make(), view.n, view.prefix):
            yield f"{kind} view, {keep} of {view.n} patches", view, keep


def _apply(view: TokenView, reduction: Reduction) -> tuple[Tensor, Tensor | None]:
    return reduction.apply(view.tokens, view.prefix, view.made, view.size if view.bias is not None else None)


# -- rules on tensors ---------------------------------------------------------------------------------------------


def _exact_budget(make: Make) -> str | None:
    for case, view, keep in _cases(make):
        index = make().reduce(view, keep).keep
        if tuple(index.shape) != (BATCH, keep):
            return f"{case}: keep has the shape {tuple(index.shape)}, not {(BATCH, keep)}"
        if index.dtype != torch.int64:
            return f"{case}: keep is {index.dtype}, not int64"
        if index.min() < 0 or index.max() >= view.n:
            return f"{case}: keep holds {int(index.min())} to {int(index.max())}, patches go from 0 to {view.n - 1}"
        for row in index:
            if row.unique().numel() != keep:
                return f"{case}: a patch is kept twice: {row.tolist()}"
    return None


def _original_order(make: Make) -> str | None:
    for case, view, keep in _cases(make):
        for row in make().reduce(view, keep).keep:
            if (row.diff() <= 0).any():
                return f"{case}: keep is not ascending: {row.tolist()}"
    return None


def _prefix_survives(make: Make) -> str | None:
    for case, view, keep in _cases(make):
        before = view.tokens.clone()
        out, _ = _apply(view, make().reduce(view, keep))
        if not torch.equal(out[:, : view.prefix], before[:, : view.prefix]):
            return f"{case}: the first {view.prefix} tokens came back changed"
        if not torch.equal(view.tokens, before):
            return f"{case}: the method wrote into the tokens it was shown"
    return None


def _keep_all(make: Make) -> str | None:
    for kind in _kinds(make()):
        view = _view(kind)
        reduction = make().reduce(view, view.n)
        if not torch.equal(reduction.keep, torch.arange(view.n).expand(BATCH, -1)):
            return f"{kind} view: keeping all of {view.n} patches gives {reduction.keep[0].tolist()}"
        out, size = _apply(view, reduction)
        if not torch.equal(out, view.tokens):
            return f"{kind} view: tokens change although all {view.n} patches are kept"
        if size is not None and not torch.equal(size, view.size):
            return f"{kind} view: sizes change although all {view.n} patches are kept"
    return None


def _batch_equals_singles(make: Make) -> str | None:
    for case, view, keep in _cases(make):
        together = make().reduce(view, keep)
        out, size = _apply(view, together)
        for i in range(BATCH):
            single = _part(view, slice(i, i + 1))
            alone = make().reduce(single, keep)
            if not torch.equal(alone.keep[0], together.keep[i]):
                return (
                    f"{case}: image {i} keeps {together.keep[i].tolist()} in the batch, {alone.keep[0].tolist()} alone"
                )
            out_alone, size_alone = _apply(single, alone)
            if not torch.allclose(out_alone[0], out[i], atol=1e-5):
                return f"{case}: tokens of image {i} differ by {(out_alone[0] - out[i]).abs().max():.1e} in the batch"
            if size is not None and size_alone is not None and not torch.equal(size_alone[0], size[i]):
                return f"{case}: sizes of image {i} differ in the batch"
    return None


def _half_precision(make: Make) -> str | None:
    for dtype in (torch.float16, torch.bfloat16):
        for kind in _kinds(make()):
            view = _view(kind, dtype=dtype)
            keep = _budgets(make(), view.n, view.prefix)[-2:][0]
            reduction = make().reduce(view, keep)
            out, _ = _apply(view, reduction)
            if out.dtype != dtype:
                return f"{kind} view: {dtype} tokens come back as {out.dtype}"
            if tuple(reduction.keep.shape) != (BATCH, keep):
                return f"{kind} view in {dtype}: keep has the shape {tuple(reduction.keep.shape)}, not {(BATCH, keep)}"
            if not out.isfinite().all():
                return f"{kind} view in {dtype}: the tokens are not finite"
            if reduction.scores is not None and not reduction.scores.isfinite().all():
                return f"{kind} view in {dtype}: the scores are not finite"
    return None


def _sizes_sum(make: Make) -> str | None:
    for case, view, keep in _cases(make):
        reduction = make().reduce(view, keep)
        if reduction.into is None:
            continue
        if reduction.drop is None:
            return f"{case}: `into` is given without `drop`"
        both = torch.cat([reduction.keep, reduction.drop], dim=1).sort(dim=1).values
        if not torch.equal(both, torch.arange(view.n).expand(BATCH, -1)):
            return f"{case}: keep and drop together are not each of the {view.n} patches once"
        if reduction.into.min() < 0 or reduction.into.max() >= keep:
            return f"{case}: `into` holds {int(reduction.into.min())} to {int(reduction.into.max())} for {keep} slots"
        out, size = _apply(view, reduction)
        assert size is not None
        if not torch.allclose(size.sum(1), view.size.sum(1)):
            return f"{case}: sizes sum to {size.sum(1).tolist()}, not {view.size.sum(1).tolist()}"
        p = view.prefix
        mass, before = (out[:, p:] * size.unsqueeze(-1)).sum(1), (view.x * view.size.unsqueeze(-1)).sum(1)
        if not torch.allclose(mass, before, atol=1e-3):
            return f"{case}: merged tokens are not means weighted by size"
    return None


def _same_seed(make: Make) -> str | None:
    with torch.random.fork_rng(devices=[]):
        for case, view, keep in _cases(make):
            torch.manual_seed(1)
            first = make().reduce(view, keep)
            torch.manual_seed(2)
            again = make().reduce(view, keep)
            if not torch.equal(first.keep, again.keep):
                return f"{case}: two equal methods keep {first.keep[0].tolist()} and {again.keep[0].tolist()}"
    return None


def _no_memory(make: Make) -> str | None:
    """What a method saw before does not count."""
    method = make()
    for kind in _kinds(method):
        view, other = _view(kind), _view(kind, n=PATCHES - 4, seed=9)
        keep = _budgets(method, view.n, view.prefix)[-2:][0]
        first = method.reduce(view, keep)
        method.reduce(other, _budgets(method, other.n, other.prefix)[-1])
        again = method.reduce(view, keep)
        if not torch.equal(first.keep, again.keep):
            return f"{kind} view: another view in between changes {first.keep[0].tolist()} to {again.keep[0].tolist()}"
    return None


def _permutation(make: Make) -> str | None:
    """Three images of four must obey: an exact tie (two patches that are each other's nearest) may fall either way."""
    if make().uses_positions:
        return None
    order = torch.randperm(PATCHES, generator=torch.Generator().manual_seed(5))
    held, first = [], ""
    for case, view, keep in _cases(make):
        other = _part(view, slice(None), order)
        here, there = make().reduce(view, keep), make().reduce(other, keep)
        moved = order[there.keep]
        rows = moved.argsort(dim=1)
        out, out_there = _apply(view, here)[0], _apply(other, there)[0]
        out_there = out_there.gather(1, rows.unsqueeze(-1).expand(-1, -1, out.shape[-1]) + view.prefix)
        same_value = (out_there - out[:, view.prefix : view.prefix + keep]).abs().amax(dim=(1, 2)) < 1e-5
        for i in range(BATCH):
            kept, kept_there = here.keep[i].tolist(), moved[i].sort().values.tolist()
            held.append(kept == kept_there and bool(same_value[i]))
            if not held[-1] and not first:
                first = (
                    f"{case}: with the patches in another order {kept_there} are kept or merged otherwise, not {kept}"
                )
    if sum(held) < 0.75 * len(held):
        return f"{first} (a method that looks at positions says uses_positions = True)"
    return None


def _gradients(make: Make) -> str | None:
    for case, whole, keep in _cases(make):
        view = _part(whole, slice(None), grad=True)
        method = make()
        reduction = method.reduce(view, keep)
        out, _ = _apply(view, reduction)
        out.square().sum().backward()
        grad = view.tokens.grad if view.sentence is None else view.prompt[0].grad[:, 3 : 3 + view.n]  # type: ignore[attr-defined]
        if grad is None or not grad.isfinite().all():
            return f"{case}: the tokens get {'no' if grad is None else 'infinite'} gradients"
        p = view.prefix
        reached = grad.abs().sum(-1) > 0
        if not reached[:, :p].all() or not reached[:, p:].gather(1, reduction.keep).all():
            return f"{case}: no gradient reaches some of the tokens that remain"
        if reduction.into is not None and not reached.all():
            return f"{case}: no gradient reaches some of the tokens that were merged"
        weighed = reduction.extra is not None or getattr(reduction, "weight", None) is not None
        if method.differentiable and weighed and view.n - keep > 1:
            through = view.q.grad
            if through is None or not through.isfinite().all() or not through.abs().sum() > 0:
                return f"{case}: the method says it is differentiable, but no gradient reaches the queries"
    return None


TENSOR_RULES: dict[str, Callable[[Make], str | None]] = {
    "exact budget": _exact_budget,
    "original order": _original_order,
    "prefix tokens survive": _prefix_survives,
    "keep-all is the identity": _keep_all,
    "same seed, same result": _same_seed,
    "no memory": _no_memory,
    "a batch equals its singles": _batch_equals_singles,
    "half precision is finite": _half_precision,
    "merge sizes sum to N": _sizes_sum,
    "permuting the patches permutes the selection": _permutation,
    "gradients reach the tokens": _gradients,
}
