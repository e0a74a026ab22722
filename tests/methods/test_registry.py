"""Methods by name: lazy, no duplicates, and help for who mistypes."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest
import torch

import tokensieve
from tokensieve.core.reduction import Reduction
from tokensieve.core.view import TokenView
from tokensieve.errors import OptionError, UnknownNameError
from tokensieve.methods import list_methods, make_method, register_method, registry
from tokensieve.methods.base import Method

NAMES = ["random", "grid", "anchor", "evit", "tome", "pitome", "divprune", "vispruner", "cdpruner", "sieve"]


@dataclasses.dataclass(kw_only=True)
class First(Method):
    """Keep the first patches.

    Second paragraph.
    """

    step: int = 1

    def reduce(self, view, keep):
        return Reduction(keep=torch.arange(keep).expand(view.batch, -1))


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    register_method("first", First)


@pytest.mark.parametrize("name", NAMES)
def test_every_listed_method_is_there(name):
    assert list_methods()[name]
    method = make_method(name)
    assert isinstance(method, Method)
    assert registry.method_options(name) == {f: getattr(method, f) for f in registry.method_options(name)}


@pytest.mark.parametrize("name", [n for n in NAMES if n != "sieve"])
def test_a_paper_is_named_where_there_is_one(name):
    module = sys.modules[registry.method_class(name).__module__]
    if name not in ("random", "grid", "anchor"):
        number = list_methods()[name].rsplit("(", 1)[1].rstrip(")")
        assert f"arXiv {number}" in module.__doc__


def test_options_reach_the_method():
    assert make_method("anchor", k=3, alpha=0.25).k == 3
    assert make_method("random", seed=4, fold=True).fold is True


@pytest.mark.parametrize(("wrong", "right"), [("ancor", "anchor"), ("tomee", "tome"), ("VisPruner", "vispruner")])
def test_unknown_methods_are_told_the_nearest(wrong, right):
    with pytest.raises(UnknownNameError, match=f'unknown method {wrong!r}. Did you mean "{right}"'):
        make_method(wrong)


def test_a_name_like_no_other_gets_the_list():
    with pytest.raises(UnknownNameError) as caught:
        make_method("zzzzzz")
    assert "Did you mean" not in str(caught.value)
    assert all(name in str(caught.value) for name in NAMES)


def test_unknown_options_are_told_the_nearest():
    with pytest.raises(UnknownNameError, match="method 'anchor' has no option 'alhpa'") as caught:
        make_method("anchor", alhpa=0.5)
    assert 'Did you mean "alpha"' in str(caught.value)


def test_one_of_ones_own(own):
    assert list_methods()["first"] == "Keep the first patches."
    assert registry.method_options("first") == {"proportional": True, "step": 1}
    kept = make_method("first", step=2).reduce(TokenView.of(torch.randn(2, 6, 4)), 3).keep
    assert kept.tolist() == [[0, 1, 2]] * 2
    with pytest.raises(UnknownNameError, match='Did you mean "first"'):
        make_method("frist")


@pytest.mark.parametrize("name", ["anchor", "first"])
def test_duplicates_are_refused(own, name):
    with pytest.raises(OptionError, match=f"{name!r} exists already"):
        register_method(name, First)
    assert make_method("anchor").__class__.__name__ == "Anchor"


def test_a_method_without_reduce_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Method()


def test_listing_imports_no_torch():
    code = (
        "import sys, tokensieve\n"
        "assert 'anchor' in tokensieve.list_methods()\n"
        "assert 'torch' not in sys.modules, 'torch was imported by the list'\n"
        "assert 'tokensieve.methods.anchor' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_list_says_where_a_method_works_as_its_class_does():
    for name in list_methods():
        assert registry.method_stages(name) == registry.method_class(name).stages
    assert "fastv" in list_methods("decoder")
    assert "fastv" not in list_methods("encoder")
    assert set(list_methods("projector")) > {"visionzip", "prumerge", "random", "grid", "divprune", "cdpruner"}
    with pytest.raises(UnknownNameError, match='Did you mean "decoder"'):
        list_methods("decode")


@pytest.mark.parametrize("name", ["visionzip", "prumerge", "fastv", "pyramiddrop", "sparsevlm"])
def test_the_papers_of_vision_language_methods_are_named(name):
    module = sys.modules[registry.method_class(name).__module__]
    assert f"arXiv {list_methods()[name].rsplit('(', 1)[1].rstrip(')')}" in module.__doc__


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("tome", {"proportional": "x"}, "proportional='x': give a number"),
        ("tome", {"proportional": float("nan")}, "proportional=nan: give a number"),
        ("random", {"seed": True}, "seed=True: give a whole number"),
        ("random", {"seed": 1.5}, "seed=1.5: give a whole number"),
        ("random", {"fold": "maybe"}, "fold='maybe': give True or False"),
        ("evit", {"fuse": 1}, "fuse=1: give True or False"),
    ],
)
def test_options_of_the_wrong_kind(name, options, said):
    with pytest.raises(OptionError, match=re.escape(said)):
        make_method(name, **options)


@pytest.mark.parametrize(("name", "what"), [("mine", int), ("mine", "First"), (3, First), ("mine", First())])
def test_only_classes_of_methods_are_registered(name, what):
    with pytest.raises(OptionError, match="register_method takes a name and a class derived from Method"):
        register_method(name, what)
    assert "mine" not in list_methods()


def test_a_class_is_not_a_method_made_already():
    with pytest.raises(OptionError, match=r"First\(\), not the class"):
        tokensieve.attach(torch.nn.Linear(2, 2), First, keep=0.5)
