"""All families: those of users first, then ours, the special ones before the general. Imports families only."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from tokensieve.errors import OptionError
from tokensieve.models.families.base import Family
from tokensieve.models.families.beit import BeitFamily
from tokensieve.models.families.openclip import OpenClipFamily
from tokensieve.models.families.rotary import Dinov3Family, MlcdFamily
from tokensieve.models.families.siglip2 import PatchMaskFamily, Siglip2Family
from tokensieve.models.families.timm import NaflexFamily, TimmFamily
from tokensieve.models.families.torch import TorchEncoderFamily, TorchvisionFamily
from tokensieve.models.families.transformers import ClipFamily, Dinov2Family, TransformersFamily
from tokensieve.models.families.video import VideoMaeFamily, Vjepa2Family

__all__ = ["families", "register_family"]

_OURS: tuple[Family, ...] = (
    OpenClipFamily(), TimmFamily(), NaflexFamily(), TorchvisionFamily(), Siglip2Family(), PatchMaskFamily(),
    MlcdFamily(), ClipFamily(), Dinov3Family(), BeitFamily(), VideoMaeFamily(), Vjepa2Family(), Dinov2Family(),
    TransformersFamily(), TorchEncoderFamily(),
)  # fmt: skip
_registered: list[Family] = []


def register_family(family: Family | type[Family]) -> None:
    """Make models of a family known to `attach`, before all others. Registering a class again replaces it."""
    made = family() if isinstance(family, type) else family
    if not isinstance(made, Family):
        raise OptionError(f"register_family takes a Family, not {type(made).__name__}")
    if not made.name or not made.forms:
        raise OptionError(f"{type(made).__name__}: a family has a name and at least one form of block")
    _registered[:] = [made, *(f for f in _registered if type(f).__qualname__ != type(made).__qualname__)]


@cache
def _installed() -> tuple[Family, ...]:
    """Families of other packages, from the entry point group "tokensieve.families"."""
    return tuple(point.load()() for point in entry_points(group="tokensieve.families"))


def families() -> tuple[Family, ...]:
    """All families, in the order in which they are tried."""
    return (*_registered, *_installed(), *_OURS)
