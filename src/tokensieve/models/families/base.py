"""What a model family has to say so that methods can be attached to it. Imports engine only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tokensieve.core.cost import BlockShape
from tokensieve.errors import UnsupportedModelError
from tokensieve.models.encoder.block import SievedBlock

__all__ = ["Family", "attention_pool_macs", "has", "linear_macs"]


def has(module: Any, *paths: str) -> bool:
    """Whether every dotted path leads somewhere that is not None."""
    for path in paths:
        found = module
        for name in path.split("."):
            found = getattr(found, name, None)
            if found is None:
                return False
    return True


def linear_macs(module: nn.Module) -> int:
    """MACs a token in a module's linear layers: the entries of its matrices."""
    return sum(p.numel() for p in module.parameters() if p.dim() == 2)


def attention_pool_macs(pool: nn.Module, keys: nn.Module | None, width: int, queries: int, tokens: int) -> int:
    """MACs of an attention pool: `queries` learned tokens look at `tokens`.

    keys: the module whose matrices meet every token. None: an nn.MultiheadAttention, in which two of the input
    projections do. All other matrices meet the queries.
    """
    if keys is not None:
        met = linear_macs(keys)
    else:
        attn = next(m for m in pool.modules() if isinstance(m, nn.MultiheadAttention))
        met = 2 * attn.embed_dim * int(attn.kdim)
    # a learned query is a matrix too, but nothing is multiplied by it
    learned = sum(p.numel() for name, p in pool.named_parameters(recurse=False) if p.dim() == 2 and name == "query")
    return tokens * met + queries * (linear_macs(pool) - met - learned) + 2 * queries * tokens * width


class Family(ABC):
    """A kind of tower: how to recognise it and where its parts are. Goes by names of parts, not by classes."""

    name: str
    block_mixin: type[SievedBlock]

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Whether this module is a tower of the family (the module that owns the blocks)."""

    @abstractmethod
    def blocks(self, tower: nn.Module) -> nn.Module:
        """The ModuleList or Sequential of blocks."""

    @abstractmethod
    def check(self, tower: nn.Module) -> None:
        """Raise UnsupportedModelError where a variant cannot be reduced."""

    @abstractmethod
    def prefix(self, tower: nn.Module) -> int:
        """Tokens before the patches."""

    def has_cls(self, tower: nn.Module) -> bool:
        """Whether the first token is a CLS token."""
        return self.prefix(tower) > 0

    @abstractmethod
    def grid(self, tower: nn.Module) -> tuple[int, int]:
        """Patches down and across for the model's usual image."""

    def turns(self, tower: nn.Module) -> bool:
        """Whether queries and keys are rotated by their place in the grid, so that a token needs one."""
        return False

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        """Whether the feature is pooled over patches (mean or attention) and not read from CLS."""
        return False

    @abstractmethod
    def shape(self, block: nn.Module) -> BlockShape:
        """What the block costs."""

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        """MACs outside the blocks and the pooling."""
        return 0

    def pool_macs(self, tower: nn.Module, tokens: int) -> int:
        """MACs of pooling so many tokens by attention; nothing where CLS or a mean is taken."""
        return 0

    def projector(self, model: nn.Module, tower: nn.Module) -> Callable[[Tensor], Tensor] | None:
        """Patches (B, N, D) of the residual stream -> the joint space with text, or None where there is none."""
        return None

    def feature_module(self, model: nn.Module, tower: nn.Module) -> nn.Module:
        """The module whose output is the projected image feature, for mode="fuse"."""
        raise UnsupportedModelError(
            f'mode="fuse" needs a tower that projects CLS into a joint space (open_clip\'s ViT); this is {self.name}'
        )

    def feature_projector(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        """The projector that belongs to a feature module, made of that module's own parts."""
        raise UnsupportedModelError(f"{self.name} has no projection for single patches")
