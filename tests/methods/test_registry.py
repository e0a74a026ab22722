"""Methods by name: lazy, no duplicates, and help for who mistypes."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tokensieve
from tokensieve.core.reduction import Reduction
from tokensieve.core.view import TokenView
from tokensieve.errors import OptionError, UnknownNameError
from tokensieve.methods import list_methods, make_method, register_method, registry, tables
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


OWN = '''
from dataclasses import dataclass
import tokensieve, torch

@dataclass(kw_only=True)
class Front(tokensieve.Method):
    """Keep the first patches."""
    step: int = 1

    def reduce(self, view, keep):
        return tokensieve.Reduction(keep=torch.arange(keep).expand(view.batch, -1))

class Half(tokensieve.Method):
    pass

other = 3
'''


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fronts.py").write_text(OWN)
    yield
    sys.modules.pop("fronts", None)


@pytest.mark.parametrize("name", ["fronts.py:Front", "./fronts.py:Front", "fronts:Front"])
def test_a_class_by_where_it_stands(own_file, name):
    view = TokenView.of(torch.randn(2, 6, 4))
    assert make_method(name, step=2).reduce(view, 3).keep.tolist() == [[0, 1, 2]] * 2
    assert registry.method_options(name)["step"] == 1
    assert registry.method_stages(name) == ("encoder", "projector", "decoder")
    assert registry.method_class(name) is registry.method_class(name)
    with pytest.raises(UnknownNameError, match='Did you mean "step"'):
        make_method(name, stap=2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fronts.py:Frnt", "has no class 'Frnt'. Did you mean \"Front\""),
        ("fronts:other", "fronts:other is not a class derived from tokensieve.Method"),
        ("fronts.py:Half", "fronts.py:Half is abstract: it does not define reduce"),
        ("backs.py:Front", "backs.py: there is no such file"),
        ("backs:Front", "backs:Front cannot be imported: ModuleNotFoundError"),
        ("broken.py:Front", "broken.py cannot be imported: ZeroDivisionError: division by zero"),
        (":Front", ":Front cannot be imported"),
        ("fronts:", "has no class ''"),
    ],
)
def test_references_that_lead_nowhere_are_one_line(own_file, name, said, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises((OptionError, UnknownNameError), match=re.escape(said)) as caught:
        make_method(name)
    assert "\n" not in str(caught.value)


def test_a_file_that_changes_is_read_again(own_file, tmp_path):
    before = registry.method_class("fronts.py:Front")
    (tmp_path / "fronts.py").write_text(OWN.replace("step: int = 1", "step: int = 2"))
    assert registry.method_options("fronts.py:Front")["step"] == 2
    assert registry.method_class("fronts.py:Front") is not before


@pytest.fixture
def plugin(own_file, tmp_path):
    """An installed package that has a method, one whose module is missing, and one that takes a built-in's name."""
    info = tmp_path / "fronts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fronts\nVersion: 1.0\n")
    lines = "front = fronts:Front\ngone = backs:Front\ntome = fronts:Front\n"
    (info / "entry_points.txt").write_text(f"[tokensieve.methods]\n{lines}")
    registry._plugins.cache_clear()
    yield
    registry._plugins.cache_clear()


def test_methods_of_installed_packages(plugin):
    assert list_methods()["front"] == "from fronts:Front"
    assert make_method("front", step=3).step == 3
    assert "front" in list_methods()
    assert make_method("tome").__class__.__name__ == "ToMe"
    with pytest.raises(OptionError, match="method 'gone' of fronts: backs:Front cannot be imported"):
        make_method("gone")
    with pytest.raises(OptionError, match="'front' exists already"):
        register_method("front", First)
    with pytest.raises(UnknownNameError, match='Did you mean "front"'):
        make_method("fornt")


def test_the_table_of_facts_says_what_the_classes_say():
    for name, facts in registry.BUILT_IN.items():
        cls = registry.method_class(name)
        assert (facts.summary, facts.paper, facts.stages) == (vars(cls)["summary"], cls.paper, cls.stages)
        assert not facts.paper or f"arXiv {facts.paper}" in sys.modules[cls.__module__].__doc__
        assert len(facts.summary) < 90


def test_methods_from_papers_say_where_they_depart():
    for name, facts in registry.BUILT_IN.items():
        if facts.paper:
            assert "\n    Departs: " in registry.method_class(name).__doc__, name


def test_the_readme_has_the_tables_of_methods():
    """`tokensieve methods --markdown` prints what belongs there."""
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    between = page.partition(tables.BEGIN)[2].partition(tables.END)[0]
    assert between.strip() == tables.markdown_tables()
    for name, facts in registry.BUILT_IN.items():
        assert f"[`{name}`](src/tokensieve/methods/{facts.module.replace('.', '/')}.py)" in between
