"""`evaluate_vlm` on a Qwen2.5-VL from a folder: its own processor, images of any size, its chat template."""

from __future__ import annotations

import pytest

from tokensieve.tasks.vlm.evaluate import VlmEvalOptions, evaluate_vlm
from tokensieve.testing.vlm import tiny_vlm

TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(58)} | {"<|vision_start|>": 58, "<|vision_end|>": 59, "<|image_pad|>": 60}
    words |= {"<|video_pad|>": 61, "<unk>": 62, "<pad>": 63}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", pad_token="<pad>", additional_special_tokens=special,
        padding_side="left",
    )  # fmt: skip
    images = {"patch_size": 8, "merge_size": 2, "min_pixels": 16 * 16, "max_pixels": 48 * 48}
    processor = hf.Qwen2_5_VLProcessor(
        hf.Qwen2VLImageProcessor(**images), tokenizer, hf.Qwen2VLVideoProcessor(**images), chat_template=TEMPLATE
    )
    path = tmp_path_factory.mktemp("qwen")
    tiny_vlm("qwen2_5_vl").model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


@pytest.mark.parametrize("method", ["visionzip", "pyramiddrop"])
def test_a_folder_of_another_family_is_evaluated(folder, method) -> None:
    options = VlmEvalOptions(model=str(folder), images=3, method=method, keep=0.25, batch_size=2, new_tokens=3)
    result = evaluate_vlm(options)
    assert result["possible"] > 1.0
    assert result["tokens_saved"] == pytest.approx(0.75 if method == "visionzip" else 0.44, abs=0.1)
    assert result["tokens_per_layer"] != ""
