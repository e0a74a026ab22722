"""Whether a computation may go another way than torch's own operations. Imports torch only."""

from __future__ import annotations

import torch

__all__ = ["eager"]


def eager() -> bool:
    """Whether numbers are all that anybody wants: no gradient or tangent, nothing compiled, traced or exported, no mode
    that sees every operation, no vmap, and no precision but the numbers' own."""
    return (
        not torch.compiler.is_compiling()  # first: a graph for any number of images must not ask for more
        and not torch.is_grad_enabled()
        and not torch._C._is_tracing()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
    )
