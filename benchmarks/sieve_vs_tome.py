"""sieve against ToMe on the real ViT-S/14 and CIFAR-10, at the same measured time: prints a table, writes a record.

    python benchmarks/sieve_vs_tome.py                      40 minutes on two quiet cores
    python benchmarks/sieve_vs_tome.py --images 200 --tune 100 --probe 1000 --rounds 2    a few minutes, to see it work

1. A linear probe is fitted on the untouched model's features of training images.
2. Tuning: each method tries every schedule that reaches 2x and 3x by MACs, with a tenth to spare for what deciding
   costs, cutting at every block, every second and every third, on training images the probe has not seen, and keeps the
   schedule with the smallest feature error for each of the three.
3. Timing: `keep` is moved until the measured speed-up is 2x and 3x, all of them and the model with all its tokens
   taking turns. That one runs fused attention, as the reduced ones do: 2x and 3x are what the reduction alone gains.
   Fewer cuts take less time and so may keep more: of the three each method keeps the one with the smallest error now,
   of those that are as fast as was asked for. The four that are left take turns once more, with four times the rounds:
   that is the speed reported.
4. Evaluation: test images, accuracy of the probe, difference with a paired 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tokensieve
from tokensieve.core.budget import SCHEDULES
from tokensieve.errors import BudgetError
from tokensieve.records import check_writable, new_record, write_record
from tokensieve.tasks.bench.models import twin
from tokensieve.tasks.bench.sdpa import attach_fused
from tokensieve.tasks.bench.timing import interleave, ratio
from tokensieve.tasks.clip.align import tower_features
from tokensieve.zoo import vit_s14
from tokensieve.zoo.cifar10 import load_cifar10

METHODS = ("tome", "sieve")
TARGETS = (2.0, 3.0)
SPACINGS = (1, 2, 3)
SPARE = 1.1
console = Console(width=110)


@dataclass
class Choice:
    """A method's settings for one speed."""

    method: str
    target: float
    schedule: str
    keep: int
    every: int  # cuts at every block, every second, every third

    def attach(self, model: nn.Module) -> tokensieve.Attachment:
        depth = len(model.transformer.resblocks)  # type: ignore[union-attr, arg-type]
        at = range(0, depth, self.every)
        return tokensieve.attach(model, self.method, keep=self.keep, schedule=self.schedule, at=at)


def pixels(images: np.ndarray) -> Tensor:
    prepare = vit_s14.preprocess()
    return torch.stack([prepare(image) for image in images])


def possible(model: nn.Module, choice: Choice) -> float:
    with choice.attach(model) as handle:
        return handle.cost().possible


def keep_for(model: nn.Module, choice: Choice, target: float) -> int | None:
    """The largest end budget whose MACs make `target` possible; None where the schedule cannot."""
    low, high = 1, 255
    while low < high:
        middle = (low + high + 1) // 2
        try:
            enough = possible(model, replace(choice, keep=middle)) >= target
        except BudgetError:
            enough = True  # under the method's floor: more must be kept
        low, high = (middle, high) if enough else (low, middle - 1)
    try:
        return low if possible(model, replace(choice, keep=low)) >= 0.98 * target else None
    except BudgetError:
        return None


@torch.inference_mode()
def reduced_features(model: nn.Module, choice: Choice, images: np.ndarray, batch: int) -> Tensor:
    with choice.attach(model):
        return torch.cat([model(pixels(images[i : i + batch])) for i in range(0, len(images), batch)])


def feature_error(model: nn.Module, choice: Choice, images: np.ndarray, full: Tensor, batch: int) -> float:
    features = reduced_features(model, choice, images, batch)
    return ((features - full).norm(dim=1) / full.norm(dim=1)).mean().item()


def tune(model: nn.Module, images: np.ndarray, full: Tensor, batch: int) -> tuple[list[Choice], list[dict[str, Any]]]:
    """Each method's best schedule for each target and spacing, by relative feature error on training images."""
    chosen, rows = [], []
    for target, method, every in itertools.product(TARGETS, METHODS, SPACINGS):
        tried = []
        for schedule in SCHEDULES:
            choice = Choice(method, target, schedule, 255, every)
            keep = keep_for(model, choice, target)
            if keep is None or keep_for(model, choice, SPARE * target) is None:  # could not be made fast enough
                rows.append({"part": "tune", **vars(choice), "keep": None})
                continue
            choice = replace(choice, keep=keep)
            error = feature_error(model, choice, images, full, batch)
            tried.append((error, choice))
            rows.append({"part": "tune", **vars(choice), "error": error})
            console.print(
                f"tune {method:6s} {target:.0f}x every {every} {schedule:10s} keep {keep:3d}: error {error:.4f}"
            )
        if tried:
            chosen.append(min(tried, key=lambda t: t[0])[1])
    return chosen, rows


def measured_speeds(model: nn.Module, choices: list[Choice], images: Tensor, rounds: int) -> list[float]:
    """The speed-up of each choice over fused attention with all tokens; all of them take turns, round by round."""
    calls: dict[str, Callable[[], Any]] = {}
    for name, attach in {"full": attach_fused, **{str(i): choice.attach for i, choice in enumerate(choices)}}.items():
        copy = twin(model)
        attach(copy)
        calls[name] = partial(copy, images)
    times = interleave(calls, rounds)
    return [ratio(times["full"], times[str(i)]) for i in range(len(choices))]


def next_keep(model: nn.Module, choice: Choice, seen: dict[int, float]) -> int:
    """Between the two tried budgets around the target; outside of all, where the MACs say that it should be."""
    slow = [k for k, speed in seen.items() if speed < choice.target]
    fast = [k for k, speed in seen.items() if speed >= choice.target]
    if slow and fast and max(fast) < min(slow):
        low, high = max(fast), min(slow)
        share = (seen[low] - choice.target) / (seen[low] - seen[high])
        return min(max(round(low + share * (high - low)), low + (high - low > 1)), high)
    wanted = possible(model, choice) * choice.target / seen[choice.keep]
    return keep_for(model, choice, wanted) or choice.keep


def calibrate(model: nn.Module, choices: list[Choice], images: Tensor, rounds: int) -> list[tuple[Choice, float]]:
    """Move every `keep` until its measured speed-up is its target, to 1 % or to one token, for all of them at once.

    Returns each with its speed-up: a schedule may have nothing left to give before it is fast enough.
    """
    tried: list[dict[int, float]] = [{} for _ in choices]
    now = list(choices)
    for _ in range(5):
        for i, speed in enumerate(measured_speeds(model, now, images, rounds)):
            tried[i].setdefault(now[i].keep, speed)
            if abs(speed / now[i].target - 1) > 0.01:
                now[i] = replace(now[i], keep=next_keep(model, now[i], tried[i]))
        if all(choice.keep in seen for choice, seen in zip(now, tried, strict=True)):
            break
    best = []
    for choice, seen in zip(choices, tried, strict=True):
        keep = min(seen, key=lambda k: abs(seen[k] - choice.target))
        best.append((replace(choice, keep=keep), seen[keep]))
        name = f"{choice.method} {choice.target:.0f}x every {choice.every}"
        console.print(f"calibrated {name}: keep {keep}, measured {seen[keep]:.2f}x")
    return best


def space(
    model: nn.Module, timed: list[tuple[Choice, float]], images: np.ndarray, full: Tensor, batch: int
) -> tuple[list[Choice], list[dict[str, Any]]]:
    """Of choices that take the same time, each method's best for each target.

    One that stayed too slow (by 2 %) has kept more, and is not a candidate where another is fast enough.
    """
    rows = [
        {"part": "space", **vars(c), "speedup": speed, "error": feature_error(model, c, images, full, batch)}
        for c, speed in timed
    ]
    chosen = []
    for target, method in itertools.product(TARGETS, METHODS):
        mine = [i for i, (c, _) in enumerate(timed) if (c.target, c.method) == (target, method)]
        for i in mine:
            every, speed, error = (rows[i][name] for name in ("every", "speedup", "error"))
            console.print(f"at equal time {method:6s} {target:.0f}x every {every}: {speed:.2f}x, error {error:.4f}")
        fast = [i for i in mine if timed[i][1] >= 0.98 * target] or [max(mine, key=lambda i: timed[i][1])]
        chosen.append(timed[min(fast, key=lambda i: rows[i]["error"])][0])
    return chosen, rows


def fit_probe(features: np.ndarray, labels: np.ndarray) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=500)).fit(features, labels)


def interval(a: np.ndarray, b: np.ndarray, draws: int = 10_000) -> tuple[float, float]:
    """Paired 95 % bootstrap interval of mean(a) - mean(b), in points; a and b are 0/1 by image."""
    generator = np.random.default_rng(0)
    difference = a.astype(float) - b.astype(float)
    picks = generator.integers(0, len(a), size=(draws, len(a)))
    low, high = np.percentile(difference[picks].mean(axis=1), [2.5, 97.5])
    return 100 * float(low), 100 * float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000, help="test images to evaluate on")
    parser.add_argument("--probe", type=int, default=6000, help="training images for the probe")
    parser.add_argument("--tune", type=int, default=400, help="further training images to tune on")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each timing")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/records/sieve_vs_tome.json"))
    args = parser.parse_args()
    check_writable(args.output)

    model = vit_s14.vit_s14_openclip()
    train, train_labels = load_cifar10("train")
    test, test_labels = load_cifar10("test")
    console.print("features of the untouched model (kept in the cache folder) ...")
    probe = fit_probe(tower_features(train[: args.probe], model, "vit-s14").numpy(), train_labels[: args.probe])
    tune_images = train[args.probe : args.probe + args.tune]
    full = tower_features(tune_images, model, "vit-s14")
    choices, rows = tune(model, tune_images, full, args.batch)
    timing = pixels(tune_images[: args.batch])
    choices, spaced = space(model, calibrate(model, choices, timing, args.rounds), tune_images, full, args.batch)
    rows += spaced
    speeds = measured_speeds(model, choices, timing, 4 * args.rounds)

    images, labels = test[: args.images], test_labels[: args.images]
    features = [reduced_features(model, choice, images, args.batch) for choice in choices]
    right_full = probe.predict(tower_features(images, model, "vit-s14").numpy()) == labels
    right = {(c.method, c.target): probe.predict(f.numpy()) == labels for c, f in zip(choices, features, strict=True)}
    table = Table("speed", "method", "schedule", "every", "keep", "measured", "accuracy", "sieve - tome [95 %]")
    table.add_row("1x", "all tokens", "", "", "256", "1.00x", f"{100 * right_full.mean():.2f} %", "")
    for choice, speed in zip(choices, speeds, strict=True):
        mine = right[choice.method, choice.target]
        row = {"part": "judge", **vars(choice), "speedup": speed, "accuracy": float(mine.mean())}
        text = ""
        if choice.method == "sieve":
            other = right["tome", choice.target]
            low, high = interval(mine, other)
            gain = 100 * float(mine.mean() - other.mean())
            row |= {"gain": gain, "gain_low": low, "gain_high": high}
            text = f"{gain:+.2f} [{low:+.2f}, {high:+.2f}]"
        rows.append(row)
        table.add_row(
            f"{choice.target:.0f}x", choice.method, choice.schedule, str(choice.every), str(choice.keep),
            f"{speed:.2f}x", f"{100 * mine.mean():.2f} %", text,
        )  # fmt: skip
    rows.append({"part": "judge", "method": "none", "speedup": 1.0, "accuracy": float(right_full.mean())})
    console.print(table)
    config = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    write_record(new_record("sieve_vs_tome", config, rows, seed=0, threads=torch.get_num_threads()), args.output)
    console.print(f"record: {args.output}")


if __name__ == "__main__":
    main()
