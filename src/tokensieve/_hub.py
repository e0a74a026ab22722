"""Quiet around downloads: a model that cannot be had is one error of ours, not twenty warnings of its library."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["quiet_hub"]


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """In here huggingface_hub does not tell of each attempt to reach its host; bars of downloads are shown."""
    try:
        from huggingface_hub.utils import logging
    except ImportError:
        yield
        return
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
