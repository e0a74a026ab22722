"""The small LLaVA's processor: transformers' LlavaProcessor with a CLIP image processor and a word-level tokenizer.

What `save_pretrained` writes loads with plain `AutoProcessor.from_pretrained`. The prompt is LLaVA-1.5's:
"USER: <image>\\nWhat colour is the circle? ASSISTANT:". Imports transformers and tokenizers, inside functions.
"""

from __future__ import annotations

from typing import Any

from tokensieve.tasks.vlm.questions import vocabulary
from tokensieve.tasks.vlm.scenes import PATCH, SIDE

__all__ = ["ASSISTANT", "IMAGE", "PROMPT", "SPECIAL", "USER", "build_processor", "build_tokenizer"]

IMAGE = "<image>"
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", IMAGE)
USER, ASSISTANT = "user:", "assistant:"
PROMPT = "USER: <image>\n{question} ASSISTANT:"


def build_tokenizer() -> Any:
    """Lower case, one token a word or mark; adds <s> in front. Padding goes left, as generation wants it."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, USER, ASSISTANT, "nothing", *vocabulary()]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    pieces = Regex(r"\w+:|[\w\-]+|[^\w\s]")
    core.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="removed", invert=True)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", words.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=[IMAGE], padding_side="left", model_max_length=1024,
    )  # fmt: skip


def build_processor() -> Any:
    """Images become 96 x 96, values -1 to 1, 144 patches; each <image> in a text becomes 144 placeholders."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    image_processor = CLIPImageProcessor(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, do_convert_rgb=True,
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    return LlavaProcessor(
        image_processor=image_processor, tokenizer=build_tokenizer(), patch_size=PATCH,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
