"""What an optional package's absence says: one line, the extra that brings it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tokensieve.cli import main as cli

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
# where a module's name is not its package's
PACKAGES = {"sklearn": "scikit-learn", "open_clip": "open_clip_torch", "clip_benchmark": "clip-benchmark",
            "pytorch_metric_learning": "pytorch-metric-learning"}  # fmt: skip
IMPLIED = {"torchvision": "timm", "markupsafe": "jinja2", "PIL": "pillow"}  # comes along with


@pytest.mark.parametrize(("module", "extra"), cli.EXTRAS.items())
def test_an_extra_brings_what_its_line_promises(module: str, extra: str) -> None:
    wanted = IMPLIED.get(module, PACKAGES.get(module, module))
    listed = PROJECT["optional-dependencies"][extra]
    names = {re.split(r"[<>=!\[;]", line)[0] for line in listed}
    assert wanted in names


def test_core_dependencies_are_few() -> None:
    names = {re.split(r"[<>=]", line)[0].lower() for line in PROJECT["dependencies"]}
    assert names == {"torch", "filelock", "numpy", "pillow", "rich", "safetensors", "pyyaml"}


@pytest.mark.parametrize("module", ["timm", "transformers", "sklearn"])
def test_a_missing_package_is_one_line(module: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def lacking(argv: list[str]) -> int:
        raise ModuleNotFoundError(f"No module named '{module}.sub'", name=f"{module}.sub")

    monkeypatch.setattr(cli, "_run", lacking)
    assert cli.main(["eval"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert module in said
    assert f'pip install "tokensieve[{cli.EXTRAS[module]}]"' in said
