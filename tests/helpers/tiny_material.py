"""A tiny CLIP as a folder that open_clip loads by itself, in any process, and a tiny webdataset."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tokensieve.tasks.clip.webdata import write_webdataset

VISION = {"image_size": 32, "layers": 3, "width": 32, "head_width": 8, "patch_size": 4, "mlp_ratio": 2.0}
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}


def tiny_clip(folder: Path) -> Path:
    import open_clip
    import torch
    from safetensors.torch import save_file

    config = {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}
    folder.mkdir()
    torch.manual_seed(0)
    model = open_clip.CLIP(**{**config, "vision_cfg": VISION, "text_cfg": TEXT})
    save_file({name: value.contiguous() for name, value in model.state_dict().items()},
              folder / "open_clip_model.safetensors")  # fmt: skip
    normal = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": normal}))
    return folder


def webdataset(root: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (12, 32, 32, 3), dtype=np.uint8)
    write_webdataset(root, "test", pixels, [i % 3 for i in range(12)], ["red", "green", "blue"], ["a {c} thing"])
