"""A forward of a LLaVA model through which merger and pruners can be learned. Imports run, handle, core.

What differs from a forward that prunes. Stage 1 is the same, tokens are merged for good. Inside the language model no
token leaves: each cut multiplies every vision token's existence by a keep mask, and the layers from there on add the
log of it to the token's key, for every query. A token that does not exist is seen by nobody, which is what dropping it
does, while the gradient says what it would change if it did exist. Text that is an answer is not a question: heads must
not read in training what they will not be shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.core.budget import Keep
from tokensieve.core.reduction import Reduction, take_tokens
from tokensieve.core.relax import existence_bias, fold_masses, keep_gate, keep_probability
from tokensieve.errors import OptionError, UnsupportedModelError
from tokensieve.methods.base import Method
from tokensieve.models.decoder.forward import Pass, Rotary, Stretch, key_bias_of, marked_places
from tokensieve.models.decoder.handle import VlmAttachment, attach_vlm

__all__ = ["SoftPass", "Softness", "attach_soft"]

_NOTHING = 1e-12  # how much of a dropped token is left: a logit would have to be 27 above the others to be seen


@dataclass
class Softness:
    """tau: temperature of the keep masks. straight_through: exactly 0 or 1 in the forward, relaxed in the backward;
    False: relaxed in both. prompt: (B, L) bool, False for the answer's tokens; None: there is no answer.
    """

    tau: float = 1.0
    straight_through: bool = True
    prompt: Tensor | None = None


class SoftPass(Pass):
    """One forward in training, without a cache; every prompt has as many images."""

    def __init__(self, attachment: VlmAttachment, softness: Softness) -> None:
        super().__init__(attachment)
        self.softness = softness
        self.alive: Tensor | None = None  # (B, L) bool: vision tokens that no cut has dropped
        self.exists: Tensor | None = None  # (B, L) float, 0 to 1
        self._existence: dict[int, Tensor | None] = {}  # first layer of a stretch -> (B, L) log of it
        self.probabilities: dict[int, Tensor] = {}  # layer -> (B, n) of the tokens that came to its head

    def asked(self, vision: Tensor, valid: Tensor | None) -> Tensor:
        prompt = self.softness.prompt
        if prompt is not None:
            prompt = prompt if self.layout.place is None else prompt.gather(1, self.layout.place)
            valid = prompt if valid is None else valid & prompt
        return super().asked(vision, valid)

    def _start(self, hidden: Tensor, cache: Any, kind: str) -> None:
        if cache is not None:
            raise OptionError("training runs whole prompts: give use_cache=False")
        super()._start(hidden, cache, kind)
        vision = self.layout.vision
        if vision is None:
            raise OptionError("training needs prompts with an image")
        if len(set(self.layout.left)) > 1:
            raise OptionError("training needs prompts with equally many images")
        self.alive = vision if self.layout.valid is None else vision & self.layout.valid
        self.exists = torch.ones(hidden.shape[:2], device=hidden.device)

    def _turn(self, index: int, hidden: Tensor, rotary: Rotary, cache: Any, kind: str) -> Tensor:
        before = self.stretch_of(index - 1)
        stretch = Stretch(
            index, before.base, before.valid, before.size, list(before.left), before.own_mask, before.key_bias
        )
        self._existence[index] = self._existence.get(before.start)
        wanted = {counts[index] for counts in self.layout.counts}
        if wanted and max(wanted) < before.left[0]:
            if kind not in ("sdpa", "eager"):
                raise UnsupportedModelError(f"attention implementation {kind!r}: training knows sdpa and eager")
            hidden = self._weigh(index, hidden, rotary, before, stretch, wanted.pop())
            assert self.exists is not None
            self._existence[index], stretch.own_mask = existence_bias(self.exists, _NOTHING), True
        else:
            self._note_all(index, before)
        self.stretches[index] = stretch
        return hidden

    def _keys_known(self, stretch: Stretch) -> tuple[Tensor | None, Tensor | None]:
        """Which tokens count, and the log of how far each exists, with what it stands for."""
        bias = self._existence.get(stretch.start)
        if bias is None:
            return super()._keys_known(stretch)
        return self.layout.valid, bias if stretch.key_bias is None else bias + stretch.key_bias

    def _weigh(self, index: int, hidden: Tensor, rotary: Rotary, before: Stretch, after: Stretch, keep: int) -> Tensor:
        """Let the method choose among the tokens that are left, as it would in pruning; gradients reach the method's
        own parameters, not what it looked at. The tokens, with what was folded into them."""
        method, tau = self.attachment.second, self.softness.tau
        assert method is not None
        assert self.alive is not None
        assert self.exists is not None
        place = marked_places(self.alive, before.left[0])
        reduction = method.reduce(self._view(index, hidden.detach(), rotary, before, None, place), keep)
        if reduction.scores is None:
            raise UnsupportedModelError(f"{type(method).__name__} has no scores to learn by")
        hard = reduction.mask(place.shape[1])
        p = keep_probability(reduction.scores, hard, tau)
        self.probabilities[index] = p.detach()
        mask = keep_gate(reduction.scores, hard, tau) if self.softness.straight_through else p
        self.exists = self.exists.scatter(1, place, self.exists.gather(1, place) * mask)
        self.alive = self.alive.scatter(1, place, hard)
        after.left = [keep] * hidden.shape[0]
        self._note(index, before, [(list(range(hidden.shape[0])), place, place.gather(1, reduction.keep), reduction)])
        return hidden if reduction.into is None else self._folded(hidden, after, place, reduction, mask)

    def _folded(self, hidden: Tensor, after: Stretch, place: Tensor, reduction: Reduction, mask: Tensor) -> Tensor:
        """Each dropped token, as far as its mask (B, n) drops it, averaged into the kept one that takes it in."""
        assert reduction.drop is not None
        assert reduction.into is not None
        assert self.attachment.second is not None
        size = torch.ones(hidden.shape[:2], device=hidden.device) if after.size is None else after.size
        kept, gone = place.gather(1, reduction.keep), place.gather(1, reduction.drop)
        mass = (1.0 - mask.gather(1, reduction.drop)) * size.gather(1, gone)
        means, total = fold_masses(
            take_tokens(hidden, kept), size.gather(1, kept), take_tokens(hidden, gone), mass, reduction.into
        )
        after.size = size.scatter(1, kept, total)
        after.key_bias = key_bias_of(self.attachment.second, after.size)
        return hidden.scatter(1, kept.unsqueeze(-1).expand_as(means), means)


def attach_soft(
    model: nn.Module,
    method: Method,
    softness: Softness,
    *,
    keep: Keep | None = None,
    at: Sequence[int] | None = None,
    positions: str | None = None,
) -> VlmAttachment:
    """As `attach`, with forwards that merger and pruners can be trained through; the handle's `last` is a SoftPass."""
    handle = attach_vlm(model, method, keep=keep, at=at, keep_average=None, schedule=None, positions=positions)
    handle.new_pass = lambda attachment: SoftPass(attachment, softness)
    return handle
