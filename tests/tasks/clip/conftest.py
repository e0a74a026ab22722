"""A tiny CLIP and a tiny CoCa as open_clip checkpoints, and tiny datasets, made once for all tests of this folder."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tokensieve.cli.main import main

CLASSES = ("red", "green", "blue", "white", "black", "grey")
VISION = {"image_size": 64, "layers": 4, "width": 32, "head_width": 8, "patch_size": 4, "mlp_ratio": 2.0}
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
COCA = {
    "embed_dim": 16,
    "vision_cfg": VISION | {"attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True},
    "text_cfg": TEXT | {"context_length": 76, "embed_cls": True, "output_tokens": True},
    "multimodal_cfg": {"context_length": 76, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
    "custom_text": True,
}


@dataclass(frozen=True)
class Tiny:
    """Names of what the tests run on, and a way to run a command line there."""

    folder: Path

    @property
    def model(self) -> list[str]:
        return ["--model", "tiny-clip", "--pretrained", str(self.folder / "tiny-clip.pt")]

    def data(self, name: str = "colours") -> list[str]:
        return ["--dataset", f"wds/{name}", "--dataset_root", str(self.folder / name), "--batch_size", "8"]

    @property
    def usual(self) -> list[str]:
        return [*self.model, *self.data(), "--quiet"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("clip")
    import open_clip
    import torch

    configs = {
        "tiny-clip": {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT},
        "tiny-coca": COCA,
        "tiny-resnet": {
            "embed_dim": 16,
            "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None},
            "text_cfg": TEXT,
        },
    }
    (folder / "configs").mkdir()
    for name, config in configs.items():
        (folder / "configs" / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / "configs")
    for name in configs:
        torch.manual_seed(0)
        model = open_clip.create_model(name)
        with torch.no_grad():  # patches must differ, and attention be peaked: no selection by ties
            for parameter in model.visual.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)
        torch.save(model.state_dict(), folder / f"{name}.pt")
    webdataset(folder / "colours")
    webdataset(folder / "few", classes=CLASSES[:3])
    webdataset(folder / "broken", spoil=5)
    captions(folder / "captioned")
    crepe(folder / "crepe")
    return Tiny(folder)


def picture(number: int) -> bytes:
    """A 64-pixel picture: a colour of its class, noise, and a square somewhere."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(number)
    base = {0: (220, 30, 30), 1: (30, 220, 30), 2: (30, 30, 220), 3: (240, 240, 240), 4: (9, 9, 9), 5: (128, 128, 128)}
    pixels = np.clip(np.array(base[number % 6]) + draw.normal(0, 25, (64, 64, 3)), 0, 255).astype(np.uint8)
    x, y = draw.integers(0, 40, 2)
    pixels[y : y + 20, x : x + 20] = draw.integers(0, 255, 3)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def _tar(path: Path, samples: list[dict[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for i, sample in enumerate(samples):
            for ending, data in sample.items():
                member = tarfile.TarInfo(f"s{i:04d}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    path.with_name("nshards.txt").write_text("1")


def webdataset(root: Path, classes: tuple[str, ...] = CLASSES, spoil: int | None = None, images: int = 24) -> None:
    for number, split in enumerate(("train", "val", "test")):
        samples = []
        for i in range(images):
            image = b"no picture" if i == spoil else picture(1000 * number + i)
            samples.append({"png": image, "cls": str((1000 * number + i) % 6 % len(classes)).encode()})
        _tar(root / split / "0.tar", samples)
    (root / "classnames.txt").write_text("\n".join(classes))
    (root / "zeroshot_classification_templates.txt").write_text("a {c} picture\n{c}")


def captions(root: Path) -> None:
    samples = [
        {"png": picture(i), "txt": f"a {CLASSES[i % 6]} picture\nnumber {i} with a square".encode()} for i in range(12)
    ]
    _tar(root / "test" / "0.tar", samples)
    (root / "dataset_type.txt").write_text("retrieval")


def crepe(root: Path) -> None:
    """As the benchmark lays SugarCrepe out."""
    (root / "val2017").mkdir(parents=True)
    table: dict[str, Any] = {}
    for i in range(10):
        (root / "val2017" / f"{i}.png").write_bytes(picture(i))
        other = CLASSES[(i + 1) % 6]
        table[str(i)] = {
            "filename": f"{i}.png",
            "caption": f"a {CLASSES[i % 6]} one",
            "negative_caption": f"a {other} one",
        }
    (root / "add_att.json").write_text(json.dumps(table))


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """An empty current folder."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run `tokensieve eval ...` in process and read its one new result."""

    def call(*words: str) -> dict[str, Any]:
        before = set(here.rglob("*.json"))
        assert main(["eval", *words]) == 0, capsys.readouterr().err
        new = set(here.rglob("*.json")) - before
        assert len(new) == 1, new
        found: dict[str, Any] = json.loads(new.pop().read_text())
        return found

    return call
