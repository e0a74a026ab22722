"""Features: in order, with modalities missing, flipped, in files, and evaluated again from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.reid_material import tiny_model, tiny_set
from tokensieve.errors import DataError, MissingMaterialError, OptionError, RecordError
from tokensieve.tasks.reid.data import ReidImages, ReidSet, load_set
from tokensieve.tasks.reid.evaluate import evaluate
from tokensieve.tasks.reid.features import (
    FeatureTable,
    extract,
    extract_all,
    load_features,
    save_features,
    selected,
    table_of,
)
from tokensieve.tasks.reid.layouts import Sample
from tokensieve.tasks.reid.model import ReidModel


@pytest.fixture(scope="module")
def reid(tmp_path_factory: pytest.TempPathFactory) -> ReidSet:
    return load_set("rgbnt201", tiny_set(tmp_path_factory.mktemp("set") / "people"))


@pytest.fixture(scope="module")
def model() -> ReidModel:
    return tiny_model(Path("data"))


@torch.no_grad()
def one_by_one(
    model: ReidModel, samples: list[Sample], leave_out: tuple[str, ...] = (), flip: bool = False
) -> np.ndarray:
    names = [name for name in model.modalities if name not in leave_out]
    images = ReidImages(samples, names, model.size, train=False, mean=model.pixel_mean, std=model.pixel_std)
    rows = []
    for i in range(len(images)):
        pixels = {name: x[None].flip(-1) if flip else x[None] for name, x in images[i]["images"].items()}
        rows.append(model(pixels, torch.tensor([samples[i].camera])).feature[0].numpy())
    return np.stack(rows)


def test_features_are_the_models_one_by_one(model: ReidModel, reid: ReidSet) -> None:
    wanted = one_by_one(model, reid.query)
    ticks: list[int] = []
    found = extract(model, reid.query, batch_size=5, tick=ticks.append)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert sum(ticks) == len(reid.query) == 12
    assert np.abs(extract(model, reid.query, after_neck=True) - wanted).max() > 1e-7


def test_flipped_features_are_the_mean_with_the_mirror_images(model: ReidModel, reid: ReidSet) -> None:
    both = (one_by_one(model, reid.query) + one_by_one(model, reid.query, flip=True)) / 2
    np.testing.assert_allclose(extract(model, reid.query, flip=True), both, atol=1e-5)


@pytest.mark.parametrize("gap", [("rgb",), ("nir", "tir")])
def test_missing_modalities_are_zero_blocks_and_are_not_looked_at(
    model: ReidModel, reid: ReidSet, gap: tuple[str, ...]
) -> None:
    found = extract(model, reid.query, missing=gap)
    np.testing.assert_allclose(found, one_by_one(model, reid.query, gap), atol=1e-5)
    table = table_of({"query": found}, {"query": reid.query}, model, False, {})
    for name in model.modalities:
        assert (table.block(name) == 0).all() == (name in gap)
    with pytest.raises(OptionError, match="uv"):
        extract(model, reid.query, missing=("uv",))
    with pytest.raises(OptionError, match="all modalities"):
        extract(model, reid.query, missing=model.modalities)


def test_an_image_in_two_splits_is_computed_once(model: ReidModel, reid: ReidSet) -> None:
    ticks: list[int] = []
    found = extract_all(model, {"query": reid.query[3:], "gallery": reid.gallery}, tick=ticks.append)
    assert sum(ticks) == len(reid.gallery)
    np.testing.assert_array_equal(found["query"], found["gallery"][3:])


def test_selected_patches_are_those_of_the_forward(model: ReidModel, reid: ReidSet) -> None:
    found = selected(model, reid.query[:2])
    images = ReidImages(reid.query[:2], model.modalities, model.size, train=False)
    with torch.no_grad():
        out = model({n: x[None] for n, x in images[1]["images"].items()}, torch.tensor([reid.query[1].camera]))
    assert found[1] == {name: reduction.keep[0].tolist() for name, reduction in out.selections.items()}
    assert {name: len(patches) for name, patches in found[0].items()} == {"rgb": 4, "nir": 4, "tir": 4}  # of 4 x 2
    assert selected(tiny_model(Path("data"), "MODEL.USE_SDTPS=False"), reid.query[:1]) == [{}]


@pytest.fixture
def table(model: ReidModel, reid: ReidSet) -> FeatureTable:
    splits = {"query": reid.query, "gallery": reid.gallery}
    return table_of(extract_all(model, splits), splits, model, False, {"checkpoint": "a \u00fc <b>"})


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_a_file_gives_the_same_table_and_figures(
    ending: str, table: FeatureTable, reid: ReidSet, tmp_path: Path
) -> None:
    path = tmp_path / f"features.{ending}"
    save_features(path, table)
    again = load_features(path)
    np.testing.assert_array_equal(again.features, table.features)
    assert (again.names, again.modalities, again.by_scene) == (table.names, table.modalities, table.by_scene)
    assert dict(again.about) == dict(table.about)
    features = again.features[:12], again.features[12:]
    pids, cameras = [s.pid for s in reid.query], [s.camera for s in reid.query]
    wanted = evaluate(features[0], pids, cameras, features[1], pids, cameras)
    assert again.rank().metrics == table.rank().metrics == wanted
    assert again.rank(rerank=True).metrics != wanted
    assert list(tmp_path.iterdir()) == [path]


def test_scenes_of_a_table_take_the_place_of_cameras(table: FeatureTable) -> None:
    scenes = np.random.default_rng(0).permutation(table.cameras)
    by_scene = FeatureTable(**{**vars(table), "scenes": scenes, "by_scene": True})
    as_cameras = FeatureTable(**{**vars(table), "cameras": scenes})
    assert by_scene.rank().metrics == as_cameras.rank().metrics
    assert by_scene.rank().metrics != table.rank().metrics


@pytest.mark.parametrize("ending", ["npz", "safetensors"])
def test_broken_files_are_named(ending: str, table: FeatureTable, tmp_path: Path) -> None:
    path = tmp_path / f"features.{ending}"
    with pytest.raises(MissingMaterialError, match="features"):
        load_features(path)
    save_features(path, table)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(RecordError, match="truncated or not a"):
        load_features(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(RecordError, match="truncated or not a"):
        load_features(path)


def test_other_files_are_refused(table: FeatureTable, tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", features=np.zeros((2, 3)))
    with pytest.raises(DataError, match="holds no features"):
        load_features(tmp_path / "other.npz")
    np.savez(tmp_path / "pickle.npz", features=np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(RecordError, match=r"pickle\.npz"):
        load_features(tmp_path / "pickle.npz")
    with pytest.raises(OptionError, match="csv"):
        save_features(tmp_path / "a.csv", table)
    (tmp_path / "full.npz").mkdir()
    with pytest.raises(RecordError, match="full"):
        save_features(tmp_path / "full.npz", table)
    with pytest.raises(DataError, match="equal blocks"):
        FeatureTable(**{**vars(table), "modalities": ("a",) * 7})
    with pytest.raises(DataError, match="not one label"):
        FeatureTable(**{**vars(table), "names": ["one"]})
