"""The contract that every method passes. A method of your own is checked with three lines:

    @pytest.mark.parametrize("rule", contract_cases(MyMethod))
    def test_my_method(rule):
        rule()

or, without pytest, with one: `check_method(MyMethod)`. A rule that fails raises ContractError, which says which rule,
on what input, and how. Rules on tensors show the method random views of the stages where it works; rules on models
attach it to a tiny model of each family named in `models`, "llava" among them.

Imports adapters, methods and core; pytest only inside `contract_cases`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.adapters.attach import attach
from tokensieve.core.reduction import Reduction
from tokensieve.core.sentence import Sentence
from tokensieve.core.view import TokenView
from tokensieve.methods.base import Method
from tokensieve.methods.registry import make_method
from tokensieve.testing.models import TinyModel, tiny_model
from tokensieve.testing.vlm import TinyLlava, tiny_llava
from tokensieve.testing.vlm_rules import VLM_RULES

__all__ = ["MODEL_RULES", "TENSOR_RULES", "ContractError", "check_method", "contract_cases"]

Make = Callable[[], Method]
BATCH, WIDTH, HEADS = 3, 32, 2
PATCHES = 24


class ContractError(AssertionError):
    """A method breaks a rule of the contract."""

    def __init__(self, rule: str, method: Method, how: str) -> None:
        self.rule = rule
        super().__init__(f"{type(method).__name__} breaks the rule {rule!r}: {how}")


def _factory(method: str | Method | type[Method] | Make, options: dict[str, Any]) -> Make:
    """Whatever was given, as a function that makes a fresh method."""
    if isinstance(method, str):
        return partial(make_method, method, **options)
    if isinstance(method, Method):
        if options:
            raise TypeError(f"options {', '.join(options)} go with a name or a class; this method is made already")
        return partial(copy.deepcopy, method)
    return partial(method, **options)


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
        queries, lambda: k, scale=scale, vision=place[:, 3 : 3 + n], last=place[:, -1], text=place[:, 3 + n :]
    )
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
        if method.differentiable and reduction.extra is not None and view.n - keep > 1:
            through = view.q.grad
            if through is None or not through.isfinite().all() or not through.abs().sum() > 0:
                return f"{case}: the method says it is differentiable, but no gradient reaches the queries"
    return None


# -- rules on models ----------------------------------------------------------------------------------------------


def _attached(make: Make, tiny: TinyModel, keep: int | float, at: Sequence[int] | None = None) -> Any:
    return attach(tiny.model, make(), keep=keep, at=at)


def _model_budget(make: Make, tiny: TinyModel) -> int:
    n = 36
    method = make()
    low = n
    for _ in range(2):
        low = max(1, method.floor(low, tiny.prefix))
    return max(low, n // 2)


def _on_model_lengths(make: Make, tiny: TinyModel) -> str | None:
    """Sequence lengths inside each block are what the budget says: real shapes at the MLPs, made tokens allowed for."""
    seen: list[int] = []
    hooks = [m.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1])) for m in tiny.mlps(tiny.model)]
    keep = _model_budget(make, tiny)
    try:
        with torch.no_grad(), _attached(make, tiny, keep, at=[0, 2]) as handle:
            tiny.feature(tiny.model, tiny.images(2))
            counts, run = handle.counts(36), handle.blocks.last
            planned, left = [], 36
            for block in range(len(seen)):
                left = counts.get(block, left)
                planned.append(tiny.prefix + left + run.states[block + 1].made)
            kept = handle.kept
    finally:
        for hook in hooks:
            hook.remove()
    if seen != planned:
        return f"{tiny.name}: the MLPs saw {seen} tokens, the budget says {planned}"
    if planned[-1] >= 36 + tiny.prefix:
        return f"{tiny.name}: nothing was reduced"
    if kept[2].shape != (2, keep) or (kept[2].diff(dim=1) <= 0).any():
        return f"{tiny.name}: the patches kept at the end are {kept[2].tolist()}, not {keep} ascending ones"
    for early, late in zip(kept[0], kept[2], strict=True):
        if not set(late.tolist()) <= set(early.tolist()):
            return f"{tiny.name}: a patch is there after block 2 that had left at block 0"
    return None


def _on_model_batch(make: Make, tiny: TinyModel) -> str | None:
    images, keep = tiny.images(4), _model_budget(make, tiny)
    with torch.no_grad(), _attached(make, tiny, keep, at=[0, 2]) as handle:
        together = tiny.feature(tiny.model, images)
        kept = handle.kept[2]
        for i in range(len(images)):
            alone = tiny.feature(tiny.model, images[i : i + 1])
            if not torch.equal(handle.kept[2][0], kept[i]):
                return f"{tiny.name}: image {i} keeps other patches alone than in a batch"
            if not torch.allclose(alone[0], together[i], atol=1e-4):
                return f"{tiny.name}: the feature of image {i} differs by {(alone[0] - together[i]).abs().max():.1e}"
    return None


def _on_model_keep_all(make: Make, tiny: TinyModel) -> str | None:
    images = tiny.images(2)
    with torch.no_grad():
        before = tiny.feature(tiny.model, images)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _attached(make, tiny, 1.0):
                after = tiny.feature(tiny.model, images)
    if not torch.equal(before, after):
        return f"{tiny.name}: keep=1.0 changes the feature by {(after - before).abs().max():.1e}"
    return None


def _on_model_halves(make: Make, tiny: TinyModel) -> str | None:
    model = copy.deepcopy(tiny.model).bfloat16()
    with torch.no_grad(), attach(model, make(), keep=_model_budget(make, tiny), at=[0, 2]):
        out = tiny.feature(model, tiny.images(2).bfloat16())
    return None if out.isfinite().all() else f"{tiny.name}: the feature is not finite in bfloat16"


def _on_model_gradients(make: Make, tiny: TinyModel) -> str | None:
    images = tiny.images(2).requires_grad_()
    with _attached(make, tiny, _model_budget(make, tiny), at=[0, 2]):
        out = tiny.feature(tiny.model, images)
        (grad,) = torch.autograd.grad(out.square().sum(), [images])
    if not grad.isfinite().all() or not (grad.abs().sum(dim=(1, 2, 3)) > 0).all():
        return f"{tiny.name}: gradients of the images are absent or not finite"
    return None


def _snapshot(model: nn.Module) -> list[Any]:
    """All that attaching could leave behind: classes, attributes, hooks, keys of the state."""
    out: list[Any] = [list(model.state_dict())]
    for name, module in model.named_modules():
        hooks = [len(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks") and v is not None]
        out.append((name, type(module), sorted(vars(module)), hooks))
    return out


def _on_model_restored(make: Make, tiny: TinyModel) -> str | None:
    images = tiny.images(2)
    with torch.no_grad():
        before, was = tiny.feature(tiny.model, images), _snapshot(tiny.model)
        state = {k: v.clone() for k, v in tiny.model.state_dict().items()}
        with _attached(make, tiny, _model_budget(make, tiny), at=[0, 2]):
            during = tiny.feature(tiny.model, images)
        after = tiny.feature(tiny.model, images)
    for a, b in zip(was, _snapshot(tiny.model), strict=True):
        if a != b:
            return f"{tiny.name}: after removal {b} is not what was there before: {a}"
    if any(not torch.equal(v, state[k]) for k, v in tiny.model.state_dict().items()):
        return f"{tiny.name}: a weight has another value after removal"
    if not torch.equal(before, after):
        return f"{tiny.name}: after removal the feature differs by {(after - before).abs().max():.1e}"
    if torch.equal(before, during):
        return f"{tiny.name}: the feature was the same while attached, so nothing was reduced"
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
MODEL_RULES: dict[str, Callable[[Make, TinyModel], str | None]] = {
    "sequence lengths": _on_model_lengths,
    "a batch of images equals its singles": _on_model_batch,
    "keep-all leaves the model alone": _on_model_keep_all,
    "the feature is finite in bfloat16": _on_model_halves,
    "gradients reach the images": _on_model_gradients,
    "restored bit for bit on removal": _on_model_restored,
}


def _run(name: str, rule: Callable[[Make], str | None], make: Make) -> None:
    how = rule(make)
    if how is not None:
        raise ContractError(name, make(), how)


def _on(model: str, rule: Callable[[Make, TinyModel], str | None]) -> Callable[[Make], str | None]:
    return lambda make: rule(make, tiny_model(model))


def _in_llava(rule: Callable[[Make, TinyLlava], str | None]) -> Callable[[Make], str | None]:
    return lambda make: rule(make, tiny_llava())


def _rules(make: Make, models: Sequence[str] | None) -> Iterator[tuple[str, Callable[[], None]]]:
    for name, rule in TENSOR_RULES.items():
        yield name, partial(_run, name, rule, make)
    if models is None:
        models = ("openclip",) if "encoder" in make().stages else ("llava",)
    for model in models:
        if model == "llava":
            for name, question in VLM_RULES.items():
                yield f"{name} [llava]", partial(_run, name, _in_llava(question), make)
            continue
        for name, check in MODEL_RULES.items():
            yield f"{name} [{model}]", partial(_run, name, _on(model, check), make)


def check_method(
    method: str | Method | type[Method] | Make, *, models: Sequence[str] | None = None, **options: Any
) -> None:
    """Check a method against every rule; ContractError names the first that it breaks.

    method: a registered name, a class or factory (with its options), or an instance.
    models: tiny models to attach it to (see `tiny_models`), or "llava"; none with (). None: the one of its stage.
    """
    for _, rule in _rules(_factory(method, options), models):
        rule()


def contract_cases(
    method: str | Method | type[Method] | Make, *, models: Sequence[str] | None = None, **options: Any
) -> list[Any]:
    """One pytest parameter for each rule, to be called without arguments. Arguments as in `check_method`."""
    import pytest

    return [pytest.param(rule, id=name.replace(" ", "-")) for name, rule in _rules(_factory(method, options), models)]
