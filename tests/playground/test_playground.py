"""What the playground shows is what the model did, and nothing of a photo outlives its call."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import tokensieve
from helpers.playgrounds import photo, playground, preprocess
from tokensieve.errors import OptionError, TokensieveError
from tokensieve.tasks.playground import records
from tokensieve.tasks.viewer import Request


def test_a_look_is_what_attach_does() -> None:
    here = playground()
    look = here.look(photo(), Request("tome", keep=0.5), ["a", "bb", "ccc"])
    model, images = here.viewer.model, preprocess(photo()).unsqueeze(0)
    with torch.inference_mode():
        full = model(images)
        with tokensieve.attach(model, "tome", keep=0.5) as handle:
            reduced = model(images)
            assert look.tokens == handle.tokens_per_layer
            assert look.gmacs == pytest.approx(handle.cost().macs / 1e9)
    assert look.cosine == pytest.approx(float(torch.cosine_similarity(full, reduced)), abs=1e-5)
    assert look.count == "18 of 36"
    assert [name for name, *_ in look.predictions] != []
    assert sum(before for _, before, _ in look.predictions) == pytest.approx(1.0)
    assert tokensieve.attachment_of(model) is None


def test_all_patches_change_nothing() -> None:
    look = playground().look(photo(), Request("random", keep=1.0))
    assert look.cosine == pytest.approx(1.0, abs=1e-5)
    assert look.count == "36 of 36"
    assert look.tokens == look.tokens_full


def test_visitors_at_once_each_get_their_own() -> None:
    here = playground()
    wanted = [np.asarray(here.look(photo(i), Request("divprune", keep=9)).kept) for i in range(4)]
    found: dict[int, np.ndarray] = {}

    def visit(i: int) -> None:
        for _ in range(3):
            found[i] = np.asarray(here.look(photo(i), Request("divprune", keep=9)).kept)
            assert np.array_equal(found[i], wanted[i])

    threads = [threading.Thread(target=visit, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(found[i], wanted[i]) for i in range(4))
    assert not np.array_equal(wanted[0], wanted[1])


@pytest.mark.parametrize(
    ("request_", "classes", "engine", "named"),
    [
        (Request("nothing", keep=0.5), [], "torch", "nothing"),
        (Request("tome", keep=0.5, at=[99]), [], "torch", "at=99"),
        (Request("tome", keep=0.0), [], "torch", "keep"),
        (Request("tome", keep=0.5), ["x" * 100], "torch", "class names"),
        (Request("tome", keep=0.5), [], "abacus", "abacus"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_the_model_alone(request_, classes, engine, named) -> None:
    here = playground()
    with pytest.raises(TokensieveError) as caught:
        here.look(photo(), request_, classes, engine)
    assert named in str(caught.value)
    assert tokensieve.attachment_of(here.viewer.model) is None


def test_a_page_in_a_frame_is_escaped() -> None:
    framed = records.framed('<script>alert("it\'s")</script>')
    assert "<script>" not in framed
    assert "sandbox=" in framed


def test_the_commands_flags_are_checked(capsys) -> None:
    from tokensieve.cli.main import main

    assert main(["ui", "--port", "0"]) == 2
    assert main(["ui", "--runs", "no/such/folder"]) == 2
    assert main(["ui", "--data", "."]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert "--port 0" in said[0]
    assert "no/such/folder" in said[1]


def test_questions_are_answered_before_and_after() -> None:
    pytest.importorskip("transformers")
    from tokensieve.tasks.playground.vlm import load_asking, sample_scene

    asking = load_asking()
    scene = sample_scene(3)
    answer = asking.ask(scene, "how many objects are there?", Request("divprune", keep=0.25))
    assert answer.tokens_full == 144
    assert answer.tokens < 0.3 * 144
    assert answer.before
    assert [label for label, _ in answer.kept] == ["before the language model: 36"]
    assert 0.0 < answer.saved < 1.0
    whole = asking.ask(scene, "how many objects are there?", Request("divprune", keep=1.0))
    assert whole.after == whole.before
    for wrong in ("", "x" * 400):
        with pytest.raises(OptionError, match="question"):
            asking.ask(scene, wrong, Request("divprune", keep=0.5))
