"""The one reader and writer of tensor files: safetensors, and numpy's .npz.

Whatever is wrong with a file - missing, cut short, something else, NaN among its weights - is one error that names it.
Imports torch, numpy and safetensors inside.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve.errors import MissingMaterialError, RecordError, one_line
from tokensieve.utils.files import open_regular, whole_file

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

__all__ = ["check_finite", "fill_module", "load_npz", "read_facts", "read_header", "read_tensors", "save_tensors"]


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """A safetensors file, whole or not at all: under another name first, on the disk, then renamed."""
    from safetensors.torch import save_file

    with whole_file(path) as part:
        save_file(dict(tensors), part, metadata=dict(about))
        part.chmod(0o644)  # the writer makes it private


@contextmanager
def _opened(path: str | Path, what: str, framework: str) -> Iterator[Any]:
    """A safetensors file, open. what: what it should be, as in "adapter", which begins the error."""
    from safetensors import SafetensorError, safe_open

    name = f"{what} {path}".strip()
    try:
        os.close(open_regular(path))
        with safe_open(path, framework) as file:
            yield file
    except FileNotFoundError:
        raise MissingMaterialError(f"{name}: there is no such file") from None
    except (SafetensorError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error, 200)
        raise RecordError(f"{name}: truncated or not a safetensors file ({reason})") from None


def read_header(path: str | Path, what: str = "") -> dict[str, str]:
    """The texts in a file's header, without its tensors; {} where there are none."""
    with _opened(path, what, "np") as file:
        return dict(file.metadata() or {})


def read_tensors(
    path: str | Path, what: str = "", *, format: str | None = None, finite: bool = True, by: str = ""
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors by name, the texts in the header) of a safetensors file.

    format: what the header must say under "format". by: the command that writes such files, for the error.
    finite: refuse NaN and infinity.
    """
    with _opened(path, what, "pt") as file:
        about = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    name = f"{what} {path}".strip()
    if format is not None and about.get("format") != format:
        written = f"; {by} writes it" if by else ""
        raise RecordError(f"{name} has the format {about.get('format')!r}, expected {format!r}{written}")
    if finite:
        check_finite(tensors, name)
    return tensors, about


def read_facts(about: Mapping[str, str], key: str, name: str) -> Any:
    """The JSON that a header holds under `key`. name: of the file, for the error."""
    try:
        return json.loads(about[key])
    except (KeyError, ValueError):
        raise RecordError(f"{name}: its header has no valid {key!r}") from None


def check_finite(tensors: Mapping[str, Tensor], name: str) -> None:
    """Raise where a tensor has NaN or infinity in it. name: of the file, for the error."""
    for key, value in tensors.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise RecordError(f"{name}: {key} has NaN or infinite values")


def fill_module(module: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """Put a file's tensors into a module. Missing, extra and wrongly shaped ones are an error that names the first."""
    wanted = module.state_dict()
    if missing := sorted(set(wanted) - set(tensors)):
        raise RecordError(f"{name}: {missing[0]} is missing ({len(missing)} of {len(wanted)} tensors are)")
    if extra := sorted(set(tensors) - set(wanted)):
        raise RecordError(f"{name}: {extra[0]} is not part of the model ({len(extra)} extra tensors)")
    for key, value in wanted.items():
        if value.shape != tensors[key].shape:
            raise RecordError(f"{name}: {key} has shape {tuple(tensors[key].shape)}, expected {tuple(value.shape)}")
    module.load_state_dict(dict(tensors))


def load_npz(path: str | Path, what: str = "") -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name; arrays of Python objects are refused."""
    import zipfile
    import zlib

    import numpy as np

    name = f"{what} {path}".strip()
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            found = np.load(stream, allow_pickle=False)
            if not isinstance(found, np.lib.npyio.NpzFile):
                raise ValueError("one array, not an archive of them")
            return {key: found[key] for key in found.files}
    except FileNotFoundError:
        raise MissingMaterialError(f"{name}: there is no such file") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise RecordError(f"{name}: truncated or not an .npz file ({one_line(error, 200)})") from None
