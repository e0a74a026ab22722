"""Several processes, one batch: embeddings from all of them with gradient, gradients averaged. gloo and nccl alike.

    torchrun --nproc_per_node 4 -m tokensieve.cli train reid --config FILE      (or `accelerate launch`)

All that the processes say to each other goes through this file, so that one of them dying is one clear error.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tokensieve.errors import MissingMaterialError, OptionError, ProcessLostError, TokensieveError
from tokensieve.utils.files import only_run
from tokensieve.utils.processes import rank, world_size

__all__ = [
    "average_gradients", "average_numbers", "check_free", "first_alone", "from_first", "gather_in_turn",
    "gather_with_gradient", "join", "leave", "only_run_of_all", "own_part", "own_rows", "own_share", "rank", "shares",
    "wait", "world_size",
]  # fmt: skip

T = TypeVar("T")
_GO_ON = "start the same command with --resume to go on from the last checkpoint, with as many processes as you like"


# -- starting and ending -----------------------------------------------------------------------------------------------


def join(*, cpu: bool = False) -> torch.device:
    """Take part in the run that torchrun or `accelerate launch` started this process for. The device of this process.

    Where nothing of the kind was started, nothing happens. cpu: even where there are GPUs.
    """
    cpu = cpu or not torch.cuda.is_available()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and world_size() == 1:
        try:
            from accelerate import PartialState
        except ImportError as error:
            raise MissingMaterialError(
                f"several processes need accelerate ({error}): install tokensieve[train]"
            ) from None
        # its functions take the group that exists when they are imported as their default, and would keep it, and
        # gloo's threads with it, beyond its end: the process might then abort when Python ends. Here there is none yet
        importlib.import_module("torch.distributed.nn.functional")
        with _together():
            PartialState(cpu=cpu)
        atexit.register(_close)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _told_to_end)
    return torch.device("cpu" if cpu else f"cuda:{torch.cuda.current_device()}")


def leave() -> None:
    """End of a run that went well, for all processes."""
    if world_size() > 1:
        wait()
        dist.destroy_process_group()


def _close() -> None:
    """When Python ends after an error: gloo's threads must end before it does."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _told_to_end(number: int, frame: Any) -> NoReturn:
    """torchrun ends the others when one process has died."""
    raise ProcessLostError(f"told to end, because another process of this run died or the run was stopped: {_GO_ON}")


@contextmanager
def _together() -> Iterator[None]:
    """Round everything that needs the other processes: that one of them is gone shows as an error here."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ProcessLostError):
            raise
        reason = " ".join(str(error).split("\n")[0].split())[:160]
        raise ProcessLostError(f"another process of this run does not answer ({reason}): {_GO_ON}") from error


def wait() -> None:
    """Until all processes are here."""
    if world_size() > 1:
        with _together():
            dist.barrier()


def first_alone(work: Callable[[], T]) -> T:
    """What `work` gives, done by the first process before the others do it: they find what it fetched."""
    if rank() == 0:
        found = work()
        wait()
        return found
    wait()
    return work()


# -- sharing out -------------------------------------------------------------------------------------------------------


def shares(rows: int) -> list[int]:
    """How many of `rows` each process takes, as equally as can be."""
    n = world_size()
    return [rows // n + (index < rows % n) for index in range(n)]


def own_part(items: Sequence[T], what: str | None = None) -> Sequence[T]:
    """This process's consecutive part of the items. what: they must be equally many for all, or it is a wrong setting
    of that name.
    """
    if what is not None and len(items) % world_size():
        raise OptionError(f"{what} {len(items)} cannot be split among {world_size()} processes")
    sizes = shares(len(items))
    start = sum(sizes[: rank()])
    return items[start : start + sizes[rank()]]


def own_share(count: Tensor | int) -> float:
    """What to multiply the mean of this process's `count` values by, so that the mean over processes is that of all."""
    if world_size() == 1:
        return 1.0
    total = torch.tensor(float(count), dtype=torch.float64, device=_device())
    with _together():
        dist.all_reduce(total)
    return float(count) * world_size() / float(total)


def gather_in_turn(own: Sequence[T]) -> list[T]:
    """All items in their order, where process r has worked on items r, r + N, r + 2N ...; any number of them."""
    if world_size() == 1:
        return list(own)
    parts: list[Any] = [None] * world_size()
    with _together():
        dist.all_gather_object(parts, list(own))
    total = sum(map(len, parts))
    return [parts[place % len(parts)][place // len(parts)] for place in range(total)]


def from_first(value: T) -> T:
    """What the first process has."""
    if world_size() == 1:
        return value
    box = [value]
    with _together():
        dist.broadcast_object_list(box, src=0)
    return box[0]


@contextmanager
def only_run_of_all(place: Path, *, file: bool = False) -> Iterator[None]:
    """`utils.files.only_run`, held by the first process for all of them; where it is refused, it is in each."""
    with ExitStack() as held:
        refused: TokensieveError | None = None
        if rank() == 0:
            try:
                held.enter_context(only_run(place, file=file))
            except TokensieveError as error:
                refused = error
        refused = from_first(refused)
        if refused is not None:
            raise refused
        yield


def check_free(place: Path, *, file: bool = False) -> None:
    """Raise where another run is at `place`, before anything is loaded for one that would be refused in the end."""
    with only_run_of_all(place, file=file):
        pass


def average_numbers(numbers: Mapping[str, float | Tensor]) -> dict[str, float]:
    """The means over the processes; the same names everywhere."""
    values = {name: float(v.detach() if isinstance(v, Tensor) else v) for name, v in numbers.items()}
    if world_size() == 1 or not values:
        return values
    flat = torch.tensor(list(values.values()), dtype=torch.float64, device=_device())
    with _together():
        dist.all_reduce(flat)
    return dict(zip(values, (flat / world_size()).tolist(), strict=True))


def _device() -> torch.device:
    """Where messages have to lie."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


# -- with gradient -----------------------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        with _together():
            dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        with _together():
            dist.all_reduce(total)
        return total.split(ctx.sizes)[rank()], None


def gather_with_gradient(x: Tensor, sizes: list[int] | None = None) -> Tensor:
    """(B, ...) of each process -> (N * B, ...) of all of them, by rank. One process: x itself.

    sizes: how many rows each process has, where they are not equally many. The gradient of a row is the sum of those
    that all processes' losses give it. With the parameters' gradients averaged over processes, N processes of batch B
    then take the step of one of batch N * B: for a loss that each computes of all rows, and for the mean of losses that
    each computes of its own.
    """
    if world_size() == 1:
        return x
    gathered: Tensor = _Gather.apply(x, sizes or [len(x)] * world_size())
    return gathered


def own_rows(gathered: Tensor) -> Tensor:
    """This process's rows of what was gathered, equally many from each."""
    size = gathered.shape[0] // world_size()
    return gathered[rank() * size : (rank() + 1) * size]


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace each gradient by its mean over the processes. One message for each type of number.

    A parameter that some processes have no gradient for (none of their samples reached it) has 0 there; one that none
    has a gradient for stays without.
    """
    if world_size() == 1:
        return
    every = list(parameters)
    there = torch.tensor([p.grad is not None for p in every], dtype=torch.int32, device=_device())
    with _together():
        dist.all_reduce(there)
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for p, count in zip(every, there.tolist(), strict=True):
        if count:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            by_type.setdefault(p.grad.dtype, []).append(p.grad)
    for grads in by_type.values():
        flat = torch.cat([g.flatten() for g in grads])
        with _together():
            dist.all_reduce(flat)
        flat /= world_size()
        for g, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(mean.view_as(g))
