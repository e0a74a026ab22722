"""`tokensieve report` and `tokensieve view`: what they write, and that mistakes are one line and code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from helpers.eval_runs import make_run, make_runs, write_runs
from tokensieve.cli import report
from tokensieve.cli.main import main
from tokensieve.records import new_record, write_record
from tokensieve.tasks.viewer import read_frames
from tokensieve.zoo.vit_s14 import onnx_path


def _material() -> bool:
    try:
        return onnx_path().is_file()
    except FileNotFoundError:
        return False


needs_weights = pytest.mark.skipif(not _material(), reason="the ViT-S/14 weights are not installed (make setup)")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """Noise, with a bright square in it."""
    pixels = np.random.default_rng(0).integers(0, 90, (300, 240, 3), dtype=np.uint8)
    pixels[120:200, 60:140] = (250, 180, 20)
    path = tmp_path / "square.png"
    Image.fromarray(pixels).save(path)
    return path


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """One line on stderr, code 2, nothing on stdout."""
    assert main(list(map(str, argv))) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_report_from_files_and_folders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_runs(tmp_path / "runs", make_runs())
    more = write_runs(tmp_path / "more", [make_run(dataset="other")]) / "00.json"
    page = tmp_path / "new" / "report.html"
    argv = ["report", str(folder), str(more), "--no_pictures", "--title", "Mine & yours", "-o", str(page)]
    assert main(argv) == 0
    assert "19 runs" in capsys.readouterr().out
    html = page.read_text(encoding="utf-8")
    assert "<title>Mine &amp; yours</title>" in html
    assert "<img" not in html
    assert [p.name for p in page.parent.iterdir()] == ["report.html"]


def test_report_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_runs(tmp_path / "runs", [make_run()])
    deeper = write_runs(folder / "sweep", [make_run()])
    bench = folder / "bench.json"
    write_record(new_record("bench", {}, []), bench)
    argv = ["report", str(folder), "--no_pictures", "-o", str(tmp_path / "report.html")]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "1 run," in out
    assert f"{deeper}: more results, not in this page" in err
    assert f"{bench}: of `tokensieve bench`" in err
    other = folder / "model"
    other.mkdir()
    (other / "config.json").write_text("{}")  # no result
    (other / "deep.json").write_text("[" * 100_000)
    assert main([*argv, f"{folder}/../runs/sweep"]) == 0
    assert "more results" not in capsys.readouterr().err
    many = [write_runs(folder / f"s{number}", [make_run()]) for number in range(8)]
    assert main([*argv, *map(str, many[:2]), str(deeper)]) == 0
    assert f"{many[6]} and 1 more: more results" in capsys.readouterr().err
    for one in many:
        (one / "00.json").unlink()
    assert main([*argv, str(deeper)]) == 0
    out, err = capsys.readouterr()
    assert "2 runs," in out
    assert "more results" not in err
    (folder / "00.json").unlink()
    line = refused(capsys, "report", folder, "--no_pictures", "-o", tmp_path / "other.html")
    assert f"there are some in {deeper}" in line


def test_report_names_the_file_that_is_no_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_runs(tmp_path / "runs", [make_run()])
    whole = json.dumps(make_run())
    page = tmp_path / "report.html"
    foreign = json.dumps({"format": "tokensieve-record-1", "rows": []})
    for name, text in {"cut.json": whole[:200], "foreign.json": foreign, "list.json": "[]", "empty.json": ""}.items():
        (folder / name).write_text(text)
        assert main(["report", str(folder), "--no_pictures", "-o", str(page)]) == 0  # the rest is reported
        assert name in capsys.readouterr().err
        page.unlink()
        assert name in refused(capsys, "report", folder / name, "--no_pictures", "-o", page)
        (folder / name).unlink()
    assert "absent" in refused(capsys, "report", tmp_path / "absent", "-o", page)
    (tmp_path / "bare").mkdir()
    assert "bare" in refused(capsys, "report", tmp_path / "bare", "-o", page)
    assert "RUNS" in refused(capsys, "report")
    assert not page.exists()


def test_an_unwritable_page_is_found_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_pictures", lambda runs, args: pytest.fail("drawn"))
    folder = write_runs(tmp_path / "runs", [make_run()])
    assert str(tmp_path) in refused(capsys, "report", folder, "-o", tmp_path)


def test_pictures_show_the_budget_that_most_methods_share() -> None:
    runs = [make_run(), make_run("tome", 0.25), make_run("sieve", 1.0)]
    runs += [make_run("anchor", 0.5) | {"keep": "0.9,0.5", "at": "3,7"}, make_run("tome", 0.5), make_run("sieve", 0.5)]
    runs += [make_run("tome", 0.5, option_fold=True), make_run("sieve", 0.7), make_run("tome", 0.7)]
    chosen = report.chosen(runs)
    assert [(r.method, r.keep) for r in chosen] == [("tome", 0.5), ("sieve", 0.5)]
    (one,) = report.chosen([runs[3]])
    assert (one.keep, one.at, one.options) == ([0.9, 0.5], [3, 7], {"alpha": 0.5, "fold": False})
    assert report.chosen([make_run(), make_run("sieve", 1.0)]) == []
    analysed = make_run("sieve", 0.5, mode="analyse", reduced=False)
    assert [r.mode for r in report.chosen([analysed])] == ["analyse"]


@needs_weights
def test_report_draws_photos_and_says_what_it_cannot_draw(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, photo: Path
) -> None:
    runs = [make_run(), make_run("sieve", 0.5), make_run("tome", 0.5), make_run("evit", 0.5, at="3,40")]
    folder = write_runs(tmp_path / "runs", runs)
    page = tmp_path / "report.html"
    assert main(["report", str(folder), "--photos", str(photo), "-o", str(page)]) == 0
    html = page.read_text(encoding="utf-8")
    assert html.count("<img") == 1 + 2 * 2
    assert "128 of 256, block 11" in html
    assert "evit is not drawn: at=40" in html
    bad = tmp_path / "bad.jpg"
    bad.write_text("no image")
    capsys.readouterr()
    assert "bad.jpg" in refused(capsys, "report", folder, "--photos", bad, "-o", tmp_path / "b.html")
    assert "no image in" in refused(capsys, "report", folder, "--photos", folder, "-o", tmp_path / "b.html")


@needs_weights
def test_view_draws_photo_kept_and_scores(capsys: pytest.CaptureFixture[str], tmp_path: Path, photo: Path) -> None:
    def size(*argv: str) -> tuple[int, int]:
        out = tmp_path / "out.png"
        assert main(["view", str(photo), *argv, "-o", str(out)]) == 0
        with Image.open(out) as image:
            assert image.format == "PNG"
            return image.size

    three = size()
    assert "anchor, keep 0.4, 102 of 256 patches after block 9" in capsys.readouterr().out
    assert three[0] > 3 * 448
    assert size("--method", "divprune", "--keep", "60")[0] < three[0]  # no scores
    assert "60 of 256 patches after block 5" in capsys.readouterr().out
    size("--at", "5", "k=8", "m=24", "fold=true")
    assert "anchor, k=8, m=24, fold=True, 32 of 256 patches after block 5" in capsys.readouterr().out
    wide = size("--method", "sieve", "--blocks", "2,6,8")
    assert wide[0] > three[0]
    assert wide[1] > 2 * 448
    size("--keep", "1.0")
    assert "256 of 256" in capsys.readouterr().out
    size("--mode", "analyse", "--keep_average", "0.6")
    assert "average 0.6" in capsys.readouterr().out


@needs_weights
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--method", "ancor"], 'Did you mean "anchor"?'),
        (["--keep", "0.0"], "keep=0.0"),
        (["--keep", "half"], "'half'"),
        (["--method", "tome", "--keep", "2", "--at", "5"], "cannot go under"),
        (["--at", "12"], "blocks 0 to 11"),
        (["--at", "five"], "'five'"),
        (["--blocks", "12"], "--blocks 12"),
        (["k8"], "'k8'"),
        (["kk=8"], "no option 'kk'"),
        (["--model", "vit-s15"], "vit-s14"),
        (["--model", "ViT-B-32"], "--pretrained"),
        (["--model", "ViT-B-32", "--pretrained", "absent.pt"], "absent.pt"),
        (["--pretrained", "x.pt"], "its own weights"),
        (["-o", "out.jpg"], ".png"),
        (["--mode", "fuse"], "--mode"),
        (["--metod", "x"], '"--method"'),
    ],
)
def test_view_refuses(capsys: pytest.CaptureFixture[str], photo: Path, argv: list[str], said: str) -> None:
    if "-o" not in argv:
        argv = [*argv, "-o", str(photo.parent / "out.png")]
    assert said in refused(capsys, "view", photo, *argv)
    assert [p.name for p in photo.parent.iterdir()] == [photo.name]


def test_view_names_files_it_cannot_read_or_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, photo: Any
) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    for name in ("text.jpg", "absent.jpg"):
        assert name in refused(capsys, "view", tmp_path / name, "-o", tmp_path / "out.png")
    assert "cannot write" in refused(capsys, "view", photo, "-o", tmp_path / "text.jpg" / "out.png")


@needs_weights
def test_view_with_a_broken_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path, photo: Path) -> None:
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"\x80\x02no checkpoint")
    out = tmp_path / "out.png"
    err = refused(capsys, "view", photo, "--model", "ViT-B-32", "--pretrained", broken, "-o", out)
    assert "broken.pt" in err


def moving_square(place: Path, frames: int = 12) -> Path:
    """A square that goes from left to right over noise that stands still: a GIF, or PNGs in a folder."""
    ground = np.random.default_rng(0).integers(0, 90, (112, 112, 3), dtype=np.uint8)
    pictures = []
    for i in range(frames):
        pixels = ground.copy()
        pixels[40:70, 7 * i : 7 * i + 28] = (250, 180, 20)
        pictures.append(Image.fromarray(pixels))
    if place.suffix == ".gif":
        pictures[0].save(place, save_all=True, append_images=pictures[1:], duration=80, loop=0)
        return place
    place.mkdir()
    for i, picture in enumerate(pictures):
        picture.save(place / f"{i:03}.png")
    return place


@pytest.mark.parametrize("name", ["clip.gif", "clip"])
def test_the_frames_of_a_moving_picture(tmp_path: Path, name: str) -> None:
    clip = moving_square(tmp_path / name)
    frames = read_frames(clip, 4)
    assert [label for label, _ in frames] == (
        ["frame 0", "frame 4", "frame 7", "frame 11"] if name == "clip.gif" else [f"{i:03}.png" for i in (0, 4, 7, 11)]
    )
    for number, (_, picture) in zip((0, 4, 7, 11), frames, strict=True):
        bright = np.asarray(picture)[55, :, 0] > 200
        assert bright.nonzero()[0][0] == 7 * number
    assert len(read_frames(clip, 99)) == 12
    assert len(read_frames(clip, 1)) == 1
    assert [label for label, _ in read_frames(moving_square(tmp_path / "still.gif", frames=1))] == ["still.gif"]


@needs_weights
def test_view_draws_what_remains_of_each_frame(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    clip, out = moving_square(tmp_path / "clip.gif"), tmp_path / "frames.png"
    assert main(["view", str(clip), "--method", "evit", "--keep", "64", "--frames", "3", "-o", str(out)]) == 0
    assert "3 frames, 64 of 256 patches of each" in capsys.readouterr().out
    assert Image.open(out).width > 3 * 448
    assert "--frames 0: at least 1" in refused(capsys, "view", clip, "--frames", "0", "-o", out)
    (tmp_path / "empty").mkdir()
    assert "no image in folder" in refused(capsys, "view", tmp_path / "empty", "-o", out)
