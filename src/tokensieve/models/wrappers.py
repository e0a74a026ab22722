"""What other libraries put around a model or its parts: PEFT's adapters, accelerate's hooks, compiled models.

Recognised by names, so that none of the libraries is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["base_layer", "needs_preparation", "prepared", "unwrapped"]

_WRAPPERS = ("_orig_mod", "module")  # torch.compile's; DataParallel's and DistributedDataParallel's
_ADAPTERS = ("base_model", "model")  # PeftModel's; that of LoraModel and its like, and of timm's `features_only`


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside compiled, parallel and PEFT wrappers, and in timm's `features_only`."""
    while True:
        cls = type(model)
        adapts = cls.__module__.split(".")[0] == "peft" or cls.__name__ == "FeatureGetterNet"
        names = _ADAPTERS if adapts else _WRAPPERS
        inner = next((model._modules[name] for name in names if model._modules.get(name) is not None), None)
        if inner is None:
            return model
        model = inner


def base_layer(module: Any) -> Any:
    """The module inside PEFT's wrapper of a layer, or the module itself."""
    return module.base_layer if _is_adapted(module) else module


def needs_preparation(module: nn.Module) -> bool:
    """Whether the module's forward does something to its weights first: see `prepared`."""
    return "_hf_hook" in module.__dict__ or _is_adapted(module)


@contextmanager
def prepared(module: Any) -> Iterator[None]:
    """Within: the weights of an attention whose own forward is not called are what that forward would find.

    accelerate's hook loads those that are offloaded; PEFT's wrapper of nn.MultiheadAttention merges the LoRA adapters
    for the time of its forward.
    """
    hook = module.__dict__.get("_hf_hook")
    merges = _is_adapted(module) and not module.disable_adapters and not module.merged
    if hook is not None:
        hook.pre_forward(module)
    try:
        if merges:
            module.merge(adapter_names=[name for name in module.active_adapters if name in module.lora_A])
        yield
    finally:
        if merges:
            module.unmerge()
        if hook is not None:
            hook.post_forward(module, None)


def _is_adapted(module: Any) -> bool:
    return "base_layer" in module._modules and "lora_A" in module._modules
