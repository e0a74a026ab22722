"""What a model family has to say so that methods can be attached to it. Imports encoder only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokensieve.core.cost import BlockShape
from tokensieve.errors import UnsupportedModelError
from tokensieve.models.encoder.block import block_output
from tokensieve.models.encoder.form import BlockForm, Given, choose_form, linear_macs, part
from tokensieve.models.verify import module_key, random_like, verification_copy, verify_forms

__all__ = ["Family", "attention_pool_macs", "has", "linear_macs", "matrix_entries", "rotated", "table_rows"]


def has(module: Any, *paths: str) -> bool:
    """Whether every dotted path leads somewhere that is not None; "a | b" where one of the two does."""
    return all(any(part(module, path.strip()) is not None for path in paths_.split("|")) for paths_ in paths)


def first_of(module: Any, names: str) -> Any:
    """The first part that is there of "a | b | c", or None."""
    return next((found for name in names.split("|") if (found := part(module, name.strip())) is not None), None)


def matrix_entries(module: Any, path: str) -> int:
    """Entries of the weight at a path (a convolution's, an embedding's); 0 where there is none."""
    weight = part(module, path)
    return int(weight.numel()) if isinstance(weight, Tensor) else 0


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


def table_rows(table: Tensor, origin: Tensor | None) -> Tensor:
    """Rows of a rotary table that belong to the patches `origin` (B, K): to be multiplied with (B, H, K, d).

    table: (N, c), (H, N, c) or (1 or B, 1 or H, N, c). origin None: all rows.
    """
    if origin is None:
        return table
    if table.dim() == 2:
        return table[origin].unsqueeze(1)
    if table.dim() == 3:
        return table[:, origin].transpose(0, 1)
    table = table.expand(origin.shape[0], -1, -1, -1)
    index = origin[:, None, :, None].expand(-1, table.shape[1], -1, table.shape[3])
    return table.gather(2, index)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, halves: bool, prefix: int) -> Tensor:
    """Rotate the patches of (B, H, P+N, d): pairs are (i, i + d/2) with `halves`, else neighbours."""
    patches = x[:, :, prefix:]
    if halves:
        a, b = patches.chunk(2, dim=-1)
        turned = torch.cat([-b, a], dim=-1)
    else:
        turned = torch.stack([-patches[..., 1::2], patches[..., ::2]], dim=-1).flatten(-2)
    return torch.cat([x[:, :, :prefix], patches * cos + turned * sin], dim=2)


class Family:
    """A kind of tower: how to recognise it and where its parts are. Goes by names of parts; numbers have the last word.

    name: in errors and lists, with an article. examples: classes or names of such models. library: the package
    whose classes (or classes derived from them) these are; "" for any. needs: parts that a tower has, "a | b" for
    either. blocks_at: where its list of blocks is. forms: descriptions of its blocks, the first that fits counts.
    """

    name: str = ""
    examples: tuple[str, ...] = ()
    library: str = ""
    needs: tuple[str, ...] = ()
    blocks_at: str = "blocks"
    forms: tuple[BlockForm, ...] = ()

    def matches(self, module: nn.Module) -> bool:
        """Whether this module is a tower of the family (the module that owns the blocks)."""
        if not has(module, self.blocks_at, *self.needs):
            return False
        return any(cls.__module__.split(".")[0] == self.library for cls in type(module).__mro__) or not self.library

    def blocks(self, tower: nn.Module) -> nn.Module:
        """The ModuleList or Sequential of blocks."""
        return cast(nn.Module, first_of(tower, self.blocks_at))

    def check(self, tower: nn.Module) -> None:
        """Raise UnsupportedModelError where a variant cannot be reduced."""
        for block in self.blocks(tower).children():
            self.form(block)

    def form(self, block: nn.Module) -> BlockForm:
        """The description that fits a block, with the block's own names in it."""
        return choose_form(self.forms, block)

    def prefix(self, tower: nn.Module) -> int:
        """Tokens before the patches."""
        raise NotImplementedError

    def has_cls(self, tower: nn.Module) -> bool:
        """Whether the first token is a CLS token."""
        return self.prefix(tower) > 0

    def grid(self, tower: nn.Module) -> tuple[int, int]:
        """Patches down and across for the model's usual image; in a video model all frames' rows are one below the
        other."""
        raise NotImplementedError

    def frames(self, tower: nn.Module) -> int:
        """Time steps in the grid of a video model, 1 for images."""
        return 1

    def turns(self, tower: nn.Module) -> bool:
        """Whether queries and keys are rotated by their place in the grid, so that a token needs one."""
        return False

    def pools_patches(self, model: nn.Module, tower: nn.Module) -> bool:
        """Whether the feature is pooled over patches (mean or attention) and not read from CLS."""
        return False

    def masked_pools(self, tower: nn.Module) -> Sequence[tuple[nn.Module, type]]:
        """Modules that pool with a mask over all patches, each with the mixin that reduces it."""
        return ()

    # -- verification ---------------------------------------------------------------------------------------------

    def sample(self, tower: nn.Module, block: nn.Module, patches: int) -> Given:
        """Random arguments of the kind a block is called with, for that many patches: a rotary table, a mask."""
        return {}

    def sample_patches(self, tower: nn.Module) -> int:
        """Patches in the sequence on which blocks are verified."""
        return 7

    def verify(self, tower: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Raise UnsupportedModelError where a block's form does not compute what its own forward does."""
        patches = self.sample_patches(tower)
        seen: set[Any] = set()
        for block in blocks:
            form = self.form(block)
            key = module_key(block, type(self).__qualname__, form, self.prefix(tower), patches)
            if key not in seen:
                self._verify_block(tower, block, form, patches, key)
            seen.add(key)

    def _verify_block(self, tower: nn.Module, block: nn.Module, form: BlockForm, patches: int, key: Any) -> None:
        copy, prefix = verification_copy(block), self.prefix(tower)
        parameters = inspect.signature(type(block).forward).parameters.values()
        absent = [p.name for p in parameters if p.default is p.empty and p.name in form.arguments]
        given = {name: None for name in absent if name not in ("args", "kwargs")} | self.sample(tower, copy, patches)
        size = (prefix + patches, 2) if form.length_first else (2, prefix + patches)

        def reference(x: Tensor) -> Tensor:
            out = copy(x, **given)
            return out[0] if form.tuple_out and isinstance(out, tuple) else out

        def ours(x: Tensor) -> Tensor:
            return block_output(form, copy, x, prefix, **given)

        x = random_like(copy, *size, form.width(copy))
        verify_forms(f"{self.name}: block {type(block).__name__}", reference, ours, (x,), key)

    # -- cost -----------------------------------------------------------------------------------------------------

    def shape(self, block: nn.Module) -> BlockShape:
        """What the block costs."""
        return self.form(block).shape(block)

    def rest_macs(self, tower: nn.Module, patches: int) -> int:
        """MACs outside the blocks and the pooling."""
        return 0

    def pool_macs(self, tower: nn.Module, tokens: int) -> int:
        """MACs of pooling that many tokens by attention; nothing where CLS or a mean is taken."""
        return 0

    # -- joint space ----------------------------------------------------------------------------------------------

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
