"""The synthetic set: seeded, in each layout, and with modalities that see what others miss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tokensieve.cli.main import main
from tokensieve.errors import OptionError, RecordError
from tokensieve.tasks.reid.data import load_set
from tokensieve.tasks.reid.people import BACKGROUND, PARTS, Pose, draw_parts, looks, make_person, make_wardrobes
from tokensieve.tasks.reid.scenery import CONDITIONS, Camera, make_camera, photograph
from tokensieve.tasks.reid.synthetic import SyntheticConfig, write_synthetic

SMALL = ["--identities", "5", "--cameras", "2", "--images", "2"]


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("layout", ["rgbnt201", "rgbnt100", "msvr310", "folder"])
def test_a_set_loads_and_a_second_run_is_byte_identical(layout: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        flags = ["--layout", layout, *SMALL, "--seed", "3", "-o", str(tmp_path / name)]
        assert main(["data", "reid-synthetic", *flags]) == 0
    assert files(tmp_path / "a") == files(tmp_path / "b")
    found = load_set(layout, tmp_path / "a")
    assert len({s.pid for s in found.train}) == 3
    assert len({s.pid for s in found.gallery}) == 2
    assert len(found.train) == 12
    assert {s.pid for s in found.query} == {s.pid for s in found.gallery}
    assert not {s.pid for s in found.query} & {s.pid for s in found.train}
    height, width = found.size
    assert found.train[0].open("tir").size == (width, height)
    assert main(["data", "reid-synthetic", *SMALL, "--layout", layout, "--seed", "4", "-o", str(tmp_path / "c")]) == 0
    assert files(tmp_path / "c").keys() == files(tmp_path / "a").keys()
    assert not set(files(tmp_path / "c").values()) & set(files(tmp_path / "a").values())


def test_more_pictures_leave_the_others_as_they_are(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "few", SyntheticConfig(identities=4, cameras=2, images=2))
    write_synthetic(tmp_path / "more", SyntheticConfig(identities=4, cameras=3, images=3))
    few, more = files(tmp_path / "few"), files(tmp_path / "more")
    assert len(more) == 4 * 3 * 3 * 3
    assert all(more[name] == data for name, data in few.items())


def test_a_plain_folder_may_have_two_modalities(tmp_path: Path) -> None:
    flags = ["--layout", "folder", *SMALL, "--modalities", "rgb", "tir", "-o", str(tmp_path / "two")]
    assert main(["data", "reid-synthetic", *flags]) == 0
    assert load_set("folder", tmp_path / "two").modalities == ("rgb", "tir")


def test_wrong_flags_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = (["--layout", "rgbnt210"], ["--identities", "3"], ["--cameras", "1"], ["--images", "1"], ["--seed", "-1"],
             ["--test_share", "1"], ["--modalities", "rgb"], ["--layout", "folder", "--modalities", "uv"])  # fmt: skip
    for flags in wrong:
        assert main(["data", "reid-synthetic", *flags, "-o", str(tmp_path / "x")]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert flags[-1] in err
    assert not (tmp_path / "x").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    with pytest.raises(RecordError, match="not an empty folder"):
        write_synthetic(tmp_path / "full", SyntheticConfig(identities=4))
    assert [p.name for p in tmp_path.iterdir()] == ["full"]
    with pytest.raises(OptionError, match="layout rgbnt100"):
        SyntheticConfig(layout="rgbnt100", modalities=("rgb",))


def test_an_interrupted_set_is_not_there(tmp_path: Path) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_synthetic(tmp_path / "set", SyntheticConfig(identities=4), stop)
    assert list(tmp_path.iterdir()) == []


def contrast(draw_from: int, condition: str) -> dict[str, float]:
    """How far the person stands out from the background in each modality, over a few pictures."""
    found: dict[str, list[float]] = {"rgb": [], "nir": [], "tir": []}
    for k in range(8):
        draw = np.random.default_rng((draw_from, k))
        camera = make_camera(draw)
        mix = np.eye(len(CONDITIONS))[CONDITIONS.index(condition)]
        camera = Camera(**{**vars(camera), "mix": mix})
        person = make_person(draw, make_wardrobes(draw, 6))
        for modality, image in photograph(draw, person, camera, (128, 64)).items():
            pixels = np.asarray(image, dtype=np.float64)
            found[modality].append(float(np.percentile(pixels, 95) - np.percentile(pixels, 5)))
    return {modality: float(np.mean(values)) for modality, values in found.items()}


def test_each_condition_hides_people_from_one_modality() -> None:
    day, night, heat = (contrast(5, condition) for condition in ("day", "night", "heat"))
    assert night["rgb"] < 0.55 * day["rgb"]
    assert night["nir"] > 0.7 * day["nir"]
    assert night["tir"] > 0.9 * day["tir"]
    assert heat["tir"] < 0.6 * day["tir"]
    assert heat["rgb"] > 0.9 * day["rgb"]


def test_people_look_alike_in_one_modality_and_differ_in_another() -> None:
    draw = np.random.default_rng(0)
    wardrobes = make_wardrobes(draw, 30)
    tables = [looks(make_person(draw, wardrobes)) for _ in range(30)]
    upper = PARTS.index("upper")

    def alike(a: int, b: int, modality: str) -> bool:
        return bool(np.abs(tables[a][modality][upper] - tables[b][modality][upper]).max() < 0.1)

    pairs = [(a, b) for a in range(30) for b in range(a)]
    only_rgb = sum(alike(a, b, "rgb") and not alike(a, b, "tir") for a, b in pairs)
    only_tir = sum(alike(a, b, "tir") and not alike(a, b, "rgb") for a, b in pairs)
    assert only_rgb > 10
    assert only_tir > 10


def test_a_person_stands_in_the_frame_and_turns() -> None:
    draw = np.random.default_rng(1)
    person = make_person(draw, make_wardrobes(draw, 5))
    seen = {}
    for name, turn in (("front", 0.0), ("side", np.pi / 2), ("back", np.pi)):
        parts, (left, top, right, bottom) = draw_parts(person, Pose(turn, 1.0, (0.5, 0.95), 0.85), (256, 128))
        assert parts.shape == (256, 128)
        assert 0.05 < (parts != BACKGROUND).mean() < 0.6
        assert 0 < left < right < 128
        assert 0 < top < bottom < 256
        seen[name] = right - left, int((parts == PARTS.index("face")).sum())
    assert seen["side"][0] < 0.8 * seen["front"][0]
    assert seen["back"][1] < 0.5 * seen["front"][1]
