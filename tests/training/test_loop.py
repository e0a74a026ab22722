"""The loop: bit-equal resume, also after a kill; schedules, several optimisers; checkpoints are whole or refused."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.toy_task import CONFIG, Toy
from tokensieve.errors import MissingMaterialError, OptionError, RecordError
from tokensieve.training import FitConfig, Step, fit, warmup_cosine
from tokensieve.training.checkpoint import checkpoints_in, load_checkpoint, save_checkpoint
from tokensieve.training.loop import seed_of_step

SCRIPT = Path(__file__).parents[1] / "helpers" / "toy_task.py"
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


class Stop(Exception):  # noqa: N818
    pass


def stop_at(step):
    def tick(done):
        if done == step:
            raise Stop

    return tick


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    task = Toy()
    return fit(task, CONFIG, folder), task, folder


def test_it_learns_and_leaves_what_it_says(whole):
    result, task, folder = whole
    assert result.step == CONFIG.steps == len(task.seen)
    assert sum(x["net"] for x in result.losses[-5:]) < sum(x["net"] for x in result.losses[:5])
    assert [v["step"] for v in result.validations] == [8, 16, 24]
    best = max(result.validations, key=lambda v: v["score"])
    assert (result.best_step, result.best_score) == (best["step"], best["score"])
    assert [p.name for p in checkpoints_in(folder / "checkpoints")] == [
        "step-00000020.safetensors",
        "step-00000024.safetensors",
    ]
    torch.testing.assert_close(load_file(folder / "last.safetensors")["0.weight"], task.net[0].weight, rtol=0, atol=0)
    assert list((folder / "tensorboard").iterdir())


def test_what_is_untrained_may_be_the_best(tmp_path):
    """Evaluated and saved before the first step, so that a run torn off in its first steps goes on too."""
    config = replace(CONFIG, steps=12, validate_first=True)

    class Fails(Toy):
        scores = (0.5, float("nan"), 0.25)

        def validate(self):
            found = super().validate()
            return replace(found, score=self.scores[-(-len(self.seen) // 8)])

    task = Fails()
    before = task.net[0].weight.clone()
    with pytest.raises(Stop):
        fit(task, config, tmp_path / "torn", tick=stop_at(2), best=tmp_path / "chosen.safetensors")
    assert [p.name for p in checkpoints_in(tmp_path / "torn" / "checkpoints")] == ["step-00000000.safetensors"]
    assert torch.equal(load_file(tmp_path / "chosen.safetensors")["0.weight"], before)
    assert not (tmp_path / "torn" / "best.safetensors").exists()
    result = fit(Fails(), config, tmp_path / "torn", resume=True, best=tmp_path / "chosen.safetensors")
    assert [v["step"] for v in result.validations] == [0, 8, 12]
    assert (result.best_step, result.best_score) == (0, 0.5)  # a score of NaN never wins
    assert torch.equal(load_file(tmp_path / "chosen.safetensors")["0.weight"], before)
    whole = fit(Fails(), config, tmp_path / "whole")
    assert whole.losses == result.losses


def test_rates_warm_up_to_the_target_and_never_above_it(whole):
    _, task, _ = whole
    net, critic = zip(*task.seen, strict=True)
    assert net[:4] == pytest.approx([0.0125, 0.025, 0.0375, 0.05])
    assert max(net) == net[3] == pytest.approx(0.05)
    assert list(net[4:]) == sorted(net[4:], reverse=True)
    assert critic == pytest.approx([x / 5 for x in net])
    assert net[14] == pytest.approx(0.05 * 0.5 * (1 + math.cos(math.pi * 10 / 20)))


@pytest.mark.parametrize("stop", [6, 8, 10])
def test_a_resumed_run_is_bit_equal(whole, tmp_path, stop):
    """10: just after a checkpoint; 8: after a validation that no checkpoint knows of."""
    result, task, _ = whole
    with pytest.raises(Stop):
        fit(Toy(), CONFIG, tmp_path, tick=stop_at(stop))
    torch.manual_seed(99)  # what a new process would have is something else too
    again = Toy()
    resumed = fit(again, CONFIG, tmp_path, resume=True)
    assert len(again.seen) == CONFIG.steps - stop // 5 * 5
    assert resumed == result
    for mine, theirs in zip(again.net.state_dict().values(), task.net.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_killed_process_goes_on_bit_equal(whole, tmp_path):
    result, _, _ = whole
    child = subprocess.Popen([sys.executable, str(SCRIPT), str(tmp_path)], stdout=subprocess.PIPE, env=ENV, text=True)
    for line in child.stdout:
        if int(line) == 12:
            child.send_signal(signal.SIGKILL)
            break
    assert child.wait() == -signal.SIGKILL
    assert checkpoints_in(tmp_path / "checkpoints")
    assert fit(Toy(), CONFIG, tmp_path, resume=True) == result


def test_a_finished_run_resumes_to_itself(whole):
    result, _, folder = whole
    (folder / "last.safetensors").unlink()  # killed just before its last act
    task = Toy()
    assert fit(task, CONFIG, folder, resume=True) == result
    assert task.seen == []
    assert (folder / "last.safetensors").is_file()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_half_written_checkpoints_are_never_seen(whole, tmp_path):
    result, _, _ = whole
    with pytest.raises(Stop):
        fit(Toy(), CONFIG, tmp_path, tick=stop_at(11))
    part = tmp_path / "checkpoints" / ".step-00000011.safetensors.77.part"
    part.write_bytes(b"half")
    assert fit(Toy(), CONFIG, tmp_path, resume=True) == result
    assert not part.exists()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_checkpoint_is_refused_by_name(tmp_path, share):
    with pytest.raises(Stop):
        fit(Toy(), CONFIG, tmp_path, tick=stop_at(11))
    last = checkpoints_in(tmp_path / "checkpoints")[-1]
    data = last.read_bytes()
    last.write_bytes(data[: int(share * len(data))])
    with pytest.raises(RecordError, match=f"{last.name}: truncated.*delete it"):
        fit(Toy(), CONFIG, tmp_path, resume=True)


def test_state_comes_back_as_it_was(tmp_path):
    shared = torch.arange(6.0).view(2, 3)
    state = {"a": [1, 2.5, None, True, "x"], "t": (1, (2, 3)), 3: {"deep": shared, "tied": shared, "view": shared.T},
             "scalar": torch.tensor(4), "inf": math.inf, "empty": {}}  # fmt: skip
    path = save_checkpoint(tmp_path, 7, state)
    found = load_checkpoint(path)
    assert found["a"] == state["a"]
    assert found["t"] == (1, (2, 3))
    assert found["inf"] == math.inf
    assert found["empty"] == {}
    assert torch.equal(found[3]["view"], shared.T)
    assert torch.equal(found[3]["tied"], shared)
    assert found["scalar"].shape == ()
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000007.safetensors"]
    with pytest.raises(TypeError, match="cannot hold set"):
        save_checkpoint(tmp_path, 8, {"x": {1, 2}})
    with pytest.raises(MissingMaterialError, match="no such file"):
        load_checkpoint(tmp_path / "none")


def test_another_safetensors_file_is_no_checkpoint(whole):
    _, _, folder = whole
    with pytest.raises(RecordError, match="has the format 'toy'"):
        load_checkpoint(folder / "last.safetensors")


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_other_settings_cannot_be_resumed_with(whole):
    _, _, folder = whole
    with pytest.raises(OptionError, match="steps was 24, is 30"):
        fit(Toy(), replace(CONFIG, steps=30), folder, resume=True)


def test_a_folder_with_a_run_is_not_overwritten(whole):
    _, _, folder = whole
    with pytest.raises(OptionError, match="--resume"):
        fit(Toy(), CONFIG, folder)


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(MissingMaterialError, match="no checkpoint to go on from"):
        fit(Toy(), CONFIG, tmp_path, resume=True)


def test_a_loss_that_explodes_ends_the_run(tmp_path):
    with pytest.raises(OptionError, match=r"loss of net is (inf|nan) at step"):
        fit(Toy(lr=1e30), replace(CONFIG, clip=None), tmp_path)


def test_a_loss_without_an_optimiser_is_a_mistake(tmp_path):
    task = Toy()
    task.step = lambda batch, step: Step({"nett": task.net(batch["x"]).sum()})
    with pytest.raises(OptionError, match="no optimiser is called nett"):
        fit(task, CONFIG, tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"warmup": 30}, {"clip": -1.0}, {"precision": "fp8"}, {"device": "tpu"}]
)
def test_settings_out_of_range(wrong):
    with pytest.raises(OptionError):
        replace(CONFIG, **wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("wrong", [{"precision": "bf16"}, {"device": "cuda"}])
def test_gpu_settings_without_a_gpu(tmp_path, wrong):
    with pytest.raises(OptionError, match="GPU"):
        fit(Toy(), replace(CONFIG, **wrong), tmp_path)


# -- optimisers -------------------------------------------------------------------------------------------------------


def test_each_loss_reaches_its_own_parameters_alone(tmp_path):
    """The same first step by hand: two backward passes on two copies, clipped, one step each."""
    task, by_hand = Toy(), Toy()
    config = FitConfig(steps=1, clip=0.05, seed=3)
    fit(task, config, tmp_path)
    torch.manual_seed(seed_of_step(3, 0))
    found = by_hand.step(next(by_hand.batches(0)), 0)
    for name, loss in found.losses.items():
        parameters = list(by_hand.modules[name].parameters())
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters, retain_graph=True), strict=True):
            p.grad = g
        norm = sum(float(p.grad.square().sum()) for p in parameters) ** 0.5
        assert norm > 0.05
        for p in parameters:
            p.grad *= 0.05 / (norm + 1e-6)
    for optimiser in by_hand.optimisers.values():
        optimiser.step()
    for name, module in task.modules.items():
        for mine, wanted in zip(module.parameters(), by_hand.modules[name].parameters(), strict=True):
            torch.testing.assert_close(mine, wanted)


def test_the_schedule_ends_at_its_floor():
    assert warmup_cosine(0, 10, 0) == 1.0
    assert warmup_cosine(9, 10, 0, floor=0.1) > 0.1
    assert warmup_cosine(10, 10, 0, floor=0.1) == pytest.approx(0.1)
    with pytest.raises(OptionError, match="does not fit"):
        warmup_cosine(0, 5, 6)
