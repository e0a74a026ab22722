"""learned: sieve whose prices and merged tokens were trained on a model. Imports core only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core.reduction import CorrectedReduction, Reduction, take_tokens
from tokensieve.core.view import TokenView
from tokensieve.errors import OptionError, UnsupportedModelError
from tokensieve.methods.base import check
from tokensieve.methods.sieve import SieveMethod
from tokensieve.utils.tensor_files import read_tensors

__all__ = ["FORMAT", "SHIPPED", "Learned", "ScoringNetworks", "adapter_bytes", "adapter_file", "load_adapter"]

FORMAT = "tokensieve-select-2"
SHIPPED = "vit-s14"
HIDDEN = 32
FACTS = 3  # log distance, log share of importance, log size
BOUND = 4.0  # a price is never changed by more than exp(4) either way


class ScoringNetworks(nn.Module):
    """One network a block: layer norm, width + 3 -> hidden, GELU, hidden -> 1, plus the 3 facts as they are.

    It starts as 0. No scale and shift in the norm (the layer after it has them) and no last bias (a shift of all scores
    chooses the same patches). The facts' own weights change sieve's exponents block by block, which little training can
    do; what a patch shows takes more.

    And what corrects merged tokens: a mean of unlike patches is shorter than they were and lies elsewhere, the more the
    larger it is, and CLS reads that. Each block has a scale and a shift for patches and a shift (`lead`) for CLS, which
    count by log(size). They start as 0; shifts are in multiples of `unit`, the tokens' root mean square in that block.
    All blocks lie in one tensor each.
    """

    def __init__(self, depth: int, width: int, hidden: int = HIDDEN, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        first = torch.randn(depth, width + FACTS, hidden, generator=generator)
        first[:, :width] *= width**-0.5
        first[:, width:] *= FACTS**-0.5
        self.first = nn.Parameter(first)
        self.bias = nn.Parameter(torch.zeros(depth, hidden))
        self.last = nn.Parameter(torch.zeros(depth, hidden))
        self.exponents = nn.Parameter(torch.zeros(depth, FACTS))
        self.scale = nn.Parameter(torch.zeros(depth, width))
        self.shift = nn.Parameter(torch.zeros(depth, width))
        self.lead = nn.Parameter(torch.zeros(depth, width))
        self.unit: Tensor
        self.register_buffer("unit", torch.ones(depth))

    @property
    def depth(self) -> int:
        return self.first.shape[0]

    @property
    def width(self) -> int:
        return self.first.shape[1] - FACTS

    def forward(self, block: int, x: Tensor, order: Tensor, facts: Tensor) -> Tensor:
        """(B, R) logs of the factors on the prices of the patches `order` (B, R).

        x: (B, N, D) all patches; facts: (B, R, 3) of those in `order`. In float32 whatever the tokens are.
        """
        parts = (self.first, self.bias, self.last, self.exponents)
        first, bias, last, exponents = (part[block].to(x.device) for part in parts)
        normed = F.layer_norm(x.float(), x.shape[-1:])
        hidden = take_tokens(normed @ first[: self.width], order) + facts @ first[self.width :] + bias
        return BOUND * torch.tanh((F.gelu(hidden) @ last + facts @ exponents) / BOUND)

    def correct(self, block: int, tokens: Tensor, size: Tensor, prefix: int) -> Tensor:
        """(B, P+K, D), sizes (B, K): patches x + log(size) * (scale * x + shift), CLS + mean of log(size) * lead."""
        unit = self.unit[block]
        scale, shift, lead = (
            part.to(tokens.device, tokens.dtype)
            for part in (self.scale[block], unit * self.shift[block], unit * self.lead[block])
        )
        weight = size.log().to(tokens.dtype)
        out = torch.addcmul(tokens, F.pad(weight, (prefix, 0)).unsqueeze(-1), torch.addcmul(shift, tokens, scale))
        if prefix:
            out[:, 0] += weight.mean(dim=1, keepdim=True) * lead
        return out


@dataclass(kw_only=True)
class Learned(SieveMethod):
    """sieve with a factor on every price, which a small network says from the patch itself, log price_i += g(x_i), and
    with merged tokens corrected by what they stand for.

    Each block has its own network g over the residual stream of a patch, its distance to the nearest more important
    one, its importance and its size, and its own scale and shifts for merged tokens (`ScoringNetworks`). All is trained
    to keep the untouched model's image feature (`tokensieve train select`), and starts as 0: untrained, this is sieve.
    Selection and merging are sieve's, budgets are exact.

    adapter: the safetensors file that training wrote (or the networks themselves). It belongs to one model. "vit-s14"
    is shipped, for the image tower of the default CLIP.
    """

    summary: ClassVar[str] = "ours: sieve, corrected and priced by training; needs adapter=FILE"
    adapter: str | Path | ScoringNetworks = ""
    stages: ClassVar[tuple[str, ...]] = ("encoder",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(bool(self.adapter), "adapter", self.adapter, "give the file that `tokensieve train select` wrote")
        self.networks = self.adapter if isinstance(self.adapter, ScoringNetworks) else load_adapter(self.adapter)

    def spacing(self) -> int:
        return 1  # it was trained so

    def check_encoder(self, depth: int, width: int) -> None:
        mine = self.networks
        if (mine.depth, mine.width) != (depth, width):
            raise UnsupportedModelError(
                f"adapter {self._name} is for an encoder of {mine.depth} blocks and width {mine.width}, "
                f"this one has {depth} blocks and width {width}"
            )

    def reduce(self, view: TokenView, keep: int) -> Reduction:
        found = super().reduce(view, keep)
        if found.into is None:
            return found
        correct = partial(self.networks.correct, self._block(view))
        return CorrectedReduction(
            keep=found.keep, drop=found.drop, into=found.into, scores=found.scores, correct=correct
        )

    def _block(self, view: TokenView) -> int:
        return round(view.depth * self.networks.depth)

    def price(self, view: TokenView, order: Tensor, distance: Tensor, importance: Tensor) -> Tensor:
        if view.x.shape[-1] != self.networks.width:
            raise UnsupportedModelError(
                f"adapter {self._name} is for tokens of width {self.networks.width}, these have {view.x.shape[-1]}"
            )
        share = importance / importance.mean(dim=1, keepdim=True)
        facts = torch.stack([distance.float(), share.float(), view.size.gather(1, order).float()], dim=-1)
        change: Tensor = self.networks(self._block(view), view.x, order, facts.clamp_min(1e-4).log())
        price = super().price(view, order, distance, importance) * change.exp()
        first = price.detach().amax(dim=1, keepdim=True)  # no factor may bring it under another: they merge into it
        return torch.cat([first, price[:, 1:]], dim=1)

    @property
    def _name(self) -> str:
        return "in memory" if isinstance(self.adapter, ScoringNetworks) else str(self.adapter)


def adapter_bytes(networks: ScoringNetworks, facts: Mapping[str, Any], half: bool = True) -> bytes:
    """The networks as a safetensors file. facts: what else to say of it (model, recipe), plain JSON."""
    from safetensors.torch import save

    dtype = torch.float16 if half else torch.float32
    state = {name: value.detach().to("cpu", dtype).contiguous() for name, value in networks.state_dict().items()}
    state["unit"] = networks.unit.detach().float().cpu()  # what others are multiples of
    about = {"format": FORMAT, "depth": str(networks.depth), "width": str(networks.width), "about": json.dumps(facts)}
    return save(state, metadata=about)


def adapter_file(path: str | Path) -> Path:
    """The file of an adapter that is given by its path, or by the name of the one that is shipped."""
    if path == SHIPPED:
        return Path(str(resources.files("tokensieve.methods.trained") / "data" / f"{SHIPPED}.safetensors"))
    return Path(path)


def load_adapter(path: str | Path) -> ScoringNetworks:
    """The networks in a file, or those that are shipped under a name. A file that is missing, cut short or something
    else is an error that names it."""
    path = adapter_file(path)
    found, about = read_tensors(path, "adapter", format=FORMAT)
    state = {name: value.float() for name, value in found.items()}
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    try:
        depth, inputs, hidden = shapes["first"]
        wanted = {"first": (depth, inputs, hidden), "bias": (depth, hidden), "last": (depth, hidden)}
        wanted |= {"exponents": (depth, FACTS), "unit": (depth,)}
        wanted |= dict.fromkeys(("scale", "shift", "lead"), (depth, inputs - FACTS))
        sound = shapes == wanted and (str(depth), str(inputs - FACTS)) == (about.get("depth"), about.get("width"))
    except (KeyError, ValueError):
        sound = False
    if not sound:
        raise OptionError(f"adapter {path}: its header does not match its tensors: it says {about}, they are {shapes}")
    networks = ScoringNetworks(depth, inputs - FACTS, hidden)
    networks.load_state_dict(state)
    return networks.requires_grad_(False)
