"""Count what a forward dispatches: operations, views and reads by the host. Imports torch only."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Operations"]

# Reads of a value, and operations whose output's shape the host has to know: each waits for the device
_READS = {
    "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "unique2", "_unique2",
    "unique_consecutive", "unique_dim",
}  # fmt: skip
_NO_KERNEL = {"_unsafe_view", "detach", "lift_fresh", "promote_types", "sym_size", "sym_numel"}


class Operations(TorchDispatchMode):
    """What is dispatched while it is active, below autograd: what a GPU would be given one by one.

    operations: by name, without views and reads. views: operations that only say otherwise what memory means. reads: a
    value, or the shape of a result, that the host waits for. Run the forward under `torch.no_grad()`: in inference mode
    composed operations come as one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.views: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._lists = _Lists(self.reads)

    def __enter__(self) -> Operations:
        self._lists.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _READS or (name in ("index", "index_put", "index_put_") and _by_mask(args[1])):
            self.reads[name] += 1
        elif func.is_view or name in _NO_KERNEL:
            self.views[name] += 1
        else:
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


class _Lists(TorchFunctionMode):
    """`tolist` and `numpy` of a tensor on CPU read memory past the dispatcher."""

    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy):
            self.reads[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def _by_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
