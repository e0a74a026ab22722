"""Two trainings in one folder, and weights that become NaN: what is good is never lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.toy_task import CONFIG, Toy
from tokensieve.cli.main import main
from tokensieve.errors import OptionError, RecordError
from tokensieve.training import fit
from tokensieve.training.checkpoint import checkpoints_in, load_checkpoint, save_checkpoint
from tokensieve.utils.files import only_run
from tokensieve.utils.tensor_files import fill_module, read_tensors, save_tensors

# each training, with -o at a place that another one holds
TRAININGS = {
    "align": ("train align --images 100 -o {place}/a.safetensors", True),
    "select": ("train select --held_out 1 --batch_size 1 --photos {photos} -o {place}/a.safetensors", True),
    "vlm-base": ("train vlm-base -o {place}", False),
    "vlm": ("train vlm -o {place}", False),
    "reid": ("train reid --config {config} -o {place}", False),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_second_training_in_one_place_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from helpers.bad_files import picture

    words, is_file = TRAININGS[name]
    (tmp_path / "photos").mkdir()
    for number in range(4):
        (tmp_path / "photos" / f"{number}.png").write_bytes(picture(number))
    config = tmp_path / "reid.yml"
    if name == "reid":
        config.write_text("{}")
    place = tmp_path / "place"
    with only_run(place / "a.safetensors" if is_file else place, file=is_file):
        before = sorted(place.rglob("*"))
        code = main(words.format(place=place, photos=tmp_path / "photos", config=config).split())
        assert sorted(place.rglob("*")) == before
    lines = capsys.readouterr().err.splitlines()
    assert (code, len(lines)) == (2, 1), lines
    assert "in use by another training" in lines[0]
    assert str(place) in lines[0]


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    """Another process holds it, is killed, and leaves nothing that must be cleared."""
    code = (
        "import sys, time; from tokensieve.utils.files import only_run\n"
        "with only_run(sys.argv[1]): print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(OptionError, match="in use by another training"):
            fit(Toy(), CONFIG, tmp_path)
        assert not checkpoints_in(tmp_path / "checkpoints")
    finally:
        child.kill()
        child.wait()
    with only_run(tmp_path):
        pass


def test_a_lock_that_is_held_here_is_free_afterwards(tmp_path: Path) -> None:
    with only_run(tmp_path), pytest.raises(OptionError), only_run(tmp_path):
        pass
    with pytest.raises(KeyError), only_run(tmp_path):
        raise KeyError
    with only_run(tmp_path):
        pass


class Spoiled(Toy):
    """Its weights, gradient or loss become NaN at step 12, two steps after a checkpoint."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "gradient":
            self.net[0].weight.register_hook(lambda grad: grad * float("nan") if self.at == 12 else grad)

    def step(self, batch, step):  # type: ignore[no-untyped-def]
        self.at = step
        found = super().step(batch, step)
        if step == 12 and self.how == "loss":
            found.losses["net"].data.fill_(float("inf"))
        if step == 14 and self.how == "weights":  # by something that no loss shows in this step
            self.net[3].bias.data.fill_(float("nan"))
        return found


@pytest.mark.parametrize(("how", "said"), [
    ("loss", "loss of net is inf at step 12"), ("gradient", "norm/net is nan at step 12"),
    ("weights", "net has NaN or infinite values after step 15"),
])  # fmt: skip
def test_a_training_that_diverges_stops_and_keeps_the_last_good_checkpoint(how: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=f"{said}.*lower the learning rate.*step-00000010"):
        fit(Spoiled(how), CONFIG, tmp_path)
    assert checkpoints_in(tmp_path / "checkpoints")[-1].name == "step-00000010.safetensors"
    for path in (*checkpoints_in(tmp_path / "checkpoints"), tmp_path / "best.safetensors"):
        read_tensors(path)  # finite, all of it
    whole = fit(Toy(), CONFIG, tmp_path / "whole")
    assert fit(Toy(), CONFIG, tmp_path, resume=True) == whole


def test_a_checkpoint_with_nan_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 3, {"modules": {"net": {"w": torch.tensor([1.0, float("nan")])}}})
    with pytest.raises(RecordError, match=r"step-00000003.*modules/net/w has NaN"):
        load_checkpoint(path)


def test_a_module_takes_only_tensors_that_fit(tmp_path: Path) -> None:
    net = nn.Linear(2, 3)
    state = dict(net.state_dict())
    for change, said in (
        ({"weight": state["weight"]}, "bias is missing"),
        ({**state, "more": torch.zeros(1)}, "more is not part of the model"),
        ({**state, "bias": torch.zeros(2)}, r"bias has shape \(2,\), expected \(3,\)"),
    ):
        save_tensors(tmp_path / "a.safetensors", change, {})
        tensors, _ = read_tensors(tmp_path / "a.safetensors")
        with pytest.raises(RecordError, match=said):
            fill_module(net, tensors, "a.safetensors")
        assert all(torch.equal(value, net.state_dict()[name]) for name, value in state.items())
