"""Whatever goes wrong is one line that names it, exit code 2, soon; and nothing is left behind."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from faults.cases import CASES, REPORTS
from helpers.bad_files import write_bad_files
from helpers.tiny_material import tiny_clip, webdataset
from tokensieve.cli.main import COMMANDS, main

LONGEST = 60  # seconds that a machine under load may take for the 20 that are allowed on one that is not


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("faults")
    found = {name: str(path) for name, path in write_bad_files(root / "files").items()}
    webdataset(root / "colours")
    model = f"--model local-dir:{tiny_clip(root / 'clip')} --pretrained ''"
    tiny = f"{model} --quiet"
    data = f"--dataset wds/colours --dataset_root {root / 'colours'} --batch_size 4"
    return found | {"clip": f"{tiny} {data}", "tiny": tiny, "model": model, "data": data}


@contextmanager
def limited(seconds: int = LONGEST) -> Iterator[None]:
    """Raise in whatever takes longer."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def left_in(folder: Path) -> list[str]:
    """Files under a folder, but for locks and the settings that the same command, run again, is compared with."""
    files = (
        path for path in folder.rglob("*") if path.is_file() and not path.name.endswith((".lock", ".held", "settings"))
    )
    return sorted(str(path.relative_to(folder)) for path in files)


@pytest.mark.parametrize(("words", "culprit"), CASES, ids=[words.replace("/", "|")[:100] for words, _ in CASES])
def test_it_is_one_line_that_names_the_culprit(
    words: str, culprit: str, files: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    argv = shlex.split(words.format(**files, out=out))
    with limited():
        code = main(argv)
    said = capfd.readouterr()
    assert code == 2, said
    # but for the bars of clip_benchmark
    lines = [line for line in said.err.splitlines() if line.strip() and "it/s" not in line]
    assert len(lines) == 1, said.err
    assert lines[0].startswith("tokensieve: error: ")
    named = [part in lines[0] for part in culprit.format(**files).split("|")]
    assert any(named), (lines[0], culprit)
    assert "Traceback" not in said.out
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("name", REPORTS)
def test_report_lists_what_it_cannot_read_and_goes_on(
    name: str, files: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    with limited():
        code = main(["report", files["run"], files[name], "--no_pictures", "-o", str(page)])
    said = capfd.readouterr()
    assert code == 0, said
    assert Path(files[name]).name in said.err
    assert len(said.err.splitlines()) == 1
    assert "1 run" in said.out
    assert page.is_file()


def test_there_are_enough_cases() -> None:
    commands = {words.split()[0] for words, _ in CASES}
    assert len(CASES) >= 150
    assert commands >= set(COMMANDS)
