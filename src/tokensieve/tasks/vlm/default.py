"""The LLaVA that is there without downloading one: trained by `tokensieve train vlm-base`, shipped with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from tokensieve.errors import MissingMaterialError

__all__ = ["SMALL_LLAVA", "load_small_llava", "small_llava_folder"]

SMALL_LLAVA = "small-llava"


def small_llava_folder() -> Path:
    """The folder that `from_pretrained` takes."""
    folder = Path(str(resources.files("tokensieve.tasks.vlm") / "data" / SMALL_LLAVA))
    if not (folder / "config.json").is_file():
        raise MissingMaterialError(f"{folder} has no model in it; make one with `tokensieve train vlm-base`")
    return folder


def load_small_llava(folder: Path | None = None) -> tuple[Any, Any]:
    """(model, processor): LlavaForConditionalGeneration in evaluation mode, float32, and its LlavaProcessor.

    folder: of a model trained otherwise; None for the shipped one.
    """
    import torch
    from transformers import AutoProcessor, LlavaForConditionalGeneration
    from transformers.utils import logging

    folder = small_llava_folder() if folder is None else folder
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # for a model that is there in an instant
    try:
        model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    finally:
        if shown:
            logging.enable_progress_bar()
    return model.eval(), AutoProcessor.from_pretrained(folder)
