"""One block with a cut between attention and MLP. Imports attention, run and core."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.encoder.attention import attend
from tokensieve.models.encoder.run import Attended, Run, State

__all__ = ["SievedBlock"]


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
