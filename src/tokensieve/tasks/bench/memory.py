"""Peak memory of a reduced model against the untouched one. Each is run in a fresh process: this module, as a script.

Nothing is subtracted: the figure is the whole process with its libraries and weights, and on CUDA all that the
allocator gave out. Where the system allows it (Linux), the mark is reset after loading, which takes more than a forward
of a small model and would hide it. And in every process all methods have run on one image and on two before, which go
different ways: which kernels of the libraries were paged in is then the same (a few MiB), and what differs is tensors.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokensieve.errors import TokensieveError
from tokensieve.models.attach import attach
from tokensieve.tasks.bench.config import BenchConfig
from tokensieve.tasks.bench.models import build_model, images

__all__ = ["measure_memory", "peak_of"]

# Tensors straight from the system and back to it: without this glibc keeps freed ones, and two runs of one thing differ
# by 3 %, with it by 0.03 %
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
_ROUGHNESS = 0.001
_TIMES = 3  # processes of each: one in ten is some MiB higher than the others, whatever it runs


def measure_memory(config: BenchConfig, tick: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each model, batch, method and budget: both peaks in bytes and their ratio. Target: not above 1.

    A peak is the middle one of a few processes.
    """
    rows = []
    for model in config.models:
        for batch in config.batches_of(model):
            stock = _typical(config, model, batch, None, 1.0)
            tick(f"memory: {model}, batch {batch}")
            for method in config.methods:
                for keep in config.keep:
                    reduced = _typical(config, model, batch, method, keep)
                    ratio = reduced["peak"] / stock["peak"]
                    rows.append(
                        {"part": "memory", "model": model, "batch": batch, "method": method, "keep": keep}
                        | {"stock_bytes": stock["peak"], "reduced_bytes": reduced["peak"], "ratio": ratio}
                        | {"includes_loading": reduced["includes_loading"]}
                        | {"target": 1.0, "met": ratio <= 1.0 + _ROUGHNESS}
                    )
                    tick(f"memory: {model}, batch {batch}")
    return rows


def _typical(config: BenchConfig, model: str, batch: int, method: str | None, keep: int | float) -> dict[str, Any]:
    """The one with the middle peak of several processes."""
    found = [_in_process(config, model, batch, method, keep) for _ in range(_TIMES)]
    return sorted(found, key=lambda one: one["peak"])[_TIMES // 2]


def _in_process(config: BenchConfig, model: str, batch: int, method: str | None, keep: int | float) -> dict[str, Any]:
    """`peak_of` in a process of its own. What goes wrong there is an error here, with its last line."""
    task = {"model": model, "batch": batch, "method": method, "keep": keep, "schedule": config.schedule}
    task |= {"device": config.device, "threads": config.threads, "seed": config.seed, "warm": list(config.methods)}
    command = [sys.executable, "-m", __name__, json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | _ALLOCATOR)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise TokensieveError(f"measuring the memory of {model}, batch {batch}, {method or 'untouched'}: {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def peak_of(task: dict[str, Any]) -> dict[str, Any]:
    """Run one model three times in this process: {"peak": bytes, "includes_loading": bool}."""
    if task["threads"]:
        torch.set_num_threads(task["threads"])
    device = task["device"]
    model, size = build_model(task["model"], device, task["seed"])
    x = images(task["batch"], size, device, task["seed"])
    with torch.inference_mode():
        for name in task["warm"]:
            with attach(model, name, keep=0.5):
                model(x[:1])
                model(x[:2])
    if task["method"] is not None:
        attach(model, task["method"], keep=task["keep"], schedule=task["schedule"])
    reset = _reset_peak(device)
    with torch.inference_mode():
        for _ in range(3):
            model(x)
    return {"peak": _peak(device), "includes_loading": not reset}


def _reset_peak(device: str) -> bool:
    """Start the high-water mark anew; whether that was possible."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak(device: str) -> int:
    """Peak in bytes. On Linux from the process's own status: ru_maxrss there also remembers who started it."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    print(json.dumps(peak_of(json.loads(sys.argv[1]))))
