"""A LLaVA's decoder written out in float64, one prompt at a time: the referee for tokens that leave on the way.

Nothing is dropped here: tokens that left are masked with -inf from that layer on, and every row is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def full_embeds(model, input_ids: Tensor, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
    """(L, D) what enters layer 0 of one prompt without padding, and the places of its vision tokens."""
    inner = model.model
    states = inner.vision_tower(pixel_values, output_hidden_states=True).hidden_states
    prefix = 1 if model.config.vision_feature_select_strategy == "default" else 0
    features = inner.multi_modal_projector(states[model.config.vision_feature_layer][:, prefix:]).flatten(0, 1)
    embeds = inner.language_model.embed_tokens(input_ids[0])
    places = (input_ids[0] == model.config.image_token_id).nonzero().flatten()
    assert len(places) == len(features)
    return embeds.index_copy(0, places, features), places


def _norm(x: Tensor, layer) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + layer.variance_epsilon).sqrt() * layer.weight.double()


def _rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    d = x.shape[-1]
    angle = positions.double()[:, None] / theta ** (torch.arange(0, d, 2).double() / d)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _attention(
    layer, x: Tensor, positions: Tensor, seen: Tensor, theta: float, key_bias: Tensor
) -> tuple[Tensor, Tensor]:
    attn, heads = layer.self_attn, layer.self_attn.config.num_attention_heads
    x = _norm(x, layer.input_layernorm)
    q, k, v = (
        x @ part.weight.double().T + (0.0 if part.bias is None else part.bias.double())
        for part in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    q, k, v = (t.view(len(x), -1, attn.head_dim).transpose(0, 1) for t in (q, k, v))
    q, k = _rotate(q, positions, theta), _rotate(k, positions, theta)
    groups = heads // k.shape[0]
    weights, out = [], []
    for h in range(heads):
        logits = q[h] @ k[h // groups].T / attn.head_dim**0.5 + key_bias
        w = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        weights.append(w)
        out.append(w @ v[h // groups])
    return torch.cat(out, dim=-1) @ attn.o_proj.weight.double().T, torch.stack(weights).mean(0)


def masked_decoder(
    model, embeds: Tensor, gone: dict[int, Tensor], positions: Tensor | None = None, *,
    joins: dict[int, dict[int, int]] | None = None, size: Tensor | None = None, proportional: float = 1.0,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Logits (L, V) of a prompt whose tokens gone[layer] (places) are invisible from that layer on; and the attention
    maps (L, L) of all layers, mean over heads. Rows of tokens that are gone mean nothing.

    joins[layer]: of the tokens gone, the place that each is averaged into. size: (L,) what each token stands for.
    """
    decoder = model.model.language_model
    theta = model.config.text_config.rope_parameters["rope_theta"]
    x, length = embeds.detach().double(), len(embeds)
    positions = torch.arange(length) if positions is None else positions
    seen = torch.ones(length, length).tril().bool()
    size = torch.ones(length).double() if size is None else size.double().clone()
    maps = []
    for index, layer in enumerate(decoder.layers):
        for place, into in (joins or {}).get(index, {}).items():
            x, total = x.clone(), size[place] + size[into]
            x[into] = (x[into] * size[into] + x[place] * size[place]) / total
            size[into] = total
        if index in gone:
            seen = seen.clone()
            seen[:, gone[index]] = False
            seen |= torch.eye(length).bool()  # a row that is gone needs something to look at
        out, weights = _attention(layer, x, positions, seen, theta, proportional * size.log())
        maps.append(weights)
        x = x + out
        y, mlp = _norm(x, layer.post_attention_layernorm), layer.mlp
        gate = torch.nn.functional.silu(y @ mlp.gate_proj.weight.double().T)
        x = x + (gate * (y @ mlp.up_proj.weight.double().T)) @ mlp.down_proj.weight.double().T
    return _norm(x, decoder.norm) @ model.lm_head.weight.double().T, maps


def gone_places(kept: dict[int, Tensor], places: Tensor, row: int = 0) -> dict[int, Tensor]:
    """A handle's `kept`, as places that are gone from each layer on: stage 1 (-1) from layer 0."""
    found = {}
    for layer, numbers in sorted(kept.items()):
        stay = set(numbers[row][numbers[row] >= 0].tolist())
        found[max(layer, 0)] = places[[i for i in range(len(places)) if i not in stay]]
    return found
