"""A tiny synthetic set and untrained tiny models, for tests of what comes after training."""

from __future__ import annotations

from pathlib import Path

import torch

from tokensieve.tasks.reid.config import parse_config
from tokensieve.tasks.reid.model import ReidModel, save_model
from tokensieve.tasks.reid.synthetic import SyntheticConfig, write_synthetic


def tiny_set(root: Path, layout: str = "rgbnt201") -> Path:
    write_synthetic(root, SyntheticConfig(layout=layout, identities=6, cameras=2, images=2, test_share=0.5))
    return root


def tiny_model(
    root: Path, *overrides: str, seed: int = 0, modalities: tuple[str, ...] = ("rgb", "nir", "tir")
) -> ReidModel:
    shape = ["MODEL.PATCH=8", "MODEL.WIDTH=24", "MODEL.DEPTH=2", "MODEL.HEADS=2", f"DATASETS.ROOT_DIR={root}"]
    config = parse_config({}, [*shape, f"SOLVER.SEED={seed}", *overrides])
    torch.manual_seed(seed)
    return ReidModel(config, (32, 16), modalities, classes=3, cameras=2).eval()


def tiny_checkpoint(path: Path, root: Path, *overrides: str, seed: int = 0) -> Path:
    save_model(tiny_model(root, *overrides, seed=seed), path)
    return path
