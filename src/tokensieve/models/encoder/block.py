"""One block with a cut between attention and MLP. Imports form, attention, run and core."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.errors import UnsupportedModelError
from tokensieve.models.encoder.attention import attend
from tokensieve.models.encoder.form import BlockForm, Given
from tokensieve.models.encoder.padding import valid_patches
from tokensieve.models.encoder.run import Attended, Run, State
from tokensieve.models.wrappers import needs_preparation, prepared

__all__ = ["SievedBlock", "block_output", "take_map"]


class SievedBlock:
    """Mixin that puts a cut into a block. `_sieve_form` says what the block consists of; modifications against
    upstream: fused attention always, log-size bias after merging, tokens leave between attention and MLP."""

    _sieve_index: int
    _sieve_form: BlockForm

    def forward(self, x: Tensor, *args: Any, run: Run | None = None, **kwargs: Any) -> Any:
        if run is None:
            raise UnsupportedModelError(
                "a block of a reduced encoder was called by itself: call the encoder, or remove the attachment first"
            )
        form = self._sieve_form
        if run.attachment.mode == "prune":
            if form.length_first:
                return self._sieve_step(x.transpose(0, 1), run, *args, **kwargs).transpose(0, 1)
            out = self._sieve_step(x, run, *args, **kwargs)
            return (out, *[None] * (form.tuple_out - 1)) if form.tuple_out else out
        if form.length_first:
            raise UnsupportedModelError('mode="analyse" and "fuse" need a tower that keeps the batch first')
        out = cast(nn.Module, super()).forward(x, *args, **kwargs)
        self._sieve_look(x, out[0] if form.tuple_out else out, run, *args, **kwargs)
        return out

    def sieve_attend(self, x: Tensor, run: Run, state: State, *args: Any, **kwargs: Any) -> Attended:
        """The first half of the block, for its input (B, L, D)."""
        reads = run.attachment.needs_log_sum and self._sieve_index in run.counts
        given = self._sieve_form.given(args, kwargs)
        mask = given.get(self._sieve_form.mask) if self._sieve_form.mask else None
        if mask is not None and not run.masked and not torch.compiler.is_exporting():
            run.valid, run.masked = valid_patches(mask, run.attachment.prefix), True
        return _attend(self._sieve_form, self, x, given, state, run.bias(state), run.attachment.prefix, reads)

    def _sieve_step(self, x: Tensor, run: Run, *args: Any, **kwargs: Any) -> Tensor:
        index = self._sieve_index
        x = run.narrow(index, x)
        state = run.enter(index, x)
        seen = self.sieve_attend(x, run, state, *args, **kwargs)
        tokens = seen.tokens
        here = tokens.shape[1] - run.attachment.prefix - state.made
        if run.cuts(index, here):
            tokens = run.cut(index, seen)
        else:
            run.states[index + 1] = state
        del seen  # or the MLP's peak comes on top of queries and keys
        return run.leave(index, self._sieve_form.finish(self, tokens))

    def _sieve_look(self, x: Tensor, out: Tensor, run: Run, *args: Any, **kwargs: Any) -> None:
        """Modes that only look: the block ran as it is; the selection is worked out beside it."""
        index = self._sieve_index
        run.states[index] = State()
        state = run.enter(index, x)
        if index in run.counts:
            with torch.no_grad():
                seen = self.sieve_attend(x, run, state, *args, **kwargs)
                if run.valid is None:
                    run.decide(index, seen)
                else:
                    run.cut(index, seen)  # what it returns is not used
        run.leaving[index] = x.shape[1]
        if run.attachment.mode == "fuse" and index == run.attachment.depth - 1:
            run.tail = out


def _attend(
    form: BlockForm, block: Any, x: Tensor, given: Given, state: State, bias: Tensor | None, prefix: int, reads: bool
) -> Attended:
    """Everything up to the cut. The map of mask and position bias, if any, is cut down to the tokens that are left."""
    attn = form.attention(block)
    if attn is not block and needs_preparation(attn):
        with prepared(attn):
            return _attend_prepared(form, block, x, given, state, bias, prefix, reads)
    return _attend_prepared(form, block, x, given, state, bias, prefix, reads)


def _attend_prepared(
    form: BlockForm, block: Any, x: Tensor, given: Given, state: State, bias: Tensor | None, prefix: int, reads: bool
) -> Attended:
    q, k, v, rest = form.project(block, x)
    table = given.get(form.rotary) if form.rotary else None
    if form.rotate is not None and (table is not None or not form.rotary):
        if state.made:
            raise UnsupportedModelError("an extra token has no place in a rotary tower")
        q = form.rotate(block, q, table, state.origin, prefix).type_as(v)
        k = form.rotate(block, k, table, state.origin, prefix).type_as(v)
    scale = form.logit_scale(block, q.shape[-1])
    added, whole = bias, form.logit_map(block, given, q)
    if whole is not None:
        added = take_map(whole, state.origin, prefix, state.made)
        added = added if bias is None else added + bias[:, None, None, :]
    out, sums = attend(q, k, v, added, scale, form.dropout_rate(block), reads)
    return Attended(form.attended(block, x, out, rest), q, k, scale, bias, sums)


def take_map(whole: Tensor, origin: Tensor | None, prefix: int, made: int) -> Tensor:
    """(1 or B, h, 1 or L, L) over all tokens -> (B, h, 1 or L', L') over the prefix and the patches that are left.

    origin: (B, N) which patches those are; None: all. Extra tokens at the end see and are seen as if by 0.
    """
    if origin is not None:
        lead = torch.arange(prefix, device=origin.device).expand(origin.shape[0], -1)
        index = torch.cat([lead, origin + prefix], dim=1)
        whole = whole.expand(origin.shape[0], -1, -1, -1)
        _, heads, rows, columns = whole.shape
        if rows > 1:
            whole = whole.gather(2, index[:, None, :, None].expand(-1, heads, -1, columns))
        whole = whole.gather(3, index[:, None, None, :].expand(-1, heads, whole.shape[2], -1))
    return F.pad(whole, (0, made, 0, made if whole.shape[2] > 1 else 0)) if made else whole


def block_output(form: BlockForm, block: Any, x: Tensor, prefix: int, **given: Any) -> Tensor:
    """The block's output (B, L, D) as the form computes it with nothing removed: what is verified."""
    if form.length_first:
        x = x.transpose(0, 1)
    seen = _attend(form, block, x, form.given((), given), State(), None, prefix, False)
    out = form.finish(block, seen.tokens)
    return out.transpose(0, 1) if form.length_first else out
