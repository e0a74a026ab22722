"""From nothing to a method that keeps the contract, in two commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tokensieve.cli.main import main

BROKEN = """
from dataclasses import dataclass
import torch, tokensieve
from tokensieve import Reduction

@dataclass(kw_only=True)
class Careless(tokensieve.Method):
    def reduce(self, view, keep):
        return Reduction(keep=torch.arange(keep + 1).expand(view.batch, -1))
"""


def test_two_commands_make_a_method_that_passes(tmp_path: Path, capsys) -> None:
    assert main(["new", "method", "largest_norm", "-o", str(tmp_path)]) == 0
    path = tmp_path / "largest_norm.py"
    assert str(path) in capsys.readouterr().out
    assert main(["check", str(path)]) == 0
    said = capsys.readouterr().out
    assert "LargestNorm" in said
    assert "0 broken" in said
    assert int(said.rsplit("\n", 2)[-2].split()[0]) > 10


@pytest.mark.slow
def test_the_written_test_passes_and_notices_a_change(tmp_path: Path) -> None:
    main(["new", "method", "largest_norm", "-o", str(tmp_path)])
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "naive", "test_largest_norm.py"]
    assert subprocess.run(words, cwd=tmp_path, check=False, capture_output=True).returncode == 0
    path = tmp_path / "largest_norm.py"
    path.write_text(path.read_text().replace("view.x.norm(dim=-1)", "-view.x.norm(dim=-1)"))
    assert subprocess.run(words, cwd=tmp_path, check=False, capture_output=True).returncode == 1


def test_a_method_that_breaks_the_contract_is_told(tmp_path: Path, capsys) -> None:
    path = tmp_path / "careless.py"
    path.write_text(BROKEN)
    assert main(["check", f"{path}:Careless"]) == 1
    said = capsys.readouterr().out
    assert "broken" in said
    assert "Careless breaks the rule" in said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["new", "method", "Largest-Norm"], "Largest-Norm"),
        (["new", "methods", "x"], "Did you mean"),
        (["new", "method", "class"], "class"),
        (["check", "nowhere.py"], "nowhere.py"),
        (["check", "tom"], "tom"),
        (["check", "tome", "--models", "openclop"], "openclop"),
        (["check", "tome", "radius=2"], "radius"),
    ],
)
def test_wrong_input_is_one_line(words, named, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_other_files_are_told(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("x = 1\n")
    assert main(["new", "method", "mine"]) == 2
    assert Path("mine.py").read_text() == "x = 1\n"
    assert not Path("test_mine.py").exists()
    assert main(["check", "mine.py"]) == 2
    Path("mine.py").write_text("import nothing_like_this\n")
    assert main(["check", "mine.py"]) == 2
    said = capsys.readouterr().err
    assert "no class in it" in said
    assert "nothing_like_this" in said
