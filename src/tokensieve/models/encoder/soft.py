"""A forward through which a selection can be learned: what comes out is the pruned model's, gradients are relaxed.

How it works. At each cut the dropped patches are folded into the kept ones, as in pruning, but stay for one more round
as ghosts at the end of the sequence: no query sees them (the bias on their keys is the log of nothing), yet gradients
say what it would change if one did. At the next cut they are folded in for good. So "keep this one after all" means,
to the gradient, "keep it until the next cut", which is what mostly happens to a patch at the edge of the budget; and
training costs little more than pruned inference, where carrying all patches through all blocks would cost three times
that.

Imports engine, methods and core.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core.budget import Keep
from tokensieve.core.reduction import CorrectedReduction, Reduction, take_tokens
from tokensieve.core.relax import existence_bias, fold_masses, keep_gate
from tokensieve.errors import OptionError, UnsupportedModelError
from tokensieve.methods.sieve import SieveMethod, unit_keys
from tokensieve.models.attach import attach_encoder
from tokensieve.models.encoder.handle import EncoderHandle
from tokensieve.models.encoder.run import Attended, Run, State

__all__ = ["SoftRun", "attach_soft"]


class SoftRun(Run):
    """One forward in training. Differs from `Run` in how a cut is made and in what a ghost's key weighs.

    tau: temperature of the relaxed decision, in units of log price.
    """

    def __init__(self, attachment: EncoderHandle, tau: float) -> None:
        super().__init__(attachment)
        self.tau = tau

    def cut(self, block: int, seen: Attended) -> Tensor:
        """(B, P+N+M, D) -> (B, P+K+R, D): the kept patches, then the N - K dropped ones as ghosts."""
        state, prefix, tokens, k = self.states[block], self.attachment.prefix, seen.tokens, seen.k
        rest = tokens[:, prefix:]
        reduction, origin, gate = self.choose(block, seen)
        assert reduction.drop is not None
        size = state.size if state.size is not None else torch.ones_like(gate)
        exists = state.exists if state.exists is not None else torch.ones_like(gate)
        n = gate.shape[1]
        # every patch as far as it does not stay, and every ghost, goes where it is most alike
        staying = F.pad(gate, (0, state.made))
        mass = (1.0 - staying) * exists * size
        method = cast(SieveMethod, self.attachment.method)
        into = self.targets(unit_keys(k.detach()[:, :, prefix:], method.parts), reduction)
        kept, kept_size = fold_masses(
            take_tokens(rest, reduction.keep), size.gather(1, reduction.keep), rest, mass, into
        )
        out = torch.cat([tokens[:, :prefix], kept], dim=1)
        if isinstance(reduction, CorrectedReduction) and reduction.correct is not None:
            out = reduction.correct(out, kept_size, prefix)
        both = torch.cat([reduction.keep, reduction.drop], dim=1)
        sizes = torch.cat([kept_size, size.gather(1, reduction.drop)], dim=1)
        self.states[block + 1] = State(
            size=sizes,
            bias=self.log_sizes(sizes),
            origin=origin,
            made=n - reduction.keep.shape[1],
            exists=(exists * staying).gather(1, both),
        )
        return torch.cat([out, take_tokens(rest, reduction.drop)], dim=1)

    def choose(self, block: int, seen: Attended) -> tuple[Reduction, Tensor, Tensor]:
        """The method's own choice, and its gate (B, N): gradients reach the method's parameters, not what it saw."""
        method, state = self.attachment.method, self.states[block]
        assert isinstance(method, SieveMethod)
        bias = None if seen.bias is None else seen.bias.detach()
        seen = Attended(seen.tokens.detach(), seen.q.detach(), seen.k.detach(), seen.scale, bias)
        reduction, origin = self.decide(block, seen)
        with torch.no_grad():
            before = state._replace(size=None if state.size is None else state.size.detach())
            view = self.view(block, before, seen)
        order, _, price = method.rank(view)
        log_price = price[:, 1:].clamp_min(torch.finfo(price.dtype).tiny).log()
        log_price = torch.cat([log_price.detach().amax(dim=1, keepdim=True), log_price], dim=1)
        log_price = torch.empty_like(log_price).scatter(1, order, log_price)
        return reduction, origin, keep_gate(log_price, reduction.mask(order.shape[1]), self.tau)

    @staticmethod
    def targets(keys: Tensor, reduction: Reduction) -> Tensor:
        """(B, N+M) the slot of the kept patch that each token is, or would be, folded into. Never its own."""
        assert reduction.drop is not None
        assert reduction.into is not None
        alike = keys @ take_tokens(keys, reduction.keep).transpose(1, 2)  # (B, N+M, K)
        own = reduction.keep.unsqueeze(1)
        alike = alike.scatter(1, own, -torch.inf)
        return alike.argmax(dim=-1).scatter(1, reduction.drop, reduction.into)

    def bias(self, state: State) -> Tensor | None:
        if state.exists is None:
            return state.bias
        there = F.pad(existence_bias(state.exists), (self.attachment.prefix, 0))
        return there if state.bias is None else there + state.bias


def attach_soft(model: nn.Module, method: SieveMethod, *, keep: Keep, tau: float = 0.5) -> EncoderHandle:
    """As `attach`, with forwards that a selection can be trained through."""
    if tau <= 0.0:
        raise OptionError(f"tau={tau}: a temperature above 0")
    handle = attach_encoder(model, method, keep=keep)
    if handle.pools_patches:
        handle.remove()
        raise UnsupportedModelError("this tower pools over patches: a selection is trained where the feature is CLS")
    handle.new_run = partial(SoftRun, tau=tau)
    return handle
