"""`tokensieve train reid` on a small synthetic set: plan, training, resume after a kill, and what goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tokensieve.cli.main import main
from tokensieve.errors import DataError, OptionError
from tokensieve.tasks.reid.config import parse_config
from tokensieve.tasks.reid.model import load_checkpoint
from tokensieve.tasks.reid.train import build_task, fit_config, plan, train_reid
from tokensieve.training.checkpoint import checkpoints_in

SMALL = ["MODEL.PATCH=8", "MODEL.WIDTH=24", "MODEL.DEPTH=2", "MODEL.HEADS=2", "INPUT.SIZE_TRAIN=[32, 16]",
         "SOLVER.IMS_PER_BATCH=8", "SOLVER.MAX_STEPS=12", "SOLVER.WARMUP_STEPS=2", "SOLVER.EVAL_PERIOD=6",
         "SOLVER.CHECKPOINT_PERIOD=4", "SOLVER.BACKBONE_LR=1e-3", "DATASETS.VAL_SHARE=0.3"]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reid") / "set"
    flags = ["--identities", "10", "--cameras", "2", "--images", "2", "--test_share", "0.3"]
    assert main(["data", "reid-synthetic", *flags, "-o", str(folder)]) == 0
    return folder


@pytest.fixture
def small(data, tmp_path):
    def config(*more, folder="run"):
        pairs = [*SMALL, f"DATASETS.ROOT_DIR={data}", f"OUTPUT_DIR={tmp_path / folder}", *more]
        return parse_config({}, pairs)

    return config


def yaml_file(path: Path) -> str:
    path.write_text("MODEL:\n  USE_SDTPS: True\n")
    return str(path)


def test_the_command_trains_and_its_model_loads(small, data, tmp_path, capsys):
    line = ["train", "reid", "--config", yaml_file(tmp_path / "c.yml"), *SMALL, f"DATASETS.ROOT_DIR={data}"]
    assert main([*line, "MODEL.USE_SDTPS=False", "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "step 6: mAP" in said
    assert "best at step" in said
    model, config = load_checkpoint(tmp_path / "out" / "best.safetensors")
    assert config.MODEL.USE_SDTPS is False
    assert model.modalities == ("rgb", "nir", "tir")
    assert model.compressor is None


def test_dry_run_prints_the_plan_and_writes_nothing(data, tmp_path, capsys):
    line = ["train", "reid", "--config", yaml_file(tmp_path / "c.yml"), *SMALL, f"DATASETS.ROOT_DIR={data}"]
    assert main([*line, "--dry-run", "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "tokens:" in said
    assert "8 (4 x 2) -> 2 of each modality" in said
    assert "12 of 8 samples (2 identities x 4 images)" in said
    assert "4 to 4 (median 4) images each" in said
    assert not (tmp_path / "out").exists()


def test_the_same_settings_give_the_same_run_and_it_learns(small):
    config = small("SOLVER.MAX_STEPS=40", "SOLVER.BASE_LR=3e-3", "SOLVER.BACKBONE_LR=3e-3", "SOLVER.EVAL_PERIOD=40")
    result = train_reid(config)
    assert sum(x["reid"] for x in result.losses[-8:]) < 0.9 * sum(x["reid"] for x in result.losses[4:12])
    short = train_reid(small(folder="a")).losses
    assert train_reid(small(folder="b")).losses == short
    assert train_reid(small("SOLVER.SEED=1", folder="c")).losses != short


@pytest.mark.parametrize("more", [["MODEL.SDTPS_USE_GUMBEL=True", "MODEL.SDTPS_AT=0"], ["MODEL.SELECTION=random"]])
def test_a_resumed_run_is_bit_equal(small, more):
    class Stop(Exception):  # noqa: N818
        pass

    def stop(step):
        if step == 7:  # in the middle of an epoch, after a validation, three steps past the checkpoint
            raise Stop

    whole = train_reid(small(*more, folder="whole"))
    with pytest.raises(Stop):
        train_reid(small(*more), tick=stop)
    torch.manual_seed(99)
    assert train_reid(small(*more), resume=True) == whole
    mine, _ = load_checkpoint(Path(small(*more).OUTPUT_DIR) / "last.safetensors")
    wanted, _ = load_checkpoint(Path(small(*more, folder="whole").OUTPUT_DIR) / "last.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(mine.state_dict().values(), wanted.state_dict().values(), strict=True))


def test_a_killed_command_goes_on_bit_equal(small, data, tmp_path):
    often = ["SOLVER.MAX_STEPS=20", "SOLVER.CHECKPOINT_PERIOD=3"]
    config = small(*often, folder="killed")
    line = [sys.executable, "-m", "tokensieve.cli", "train", "reid", "--config", yaml_file(tmp_path / "c.yml"), *SMALL,
            *often, f"DATASETS.ROOT_DIR={data}", "-o", config.OUTPUT_DIR]  # fmt: skip
    child = subprocess.Popen(line, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 240
    while not checkpoints_in(Path(config.OUTPUT_DIR) / "checkpoints") and time.monotonic() < until:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    torch.set_num_threads(1)  # as the killed one: sums of several threads round otherwise
    resumed = train_reid(config, resume=True)
    assert resumed == train_reid(small(*often, folder="whole"))


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_another_configuration_cannot_be_resumed_with(small):
    train_reid(small())
    with pytest.raises(OptionError, match=r"other settings: config\.MODEL\.SDTPS_BETA was 0\.25, is 0\.1$"):
        train_reid(small("MODEL.SDTPS_BETA=0.1"), resume=True)
    train_reid(small("DATALOADER.NUM_WORKERS=1"), resume=True)  # changes nothing that comes out


@pytest.mark.parametrize(
    ("more", "message"),
    [(["DATASETS.ROOT_DIR=nowhere"], "nowhere: there is no such folder"), (["MODEL.USE_SDPTS=1"], "Did you mean"),
     (["SOLVER.IMS_PER_BATCH=64"], "wants 16 identities"), (["MODEL.PATCH=7"], "patch size 7"),
     (["MODEL.TRANSFORMER_TYPE=ViT-B-16", "MODEL.PRETRAIN_PATH=none.pt"], r"none\.pt.*no such file"),
     (["--resume"], "no checkpoint to go on from"), (["--rezume"], "--resume")],
)  # fmt: skip
def test_mistakes_are_one_line_and_code_2(data, tmp_path, capsys, more, message):
    import re

    line = ["train", "reid", "--config", yaml_file(tmp_path / "c.yml"), *SMALL, f"DATASETS.ROOT_DIR={data}"]
    assert main([*line, "-o", str(tmp_path / "out"), *more]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said)
    assert said.count("\n") == 1


def test_a_broken_set_is_refused_before_training_and_can_be_skipped(small, data, tmp_path):
    import shutil

    shutil.copytree(data, tmp_path / "broken")
    file = next((tmp_path / "broken" / "train_171" / "NI").iterdir())
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(DataError, match=file.name):
        build_task(small(f"DATASETS.ROOT_DIR={tmp_path / 'broken'}"))
    task = build_task(small(f"DATASETS.ROOT_DIR={tmp_path / 'broken'}", "DATASETS.SKIP_BROKEN=True"))
    assert str(plan(task))


def test_validation_identities_are_not_trained_on(small):
    task = build_task(small())
    trained = {sample.pid for sample in task.images.samples}
    held = {sample.pid for sample in task.val_gallery}
    tested = {sample.pid for sample in [*task.data.query, *task.data.gallery]}
    assert not trained & held
    assert not (trained | held) & tested
    assert task.model.classes == len(trained)
    assert fit_config(small()).validate_every == 6
