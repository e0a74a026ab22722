"""Where the checkpoints of `train select` and `train align` lie, which write one file: in a folder beside it."""

from __future__ import annotations

from pathlib import Path

from tokensieve.errors import MissingMaterialError, OptionError, RecordError
from tokensieve.training.checkpoint import CHECKPOINTS, checkpoints_in
from tokensieve.training.distributed import from_first

__all__ = ["check_start", "state_folder"]


def state_folder(output: Path) -> Path:
    """The folder of the run that writes `output`."""
    return output.with_name(f"{output.name}.state")


def check_start(output: Path, resume: bool) -> None:
    """Raise where there is nothing to resume, or where a new run would write over another one's checkpoints."""
    folder = state_folder(output)
    is_file, begun = from_first((folder.is_file(), bool(checkpoints_in(folder / CHECKPOINTS))))
    if is_file:
        raise RecordError(f"{folder} is not a folder of checkpoints (0.1 wrote a file there): delete it and start anew")
    if resume and not begun:
        raise MissingMaterialError(f"{folder}: there is no run to resume; leave --resume out to start anew")
    if not resume and begun:
        raise OptionError(f"{output} is of a training run already: go on with --resume, or name another output")
