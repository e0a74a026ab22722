"""The search space: what YAML says, what is drawn of it, what is refused."""

from __future__ import annotations

import optuna
import pytest
import yaml

from tokensieve.errors import OptionError, UnknownNameError
from tokensieve.search.settings import EvalSearchConfig, SearchSettings
from tokensieve.search.space import Parameter, corners, draw, pinned
from tokensieve.utils.settings import parse_settings

TEXT = """
method: [anchor, tome]
keep: {low: 0.2, high: 0.85, step: 0.05}
lr: {low: 1e-5, high: 1e-2, log: true}
k: {low: 2, high: 10, step: 2}
fold: bool
at: [[5], [3, 6, 9], null]
alpha: {low: 0, high: 1, type: float, when: {method: anchor}}
"""


def space_of(text: str):
    return SearchSettings.model_validate({"space": yaml.safe_load(text)}).space


def drawn(space, count: int = 60):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [draw(space, study.ask()) for _ in range(count)]


def test_what_is_drawn_is_what_the_file_says() -> None:
    found = drawn(space_of(TEXT))
    grid = [round(0.2 + 0.05 * i, 12) for i in range(14)]
    assert {type(one["k"]) for one in found} == {int}
    assert {one["k"] for one in found} == {2, 4, 6, 8, 10}
    assert {one["keep"] for one in found} <= set(grid)
    assert {one["keep"] for one in found} & {0.85, 0.2}
    assert {one["fold"] for one in found} == {True, False}
    assert {str(one["at"]) for one in found} == {"[5]", "[3, 6, 9]", "None"}
    assert all(("alpha" in one) == (one["method"] == "anchor") for one in found)
    assert all(isinstance(one["alpha"], float) for one in found if "alpha" in one)
    below = sum(one["lr"] < 10**-3.5 for one in found)  # the middle on a log scale
    assert 18 <= below <= 42
    assert all(1e-5 <= one["lr"] <= 1e-2 for one in found)


def test_a_number_is_whole_where_its_ends_are() -> None:
    space = space_of("a: {low: 1, high: 9}\nb: {low: 1, high: 9.5}\nc: {low: 1, high: 9, step: 0.5}")
    assert [p.type for p in space.values()] == ["int", "float", "float"]


def test_corners_have_every_choice_and_both_ends() -> None:
    space = space_of(TEXT)
    found = list(corners(space))
    for name, parameter in space.items():
        seen = [one[name] for one in found if name in one]
        for value in parameter.examples():
            assert value in seen
    assert all(("alpha" in one) == (one["method"] == "anchor") for one in found)


def test_what_is_pinned_leaves_the_space_with_what_hangs_on_it() -> None:
    space = space_of(TEXT + "beta: {low: 0.0, high: 1.0, when: {alpha: 0.5}}")
    left = pinned(space, {"method": "tome"})
    assert {"method", "alpha", "beta"}.isdisjoint(left)
    left = pinned(space, {"method": "anchor"})
    assert "alpha" in left
    assert left["alpha"].when == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keep: {low: 0.9, high: 0.1}", "space.keep: low 0.9 is not below high 0.1"),
        ("keep: {low: 0.1}", "space.keep: give low and high"),
        ("lr: {low: 0.0, high: 1.0, log: true}", "space.lr: log: low 0 must be above 0"),
        ("lr: {low: 0.1, high: 1.0, log: true, step: 0.1}", "log and step"),
        ("k: {low: 1, high: 5, step: 9}", "space.k: step 9"),
        ("k: {type: int, low: 1.5, high: 5}", "whole numbers"),
        ("m: []", "space.m: give at least one value"),
        ("m: [a, a]", "space.m: the same value is there twice"),
        ("m: {type: categorical, choices: [a], low: 1}", "are for numbers"),
        ("m: {type: bool, choices: [a]}", "a bool has no choices"),
        ("m: {type: float, choices: [a]}", "choices are for a categorical one"),
        ("a: {low: 1, high: 2, when: {b: 1}}", "when: b is not in the space before it"),
        ("m: [x]\na: {low: 1, high: 2, when: {m: y}}", "when: m is never 'y'"),
        ("m: 3", "3 is not a range"),
        ("m: {type: flaot, low: 1, high: 2}", "flaot"),
    ],
)
def test_what_is_wrong_is_named(text, words) -> None:
    with pytest.raises(OptionError, match=words.replace("(", r"\(")):
        parse_settings(EvalSearchConfig, {"search_settings": {"space": yaml.safe_load(text)}})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"search_settings": {"space": {"keep": {"lwo": 0.1, "high": 1.0}}}}, "mean .search_settings.space.keep.low"),
        ({"search_settings": {"n_trails": 5}}, 'Did you mean "search_settings.n_trials"'),
        ({"serach_settings": {}}, 'Did you mean "search_settings"'),
    ],
)  # fmt: skip
def test_unknown_keys_get_the_nearest_right_one(data, words) -> None:
    with pytest.raises(UnknownNameError, match=words):
        parse_settings(EvalSearchConfig, data)


def test_objectives_are_one_or_two_and_know_their_direction() -> None:
    found = SearchSettings.model_validate({"objectives": ["accuracy", "macs"]}).objectives
    assert [o.direction for o in found] == ["maximize", "minimize"]
    found = SearchSettings.model_validate({"objectives": [{"metric": "loss", "direction": "minimize"}]}).objectives
    assert found[0].better == -1
    for wrong in (["a", "b", "c"], ["a", "a"]):
        with pytest.raises(OptionError, match="one, or two different"):
            parse_settings(EvalSearchConfig, {"search_settings": {"objectives": wrong}})


def test_one_and_true_are_two_choices() -> None:
    parameter = Parameter.model_validate([1, True, 1.0, "1"])
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    seen = {(type(v).__name__, v) for v in (parameter.suggested(study.ask(), "a") for _ in range(40))}
    assert seen == {("int", 1), ("bool", True), ("float", 1.0), ("str", "1")}
