"""What blocks for few tokens are made of, for tests."""

from __future__ import annotations

from torch import nn

from tokensieve.adapters.lean_blocks import Parts


def parts_of(model: nn.Module) -> list[Parts]:
    return [p for m in model.modules() if hasattr(m, "sieve_parts") and (p := m.sieve_parts()) is not None]
