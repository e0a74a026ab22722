"""A reduction after which merged tokens are changed a little more. Imports torch only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tokensieve.core.reduction import Reduction

__all__ = ["Mend", "MendedReduction"]

Mend = Callable[[Tensor, Tensor, int], Tensor]  # tokens (B, P+K, D), sizes (B, K), P -> tokens


@dataclass(frozen=True)
class MendedReduction(Reduction):
    """mend: what happens to the tokens once the dropped ones are folded in; nothing as long as nothing was merged."""

    mend: Mend | None = None

    def apply(
        self, x: Tensor, prefix: int = 0, made: int = 0, size: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        out, new_size = super().apply(x, prefix, made, size)
        if self.mend is not None and new_size is not None:
            out = self.mend(out, new_size, prefix)
        return out, new_size
