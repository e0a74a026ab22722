"""Work spread over a Ray cluster: one that is there, or one of this machine alone. Imports Ray inside functions.

Plain Ray tasks, driven by Optuna's ask and tell, and not Ray Tune with its OptunaSearch:

- Tune saves the state of an experiment from time to time; what ended after the last time is run again when its driver
  was killed. Here the study is told of each trial when it ends, and knows what to run.
- Tune keeps a second list of trials beside the study, and cannot take up one that the study has as running.
- OptunaSearch runs no Optuna pruner; Tune's own schedulers would stop other trials here than on one machine.

A task whose worker is killed is started again by Ray (`RETRIES` times), on any machine of the cluster.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokensieve.errors import MissingMaterialError, OptionError, one_line
from tokensieve.records import cores
from tokensieve.search.local import Hopeless, Run, keep_found, reason_of, settled
from tokensieve.search.settings import ManagerSettings
from tokensieve.search.study import Asked, Found, StudyFile, UnknownObjectiveError

__all__ = ["RETRIES", "Cluster", "connected", "lost", "run_on_cluster"]

RETRIES = 3
_STARTS = 3
_PATIENCE = 10.0  # seconds, for a host to answer
_STORE = 200 * 2**20  # bytes of shared memory of a private cluster: settings and results are small


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingMaterialError('mode ray needs Ray: pip install "tokensieve[ray]"') from None
    return ray


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process is connected to, and what each task takes of it."""

    ray: Any
    cpus: int
    gpus: int

    def task(self, function: Callable[..., Any]) -> Any:
        """The function as a Ray task that is started again where its worker is killed, but not where it raises."""
        return self.ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=RETRIES)(function)

    @property
    def slots(self) -> int:
        """Tasks that fit at once into what the cluster has now. None at all is an error."""
        have = self.ray.cluster_resources()
        slots = math.inf
        for name, wanted in (("CPU", self.cpus), ("GPU", self.gpus)):
            if wanted:
                slots = min(slots, have.get(name, 0) // wanted)
        if slots < 1:
            wants = f"{self.cpus} CPU" + (f" and {self.gpus} GPU" if self.gpus else "")
            has = f"{have.get('CPU', 0):g} CPU and {have.get('GPU', 0):g} GPU"
            raise OptionError(f"a run wants {wants}, the whole Ray cluster has {has}")
        return int(min(slots, 10_000))


@contextmanager
def connected(manager: ManagerSettings) -> Iterator[Cluster]:
    """The cluster of `ray_address` or $RAY_ADDRESS; else one on this machine, loopback only, that ends with the block.

    A process that is connected already stays so.
    """
    address = manager.ray_address or os.environ.get("RAY_ADDRESS")
    if not address and "ray" not in sys.modules:
        _before_import()
    ray = _import_ray()
    cluster = Cluster(ray, manager.cpus_per_subtask or 1, manager.gpus_per_subtask or 0)
    if ray.is_initialized():
        yield cluster
        return
    common = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address:
        _check_reachable(address)
        try:
            ray.init(address=address, **common)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = one_line(error, 200)
            raise MissingMaterialError(
                f"no Ray cluster at {address}: {reason} (one with tokens wants RAY_AUTH_MODE=token and RAY_AUTH_TOKEN)"
            ) from None
    else:
        _start(ray, manager, common)
    try:
        yield cluster
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray tries for many minutes to reach a host that does not answer."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():  # "auto", "local": Ray knows them
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError, ValueError) as error:  # the last: names that no host can have
        raise MissingMaterialError(
            f"no Ray cluster at {address}: {one_line(error)}; start one with `ray start --head`, or leave the address "
            "out for one on this machine"
        ) from None


def _before_import() -> None:
    """What Ray reads of the environment when it is imported, for a private cluster."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # else it puts the machine's own address in place of 127.0.0.1
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if "RAY_AUTH_MODE" not in os.environ:  # else it leaves a token in the home folder
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _start(ray: Any, manager: ManagerSettings, common: Mapping[str, Any]) -> None:
    gpus: dict[str, Any] = {}
    if manager.available_gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, manager.available_gpus))
        gpus = {"num_gpus": len(manager.available_gpus)}
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # workers find what this one finds
    wanted = {
        "address": "local", "num_cpus": cores(), "include_dashboard": False, "object_store_memory": _STORE,
        "_node_ip_address": "127.0.0.1", **gpus, **common,
    }  # fmt: skip
    try:
        _init(ray, wanted)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _init(ray: Any, wanted: Mapping[str, Any]) -> None:
    """Start a cluster. Ray gives its parts half a minute, which a busy machine may not keep to: then once more."""
    for attempt in range(_STARTS):
        try:
            ray.init(**wanted)
            return
        except Exception as error:  # Ray has no class of its own for it
            ray.shutdown()
            if attempt + 1 == _STARTS or "timed out" not in str(error):
                raise MissingMaterialError(f"a Ray cluster cannot be started here: {reason_of(error)}") from error


def lost(ray: Any, error: Exception) -> str:
    """Why Ray gives no result, in one line: the task could not begin, or its worker was lost too often."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return re.sub(r"\x1b\[\d+m", "", reason_of(error))
    return f"its worker was lost {RETRIES + 1} times: {reason_of(error)}"


# -- the trials of a study ---------------------------------------------------------------------------------------------


class _Board:
    """Where trials on other machines report, and hear whether to go on. An async actor: reports wait for their answer
    without a thread each, and so does the driver for the next report."""

    def __init__(self) -> None:
        import asyncio

        self._asyncio = asyncio
        self._reports: Any = asyncio.Queue()
        self._answers: dict[tuple[int, int], Any] = {}

    async def report(self, number: int, step: int, value: float) -> bool:
        """A trial's word; whether it is hopeless."""
        answer = self._asyncio.get_running_loop().create_future()
        self._answers[number, step] = answer  # of a killed attempt: nobody waits for the old one any more
        await self._reports.put((number, step, value))
        hopeless: bool = await answer
        return hopeless

    async def next(self) -> tuple[int, int, float]:
        found: tuple[int, int, float] = await self._reports.get()
        return found

    async def answer(self, number: int, step: int, hopeless: bool) -> None:
        answer = self._answers.pop((number, step), None)
        if answer is not None and not answer.done():
            answer.set_result(hopeless)


def _trial(run: Run, params: Mapping[str, Any], origin: int, number: int, board: Any, home: str) -> tuple[str, Any]:
    """One trial, on any machine: ("found", Found), ("hopeless", None) or ("failed", reason). home: the driver's node.

    On another node than that, the files that the run made travel with what it found.
    """
    import ray

    def report(step: int, value: float) -> None:
        if ray.get(board.report.remote(number, step, value)):
            raise Hopeless

    try:
        found = run(params, origin, report)
        if ray.get_runtime_context().get_node_id() != home:
            found = replace(found, files={name: path.read_bytes() for name, path in found.made.items()}, made={})
        return "found", found
    except Hopeless:
        return "hopeless", None
    except Exception as error:  # told in words: the driver need not be able to unpickle it
        return "failed", reason_of(error)


def run_on_cluster(
    cluster: Cluster, store: StudyFile, run: Run, total: int, folder: Path, after: Callable[[Asked], None]
) -> None:
    """As `engine.run_here`, with as many trials at once as fit into the cluster."""
    ray = cluster.ray
    task = cluster.task(_trial)
    calls = 2 * cluster.slots + 100  # a report of every trial, also of a killed attempt, and the driver's own
    board = ray.remote(num_cpus=0, max_concurrency=calls)(_Board).remote()
    home = ray.get_runtime_context().get_node_id()
    running: dict[Any, tuple[Asked, float]] = {}
    heard = board.next.remote()
    try:
        while running or store.spent < total:
            while len(running) < cluster.slots and store.spent + len(running) < total:
                asked = store.ask()
                if settled(store, asked):
                    after(asked)
                    continue
                reference = task.remote(run, asked.params, asked.origin, asked.number, board, home)
                running[reference] = (asked, time.monotonic())
            if not running:
                continue
            ready, _ = ray.wait([heard, *running], num_returns=1)
            if ready[0] == heard:
                number, step, value = ray.get(heard)
                own = next((one for one, _ in running.values() if one.number == number), None)
                board.answer.remote(number, step, own is not None and store.report(own, step, value))
                heard = board.next.remote()
                continue
            asked, start = running.pop(ready[0])
            _ended(ray, store, asked, ready[0], folder, time.monotonic() - start)
            after(asked)
    except UnknownObjectiveError:
        for asked, _ in running.values():
            store.void(asked)
        raise
    except BaseException:
        for asked, _ in running.values():
            store.interrupted(asked)
        raise
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        ray.kill(board)


def _ended(ray: Any, store: StudyFile, asked: Asked, reference: Any, folder: Path, seconds: float) -> None:
    try:
        how, what = ray.get(reference)
    except ray.exceptions.RayError as error:
        store.failed(asked, lost(ray, error), seconds)
        return
    if how == "hopeless":
        store.pruned(asked, seconds)
    elif how == "failed":
        store.failed(asked, what, seconds)
    else:
        found: Found = what
        try:
            keep_found(store, asked, found, folder, seconds)
        except UnknownObjectiveError:
            store.void(asked)
            raise
        except ArithmeticError as error:
            store.failed(asked, reason_of(error), seconds)
