"""When numbers are all that anybody wants."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from tokensieve.core.eager import eager


def test_only_where_nothing_else_wants_to_know():
    assert not eager()  # gradients
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(eager())
        return x

    one = torch.ones(1)
    with torch.inference_mode():
        assert eager()
    with torch.no_grad():
        assert eager()
        torch.jit.trace(look, one, check_trace=False)
        torch.vmap(look)(one)
        torch.func.jvp(look, (one,), (one,))
        with torch.autograd.forward_ad.dual_level():
            look(one)
        with torch.device("cpu"):  # a mode that sees every function
            look(one)
        with FlopCounterMode(display=False):  # and one that sees every operation
            look(one)
        with torch.autocast("cpu", torch.bfloat16):
            look(one)
        assert eager()
        assert torch.compile(lambda x: x + eager(), backend="eager")(one) == 1
    assert seen == [False] * 7
