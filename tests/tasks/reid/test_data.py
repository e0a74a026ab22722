"""Loaders of the four layouts, the check before use, tensors and the validation split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from tokensieve.cli.main import main
from tokensieve.errors import DataError, OptionError, UnknownNameError
from tokensieve.tasks.reid.augment import draw_augmentation
from tokensieve.tasks.reid.data import ReidImages, Sample, check_set, load_set, split_validation
from tokensieve.tasks.reid.layouts import scan_images


def picture(path: Path, size: tuple[int, int] = (8, 16), value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0], 3), value, dtype=np.uint8)).save(path)
    return path


def rgbnt201(root: Path) -> Path:
    for split, pids in (("train_171", (258, 259)), ("test", (300, 301))):
        for folder in ("RGB", "NI", "TI"):
            for pid in pids:
                for camera in (1, 2):
                    picture(root / split / folder / f"{pid:06d}_cam{camera}_0_02.jpg")
    return root


def rgbnt100(root: Path) -> Path:
    for split in ("bounding_box_train", "query", "bounding_box_test"):
        for pid in (1, 2):
            for camera in (1, 8):
                strip = np.zeros((16, 96, 3), dtype=np.uint8)
                strip[:, 32:64], strip[:, 64:] = 100, 200
                path = root / "rgbir" / split / f"{pid:04d}_c{camera}_0{camera}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(strip).save(path)
    picture(root / "rgbir" / "bounding_box_test" / "-1_c3_junk.jpg", (96, 16))
    return root


def msvr310(root: Path) -> Path:
    for split in ("bounding_box_train", "query3", "bounding_box_test"):
        for pid in (1, 17):
            for scene in (1, 12):
                for folder in ("vis", "ni", "th"):
                    picture(root / split / f"{pid:04d}" / folder / f"{pid:04d}_s{scene:03d}_v{scene % 8}_001.jpg")
    return root


def plain(root: Path) -> Path:
    for split in ("train", "query", "gallery"):
        for folder in ("depth", "rgb"):
            for pid in (1, 2):
                for camera in (0, 5):
                    picture(root / split / folder / f"{pid}_c{camera}_s3_front door.png", (16, 8))
    return root


MAKERS: dict[str, Callable[[Path], Path]] = {
    "rgbnt201": rgbnt201, "rgbnt100": rgbnt100, "msvr310": msvr310, "folder": plain,
}  # fmt: skip


@pytest.mark.parametrize("layout", MAKERS)
def test_whole_sets_load(layout: str, tmp_path: Path) -> None:
    found = load_set(layout, MAKERS[layout](tmp_path))
    assert [len(part) for part in (found.train, found.query, found.gallery)] == [4, 4, 4]
    assert found.modalities == (("rgb", "depth") if layout == "folder" else ("rgb", "nir", "tir"))
    assert check_set(layout, tmp_path) == []
    assert found.skipped == ()
    assert found.by_scene is (layout == "msvr310")


def test_names_mean_what_the_sets_say(tmp_path: Path) -> None:
    facts = {}
    for layout, make in MAKERS.items():
        found = load_set(layout, make(tmp_path / layout))
        facts[layout] = {(s.pid, s.camera, s.scene) for s in found.train}, found.size
    assert facts["rgbnt201"] == ({(p, c, None) for p in (258, 259) for c in (0, 1)}, (256, 128))
    assert facts["rgbnt100"] == ({(p, c, None) for p in (1, 2) for c in (0, 7)}, (128, 256))
    assert facts["msvr310"] == ({(p, s % 8, s) for p in (1, 17) for s in (1, 12)}, (128, 256))
    assert facts["folder"] == ({(p, c, 3) for p in (1, 2) for c in (0, 5)}, (128, 256))  # wide, as its images are


def test_a_strip_is_cut_into_its_modalities(tmp_path: Path) -> None:
    found = load_set("rgbnt100", rgbnt100(tmp_path / "set"))
    assert load_set("rgbnt100", tmp_path / "set" / "rgbir").summary() == found.summary()
    for modality, value in (("rgb", 0), ("nir", 100), ("tir", 200)):
        image = np.asarray(found.query[0].open(modality))
        assert image.shape == (16, 32, 3)
        assert (image == value).all()
    assert all(s.pid != -1 for s in found.gallery)


def test_test_stands_for_query_and_gallery_in_a_plain_folder(tmp_path: Path) -> None:
    plain(tmp_path)
    (tmp_path / "gallery").rename(tmp_path / "test")
    found = load_set("folder", tmp_path)
    assert [s.name for s in found.query] == [s.name for s in found.gallery]


def cut(path: Path) -> None:
    """A photo whose last third is not there."""
    noise = np.random.default_rng(0).integers(0, 255, (64, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


BREAKS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing modality": (lambda r: (r / "train_171/NI/000258_cam1_0_02.jpg").unlink(), "000258_cam1_0_02.jpg",
                         "no NI image"),
    "only one modality": (lambda r: picture(r / "test/TI/000300_cam1_0_99.jpg"), "TI/000300_cam1_0_99.jpg",
                          "no RGB and no NI image"),
    "odd name": (lambda r: [picture(r / f"train_171/{m}/copy of 1.jpg") for m in ("RGB", "NI", "TI")], "copy of 1.jpg",
                 "does not parse"),
    "camera 0": (lambda r: [picture(r / f"train_171/{m}/000258_cam0_0.jpg") for m in ("RGB", "NI", "TI")],
                 "000258_cam0_0.jpg", "does not parse"),
    "cut short": (lambda r: cut(r / "train_171/TI/000259_cam2_0_02.jpg"), "TI/000259_cam2_0_02.jpg", "cut short"),
    "no image": (lambda r: (r / "test/RGB/000301_cam2_0_02.jpg").write_text("x"), "RGB/000301_cam2_0_02.jpg",
                 "not an image"),
    "empty file": (lambda r: (r / "test/RGB/000301_cam2_0_02.jpg").write_bytes(b""), "RGB/000301_cam2_0_02.jpg",
                   "not an image"),
    "one camera": (lambda r: [(r / f"train_171/{m}/000258_cam1_0_02.jpg").unlink() for m in ("RGB", "NI", "TI")],
                   "000258_cam2_0_02", "one camera"),
    "no match": (lambda r: [(r / f"test/{m}/000300_cam1_0_02.jpg").unlink() for m in ("RGB", "NI", "TI")],
                 "000300_cam2_0_02", "no match from another camera"),
    "two endings": (lambda r: picture(r / "train_171/RGB/000258_cam1_0_02.png"), "000258_cam1_0_02.png", "too"),
}  # fmt: skip


@pytest.mark.parametrize("what", BREAKS)
def test_what_is_broken_is_named_and_can_be_left_out(what: str, tmp_path: Path) -> None:
    for folder in ("RGB", "NI", "TI"):  # a third training identity, so that some is left
        for camera in (1, 2):
            picture(rgbnt201(tmp_path) / "train_171" / folder / f"000260_cam{camera}_0_02.jpg")
    breaks, file, reason = BREAKS[what]
    breaks(tmp_path)
    with pytest.raises(DataError) as caught:
        load_set("rgbnt201", tmp_path)
    message = str(caught.value)
    assert file in message
    assert reason in message
    assert "\n" not in message
    assert "--skip_broken" in message
    found = load_set("rgbnt201", tmp_path, skip_broken=True)
    assert found.skipped
    assert file in str(found.skipped[0])
    assert len({s.pid for s in found.train}) >= 2
    ReidImages([*found.train, *found.query, *found.gallery], found.modalities, (16, 8), train=False)[0]
    for sample in (*found.train, *found.query, *found.gallery):
        assert set(sample.paths) == {"rgb", "nir", "tir"}
        assert all(sample.open(m).size for m in sample.paths)


def test_many_problems_are_counted_in_one_line_and_listed_by_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rgbnt201(tmp_path)
    for k in range(7):
        picture(tmp_path / "train_171" / "RGB" / f"bad{k}.jpg")
    with pytest.raises(DataError, match=r"7 broken entries: .*bad0.*bad1.*bad2.* and 4 more"):
        load_set("rgbnt201", tmp_path)
    assert main(["data", "reid-check", str(tmp_path), "--layout", "rgbnt201"]) == 2
    out = capsys.readouterr().out
    assert all(f"train_171/RGB/bad{k}.jpg: name does not parse" in out for k in range(7))
    assert main(["data", "reid-check", str(rgbnt201(tmp_path / "whole")), "--layout", "rgbnt201"]) == 0


def test_one_scene_is_no_fault_of_a_training_vehicle_but_of_a_query(tmp_path: Path) -> None:
    msvr310(tmp_path)
    for folder in ("vis", "ni", "th"):
        picture(tmp_path / "bounding_box_train" / "0005" / folder / "0005_s001_v1_001.jpg")
        picture(tmp_path / "bounding_box_train" / "0005" / folder / "0005_s001_v1_002.jpg")
    assert len(load_set("msvr310", tmp_path).train) == 6
    for folder in ("vis", "ni", "th"):
        picture(tmp_path / "query3" / "0005" / folder / "0005_s001_v1_001.jpg")
        picture(tmp_path / "bounding_box_test" / "0005" / folder / "0005_s001_v2_001.jpg")
    with pytest.raises(DataError, match=r"0005_s001_v1_001 .no match from another scene"):
        load_set("msvr310", tmp_path)


def test_a_strip_of_two_images_is_found(tmp_path: Path) -> None:
    rgbnt100(tmp_path)
    picture(tmp_path / "rgbir" / "query" / "0001_c3_9.png", (64, 16))
    with pytest.raises(DataError, match=r"0001_c3_9\.png .64 x 16 is not a strip"):
        load_set("rgbnt100", tmp_path)


def test_wrong_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder"):
        load_set("rgbnt201", tmp_path / "nowhere")
    with pytest.raises(DataError, match="train_171 is not there"):
        load_set("rgbnt201", tmp_path)
    with pytest.raises(UnknownNameError, match='Did you mean "rgbnt201"'):
        load_set("rgbnt20", tmp_path)
    for split in ("train_171", "test"):
        (tmp_path / split).mkdir()
    with pytest.raises(DataError, match="no image is left in train"):
        load_set("rgbnt201", tmp_path, skip_broken=True)


@pytest.fixture
def coloured(tmp_path: Path) -> list[Sample]:
    """Two modalities whose pixels name their place, so that geometry can be compared."""
    ramp = np.arange(32 * 16, dtype=np.uint16).reshape(32, 16)
    pixels = np.stack([ramp % 251, ramp // 2, ramp % 127], axis=-1).astype(np.uint8)
    samples = []
    for pid in (40, 7):
        for camera in (0, 1):
            paths = {}
            for modality in ("rgb", "tir"):
                paths[modality] = tmp_path / f"{pid}_{camera}_{modality}.png"
                Image.fromarray(pixels).save(paths[modality])
            samples.append(Sample(paths, pid, camera, None, f"{pid}_{camera}"))
    return samples


def test_items_without_training_are_the_normalised_images(coloured: list[Sample]) -> None:
    images = ReidImages(coloured, ("rgb", "tir", "nir"), (32, 16), train=False, mean=(0.1, 0.2, 0.3), std=(1, 2, 4))
    item = images[2]
    pixels = np.asarray(Image.open(coloured[2].paths["rgb"])).astype(np.float64) / 255
    wanted = (pixels - [0.1, 0.2, 0.3]) / [1, 2, 4]
    np.testing.assert_allclose(item["images"]["rgb"].permute(1, 2, 0).numpy(), wanted, atol=1e-6)
    assert item["present"] == {"rgb": True, "tir": True, "nir": False}
    assert item["images"]["nir"].abs().max() == 0
    assert (item["label"], item["pid"], item["camera"], item["index"]) == (0, 7, 0, 2)  # labels by rising pid
    assert images[0]["label"] == 1
    assert images.identities == [7, 40]


def test_modalities_are_augmented_alike_and_only_by_seed_epoch_and_index(coloured: list[Sample]) -> None:
    def items(seed: int, epoch: int, order: list[int]) -> dict[int, torch.Tensor]:
        images = ReidImages(coloured, ("rgb", "tir"), (32, 16), train=True, seed=seed)
        images.set_epoch(epoch)
        found = {}
        for index in order:
            item = images[index]
            assert torch.equal(item["images"]["rgb"], item["images"]["tir"])
            found[index] = item["images"]["rgb"]
        return found

    first, again = items(1, 5, [0, 1, 2, 3]), items(1, 5, [3, 1, 0, 2])
    assert all(torch.equal(first[i], again[i]) for i in first)
    for other in (items(2, 5, [0, 1, 2, 3]), items(1, 6, [0, 1, 2, 3])):
        assert not all(torch.equal(first[i], other[i]) for i in first)
    assert not torch.equal(first[0], first[1])  # equal files, other index


def test_augmentation_flips_moves_and_erases_as_it_says() -> None:
    image = torch.rand(3, 32, 16) + 1
    drawn = [draw_augmentation((0, 0, i), (32, 16)) for i in range(400)]
    assert 150 < sum(a.flip for a in drawn) < 250
    assert 150 < sum(a.erase is not None for a in drawn) < 250
    assert {a.top for a in drawn} == {a.left for a in drawn} == {0, 1, 2}
    for a in drawn[:50]:
        out = a.apply(image)
        wanted = torch.zeros(3, 32 + 2 * a.pad, 16 + 2 * a.pad)
        wanted[:, a.pad : a.pad + 32, a.pad : a.pad + 16] = image.flip(2) if a.flip else image
        wanted = wanted[:, a.top : a.top + 32, a.left : a.left + 16]
        if a.erase:
            y, x, tall, wide = a.erase
            assert 0.01 < tall * wide / (32 * 16) < 0.45
            wanted[:, y : y + tall, x : x + wide] = 0
        assert torch.equal(out, wanted)


def test_workers_read_the_same_as_none(coloured: list[Sample]) -> None:
    images = ReidImages(coloured, ("rgb", "tir"), (32, 16), train=True, seed=3)
    images.set_epoch(4)
    alone, helped = (next(iter(DataLoader(images, batch_size=4, num_workers=n))) for n in (0, 2))
    assert torch.equal(alone["images"]["rgb"], helped["images"]["rgb"])
    assert alone["present"]["rgb"].tolist() == [True] * 4
    assert alone["camera"].tolist() == [0, 1, 0, 1]


def test_a_file_that_breaks_later_is_named(coloured: list[Sample]) -> None:
    coloured[1].paths["tir"].write_bytes(b"")
    with pytest.raises(DataError, match=r"40_1_tir\.png"):
        ReidImages(coloured, ("rgb", "tir"), (32, 16), train=False)[1]


def test_sixteen_bits_are_scaled_and_photos_turned(tmp_path: Path) -> None:
    warm = np.array([[0, 257 * 40], [257 * 200, 65535]], dtype=np.uint16)
    Image.fromarray(warm).save(tmp_path / "warm.png")
    sample = Sample({"tir": tmp_path / "warm.png", "rgb": tmp_path / "turned.jpg"}, 1, 0, None, "x")
    assert np.asarray(sample.open("tir"))[..., 0].tolist() == [[0, 40], [200, 255]]
    exif = Image.Exif()
    exif[0x0112] = 6  # a phone held upright
    Image.new("RGB", (40, 20)).save(tmp_path / "turned.jpg", exif=exif)
    assert sample.open("rgb").size == (20, 40)


def test_folders_without_images_are_no_modality(tmp_path: Path) -> None:
    (plain(tmp_path) / "train" / "labels").mkdir()
    (tmp_path / "train" / "labels" / "list.txt").write_text("1")
    assert load_set("folder", tmp_path).modalities == ("rgb", "depth")


def people(count: int, cameras: int = 3, images: int = 2) -> list[Sample]:
    return [Sample({}, p, c, None, f"{p}_{c}_{k}") for p in range(count) for c in range(cameras) for k in range(images)]


def test_validation_is_apart_by_identity(tmp_path: Path) -> None:
    samples = people(20)
    train, query, gallery = split_validation(samples, 0.25, seed=1)
    held = {s.pid for s in gallery}
    assert len(held) == 5
    assert held == {s.pid for s in query}
    assert not held & {s.pid for s in train}
    assert len(train) + len(gallery) == len(samples)
    assert len(query) == 5 * 3
    assert len({(s.pid, s.camera) for s in query}) == len(query)
    assert {s.name for s in query} <= {s.name for s in gallery}
    assert split_validation(samples[::-1], 0.25, seed=1)[2] == gallery
    assert split_validation(samples, 0.25, seed=2)[2] != gallery


def test_validation_refuses_what_cannot_be_split() -> None:
    for share in (0, 1, -0.5, float("nan")):
        with pytest.raises(OptionError, match="share"):
            split_validation(people(10), share, 0)
    with pytest.raises(DataError, match="3 training identities"):
        split_validation(people(3), 0.5, 0)
    for share in (0.01, 0.99):
        train, _, gallery = split_validation(people(4), share, 0)
        assert len({s.pid for s in train}) == len({s.pid for s in gallery}) == 2


def test_own_images_need_no_labels(tmp_path: Path) -> None:
    for name in ("a photo", "b"):
        picture(tmp_path / "both" / "rgb" / f"{name}.jpg")
    picture(tmp_path / "both" / "tir" / "b.png")
    found = scan_images([tmp_path / "both"], ("rgb", "nir", "tir"))
    assert [(s.name, sorted(s.paths), s.pid, s.camera) for s in found] == [
        ("a photo", ["rgb"], -1, -1), ("b", ["rgb", "tir"], -1, -1)]  # fmt: skip
    plain_files = scan_images([tmp_path / "both" / "rgb", tmp_path / "both" / "tir" / "b.png"], ("rgb",))
    assert [s.name for s in plain_files] == ["a photo", "b", "b"]
    with pytest.raises(DataError, match="no folder rgb, nir"):
        scan_images([tmp_path / "both" / "rgb"], ("rgb", "nir"))
