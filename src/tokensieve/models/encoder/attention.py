"""Fused attention that also tells each row's log-sum-exp. Imports torch only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attend"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float, log_sum: bool
) -> tuple[Tensor, Tensor | None]:
    """Fused attention of (B, H, L, d); with `log_sum` also each row's log-sum-exp (B, H, L), where the kernel has it.

    bias: what is added to the logits, (B, L) on every row of them or a map (B, 1 or H, 1 or L, L).
    On CPU that is the kernel which scaled_dot_product_attention takes anyway, called by its name. Elsewhere, in
    training with dropout or a learned bias, and in export, it is None, and a view that needs it computes it.
    """
    mask = bias if bias is None or bias.dim() == 4 else bias.view(-1, 1, 1, bias.shape[1])
    if mask is not None and mask.dtype != q.dtype:
        mask = mask.to(q.dtype)
    learned = mask is not None and mask.requires_grad  # a position bias in training: the kernel has no gradient for it
    if log_sum and dropout == 0.0 and q.device.type == "cpu" and not learned and not torch.compiler.is_exporting():
        if mask is not None:
            mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], -1)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = kernel(q, k, v, dropout, False, attn_mask=mask, scale=scale)
        return out, sums
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale), None
