"""A vision-language model and its processor from a folder or a name, with one clear line where that does not work.

Imports torch; transformers inside functions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tokensieve.errors import MissingMaterialError, UnsupportedModelError
from tokensieve.tasks.vlm.default import load_small_llava
from tokensieve.tasks.vlm.smol.model import SMOL, load_smol_llava
from tokensieve.utils.hub import quiet_hub

__all__ = ["load_llava"]

# model_type of the configurations that questions can be put to
KINDS = (
    "llava", "llava_next", "llava_onevision", "vipllava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "internvl",
    "aya_vision", "idefics3", "smolvlm", "gemma3", "paligemma", "mistral3",
)  # fmt: skip


def load_llava(name: str | None = None, device: str | None = None) -> tuple[Any, Any]:
    """(model, processor) in evaluation mode. None: the shipped small one; "smol": SmolLaVA.

    name: else a folder of `save_pretrained`, or a name that transformers knows. float32 on a CPU, as stored on a GPU. A
    checkpoint of another kind of model, or one that lacks weights, is refused.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name is None:
        model, processor = load_small_llava()
        return model.to(device), processor
    if name == SMOL:
        model, processor = load_smol_llava()
        return model.to(device), processor
    return _load(name, device)


def _load(name: str, device: str) -> tuple[Any, Any]:
    import transformers as hf
    from safetensors import SafetensorError

    _check_kind(name)
    dtype: Any = torch.float32 if device == "cpu" else "auto"
    level = hf.logging.get_verbosity()
    hf.logging.set_verbosity_error()  # what is missing is said below, in one line
    try:
        loader: Any = hf.AutoModelForImageTextToText  # its types do not know output_loading_info
        with quiet_hub():
            model, info = loader.from_pretrained(name, dtype=dtype, output_loading_info=True)
            processor = hf.AutoProcessor.from_pretrained(name)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise MissingMaterialError(f"model {name} cannot be loaded: {_short(error)}") from None
    finally:
        hf.logging.set_verbosity(level)
    missing = sorted(info["missing_keys"])
    if missing:
        raise UnsupportedModelError(
            f"model {name}: {len(missing)} weights are not in its checkpoint ({missing[0]}, ...): of another model?"
        )
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        raise MissingMaterialError(f"model {name} has no processor of images and text beside it (preprocessor_config)")
    return model.eval().to(device), processor


def _check_kind(name: str) -> None:
    """Refuse what is not a known vision-language model by its configuration."""
    import transformers as hf

    folder = Path(name)
    if folder.exists():
        file = folder / "config.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get("model_type", "nothing")
        except OSError as error:
            reason = error.strerror or error
            raise MissingMaterialError(f"model {name}: cannot read {file}: {reason}") from None
        except (ValueError, AttributeError):
            raise MissingMaterialError(f"model {name}: {file} is not a configuration of a model") from None
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:  # no name on a hub is like that
        raise MissingMaterialError(f"model {name}: there is no such folder")
    else:
        try:
            with quiet_hub():
                found = hf.AutoConfig.from_pretrained(name).model_type
        except (OSError, ValueError, KeyError) as error:
            raise MissingMaterialError(
                f"model {name}: no such folder, and transformers cannot get it: {_short(error)}"
            ) from None
    if found not in KINDS:
        raise UnsupportedModelError(
            f"model {name} is a {found} model: questions can be put to models of the kinds {', '.join(KINDS)}"
        )


def _short(error: BaseException) -> str:
    """The first sentence of what a library said."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
