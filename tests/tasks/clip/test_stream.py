"""Big data: shards found, read, streamed; features and accuracies of the parts are those of the whole."""

from __future__ import annotations

import io
import json
import os
import tarfile
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

import tokensieve
from tokensieve.cli.main import main
from tokensieve.errors import DataError, MissingMaterialError, OptionError, RecordError
from tokensieve.tasks.clip import shards as shards_module
from tokensieve.tasks.clip.extract import load_features
from tokensieve.tasks.clip.shards import find_shards, read_shard
from tokensieve.tasks.clip.stream import Parts

CLASSES = ("red", "green", "blue", "white", "black", "grey")
TOTAL = 50
SPOILED = "s000031"


def picture(number: int) -> bytes:
    """Noise of its own, with a square."""
    draw = np.random.default_rng(number)
    pixels = draw.integers(0, 255, (64, 64, 3), dtype=np.uint8)
    pixels[10 + number % 30 :, : 20 + number % 40] = draw.integers(0, 255, 3)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def big_set(root: Path, sizes: tuple[int, ...], spoil: str | None = None) -> Path:
    """A webdataset as clip_benchmark lays it out, of several shards."""
    number = 0
    for shard, size in enumerate(sizes):
        members = []
        for _ in range(size):
            key = f"s{number:06d}"
            members.append((f"{key}.cls", str(number % 6).encode()))
            members.append((f"{key}.png", b"no picture" if key == spoil else picture(number)))
            number += 1
        write_tar(root / "test" / f"{shard}.tar", members)
    (root / "test" / "nshards.txt").write_text(f"{len(sizes)}\n")
    (root / "classnames.txt").write_text("\n".join(CLASSES))
    (root / "zeroshot_classification_templates.txt").write_text("a {c} picture\n{c}")
    return root


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    return big_set(tmp_path_factory.mktemp("big"), (20, 7, 23))


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    return big_set(tmp_path_factory.mktemp("spoiled"), (20, 7, 23), SPOILED)


def extract(tiny, *words: str) -> int:
    return main(["extract", "clip", *map(str, words), *tiny.model, "--num_workers", "0", "--batch_size", "8"])


def features_in(folder: Path) -> tuple[list[str], torch.Tensor]:
    parts = list(load_features(folder))
    return [key for _, keys, _ in parts for key in keys], torch.cat([features for _, _, features in parts])


@pytest.fixture(scope="module")
def wanted(tiny):
    """Features by open_clip alone, image by image, untouched and reduced."""
    import open_clip

    model, _, transform = open_clip.create_model_and_transforms(
        "tiny-clip", pretrained=str(tiny.folder / "tiny-clip.pt")
    )
    model.eval()
    images = [transform(Image.open(io.BytesIO(picture(number))).convert("RGB")) for number in range(TOTAL)]
    with torch.no_grad():
        plain = torch.cat([model.encode_image(image[None]) for image in images])
        with tokensieve.attach(model, "sieve", keep=0.4, proportional=0.0):
            reduced = torch.cat([model.encode_image(image[None]) for image in images])
    return plain, reduced


# -- shards ------------------------------------------------------------------------------------------------------------


def test_shards_are_found_by_file_pattern_and_folder(big, tmp_path):
    folder = big / "test"
    assert [shard.path.name for shard in find_shards([str(folder)])] == ["0.tar", "1.tar", "2.tar"]
    assert [shard.name for shard in find_shards([f"{folder}/{{1..2}}.tar", f"{folder}/0.tar"])] == ["1", "2", "0"]
    for name in ("2", "10", "1"):
        write_tar(tmp_path / "a" / f"{name}.tar", [])
    assert [shard.name for shard in find_shards([str(tmp_path / "a")])] == ["1", "2", "10"]
    write_tar(tmp_path / "b" / "1.tar", [])
    names = [shard.name for shard in find_shards([str(tmp_path / "a"), str(tmp_path / "b")])]
    assert names == ["a-1", "2", "10", "b-1"]


@pytest.mark.parametrize(
    ("word", "error", "said"),
    [
        ("{test}/{{0..4}}.tar", MissingMaterialError, r"2 of 5 shards are not there \(3\.tar, 4\.tar\)"),
        ("{test}/9.tar", MissingMaterialError, "not there"),
        ("{test}/absent", MissingMaterialError, "no such file or folder"),
        ("{test}/nshards.txt", OptionError, r"no \.tar file"),
        ("https://example.org/0.tar", OptionError, "fetch them first"),
        ("{test}/{{0..", OptionError, "braces"),
    ],
)
def test_shards_that_are_not_there_are_named(big, word, error, said):
    with pytest.raises(error, match=said):
        find_shards([word.format(test=big / "test")])


def test_samples_are_as_webdataset_reads_them(tmp_path):
    """Folders in names, several dots, names without an ending, links: all as the library has it."""
    webdataset = pytest.importorskip("webdataset")
    members = [("a/x.cls", b"1"), ("a/x.seg.png", b"2"), ("b/x.PNG", b"3"), ("noending", b"4"),
               ("y.v2.txt", b"6"), ("y.jpg", b"7")]  # fmt: skip
    path = write_tar(tmp_path / "s.tar", members)
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("z.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    mine = [(sample.key, sample.parts) for sample in read_shard(find_shards([str(path)])[0])]
    theirs = [
        (sample["__key__"], {name: data for name, data in sample.items() if not name.startswith("__")})
        for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    ]
    assert mine == theirs
    assert len(mine) == 3
    hidden = write_tar(tmp_path / "h.tar", [("b/._x.png", b"5"), ("b/x.png", b"6")])  # as a Mac writes them
    assert [sample.key for sample in read_shard(find_shards([str(hidden)])[0])] == ["b/x"]


@pytest.mark.parametrize("cut", [1, 700, 5000, "between members", "header"])
def test_a_damaged_archive_is_one_error_that_names_it(big, tmp_path, cut):
    data = bytearray((big / "test" / "0.tar").read_bytes())
    path = tmp_path / "cut.tar"
    if cut == "between members":
        with tarfile.open(big / "test" / "0.tar") as tar:
            data = data[: tar.getmembers()[10].offset]
    elif cut == "header":
        with tarfile.open(big / "test" / "0.tar") as tar:
            start = tar.getmembers()[10].offset
        data[start : start + 100] = b"\xff" * 100
    else:
        data = data[:-cut] if cut > 1 else data[:cut]
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"cut\.tar (is cut short|is damaged|is truncated or not a tar)"):
        list(read_shard(find_shards([str(path)])[0]))


def test_members_that_lead_out_of_the_folder_touch_no_file(tiny, tmp_path, capsys):
    inside = tmp_path / "in" / "side"
    members = [("../../evil.png", picture(0)), (f"{tmp_path}/evil.png", picture(1)), ("good.png", picture(2))]
    path = write_tar(inside / "s.tar", members)
    assert extract(tiny, path, "-o", tmp_path / "out") == 0
    assert not list(tmp_path.rglob("*evil*"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["s.safetensors", "settings"]
    keys, _ = features_in(tmp_path / "out")
    assert keys[2] == "good"


# -- extract -----------------------------------------------------------------------------------------------------------


def test_features_are_those_of_the_images(tiny, big, wanted, tmp_path, capsys):
    assert extract(tiny, big / "test", "-o", tmp_path / "plain") == 0
    assert "50 images of this run, 3 of 3 shards done" in capsys.readouterr().out
    keys, found = features_in(tmp_path / "plain")
    assert keys == [f"s{number:06d}" for number in range(TOTAL)]
    torch.testing.assert_close(found, wanted[0], rtol=1e-4, atol=1e-5)
    words = [
        "--method",
        "sieve",
        "--keep",
        "0.4",
        "proportional=0.0",
        "--normalize",
        "--dtype",
        "float16",
        "--merge",
        tmp_path / "all.npy",
    ]
    assert extract(tiny, f"{big}/test/{{0..2}}.tar", "-o", tmp_path / "sieve", *words) == 0
    merged = np.load(tmp_path / "all.npy")
    assert merged.dtype == np.float16
    reduced = torch.nn.functional.normalize(wanted[1], dim=-1)
    torch.testing.assert_close(torch.from_numpy(merged).float(), reduced, rtol=1e-2, atol=2e-3)
    lines = [json.loads(line) for line in (tmp_path / "all.keys.jsonl").read_text().splitlines()]
    assert lines[20] == ["1", "s000020"]
    assert len(lines) == TOTAL
    assert not torch.allclose(wanted[0], wanted[1], atol=1e-2)


def test_a_folder_of_images_is_cut_into_shards(tiny, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shards_module, "FILES", 3)
    for number in range(8):
        path = tmp_path / "photos" / ("b" if number > 4 else "a") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    (tmp_path / "photos" / "notes.txt").write_text("")
    assert extract(tiny, tmp_path / "photos", "-o", tmp_path / "out") == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    keys, found = features_in(tmp_path / "out")
    assert keys[4:6] == ["a/4.png", "b/5.png"]
    torch.testing.assert_close(found, wanted[0][:8], rtol=1e-4, atol=1e-5)
    (tmp_path / "photos" / "a" / "00.png").write_bytes(picture(9))
    assert extract(tiny, tmp_path / "photos", "-o", tmp_path / "out") == 2
    assert "is of another images-00000" in capsys.readouterr().err


def test_a_run_goes_on_and_repeats_no_finished_shard(tiny, big, tmp_path, capsys):
    out = tmp_path / "out"
    assert extract(tiny, big / "test" / "1.tar", "-o", out) == 0
    before = (out / "1.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    assert extract(tiny, big / "test", "-o", out) == 0
    assert "43 images of this run, 3 of 3 shards done" in capsys.readouterr().out
    assert (out / "1.safetensors").stat().st_mtime_ns == before
    assert extract(tiny, big / "test", "-o", out) == 0
    assert "0 images of this run" in capsys.readouterr().out
    assert extract(tiny, big / "test", "-o", out, "--method", "tome", "--keep", "0.5", "--normalize") == 2
    said = capsys.readouterr().err
    assert "reduction.method was 'none', is 'tome'" in said
    assert "normalize was False, is True" in said
    assert said.count("\n") == 1
    (out / "1.safetensors").write_bytes(b"half a file")
    assert extract(tiny, big / "test", "-o", out) == 2
    assert "1.safetensors: truncated or not a safetensors file" in capsys.readouterr().err


def test_a_command_that_fails_does_not_take_the_folder(tiny, big, tmp_path, capsys):
    out = tmp_path / "features"
    (tmp_path / "noise.pt").write_bytes(b"no weights" * 99)
    words = ["extract", "clip", str(big / "test"), "-o", str(out), "--num_workers", "0"]
    wrong = ["--model", "tiny-clip", "--pretrained", str(tmp_path / "noise.pt")]
    assert main([*words, *wrong]) == 2
    assert main([*words, *tiny.model, "--method", "evit", "--keep", "0"]) == 2
    assert not list(out.glob("*"))
    capsys.readouterr()
    assert main([*words, *tiny.model, "--method", "evit", "--keep", "0.5"]) == 0
    assert f"{TOTAL} images" in capsys.readouterr().out


def test_two_commands_that_start_together_do_not_share_a_folder(tmp_path):
    first, second = (Parts(tmp_path, {"keep": keep}, ".x") for keep in (0.5, 0.4))
    first.begin()
    with pytest.raises(OptionError, match=r"keep was 0.5, is 0.4"):
        second.begin()


def test_another_shard_under_the_same_name_is_refused(tiny, big, tmp_path, capsys):
    first = write_tar(tmp_path / "s.tar", [("a.png", picture(0))])
    assert extract(tiny, first, "-o", tmp_path / "out") == 0
    write_tar(tmp_path / "s.tar", [(f"{i}.png", picture(i)) for i in range(5)])
    assert extract(tiny, first, "-o", tmp_path / "out") == 2
    assert "is of another s (it had" in capsys.readouterr().err


def test_what_cannot_be_read_is_counted_and_named_or_an_error(tiny, spoiled, tmp_path, capsys):
    assert extract(tiny, spoiled / "test", "-o", tmp_path / "out") == 0
    said = capsys.readouterr()
    assert said.err == f"tokensieve: note: 2: {SPOILED} cannot be read: not an image\n"
    assert "all shards: 49 images, 1 samples could not be read" in said.out
    with safe_open(tmp_path / "out" / "2.safetensors", "pt") as file:
        assert json.loads(file.metadata()["bad"]) == [[SPOILED, "not an image"]]
    assert extract(tiny, spoiled / "test", "-o", tmp_path / "strict", "--strict") == 2
    hint = "without --strict it is left out and told"
    assert capsys.readouterr().err == f"tokensieve: error: 2: {SPOILED} cannot be read: not an image; {hint}\n"
    assert sorted(path.stem for path in (tmp_path / "strict").glob("*.safetensors")) == ["0", "1"]


def test_a_set_of_which_nothing_can_be_read_is_an_error(tiny, tmp_path, capsys):
    big_set(tmp_path / "bad", (1,), "s000000")
    assert extract(tiny, tmp_path / "bad" / "test", "-o", tmp_path / "out") == 2
    assert "none of the 1 samples could be read" in capsys.readouterr().err


def test_a_shard_that_is_cut_short_stops_no_other(tiny, big, tmp_path, capsys):
    for name in ("0.tar", "1.tar", "2.tar"):
        data = (big / "test" / name).read_bytes()
        (tmp_path / name).write_bytes(data[:9000] if name == "1.tar" else data)
    assert extract(tiny, tmp_path, "-o", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "1.tar is cut short" in said
    assert "2 of 3 shards are done" in said
    assert extract(tiny, tmp_path / "1.tar", "-o", tmp_path / "other", "--merge", tmp_path / "all.npy") == 2
    assert not (tmp_path / "all.npy").exists()
    capsys.readouterr()
    (tmp_path / "1.tar").write_bytes((big / "test" / "1.tar").read_bytes())
    assert extract(tiny, tmp_path, "-o", tmp_path / "out") == 0
    assert "7 images of this run, 3 of 3" in capsys.readouterr().out


def test_workers_and_processes_share_the_shards_out(tiny, big, tmp_path, monkeypatch, capsys):
    extract(tiny, big / "test", "-o", tmp_path / "one")
    line = ["extract", "clip", str(big / "test"), *tiny.model, "--batch_size", "8", "-o", str(tmp_path / "many")]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main([*line, "--num_workers", "2"]) == 0
    assert [path.stem for path in (tmp_path / "many").glob("*.safetensors")] == ["1"]
    assert "1 of 3 shards done" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "0")
    assert main([*line, "--num_workers", "2"]) == 0
    assert "3 of 3 shards done" in capsys.readouterr().out
    one, many = features_in(tmp_path / "one"), features_in(tmp_path / "many")
    assert one[0] == many[0]
    assert torch.equal(one[1], many[1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--keep", "0.5"], "--keep does nothing without --method"),
        (["--method", "sive", "--keep", "0.5"], "sieve"),
        (["--dtype", "int8"], "--dtype int8"),
        (["--batch_size", "0"], "--batch_size 0"),
        (["--merge", "all.npz"], "ends in .npy"),
        (["--method", "sieve", "--keep", "0.5", "foldd=1"], "foldd"),
        (["--model", "tiny-klip"], "--pretrained go together"),
        (["--model", "tiny-klip", "--pretrained", "x"], "tiny-clip"),
        (["--stict"], '"--strict"'),
    ],
)
def test_wrong_command_lines_are_one_line(tiny, big, tmp_path, capsys, words, said):
    assert main(["extract", "clip", str(big / "test"), "-o", str(tmp_path / "out"), *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_files_that_are_something_else_are_refused(tmp_path):
    with pytest.raises(MissingMaterialError, match="no features"):
        list(load_features(tmp_path))
    torch_file = tmp_path / "x.safetensors"
    from safetensors.torch import save_file

    save_file({"features": torch.zeros(1, 1)}, torch_file)
    assert load_file(torch_file)
    with pytest.raises(RecordError, match="not a file of `tokensieve extract clip`"):
        list(load_features(tmp_path))


# -- eval --------------------------------------------------------------------------------------------------------------


def data(root: Path) -> list[str]:
    return ["--dataset", "wds/big", "--dataset_root", str(root), "--batch_size", "8", "--num_workers", "0", "--quiet"]


@pytest.mark.parametrize("method", [[], ["--method", "tome", "--keep", "0.3"]])
def test_streamed_accuracy_is_that_of_the_benchmark(tiny, big, run, here, method):
    whole = run(*tiny.model, *data(big), *method, "--output", "whole.json")
    parts = run(*tiny.model, *data(big), *method, "--stream", "--output", "parts.json")["metrics"]
    assert parts == whole["metrics"]
    assert 0 < parts["acc1"] < 1
    for name in ("gmacs", "tokens_per_layer", "task", "images"):
        assert json.loads((here / "parts.json").read_text())[name] == whole[name]


def test_a_streamed_run_goes_on_where_it_was_interrupted(tiny, big, here, monkeypatch, capsys):
    """As two processes that run one after the other: the second finds all shards done and writes the result."""
    line = ["eval", *tiny.model, *data(big), "--stream", "--output", "out.json"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(line) == 0
    assert "the result comes when the others' are" in capsys.readouterr().out
    assert not (here / "out.json").exists()
    assert [path.name for path in (here / "out.json.parts").glob("*.counts")] == ["1.counts"]
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    before = (here / "out.json.parts" / "1.counts").stat().st_mtime_ns
    assert main(line) == 0
    assert (here / "out.json.parts" / "1.counts").stat().st_mtime_ns == before
    found = json.loads((here / "out.json").read_text())
    assert (found["streamed_images"], found["images"], found["shards"]) == (TOTAL, TOTAL - 7, 3)
    assert main([*line, "--method", "tome", "--keep", "0.5"]) == 2
    assert "reduction.method was 'none', is 'tome'" in capsys.readouterr().err


def test_a_bad_sample_does_not_count_and_is_named(tiny, spoiled, run, here, capsys):
    found = run(*tiny.model, *data(spoiled), "--stream")
    assert (found["streamed_images"], found["bad_samples"]) == (TOTAL - 1, 1)
    assert SPOILED in found["bad_names"]
    assert main(["eval", *tiny.model, *data(spoiled), "--stream", "--strict", "--output", "strict.json"]) == 2
    assert SPOILED in capsys.readouterr().err
    assert main(["eval", *tiny.model, *data(spoiled), "--output", "plain.json"]) == 2  # as ever without --stream


def test_few_classes_have_no_acc5_and_strange_labels_are_bad(tiny, run, tmp_path):
    root = big_set(tmp_path / "few", (9, 8))
    (root / "classnames.txt").write_text("\n".join(CLASSES[:4]))
    found = run(*tiny.model, *data(root), "--stream")
    assert found["metrics"]["acc5"] is None
    assert (found["streamed_images"], found["bad_samples"]) == (12, 5)
    assert "its class 4 is none of the 4" in found["bad_names"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stream", "--task", "linear_probe"], "not for linear_probe"),
        (["--stream", "--distributed"], "--distributed"),
        (["--stream", "--save_clf", "x.pt"], "--save_clf"),
        (["--stream", "--images", "3"], "--images"),
        (["--strict"], "--strict is for --stream"),
    ],
)
def test_what_cannot_be_streamed_is_named(tiny, big, here, capsys, words, said):
    assert main(["eval", *tiny.model, *data(big), *words]) == 2
    assert said in capsys.readouterr().err


def _as_process(rank: int, lines: list[list[str]]) -> None:
    """One of two, as torchrun would start it."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os._exit(max(main(line) for line in lines))


@pytest.fixture
def one_thread():
    """As each of several processes has: sums in another order differ in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_two_real_processes_share_the_shards(tiny, big, tmp_path, capfd, one_thread):
    """At the same time: each shard once, one result, and it is that of one process."""
    model = [*tiny.model, "--batch_size", "8", "--num_workers", "0"]
    lines = [
        ["extract", "clip", str(big / "test"), "-o", str(tmp_path / "two"), *model],
        ["eval", "--stream", *data(big), *model, "--output", str(tmp_path / "two.json"), "--speed_batches", "0"],
    ]
    both = [get_context("fork").Process(target=_as_process, args=(rank, lines)) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(600)
    assert [process.exitcode for process in both] == [0, 0]
    assert extract(tiny, big / "test", "-o", tmp_path / "one") == 0
    one, two = features_in(tmp_path / "one"), features_in(tmp_path / "two")
    assert one[0] == two[0]
    assert torch.equal(one[1], two[1])
    assert json.loads((tmp_path / "two.json").read_text())["streamed_images"] == TOTAL
