"""Files that are broken in one way each, and whole ones beside them: by the name that the fault cases call them."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from helpers.eval_runs import make_run
from helpers.reid_material import tiny_checkpoint, tiny_set
from tokensieve.methods.trained.learned import ScoringNetworks, adapter_bytes
from tokensieve.tasks.reid.model import load_checkpoint

NAN = float("nan")


def write_bad_files(root: Path) -> dict[str, Path]:
    """name -> path, all of them under `root`."""
    root.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path] = {"root": root}
    for part in (_plain, _images, _tensors, _reid, _tars, _records, _configs, _questions):
        part(root, found)
    return found


def _plain(root: Path, found: dict[str, Path]) -> None:
    found["empty"] = _put(root / "empty.txt", b"")
    found["text"] = _put(root / "text.txt", b"just a text")
    found["folder"] = root / "folder"
    found["folder"].mkdir()
    found["pipe"] = root / "pipe"
    os.mkfifo(found["pipe"])


def _put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# -- images ------------------------------------------------------------------------------------------------------------


def picture(number: int = 0, size: int = 32, form: str = "PNG") -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 255, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, form)
    return out.getvalue()


def bomb(width: int = 30_000, height: int = 30_000) -> bytes:
    """A PNG of a few hundred bytes that says it is so large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _images(root: Path, found: dict[str, Path]) -> None:
    found["photo"] = _put(root / "photo.jpg", picture(form="JPEG"))
    kinds = {
        "bomb": ("png", bomb()),
        "wide": ("png", bomb(11_000, 10_000)),  # below Pillow's own limit
        "cut": ("png", picture(size=256)[:9000]),
        "noimage": ("jpg", b"no image at all"),
        "noimage_empty": ("jpg", b""),
    }
    for name, (ending, data) in kinds.items():
        found[name] = _put(root / f"{name}.{ending}", data)
        for number in range(6):
            found[f"folder_{name}"] = _put(root / f"photos_{name}" / f"{number}.{ending}", data).parent
    found["pipe_jpg"] = root / "pipe.jpg"
    os.mkfifo(found["pipe_jpg"])
    found["folder_pipe"] = root / "photos_pipe"
    found["folder_pipe"].mkdir()
    for number in range(6):
        os.mkfifo(found["folder_pipe"] / f"{number}.jpg")
        found["many"] = _put(root / "many" / f"{number}.png", picture(number)).parent
    found["photos"] = _put(root / "photos" / "a.png", picture(1)).parent
    found["only_pipe"] = root / "only_pipe"
    found["only_pipe"].mkdir()
    os.mkfifo(found["only_pipe"] / "a.jpg")


# -- tensors -----------------------------------------------------------------------------------------------------------


def _tensors(root: Path, found: dict[str, Path]) -> None:
    networks = ScoringNetworks(12, 384)
    found["adapter_cut"] = _put(root / "adapter_cut.safetensors", adapter_bytes(networks, {})[:-40])
    found["adapter_text"] = _put(root / "adapter_text.safetensors", b"no tensors")
    found["adapter_empty"] = _put(root / "adapter_empty.safetensors", b"")
    with torch.no_grad():
        networks.bias[3] = NAN
    found["adapter_nan"] = _put(root / "adapter_nan.safetensors", adapter_bytes(networks, {}))
    found["adapter_other"] = root / "adapter_other.safetensors"
    save_file({"a": torch.zeros(2)}, found["adapter_other"])
    found["npz_empty"] = _put(root / "empty.npz", b"")
    found["npz_text"] = _put(root / "text.npz", b"no arrays")
    out = io.BytesIO()
    np.savez(out, a=np.zeros(3))
    found["npz_cut"] = _put(root / "cut.npz", out.getvalue()[:-30])
    found["npz_other"] = _put(root / "other.npz", out.getvalue())
    out = io.BytesIO()
    np.savez(out, a=np.array([{}], dtype=object))
    found["npz_objects"] = _put(root / "objects.npz", out.getvalue())
    found["pt_text"] = _put(root / "text.pt", b"no weights")
    found["pt_empty"] = _put(root / "empty.pt", b"")
    found["pipe_safetensors"] = root / "pipe.safetensors"
    os.mkfifo(found["pipe_safetensors"])


def _reid(root: Path, found: dict[str, Path]) -> None:
    found["people"] = tiny_set(root / "people")
    whole = found["reid"] = tiny_checkpoint(root / "reid.safetensors", found["people"])
    state, about = load_file(whole), _header(whole)
    first = sorted(state)[0]
    changes: dict[str, dict[str, Any]] = {
        "missing": {name: value for name, value in state.items() if name != first},
        "extra": {**state, "surplus.weight": torch.zeros(2)},
        "shape": {**state, first: torch.zeros(1, 2, 3)},
        "nan": {**state, first: torch.full_like(state[first].float(), NAN)},
        "inf": {**state, first: torch.full_like(state[first].float(), float("inf"))},
    }
    for name, tensors in changes.items():
        found[f"reid_{name}"] = root / f"reid_{name}.safetensors"
        save_file(tensors, found[f"reid_{name}"], metadata=about)
    headers = {
        "noconfig": {name: text for name, text in about.items() if name != "config"},
        "badconfig": {**about, "config": "{"},
        "badshape": {**about, "shape": "[1, 2]"},
        "otherconfig": {**about, "config": '{"MODEL": {"COLOUR": 3}}'},
        "format": {**about, "format": "something-9"},
    }
    for name, header in headers.items():
        found[f"reid_{name}"] = root / f"reid_{name}.safetensors"
        save_file(state, found[f"reid_{name}"], metadata=header)
    found["reid_cut"] = _put(root / "reid_cut.safetensors", whole.read_bytes()[:-40])
    found["reid_empty"] = _put(root / "reid_empty.safetensors", b"")
    load_checkpoint(whole)  # the one that all others differ from is whole
    broken = found["people_bomb"] = tiny_set(root / "people_bomb")
    _put(sorted(broken.rglob("*.jpg"))[0], bomb())
    piped = found["people_pipe"] = tiny_set(root / "people_pipe")
    victim = sorted(piped.rglob("*.jpg"))[0]
    victim.unlink()
    os.mkfifo(victim)


def _header(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return dict(file.metadata())


# -- archives ----------------------------------------------------------------------------------------------------------


def tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def sparse_tar(path: Path, claims: int = 20 * 2**30) -> Path:
    """2 KiB whose one member, a GNU sparse file, claims 20 GiB."""
    info = tarfile.TarInfo("a.png")
    info.size = 512
    head = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    head[156:157] = tarfile.GNUTYPE_SPARSE
    head[386:398] = b"00000000000\0"  # the one piece that is stored: at 0 ...
    head[398:410] = b"%011o\0" % 512  # ... of 512 bytes
    head[483:495] = b"\x80" + claims.to_bytes(11, "big")
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return _put(path, bytes(head) + bytes(512) + bytes(1024))


def _tars(root: Path, found: dict[str, Path]) -> None:
    whole = tar(root / "whole.tar", {f"{i}.{e}": d for i in range(3) for e, d in (("png", picture(i)), ("cls", b"0"))})
    found["tar"] = whole
    found["tar_cut"] = _put(root / "cut.tar", whole.read_bytes()[:3000])
    found["tar_text"] = _put(root / "text.tar", b"no archive")
    found["tar_empty"] = _put(root / "empty.tar", b"")
    found["tar_sparse"] = sparse_tar(root / "sparse.tar")
    found["tar_bomb"] = tar(root / "bomb.tar", {"0.png": bomb(), "0.cls": b"0"})
    found["tar_noimage"] = tar(root / "noimage.tar", {"0.png": b"no image"})
    found["pipe_tar"] = root / "pipe.tar"
    os.mkfifo(found["pipe_tar"])
    for name in ("sparse", "bomb", "cut"):
        folder = found[f"wds_{name}"] = root / f"wds_{name}"
        _put(folder / "test" / "0.tar", found[f"tar_{name}"].read_bytes())
        _put(folder / "test" / "nshards.txt", b"1")
        _put(folder / "classnames.txt", b"red\ngreen")
        _put(folder / "zeroshot_classification_templates.txt", b"a {c}")
    nocaption = found["wds_nocaption"] = root / "wds_nocaption"
    tar(
        nocaption / "test" / "0.tar",
        {f"{i}.{e}": d for i in range(3) for e, d in (("png", picture(i, 64)), ("cls", b"0"))},
    )
    _put(nocaption / "test" / "nshards.txt", b"1")
    _put(nocaption / "dataset_type.txt", b"retrieval")


# -- records, settings, questions --------------------------------------------------------------------------------------


def _records(root: Path, found: dict[str, Path]) -> None:
    run = make_run("sieve", 0.5)
    found["run"] = _put(root / "run.json", json.dumps(run).encode())
    found["record_cut"] = _put(root / "record_cut.json", json.dumps(run).encode()[:100])
    found["record_text"] = _put(root / "record_text.json", b"no record")
    found["record_empty"] = _put(root / "record_empty.json", b"")
    found["record_list"] = _put(root / "record_list.json", b"[1, 2]")
    found["record_nested"] = _put(root / "record_nested.json", b"[" * 100_000)
    wrong = {
        "metrics": "fine", "method": 3, "tokens_per_layer": {"a": 1}, "speedup": [1], "keep": {}, "at": 5,
        "images_per_second": "fast", "dataset": ["a"],
    }  # fmt: skip
    for name, value in wrong.items():
        found[f"record_{name}"] = _put(root / f"record_{name}.json", json.dumps(run | {name: value}).encode())
    study = {"format": "tokensieve-search-1", "name": "x", "objectives": 3, "space": [], "trials": {}, "best": "a"}
    found["study_wrong"] = _put(root / "study.json", json.dumps(study).encode())


def _configs(root: Path, found: dict[str, Path]) -> None:
    texts = {
        "config_text": "just text", "config_list": "[1, 2]", "config_broken": "a: [1, ", "config_unknown": "colour: 3",
        "config_nan": "SOLVER: {BASE_LR: .nan}", "config_seed": "SOLVER: {SEED: -1}",
        "config_code": "a: !!python/object/apply:os.system [ls]",
    }  # fmt: skip
    for name, text in texts.items():
        found[name] = _put(root / f"{name}.yml", text.encode())
    found["config_binary"] = _put(root / "config_binary.yml", b"\xff\xfe\x00\x80")
    reid = {"DATASETS": {"ROOT_DIR": str(found["people"]), "VAL_SHARE": 0.5}, "OUTPUT_DIR": str(root / "never")}
    found["config_reid"] = _put(root / "config_reid.yml", json.dumps(reid).encode())


def _questions(root: Path, found: dict[str, Path]) -> None:
    def line(**changes: object) -> bytes:
        base = {"image": "photo.jpg", "question": "What is it?", "answers": ["a cat"]}
        return (json.dumps(base | changes) + "\n").encode()

    kinds = {
        "ask": line(), "ask_empty": b"", "ask_text": b"What?\n", "ask_list": b"[1]\n",
        "ask_gone": line(image="gone.jpg"),
        "ask_bomb": line(image="bomb.png"), "ask_cut": line(image="cut.png"), "ask_pipe": line(image="pipe.jpg"),
        "ask_number": line(question=3), "ask_noanswers": line(answers=[]), "ask_long": line(question="what " * 4000),
    }  # fmt: skip
    for name, data in kinds.items():
        found[name] = _put(root / f"{name}.jsonl", data)
