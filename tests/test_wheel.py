"""The wheel: complete, small, and useful with the core dependencies alone."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
# what `pip install torch numpy pillow rich safetensors PyYAML` brings, torch's own dependencies included
CORE = ("torch", "torchgen", "functorch", "numpy", "PIL", "rich", "safetensors", "yaml", "typing_extensions", "sympy",
        "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock", "pygments", "markdown_it",
        "mdurl")  # fmt: skip
DATA = (
    "tokensieve/py.typed",
    "tokensieve/report/templates/page.html.j2",
    "tokensieve/methods/trained/data/vit-s14.safetensors",
    "tokensieve/tasks/clip/data/vit-s14-minilm.safetensors",
    "tokensieve/tasks/vlm/data/small-llava/model.safetensors",
)
ATTACH = """
import torch, tokensieve
from torch import nn
from tokensieve.methods.base import Selector
from tokensieve.core.view import TokenView
view = TokenView.of(torch.randn(2, 17, 32), heads=4)
kept = tokensieve.make_method("sieve").reduce(view, 5).keep
assert kept.shape == (2, 5), kept.shape
from tokensieve.testing import tiny_models
print("works")
"""
LACKING = {
    "bench": ["bench", "--quick"],
    "demo": ["demo", "-o", "out"],
    "eval": ["eval"],
    "eval reid": ["eval", "reid", "--checkpoint", "none.safetensors"],
    "eval vlm": ["eval", "vlm"],
    "extract": ["extract", "clip", "photos", "-o", "features"],
    "plan": ["plan", "--model", "ViT-B-16", "--images", "1e6", "--method", "sieve"],
    "search": ["search", "clip", "--trials", "2"],
    "sweep": ["sweep", "--methods", "sieve", "--keep", "0.5", "-o", "out"],
    "train align": ["train", "align"],
    "train reid": ["train", "reid", "--config", "none.yml"],
    "train select": ["train", "select"],
    "train vlm": ["train", "vlm"],
    "train vlm-base": ["train", "vlm-base"],
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree, out = tmp_path_factory.mktemp("tree") / "project", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(tree)],
        check=True,
    )
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and the core dependencies, and nothing else: its interpreter."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home / "venv", with_pip=False, symlinks=True)
    site = next((home / "venv" / "lib").glob("python3*")) / "site-packages"
    for name in CORE:
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        assert spec.origin is not None, name
        origin = Path(spec.origin)
        place = origin.parent if origin.name == "__init__.py" else origin
        (site / place.name).symlink_to(place)
        libs = place.parent / f"{name}.libs"  # numpy's and Pillow's shared libraries stand beside them
        if libs.is_dir():
            (site / libs.name).symlink_to(libs)
    for libs in Path(importlib.util.find_spec("numpy").origin).parents[1].glob("pillow.libs"):
        (site / libs.name).symlink_to(libs)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return home / "venv" / "bin" / "python"


def _run(python: Path, where: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([str(python), *words], cwd=where, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_wheel_has_its_data_and_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < 15e6
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert set(DATA) <= names
    assert not any(name.startswith("tests") for name in names)


@pytest.mark.slow
def test_the_core_alone_reduces_tokens(bare: Path, tmp_path: Path) -> None:
    done = _run(bare, tmp_path, "-c", ATTACH)
    assert done.stdout == "works\n", done.stderr
    listed = _run(bare, tmp_path, "-m", "tokensieve.cli", "methods")
    assert listed.returncode == 0, listed.stderr
    assert "sieve" in listed.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", LACKING)
def test_a_command_without_its_extra_says_which(command: str, bare: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "photo.png")
    done = _run(bare, tmp_path, "-m", "tokensieve.cli", *LACKING[command])
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().count("\n") == 0, done.stderr
    assert 'pip install "tokensieve[' in done.stderr
    left = [path.name for path in tmp_path.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    assert left == ["photo.png"]
