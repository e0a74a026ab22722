"""On a full disk a command says so in one line, leaves nothing half-written, and keeps what was there before.

No file may grow beyond a limit here: every writer, also those of libraries, gets the system's error in the middle.
"""

from __future__ import annotations

import json
import resource
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from helpers.bad_files import picture, tar
from helpers.eval_runs import make_run
from helpers.reid_material import tiny_checkpoint, tiny_set
from helpers.tiny_material import tiny_clip, webdataset
from helpers.toy_task import CONFIG, Toy
from tokensieve.cli.main import main
from tokensieve.errors import RecordError
from tokensieve.training import fit
from tokensieve.training.checkpoint import checkpoints_in
from tokensieve.utils.files import only_run, whole_folder, write_whole
from tokensieve.utils.tensor_files import save_tensors

# a command and the file or folder it writes; the files that are there before it are named after it
COMMANDS = {
    "plan": ("plan -o {out}/plan.json", "plan.json"),
    "build": ("build {run} -o {out}/a.csv", "a.csv"),
    "report": ("report {run} --no_pictures -o {out}/page.html", "page.html"),
    "view": ("view {photo} -o {out}/view.png", "view.png"),
    "eval": ("eval {clip} --output {out}/eval.json", "eval.json"),
    "eval reid": ("eval reid --checkpoint {reid} -o {out}/reid.json", "reid.json"),
    "export": ("eval reid --checkpoint {reid} --export {out}/reid.npz", "reid.npz"),
    "export safetensors": ("eval reid --checkpoint {reid} --export {out}/f.safetensors", "f.safetensors"),
    "extract reid": ("extract reid --checkpoint {reid} --modality rgb {photo} -o {out}/e.npz", "e.npz"),
    "extract clip": ("extract clip {tar} -o {out}/features {model}", "features"),
    "vqa": ("data vqa-synthetic --images 2 -o {out}/vqa", "vqa"),
    "people": ("data reid-synthetic --identities 4 --images 2 --cameras 2 -o {out}/people", "people"),
    "cifar10": ("data cifar10 --images 20 -o {out}/cifar10", "cifar10"),
    "new": ("new method nearest -o {out}", "nearest.py"),
    "search": ("search clip {clip} --trials 1 -o {out}/study", "study/study.db"),
    "search journal": ("search clip {clip} --trials 1 --study s.log -o {out}/study", "study/s.log"),
}
REPLACES = {"plan", "build", "report", "view", "eval reid", "export", "export safetensors", "extract reid", "eval"}


@contextmanager
def full_disk(room: int = 300) -> Iterator[None]:
    """Every write beyond that many bytes of any file fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("full")
    (root / "run.json").write_text(json.dumps(make_run("sieve", 0.5)))
    (root / "photo.png").write_bytes(picture())
    webdataset(root / "colours")
    model = f"--model local-dir:{tiny_clip(root / 'clip')} --pretrained ''"
    data = f"--quiet --dataset wds/colours --dataset_root {root / 'colours'} --batch_size 4 --num_workers 0"
    return {
        "run": str(root / "run.json"), "photo": str(root / "photo.png"), "clip": f"{model} {data}", "model": model,
        "reid": str(tiny_checkpoint(root / "reid.safetensors", tiny_set(root / "set"))),
        "tar": str(tar(root / "whole.tar", {f"{i}.png": picture(i) for i in range(3)})),
    }  # fmt: skip


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith((".lock", ".held"))
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_writes(
    name: str,
    files: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words, written = COMMANDS[name]
    target = tmp_path / written
    if name in REPLACES:
        target.write_bytes(b"what was here before")
    before = everything(tmp_path)
    argv = shlex.split(words.format(**files, out=tmp_path))
    with full_disk():
        code = main(argv)
    said = capsys.readouterr().err
    assert code == 2, said
    lines = [line for line in said.splitlines() if line.strip() and "it/s" not in line]  # bars of clip_benchmark
    assert len(lines) == 1, said
    assert "cannot write" in lines[0]
    assert target.name in lines[0]
    after = everything(tmp_path)
    if name.startswith("search"):  # SQLite and the journal make their file before anything is in it
        after = {place: data for place, data in after.items() if len(data) > 300}
    assert after == before


def test_a_training_keeps_its_last_checkpoint(tmp_path: Path) -> None:
    """Killed by a full disk in the middle, it goes on from what is whole, to the end of a run that never stopped."""
    torch.manual_seed(0)
    whole = fit(Toy(), CONFIG, tmp_path / "whole")
    task, folder = Toy(), tmp_path / "run"
    step = task.step

    def failing(batch, at):  # type: ignore[no-untyped-def]
        if at == 12:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
        return step(batch, at)

    task.step = failing
    with full_disk(2**40), pytest.raises(RecordError, match=r"cannot write.*step-00000015|cannot write into"):
        fit(task, CONFIG, folder)
    kept = [path.name for path in checkpoints_in(folder / "checkpoints")]
    assert kept[-1] == "step-00000010.safetensors"
    assert not list(folder.rglob("*.part"))
    assert fit(Toy(), CONFIG, folder, resume=True) == whole


def test_writers_leave_what_was_there(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a.safetensors", {"x": torch.ones(4)}, {})
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "old").write_bytes(b"old")
    before = everything(tmp_path)
    with full_disk():
        with pytest.raises(RecordError, match=r"cannot write .*a\.safetensors: File too large"):
            save_tensors(tmp_path / "a.safetensors", {"x": torch.ones(4000)}, {})
        with pytest.raises(RecordError, match=r"cannot write .*b\.txt"):
            write_whole(tmp_path / "b.txt", bytes(1000))
        with pytest.raises(RecordError, match=r"cannot write .*set"), whole_folder(tmp_path / "set") as part:
            (part / "new").write_bytes(bytes(1000))
    assert everything(tmp_path) == before
    with only_run(tmp_path / "run"):  # and a lock takes no room
        assert (tmp_path / "run" / ".lock").stat().st_size == 0
