"""tokensieve: drop the tokens that do not matter, in vision transformers you already have.

    with tokensieve.attach(model, "sieve", keep=0.4) as handle:
        features = model.encode_image(images)
        handle.kept

Importing this package does not import torch; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tokensieve._version import VERSION
from tokensieve.utils.torchvision import arrange

if TYPE_CHECKING:
    from tokensieve.core.reduction import Reduction
    from tokensieve.core.view import TokenView
    from tokensieve.engines.base import Engine
    from tokensieve.engines.export import export
    from tokensieve.engines.load import load_engine
    from tokensieve.methods.base import Method, Selector
    from tokensieve.methods.registry import list_methods, make_method, register_method
    from tokensieve.models.attach import attach, attachment_of
    from tokensieve.models.families.base import Family
    from tokensieve.models.families.registry import register_family
    from tokensieve.models.handle import Attachment

__version__ = VERSION

arrange()

_WHERE = {
    "Attachment": "models.handle",
    "Engine": "engines.base",
    "export": "engines.export",
    "load_engine": "engines.load",
    "attach": "models.attach",
    "attachment_of": "models.attach",
    "Reduction": "core.reduction",
    "TokenView": "core.view",
    "Method": "methods.base",
    "Selector": "methods.base",
    "list_methods": "methods.registry",
    "make_method": "methods.registry",
    "register_method": "methods.registry",
    "register_family": "models.families.registry",
    "Family": "models.families.base",
}

__all__ = [
    "Attachment",
    "Engine",
    "Family",
    "Method",
    "Reduction",
    "Selector",
    "TokenView",
    "__version__",
    "attach",
    "attachment_of",
    "export",
    "list_methods",
    "load_engine",
    "make_method",
    "register_family",
    "register_method",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'tokensieve' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tokensieve.{_WHERE[name]}"), name)
