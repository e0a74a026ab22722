"""MACs from token counts, against the operations of a block that is really run."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tokensieve.core.cost import BlockShape, block_macs, encoder_cost


def shape_of(width, ratio=4):
    return BlockShape(attention_linear=4 * width * width, attention_width=width, mlp_linear=2 * ratio * width * width)


def counted_macs(width, tokens_in, tokens_out, heads=2, ratio=4):
    """A block of plain matmuls, counted by torch."""
    x = torch.randn(tokens_in, width)
    with FlopCounterMode(display=False) as counter:
        q, k, v = (x @ torch.randn(width, 3 * width)).chunk(3, dim=1)
        q, k, v = (t.view(tokens_in, heads, -1).transpose(0, 1) for t in (q, k, v))
        out = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        out = out.transpose(0, 1).reshape(tokens_in, width) @ torch.randn(width, width)
        out[:tokens_out] @ torch.randn(width, ratio * width) @ torch.randn(ratio * width, width)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(("width", "tokens_in", "tokens_out"), [(8, 5, 5), (16, 17, 9), (32, 50, 1)])
def test_block_macs_are_what_torch_counts(width, tokens_in, tokens_out):
    assert block_macs(shape_of(width), tokens_in, tokens_out) == counted_macs(width, tokens_in, tokens_out)


def test_encoder_cost_follows_the_tokens_through_the_blocks():
    shapes = [shape_of(8), shape_of(16), shape_of(8)]
    cost = encoder_cost(shapes, 20, [20, 11, 6], rest=123)
    assert cost.macs == 123 + counted_macs(8, 20, 20) + counted_macs(16, 20, 11) + counted_macs(8, 11, 6)
    assert cost.macs_full == 123 + 2 * counted_macs(8, 20, 20) + counted_macs(16, 20, 20)
    assert cost.tokens_per_layer == (20, 11, 6)
    assert cost.possible == pytest.approx(cost.macs_full / cost.macs)
    assert cost.possible > 1


def test_nothing_removed_nothing_possible():
    assert encoder_cost([shape_of(8)] * 3, 20, [20] * 3, rest=7).possible == 1.0


def test_one_count_for_each_block():
    with pytest.raises(ValueError, match="shorter"):
        encoder_cost([shape_of(8)] * 3, 20, [20, 10])
