"""`fit`: steps, schedule, clipping, logging, validation, checkpoints, resume. One loop for all that is trained."""

from __future__ import annotations

import importlib
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokensieve.errors import OptionError
from tokensieve.records import differences
from tokensieve.training.checkpoint import (
    CHECKPOINTS,
    checkpoints_in,
    latest,
    load_checkpoint,
    prune,
    save_checkpoint,
)
from tokensieve.training.distributed import (
    average_gradients,
    average_numbers,
    from_first,
    only_run_of_all,
    rank,
    wait,
)
from tokensieve.training.schedule import warmup_cosine
from tokensieve.training.task import Step, Task, Validation
from tokensieve.utils.files import system_errors

__all__ = ["BEST", "CHECKPOINTS", "LAST", "FitConfig", "FitResult", "check_installed", "fit", "seed_of_step"]

BEST, LAST = "best.safetensors", "last.safetensors"
PRECISIONS = ("auto", "no", "fp16", "bf16")


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How to train, whatever is trained.

    warmup: steps up to the target learning rates. clip: largest norm of an optimiser's gradients, None for any.
    validate_every, checkpoint_every: steps; both happen after the last step too, and with validate_first before the
    first: what is untrained then competes for the best. keep_checkpoints: how many of the newest
    stay. precision: mixed precision, on a GPU only; auto is bf16 where the GPU can, else fp16. device: auto, cpu, cuda.
    """

    steps: int
    warmup: int = 0
    clip: float | None = 1.0
    validate_every: int = 500
    validate_first: bool = False
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    log_every: int = 10
    seed: int = 0
    precision: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "validate_every", "checkpoint_every", "keep_checkpoints", "log_every"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: at least 1")
        if self.clip is not None and not self.clip > 0:
            raise OptionError(f"clip={self.clip}: above 0, or none")
        if self.precision not in PRECISIONS:
            raise OptionError(f"precision={self.precision!r}: one of {', '.join(PRECISIONS)}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise OptionError(f"device={self.device!r}: auto, cpu or cuda")
        warmup_cosine(0, self.steps, self.warmup)

    def facts(self) -> dict[str, Any]:
        """Those of the settings that change what comes out."""
        return {name: getattr(self, name) for name in ("steps", "warmup", "clip", "validate_every", "seed")}


@dataclass
class FitResult:
    """What happened so far: each step's losses by optimiser, each validation with its step, and the best step."""

    losses: list[dict[str, float]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    best_step: int | None = None
    best_score: float | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)


def fit(
    task: Task,
    config: FitConfig,
    folder: Path,
    *,
    resume: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    tick: Callable[[int], None] = lambda step: None,
    best: Path | None = None,
) -> FitResult:
    """Train a task, and leave in `folder`: checkpoints/, tensorboard/, best.safetensors and last.safetensors.

    resume: go on from the last checkpoint of the folder; on a CPU the losses are then, bit for bit, those of a run that
    was never interrupted. best: where the best model goes instead of best.safetensors. tell: called with a line a
    validation; tick: with the steps done so far.

    Under torchrun or `accelerate launch` the processes train together, and what they return is the same. Only the first
    writes and tells. A run may be resumed with another number of them: no state is a process's own.
    """
    return _Loop(task, config, folder, tell, tick, best or folder / BEST).run(resume)


def check_installed() -> None:
    """Import what `fit` needs: where it is missing, that shows before anything is computed for a training."""
    for name in ("accelerate", "torch.utils.tensorboard"):
        importlib.import_module(name)


def seed_of_step(seed: int, step: int) -> int:
    """What all generators of all processes are set to before a step: it draws the same whatever was drawn before."""
    return (seed * 1_000_003 + step) % 2**32


class _Loop:
    def __init__(
        self, task: Task, config: FitConfig, folder: Path, tell: Callable[[str], None], tick: Callable[[int], None],
        best: Path,
    ) -> None:  # fmt: skip
        self.task, self.config, self.folder, self.tell, self.tick, self.best = task, config, folder, tell, tick, best
        self.accelerator = _accelerator(config)
        for module in task.modules.values():
            module.to(self.accelerator.device)
        for optimiser in task.optimisers.values():
            for group in optimiser.param_groups:
                group["target_lr"] = group["lr"]
        self.optimisers = {name: self.accelerator.prepare_optimizer(o) for name, o in task.optimisers.items()}
        self.result = FitResult()

    @property
    def writes(self) -> bool:
        """Only the first process writes."""
        return rank() == 0

    def run(self, resume: bool) -> FitResult:
        with only_run_of_all(self.folder):
            return self._run(resume)

    def _run(self, resume: bool) -> FitResult:
        if resume:
            self._take_up(latest(self.folder / CHECKPOINTS))
        elif checkpoints_in(self.folder / CHECKPOINTS):
            raise OptionError(
                f"{self.folder} holds a training run already: go on with --resume, or name another folder"
            )
        with system_errors(f"cannot write into {self.folder}"), self._scalars() as log:
            self._train(log)
        return self.result

    def _train(self, log: Callable[[str, float, int], None]) -> None:
        from accelerate.utils import send_to_device

        c, done = self.config, self.result.step
        self._mode(True)
        if c.validate_first and not done and not self.result.validations:
            self._validate(log)
            self._save()
        batches = self.task.batches(done) if done < c.steps else iter(())
        self.tick(done)
        for step in range(done, c.steps):
            batch = send_to_device(next(batches), self.accelerator.device)
            self._learn(batch, step, log)
            last = step + 1 == c.steps
            if last or (step + 1) % min(c.validate_every, c.checkpoint_every) == 0:
                self._check_weights()
            if last or (step + 1) % c.validate_every == 0:
                self._validate(log)
            if last or (step + 1) % c.checkpoint_every == 0:
                self._save()
            self.tick(step + 1)
        if self.writes:
            self.task.export(self.folder / LAST)
        wait()

    # -- one step ------------------------------------------------------------------------------------------------------

    def _learn(self, batch: Any, step: int, log: Callable[[str, float, int], None]) -> None:
        from accelerate.utils import set_seed

        set_seed(seed_of_step(self.config.seed, step))
        pace = warmup_cosine(step, self.config.steps, self.config.warmup)
        for optimiser in self.optimisers.values():
            optimiser.zero_grad()
            for group in optimiser.param_groups:
                group["lr"] = group["target_lr"] * pace
        with self.accelerator.autocast():
            found = self.task.step(batch, step)
        losses = self._losses(found, step)
        norms = self._backward(found)
        self._check_norms(norms, step)
        for name, optimiser in self.optimisers.items():
            if name in found.losses:
                optimiser.step()
        self.result.losses.append(losses)
        if step % self.config.log_every == 0 or step + 1 == self.config.steps:
            numbers = {f"loss/{name}": value for name, value in losses.items()} | norms
            numbers |= average_numbers(found.scalars)
            for name, optimiser in self.optimisers.items():
                numbers |= {f"lr/{name}/{i}": group["lr"] for i, group in enumerate(optimiser.param_groups)}
            for name, value in numbers.items():
                log(name, value, step)

    def _losses(self, found: Step, step: int) -> dict[str, float]:
        unknown = set(found.losses) - set(self.optimisers)
        if unknown:
            raise OptionError(f"no optimiser is called {', '.join(sorted(unknown))}; there are {list(self.optimisers)}")
        losses = average_numbers(found.losses)
        for name in losses:
            if not math.isfinite(losses[name]):
                raise self._diverged(f"the loss of {name} is {losses[name]} at step {step}")
        return losses

    def _check_norms(self, norms: dict[str, float], step: int) -> None:
        """Raise before an optimiser takes a step by a gradient that is NaN or infinite.

        With a scaler (fp16) an overflow is expected: it leaves the step out and lowers its scale.
        """
        if self.accelerator.scaler is None:
            for name, norm in norms.items():
                if not math.isfinite(norm):
                    raise self._diverged(f"the gradient's {name} is {norm} at step {step}")

    def _check_weights(self) -> None:
        """Raise before weights that are NaN or infinite are evaluated or written over good ones."""
        for name, module in self.task.modules.items():
            for key, value in module.state_dict().items():
                if value.is_floating_point() and not bool(value.isfinite().all()):
                    step = self.result.step
                    raise self._diverged(f"{key} of {name} has NaN or infinite values after step {step}")

    def _diverged(self, what: str) -> OptionError:
        kept = checkpoints_in(self.folder / CHECKPOINTS)
        good = f"; the last good checkpoint is {kept[-1]}" if kept else ""
        return OptionError(f"{what}: lower the learning rate{good}")

    def _backward(self, found: Step) -> dict[str, float]:
        """Each loss to its own parameters; then all gradients averaged over processes and clipped. The norms."""
        own = {name: _trained(self.optimisers[name]) for name in found.losses}
        left = len(found.losses)
        for name, loss in found.losses.items():
            left -= 1
            self.accelerator.backward(loss, inputs=own[name], retain_graph=left > 0)
        for parameters in own.values():
            average_gradients(parameters)  # before unscaling: an overflow in one process is then one in all
        self.accelerator.unscale_gradients()
        norms = {}
        for name, parameters in own.items():
            norm = nn.utils.clip_grad_norm_(parameters, self.config.clip or math.inf)
            norms[f"norm/{name}"] = float(norm)
        return norms

    # -- validation ----------------------------------------------------------------------------------------------------

    def _mode(self, training: bool) -> None:
        for module in self.task.modules.values():
            module.train(training)

    def _validate(self, log: Callable[[str, float, int], None]) -> None:
        """All processes evaluate, each a part where the task shares it out; the first one's result counts.

        The best so far is written before any checkpoint knows of it.
        """
        step = self.result.step
        self._mode(False)
        with torch.no_grad():
            found: Validation | None = from_first(self.task.validate())
        self._mode(True)
        if found is None:
            return
        self.result.validations.append({"step": step, "score": found.score, **found.metrics})
        for name, value in found.metrics.items():
            log(f"validation/{name}", value, step)
        best = self.result.best_score
        better = math.isfinite(found.score) and (best is None or found.score > best)
        if better:
            self.result.best_step, self.result.best_score = step, found.score
        if not self.writes:
            return
        if better:
            self.task.export(self.best)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in found.metrics.items())
        self.tell(f"step {step}: {figures}{' (best so far)' if better else ''}")

    # -- going on ------------------------------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        facts = {**self.config.facts(), **self.task.facts()}
        plain: dict[str, Any] = json.loads(json.dumps(facts))
        return plain

    def _save(self) -> None:
        if self.writes:
            scaler = self.accelerator.scaler
            state = {
                "step": self.result.step,
                "facts": self._facts(),
                "modules": {name: dict(module.state_dict()) for name, module in self.task.modules.items()},
                "optimisers": {name: o.state_dict() for name, o in self.task.optimisers.items()},
                "scaler": scaler.state_dict() if scaler is not None else None,
                "result": asdict(self.result),
            }
            save_checkpoint(self.folder / CHECKPOINTS, self.result.step, state)
            prune(self.folder / CHECKPOINTS, self.config.keep_checkpoints)
        wait()

    def _take_up(self, path: Path) -> None:
        state = load_checkpoint(path)
        now, was = self._facts(), state["facts"]
        if other := differences(was, now):
            raise OptionError(f"{path} is of a run with other settings: {'; '.join(other)}")
        for name, module in self.task.modules.items():
            module.load_state_dict(state["modules"][name])
        for name, optimiser in self.task.optimisers.items():
            optimiser.load_state_dict(state["optimisers"][name])
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.result = FitResult(**state["result"])
        if self.writes:
            self.tell(f"going on from step {self.result.step} ({path})")

    @contextmanager
    def _scalars(self) -> Iterator[Callable[[str, float, int], None]]:
        """A function that logs a number of a step, to TensorBoard."""
        if not self.writes:
            yield lambda name, value, step: None
            return
        from torch.utils.tensorboard import SummaryWriter

        # what an interrupted run logged beyond its checkpoint is hidden
        with _quiet_threads(), SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.result.step) as writer:
            yield lambda name, value, step: writer.add_scalar(name, value, step)


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """TensorBoard's thread prints a traceback where the disk is full, and hands the error to the next call too."""
    before = threading.excepthook

    def hook(args: Any) -> None:
        if not isinstance(args.exc_value, OSError):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def _accelerator(config: FitConfig) -> Any:
    from accelerate import Accelerator

    cpu = config.device == "cpu" or not torch.cuda.is_available()
    if config.device == "cuda" and cpu:
        raise OptionError("device=cuda: there is no GPU that torch can use here")
    precision = config.precision
    if precision == "auto":
        precision = "no" if cpu else "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    elif precision != "no" and cpu:
        raise OptionError(f"precision={precision!r} is for GPUs; on a CPU leave it at auto")
    return Accelerator(mixed_precision=precision, cpu=cpu)


def _trained(optimiser: Any) -> list[nn.Parameter]:
    return [p for group in optimiser.param_groups for p in group["params"] if p.requires_grad]
