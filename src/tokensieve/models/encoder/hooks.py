"""Say which of the user's hooks a reduced block does not call. Imports form."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from tokensieve.models.encoder.form import BlockForm, part

__all__ = ["warn_of_hooks"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def warn_of_hooks(form: BlockForm, block: nn.Module, index: int, warned: set[str]) -> None:
    """Warn once of each module with hooks whose parts are called in its place. `warned` remembers which.

    Hooks on the block, on its norms, projections and MLP are called as ever.
    """
    for path in (form.attn, f"{form.attn}.{form.dropout}"):
        module = part(block, path) if path.strip(".") else None
        name = f"{path} of block {index}"
        if module is block or not isinstance(module, nn.Module) or name in warned or not _has_hooks(module):
            continue
        warned.add(name)
        warnings.warn(
            f"hooks on {name} ({type(module).__name__}) are not called while a method is attached: its projections and "
            "norms are called one by one, and hooks on those are",
            stacklevel=3,
        )


def _has_hooks(module: nn.Module) -> bool:
    """Whether there are hooks, apart from those by which transformers records outputs."""
    own: Any = (hook for name in _HOOKS for hook in module.__dict__.get(name, {}).values())
    return any(not str(getattr(hook, "__module__", "")).startswith("transformers.") for hook in own)
