"""The whole of SmolLaVA, as it ships."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import tokensieve
from tokensieve.errors import MissingMaterialError, UnsupportedModelError
from tokensieve.tasks.vlm.smol.model import load_smol_llava, merge_adapter
from tokensieve.zoo import smollm2, vit_s14


def missing() -> str:
    try:
        smollm2.smollm2_path()
        vit_s14.onnx_path()
    except MissingMaterialError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
@torch.no_grad()
def test_it_answers_in_words_and_reduces_like_any_llava() -> None:
    model, processor = load_smol_llava()
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8))
    prompt = "USER: <image>\nIs there a cat? ASSISTANT:"
    inputs = processor(images=[picture], text=[prompt], return_tensors="pt")
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 256
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask", "pixel_values")}
    plain = model(**inputs).logits
    said = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert processor.decode(said, skip_special_tokens=True).strip() in ("yes", "no")
    with pytest.warns(UserWarning, match="nothing is reduced"), tokensieve.attach(model, "sieve", keep=1.0):
        assert torch.equal(model(**inputs).logits, plain)
    with tokensieve.attach(model, "sieve", keep_average=0.25) as handle:
        out = model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert handle.cost().vision_tokens_per_layer[0] == 64
    assert out.shape[0] == 1
    parts = {f"projector.{name}": x for name, x in model.model.multi_modal_projector.state_dict().items()}
    with pytest.raises(UnsupportedModelError, match="not an adapter"):
        merge_adapter(model, parts | {"other": torch.zeros(1)})
