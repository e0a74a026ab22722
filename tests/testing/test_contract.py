"""Every registered method keeps the contract on every family; methods that break a rule are caught by that rule."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tokensieve import Method, Reduction, Selector, TokenView, list_methods
from tokensieve.errors import UnknownNameError, UnsupportedModelError
from tokensieve.methods.registry import method_options
from tokensieve.testing import ContractError, check_method, contract_cases, tiny_model, tiny_models
from tokensieve.testing.contract import MODEL_RULES, TENSOR_RULES
from tokensieve.testing.vlm import tiny_llava
from tokensieve.testing.vlm_rules import VLM_RULES

# learned needs a trained file: tested where it is made; two_stage has parts that are methods themselves
METHODS = [name for name in list_methods() if name not in ("learned", "merger", "pruner", "two_stage")]
ENCODER = [name for name in METHODS if name in list_methods("encoder")]
VARIANTS = [(name, {}) for name in METHODS] + [
    (name, {"fold": True}) for name in METHODS if "fold" in method_options(name)
]


@pytest.mark.parametrize("rule", list(TENSOR_RULES))
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_every_method_on_tensors(name: str, options: dict, rule: str) -> None:
    check_rule(name, options, rule)


def check_rule(name: str, options: dict, rule: str) -> None:
    from tokensieve.methods.registry import make_method

    how = TENSOR_RULES[rule](lambda: make_method(name, **options))
    assert how is None, how


@pytest.mark.parametrize("family", tiny_models())
@pytest.mark.parametrize("name", ENCODER)
def test_every_method_on_every_family(name: str, family: str) -> None:
    from tokensieve.methods.registry import make_method

    # a rotary tower has no place for a token that was made
    options = {"fuse": False} if (name, family) == ("evit", "timm_eva") else {}
    tiny = tiny_model(family)
    for rule, check in MODEL_RULES.items():
        how = check(lambda: make_method(name, **options), tiny)
        assert how is None, f"{rule}: {how}"


@pytest.mark.parametrize("rule", contract_cases("anchor", models=("timm_registers",), k=4))
def test_the_three_lines_of_the_docstring(rule) -> None:
    rule()


def test_contract_cases_are_named_and_cover_every_rule() -> None:
    names = [case.id for case in contract_cases("grid", models=("timm", "openclip"))]
    assert len(names) == len(set(names)) == len(TENSOR_RULES) + 2 * len(MODEL_RULES)


def test_check_method_takes_names_classes_instances_and_factories() -> None:
    check_method("anchor", models=(), k=3)
    check_method(ByNorm, models=())
    check_method(ByNorm(), models=("timm",))
    check_method(lambda: ByNorm(fold=True), models=())
    with pytest.raises(TypeError, match="made already"):
        check_method(ByNorm(), fold=True)


def test_unknown_tiny_model() -> None:
    with pytest.raises(UnknownNameError, match="openclip_coca"):
        tiny_model("openclip_cocoa")


def test_importing_the_package_imports_neither_pytest_nor_a_model_library() -> None:
    code = (
        "import sys, tokensieve.testing; "
        "print([m for m in ('pytest', 'open_clip', 'timm', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# -- methods that break one rule each ---------------------------------------------------------------------------------


@dataclass(kw_only=True)
class ByNorm(Selector):
    """A right one: the patches of largest norm."""

    def score(self, view: TokenView, keep: int) -> Tensor:
        return view.x.float().norm(dim=-1)


@dataclass(kw_only=True)
class OneTooMany(ByNorm):
    def reduce(self, view: TokenView, keep: int) -> Reduction:
        return super().reduce(view, min(keep + 1, view.n))


@dataclass(kw_only=True)
class DropsNothing(ByNorm):
    def reduce(self, view: TokenView, keep: int) -> Reduction:
        return super().reduce(view, view.n)


@dataclass(kw_only=True)
class TwiceTheSame(ByNorm):
    def reduce(self, view: TokenView, keep: int) -> Reduction:
        index = super().reduce(view, keep).keep.clone()
        if 1 < keep < view.n:
            index[:, 1] = index[:, 0]
        return Reduction(keep=index)


@dataclass(kw_only=True)
class Reorders(ByNorm):
    def reduce(self, view: TokenView, keep: int) -> Reduction:
        index = super().reduce(view, keep).keep
        return Reduction(keep=index if keep == view.n else index.flip(1))


@dataclass(kw_only=True)
class LooksAtBatchMates(ByNorm):
    def score(self, view: TokenView, keep: int) -> Tensor:
        norm = super().score(view, keep)
        return (norm - norm.mean()).abs()


@dataclass(kw_only=True)
class EatsThePrefix(ByNorm):
    def reduce(self, view: TokenView, keep: int) -> Reduction:
        view.tokens[:, : view.prefix] *= 2
        return super().reduce(view, keep)


@dataclass(kw_only=True)
class NeverAll(ByNorm):
    def reduce(self, view: TokenView, keep: int) -> Reduction:
        return super().reduce(view, min(keep, view.n - 1))


@dataclass(kw_only=True)
class Overflows(ByNorm):
    def score(self, view: TokenView, keep: int) -> Tensor:
        return view.x.square().sum(-1) * 1e4 if view.x.dtype == torch.float16 else super().score(view, keep)


@dataclass(kw_only=True)
class LosesMass(ByNorm):
    def reduce(self, view: TokenView, keep: int) -> Reduction:
        from tokensieve.core.merge import fold

        index = super().reduce(view, keep).keep
        if keep == view.n:
            return Reduction(keep=index)
        made = fold(index, view.keys)
        assert made.drop is not None
        assert made.into is not None
        return Reduction(keep=index, drop=made.drop[:, 1:], into=made.into[:, 1:])


@dataclass(kw_only=True)
class DrawsFromTheGlobalGenerator(ByNorm):
    def score(self, view: TokenView, keep: int) -> Tensor:
        return torch.rand(1, view.n).expand(view.batch, -1)


@dataclass(kw_only=True)
class Remembers(ByNorm):
    seen: list = field(default_factory=list)

    def score(self, view: TokenView, keep: int) -> Tensor:
        self.seen.append(view.n)
        return super().score(view, keep) * (-1 if len(self.seen) > 1 else 1)


@dataclass(kw_only=True)
class HidesItsPositions(ByNorm):
    def score(self, view: TokenView, keep: int) -> Tensor:
        return torch.arange(view.n).float().expand(view.batch, -1)


@dataclass(kw_only=True)
class ClaimsGradients(ByNorm):
    differentiable: ClassVar[bool] = True

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        plain = super().reduce(view, keep)
        if keep == view.n:
            return plain
        weight = torch.ones(view.batch, view.n).scatter(1, plain.keep, 0.0)
        return Reduction(keep=plain.keep, extra=(weight / weight.sum(1, keepdim=True)).unsqueeze(1))


BROKEN = [
    (OneTooMany, "exact budget", "shape"),
    (DropsNothing, "exact budget", "shape"),
    (TwiceTheSame, "exact budget", "twice"),
    (Reorders, "original order", "not ascending"),
    (LooksAtBatchMates, "a batch equals its singles", "alone"),
    (EatsThePrefix, "prefix tokens survive", "changed"),
    (NeverAll, "keep-all is the identity", "keeping all"),
    (Overflows, "half precision is finite", "scores are not finite"),
    (LosesMass, "merge sizes sum to N", "keep and drop together"),
    (DrawsFromTheGlobalGenerator, "same seed, same result", "two equal methods"),
    (Remembers, "no memory", "in between"),
    (HidesItsPositions, "permuting the patches permutes the selection", "uses_positions"),
    (ClaimsGradients, "gradients reach the tokens", "queries"),
]


@pytest.mark.parametrize(("cls", "rule", "words"), BROKEN, ids=[c.__name__ for c, _, _ in BROKEN])
def test_a_broken_method_is_caught_by_the_right_rule(cls: type[Method], rule: str, words: str) -> None:
    with pytest.raises(ContractError) as caught:
        check_method(cls, models=())
    assert caught.value.rule == rule
    assert cls.__name__ in str(caught.value)
    assert words in str(caught.value)


def test_a_broken_method_fails_as_a_case_of_pytest_too() -> None:
    """What the three lines of the docstring run: a case says nothing, or raises."""
    good, bad = (
        next(case.values[0] for case in contract_cases(method, models=("openclip",)) if "sequence-lengths" in case.id)
        for method in (ByNorm, DropsNothing)
    )
    good()
    with pytest.raises(ContractError) as caught:
        bad()
    assert caught.value.rule == "sequence lengths"


def test_a_method_that_reduces_nothing_is_caught_on_a_model_too() -> None:
    how = MODEL_RULES["sequence lengths"](DropsNothing, tiny_model("openclip"))
    assert how is not None
    assert "tokens" in how


LANGUAGE = [name for name in METHODS if name in {**list_methods("projector"), **list_methods("decoder")}]


@pytest.mark.parametrize("name", LANGUAGE)
def test_every_method_of_a_language_model_in_a_llava(name: str) -> None:
    from tokensieve.methods.registry import make_method

    for rule, check in VLM_RULES.items():
        how = check(lambda: make_method(name), tiny_llava())
        assert how is None, f"{rule}: {how}"


def test_the_contract_of_a_language_models_method_goes_by_its_stage() -> None:
    names = [case.id for case in contract_cases("fastv")]
    assert len(names) == len(TENSOR_RULES) + len(VLM_RULES)
    with pytest.raises(UnsupportedModelError, match=r"FastV works in a vision-language model .* at its decoder"):
        check_method("fastv", models=("openclip",))
