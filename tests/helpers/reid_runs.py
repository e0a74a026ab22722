"""A result of `tokensieve eval reid` with made-up figures and pictures, for tests only."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from helpers.eval_runs import make_run


def make_reid_run(folder: Path, name: str = "person", **changes: Any) -> dict[str, Any]:
    """Two queries with five of the gallery each, their pictures in `folder`."""
    measures = ("mAP", "R1", "R5", "R10", "mINP")
    rows = [
        {"missing": gap, "left": [], "reranked": reranked, "checkpoints": 3,
         "metrics": dict.fromkeys(measures, 0.555), "deviation": dict.fromkeys(measures, 0.015)}
        for gap in ([], ["rgb"], ["rgb", "nir"]) for reranked in (False, True)
    ]  # fmt: skip
    lists = [
        {"query": _entry(folder, f"{name} {q}", 7), "average_precision": 0.25 + 0.5 * q, "grid": [4, 2],
         "selected": {m: [0, 2, 5] for m in ("rgb", "nir", "tir")},
         "gallery": [{**_entry(folder, f"{name} {q}{k}", 7 if k % 2 else k), "right": bool(k % 2), "distance": k / 9}
                     for k in range(5)]}
        for q in range(2)
    ]  # fmt: skip
    run = make_run(
        "sdtps", 26, task="reid", dataset="people", layout="rgbnt201", data=str(folder), language=None,
        model="small", metrics=dict.fromkeys(measures, 0.555), rows=rows, lists=lists, queries=12, unmatched=0,
        tokens_per_layer="129 129", speedup=None, speedup_low=None, speedup_high=None,
    )  # fmt: skip
    return run | changes


def _entry(folder: Path, name: str, pid: int) -> dict[str, Any]:
    files = {}
    for place, modality in enumerate(("rgb", "nir", "tir")):
        file = f"{modality}/{zlib.crc32(name.encode())}.jpg"
        (folder / modality).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(place).integers(0, 255, (64, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / file)
        files[modality] = file
    return {"name": name, "pid": pid, "camera": 1, "scene": None, "files": files, "parts": {}}
