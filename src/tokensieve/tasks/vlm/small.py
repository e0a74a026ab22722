"""The small LLaVA: transformers' LlavaForConditionalGeneration with a CLIP tower and a Llama decoder, 144 image tokens.

Nothing about it is special but its size and how its weights start (`build_small_llava`). Imports torch;
transformers inside functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.errors import OptionError
from tokensieve.tasks.vlm.scenes import GRID, PATCH, SIDE

__all__ = ["SmallSizes", "build_small_llava", "image_tensor"]


@dataclass(frozen=True)
class SmallSizes:
    """width: of tower and decoder. The tower's features are taken from its second last layer, as LLaVA-1.5 does."""

    width: int = 128
    heads: int = 4
    vision_layers: int = 5
    text_layers: int = 8
    vision_mlp: int = 384
    text_mlp: int = 320

    def __post_init__(self) -> None:
        if self.width % (4 * self.heads):
            raise OptionError(f"width={self.width}: a multiple of 4 x heads={self.heads}")
        if self.vision_layers < 2 or self.text_layers < 1:
            raise OptionError("at least 2 vision layers (the second last is used) and 1 text layer")


def build_small_llava(sizes: SmallSizes, tokenizer: Any, seed: int = 0) -> Any:
    """A fresh model. Its start departs from transformers' in three ways, each of which makes learning quicker:

    - the tower's positions begin as sines and cosines of row and column, and its second and third layer's heads by
      looking at the eight neighbours, since a thing spreads over a few patches;
    - the decoder's query and key projections begin equal, so that attention begins by looking for what is alike;
    - input and output embeddings are one matrix, so that what attention copies from a word is that word's logit.
    """
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=sizes.width, intermediate_size=sizes.vision_mlp, num_hidden_layers=sizes.vision_layers,
        num_attention_heads=sizes.heads, image_size=SIDE, patch_size=PATCH, projection_dim=sizes.width,
        hidden_act="gelu",
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=sizes.width, intermediate_size=sizes.text_mlp,
        num_hidden_layers=sizes.text_layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads,
        max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=GRID * GRID, vision_feature_layer=-2, vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(config)
        _start(model, sizes)
    model.generation_config.max_new_tokens = 40
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


@torch.no_grad()
def _start(model: Any, sizes: SmallSizes) -> None:
    tower = model.model.vision_tower
    tower = getattr(tower, "vision_model", tower)  # where it was before transformers 5.6
    for module in tower.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    sines = sizes.width // sizes.heads  # that many channels begin as position, the others as content
    embed = tower.embeddings
    nn.init.normal_(embed.patch_embedding.weight, std=(3 * PATCH * PATCH) ** -0.5)
    embed.patch_embedding.weight[:sines] = 0
    embed.position_embedding.weight.zero_()
    embed.position_embedding.weight[1:, :sines] = _sines(sines)
    for layer, offsets in zip(tower.encoder.layers[1:-2], (_SIDES, _CORNERS), strict=False):
        for head in range(sizes.heads):
            _look_at(layer.self_attn, head, sines, offsets[head % 4])
    for name in ("linear_1", "linear_2"):
        nn.init.xavier_uniform_(getattr(model.model.multi_modal_projector, name).weight)
    for layer in model.model.language_model.layers:
        nn.init.normal_(layer.self_attn.q_proj.weight, std=sizes.width**-0.5)
        layer.self_attn.k_proj.weight.copy_(layer.self_attn.q_proj.weight)


_SIDES = ((-1, 0), (1, 0), (0, -1), (0, 1))
_CORNERS = ((-1, -1), (-1, 1), (1, -1), (1, 1))
_SHARP = 1.2  # most of the attention then lies on the neighbour meant


def _waves(sines: int) -> Tensor:
    """Angular frequencies for `sines` channels: wave lengths from 2.5 to 40 patches."""
    return 2 * torch.pi / torch.logspace(0.4, 1.6, sines // 4)


def _sines(sines: int) -> Tensor:
    """(144, sines): sin and cos of each wave by row, then by column."""
    row, column = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    parts = [f(axis.reshape(-1, 1) * _waves(sines)) for axis in (row, column) for f in (torch.sin, torch.cos)]
    return torch.cat(parts, 1)


def _look_at(attention: Any, head: int, sines: int, offset: tuple[int, int]) -> None:
    """Let a head begin by looking `offset` patches (down, right): the query's position is turned on by so much."""
    quarter = sines // 4
    turn = torch.zeros(sines, sines)
    for axis, steps in enumerate(offset):
        angle = steps * _waves(sines)
        at = 2 * quarter * axis
        sin, cos = slice(at, at + quarter), slice(at + quarter, at + 2 * quarter)
        turn[sin, sin] = turn[cos, cos] = torch.diag(torch.cos(angle))
        turn[sin, cos], turn[cos, sin] = torch.diag(torch.sin(angle)), -torch.diag(torch.sin(angle))
    rows = slice(head * sines, (head + 1) * sines)
    for projection, matrix in ((attention.q_proj, turn), (attention.k_proj, torch.eye(sines))):
        projection.weight[rows] = 0
        projection.weight[rows, :sines] = _SHARP * matrix


def image_tensor(images: Any) -> Tensor:
    """(B, 96, 96, 3) uint8 -> (B, 3, 96, 96) float32 from -1 to 1, as the processor gives it."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)
