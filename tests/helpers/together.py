"""The four trainings at toy size, for test_processes.py: whole, torn off and resumed, in one process or in several.

python together.py FOLDER      as one of several processes, in a folder that `prepare` has filled
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tokensieve.training.distributed import (
    average_gradients,
    average_numbers,
    from_first,
    gather_in_turn,
    gather_with_gradient,
    join,
    leave,
    own_part,
    own_share,
    rank,
    shares,
    world_size,
)

REID = ["MODEL.PATCH=8", "MODEL.WIDTH=24", "MODEL.DEPTH=2", "MODEL.HEADS=2", "INPUT.SIZE_TRAIN=[32, 16]",
        "SOLVER.IMS_PER_BATCH=8", "SOLVER.MAX_STEPS=9", "SOLVER.WARMUP_STEPS=2", "SOLVER.EVAL_PERIOD=5",
        "SOLVER.CHECKPOINT_PERIOD=3", "SOLVER.BACKBONE_LR=1e-3", "DATASETS.VAL_SHARE=0.4", "TEST.IMS_PER_BATCH=4",
        "MODEL.SDTPS_USE_GUMBEL=True"]  # fmt: skip
VLM = ["batch_size=4", "questions=24", "val_questions=40", "eval_every=3", "checkpoint_every=2", "pruner_d_internal=16",
       "pruning_layers=[1]", "warmup_steps=1", "disc_reinit_prob=0.3"]  # fmt: skip


class Stop(Exception):  # noqa: N818
    """Interrupts a training."""


def _ticker(stop):
    def tick(done):
        if done == stop:
            raise Stop

    return tick


def prepare(root: Path) -> None:
    """Data and models on disk."""
    from tokensieve.cli.main import main
    from tokensieve.tasks.vlm.base import save_small_llava
    from tokensieve.tasks.vlm.processor import build_processor
    from tokensieve.tasks.vlm.small import SmallSizes, build_small_llava

    flags = ["--identities", "10", "--cameras", "2", "--images", "2", "--test_share", "0.2"]
    assert main(["data", "reid-synthetic", *flags, "-o", str(root / "reid")]) == 0
    processor = build_processor()
    sizes = SmallSizes(width=32, heads=2, vision_layers=3, text_layers=2, vision_mlp=48, text_mlp=48)
    save_small_llava(build_small_llava(sizes, processor.tokenizer, seed=1), processor, root / "llava")


def reid(root: Path, folder: Path, resume: bool = False, stop: int | None = None) -> dict[str, Any]:
    from tokensieve.tasks.reid.config import parse_config
    from tokensieve.tasks.reid.train import train_reid

    config = parse_config({}, [*REID, f"DATASETS.ROOT_DIR={root / 'reid'}", f"OUTPUT_DIR={folder}"])
    result = train_reid(config, resume=resume, tick=_ticker(stop))
    return {"losses": result.losses, "validations": result.validations}


def vlm(root: Path, folder: Path, resume: bool = False, stop: int | None = None) -> dict[str, Any]:
    from tokensieve.tasks.vlm.config import SMALL, parse_config
    from tokensieve.tasks.vlm.train import train_vlm

    config = parse_config(SMALL, [*VLM, f"name={root / 'llava'}", f"output_dir={folder}"])
    result = train_vlm(config, resume=resume, tick=_ticker(stop))
    return {"losses": result.losses, "validations": result.validations}


def select(root: Path, folder: Path, resume: bool = False, stop: int | None = None) -> dict[str, Any]:
    from tokensieve.tasks.clip.select import Photos, SelectConfig, Subject, train_select
    from tokensieve.testing import tiny_model

    torch.manual_seed(0)  # the model is drawn
    tiny = tiny_model("openclip")
    classes = F.normalize(torch.randn(3, 16, generator=torch.Generator().manual_seed(7)), dim=-1)
    subject = Subject(tiny.model, lambda x: tiny.feature(tiny.model, x), "tiny", classes, scale=5.0)
    photos = Photos(torch.randn(30, 3, 48, 48, generator=torch.Generator().manual_seed(1)).numpy(), torch.as_tensor)
    config = SelectConfig(held_out=9, steps=6, batch_size=4, keep=(18, 9), every=2, kl=0.5, lr=0.02)
    found, losses = train_select(subject, photos, config, folder / "a.safetensors", resume=resume, tick=_ticker(stop))
    return {"losses": losses, "validations": [{"loss": j.loss, "cosine": j.cosine} for j in found]}


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Module()
        self.visual.proj = nn.Parameter(torch.zeros(12, 6))
        self.text = nn.Module()
        self.text.proj = nn.Linear(8, 6, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(0.0))


def align(root: Path, folder: Path, resume: bool = False, stop: int | None = None) -> dict[str, Any]:
    """365 images to train on, 64 a step: the last batch of an epoch has 45, which two processes cannot halve."""
    from tokensieve.tasks.clip import align as task

    g = torch.Generator().manual_seed(1)
    centres, words = torch.randn(4, 12, generator=g), torch.randn(4, 8, generator=g)
    owner, text_owner = torch.arange(405) % 4, torch.arange(12) % 4
    features = centres[owner] + 0.6 * torch.randn(405, 12, generator=g)
    text = words[text_owner] + 0.1 * torch.randn(12, 8, generator=g)
    config = task.AlignConfig(images=405, epochs=3, batch_size=64, lr=1e-2)
    towers = task.AlignTask(Towers(), features, owner, text, text_owner, config)
    result = task.fit_projections(towers, folder / "a.state", resume, tick=_ticker(stop))
    return {
        "losses": list(result.losses),
        "validations": [{"accuracy": result.held_out_accuracy, "epoch": result.epoch}],
    }


# name -> the training, and after how many steps it is torn off
TRAININGS = {"reid": (reid, 7), "vlm": (vlm, 5), "select": (select, 5), "align": (align, 13)}


def torn(root: Path, name: str, folder: Path) -> None:
    training, stop = TRAININGS[name]
    try:
        training(root, folder, stop=stop)
    except Stop:
        return
    raise AssertionError(f"{name} was not torn off")


def _agree() -> None:
    """The pieces, each against what one process would do."""
    assert world_size() == 2
    whole = list(range(7))
    assert gather_in_turn(whole[rank() :: 2]) == whole
    assert gather_in_turn([3] if rank() == 0 else []) == [3]
    assert (shares(7), list(own_part(whole))) == ([4, 3], whole[:4] if rank() == 0 else whole[4:])
    assert from_first(rank()) == 0
    assert average_numbers({"a": rank(), "b": torch.tensor(3.0)}) == {"a": 0.5, "b": 3.0}
    values = torch.tensor([1.0, 2.0, 6.0])[: 1 if rank() == 0 else 3]  # all together: 1, 1, 2, 6
    assert average_numbers({"mean": own_share(len(values)) * values.mean()})["mean"] == 2.5
    rows = torch.arange(14.0).view(7, 2).sin()
    weight = torch.tensor([[1.0], [2.0]], requires_grad=True)
    (gather_with_gradient(rows[own_part(whole)] @ weight, shares(7)).square().sum() ** 2).backward()
    average_gradients([weight])
    alone = torch.tensor([[1.0], [2.0]], requires_grad=True)
    ((rows @ alone).square().sum() ** 2).backward()
    torch.testing.assert_close(weight.grad, alone.grad)
    some, none = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    some.grad = torch.full((2,), 4.0) if rank() == 0 else None
    average_gradients([some, none])
    assert some.grad is not None
    assert some.grad.tolist() == [2.0, 2.0]
    assert none.grad is None


def process(number: int, port: str, base: Path, start: Any) -> None:
    """One of two processes: waits for `start`, then trains all of them, whole, resumed and torn off."""
    torch.set_num_threads(1)
    assert start.wait(600)  # nothing came: the tests were ended
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": port}  # fmt: skip
    join()
    _agree()
    found: dict[str, Any] = {}
    for name, (training, _) in TRAININGS.items():
        found[name] = {"whole": training(base, base / "two" / name)}
        found[name]["1 -> 2"] = training(base, base / "from-one" / name, resume=True)
        torn(base, name, base / "from-two" / name)
    if rank() == 0:
        (base / "found.json").write_text(json.dumps(found))
    assert _threads_of_gloo()
    leave()
    assert not _threads_of_gloo()  # one that is left may abort the process when Python ends


def _threads_of_gloo() -> list[str]:
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]
