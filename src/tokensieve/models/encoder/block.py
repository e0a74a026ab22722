"""One block with a cut between attention and MLP. Imports run and core."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.encoder.run import Attended, Run, State

__all__ = ["SievedBlock", "attend"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float, log_sum: bool
) -> tuple[Tensor, Tensor | None]:
    """Fused attention of (B, H, L, d); with `log_sum` also each row's log-sum-exp (B, H, L), where the kernel has it.

    On CPU that is the kernel which scaled_dot_product_attention takes anyway, called by its name. Elsewhere, in
    training with dropout and in export it is None, and a view that needs it computes it.
    """
    mask = None if bias is None else bias.view(-1, 1, 1, bias.shape[1])
    if mask is not None and mask.dtype != q.dtype:
        mask = mask.to(q.dtype)
    if log_sum and dropout == 0.0 and q.device.type == "cpu" and not torch.compiler.is_exporting():
        if mask is not None:
            mask = mask.expand(-1, q.shape[1], q.shape[2], -1)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = kernel(q, k, v, dropout, False, attn_mask=mask, scale=scale)
        return out, sums
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale), None


class SievedBlock:
    """Mixin that puts a cut into a block. A family says how its parts are called; modifications against upstream:
    fused attention always, log-size bias after merging, tokens leave between attention and MLP."""

    _sieve_index: int

    def sieve_qkv(self, x: Tensor, state: State, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, float]:
        """First norm and projections of the block input (B, L, D): q, k, v (B, H, L, d) and the logit scale."""
        raise TypeError(f"{type(self).__name__} does not say how it projects")

    def sieve_attended(self, x: Tensor, out: Tensor) -> Tensor:
        """Block input (B, L, D) and heads' output (B, L, H * d) -> the residual stream after attention."""
        raise TypeError(f"{type(self).__name__} does not say what follows attention")

    def sieve_mlp(self, x: Tensor) -> Tensor:
        """Residual stream at the cut -> the block's output."""
        raise TypeError(f"{type(self).__name__} does not say what its MLP is")

    def sieve_dropout(self) -> float:
        """Attention dropout in force now."""
        return 0.0

    def forward(self, x: Tensor, *args: Any, run: Run | None = None, **kwargs: Any) -> Tensor:
        if run is None:
            raise UnsupportedModelError(
                "a block of a reduced encoder was called by itself: call the encoder, or remove the attachment first"
            )
        if run.attachment.mode == "prune":
            return self._sieve_step(x, run, *args, **kwargs)
        out = cast(nn.Module, super()).forward(x, *args, **kwargs)
        return self._sieve_look(x, out, run, *args, **kwargs)

    def sieve_attend(self, x: Tensor, run: Run, state: State, *args: Any, **kwargs: Any) -> Attended:
        """The first half of the block, for its input (B, L, D)."""
        q, k, v, scale = self.sieve_qkv(x, state, *args, **kwargs)
        bias = run.bias(state)
        reads = run.attachment.method.needs_log_sum and self._sieve_index in run.counts
        out, sums = attend(q, k, v, bias, scale, self.sieve_dropout(), reads)
        tokens = self.sieve_attended(x, out.transpose(1, 2).flatten(2))
        return Attended(tokens, q, k, scale, bias, sums)

    def _sieve_step(self, x: Tensor, run: Run, *args: Any, **kwargs: Any) -> Tensor:
        index = self._sieve_index
        state = run.enter(index, x)
        seen = self.sieve_attend(x, run, state, *args, **kwargs)
        tokens = seen.tokens
        here = tokens.shape[1] - run.attachment.prefix - state.made
        if run.counts.get(index, here) < here:
            tokens = run.cut(index, seen)
        else:
            run.states[index + 1] = state
        del seen  # or the MLP's peak comes on top of queries and keys
        return run.leave(index, self.sieve_mlp(tokens))

    def _sieve_look(self, x: Tensor, out: Tensor, run: Run, *args: Any, **kwargs: Any) -> Tensor:
        """Modes that only look: the block ran as it is; the selection is worked out beside it."""
        index = self._sieve_index
        run.states[index] = State()
        state = run.enter(index, x)
        if index in run.counts:
            with torch.no_grad():
                run.decide(index, self.sieve_attend(x, run, state, *args, **kwargs))
        run.leaving[index] = x.shape[1]
        if run.attachment.mode == "fuse" and index == run.attachment.depth - 1:
            run.tail = out
        return out
