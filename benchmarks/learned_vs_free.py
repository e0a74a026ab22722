"""A trained selection against the training-free methods on the default CLIP and CIFAR-10: a table and a record.

    python benchmarks/learned_vs_free.py                                              the shipped adapter, half an hour
    python benchmarks/learned_vs_free.py --adapter FILE --images 300 --probe 500      a first look

All methods remove geometrically and get the budget that makes 2x and 3x possible by MACs. On test images: cosine
of the image feature with the untouched model's, zero-shot accuracy, accuracy of a linear probe on the tower's CLS
feature, and their differences to the adapter with paired 95 % bootstrap intervals. Speed is measured beside the same
layers with all tokens, batch by batch. The adapter was trained on training images from 20,000 on, the probe on those
before.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sieve_vs_tome import Choice, fit_probe, interval, keep_for, pixels
from torch import Tensor

import tokensieve
from tokensieve.methods.registry import make_method
from tokensieve.records import check_writable, new_record, write_record
from tokensieve.tasks.bench.sdpa import attach_fused
from tokensieve.tasks.clip.align import tower_features
from tokensieve.tasks.clip.select import default_subject
from tokensieve.zoo import vit_s14
from tokensieve.zoo.cifar10 import load_cifar10

TARGETS = (2.0, 3.0)
FREE: dict[str, dict[str, bool]] = {
    "sieve": {}, "tome": {}, "pitome": {}, "evit": {"fold": True}, "anchor": {"fold": True}
}  # fmt: skip
console = Console(width=130)


class Evaluator:
    """Encodes test images with every method in turn, and keeps what each image's feature says."""

    def __init__(self, adapter: str) -> None:
        subject, _ = default_subject(kl=1.0)
        clip: Any = subject.model
        self.tower = vit_s14.vit_s14_openclip()  # the same weights, without the projection
        self.proj, self.classes = clip.visual.proj.detach(), subject.classes
        self.methods = {name: make_method(name, **options) for name, options in FREE.items()}
        self.methods["learned"] = make_method("learned", adapter=adapter)
        self.keep = {target: self._budgets(target) for target in TARGETS}

    def _budgets(self, target: float) -> dict[str, int]:
        found = {}
        for name, method in self.methods.items():
            like = "sieve" if name == "learned" else name  # with the same cuts their MACs are the same
            found[name] = keep_for(self.tower, Choice(like, target, "geometric", 1, method.spacing()), target)
        return {name: keep for name, keep in found.items() if keep is not None}

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The tower's CLS feature, and the joint one."""
        cls = self.tower(x)
        return cls, cls @ self.proj

    @torch.inference_mode()
    def run(self, images: np.ndarray, batch: int) -> dict[tuple[str, float], dict[str, Any]]:
        """For each method and target, and ("none", 1.0): CLS features, joint features and the median speed-up."""
        runs: list[tuple[str, float]] = [("none", 1.0)]
        runs += [(name, target) for target, budgets in self.keep.items() for name in budgets]
        parts: dict[tuple[str, float], list[tuple[Tensor, Tensor, float]]] = {run: [] for run in runs}
        for start in range(0, len(images), batch):
            x = pixels(images[start : start + batch])
            base = 0.0
            for run in runs:
                begin = time.perf_counter()
                cls, joint = self._reduced(run, x)
                spent = time.perf_counter() - begin
                base = base or spent
                parts[run].append((cls, joint, base / spent))
        return {
            run: {
                "cls": torch.cat([part[0] for part in found]),
                "joint": torch.cat([part[1] for part in found]),
                "speedup": float(np.median([part[2] for part in found])),
            }
            for run, found in parts.items()
        }

    def _reduced(self, run: tuple[str, float], x: Tensor) -> tuple[Tensor, Tensor]:
        name, target = run
        if name == "none":  # all tokens, on the layers of a reduced model: speed-ups are the reduction's alone
            with attach_fused(self.tower):
                return self.encode(x)
        with tokensieve.attach(self.tower, self.methods[name], keep=self.keep[target][name], schedule="geometric"):
            return self.encode(x)

    def guesses(self, joint: Tensor) -> np.ndarray:
        assert self.classes is not None
        return (F.normalize(joint, dim=-1) @ self.classes.T).argmax(dim=1).numpy()


def rows_of(
    evaluator: Evaluator, images: np.ndarray, labels: np.ndarray, probe: Any, batch: int
) -> list[dict[str, Any]]:
    """One row a method and target: its figures, and the adapter's lead over it."""
    found = evaluator.run(images, batch)
    full = found["none", 1.0]
    scores = {}
    for run, made in found.items():
        scores[run] = {
            "cosine": F.cosine_similarity(made["joint"], full["joint"]).numpy(),
            "zero_shot": evaluator.guesses(made["joint"]) == labels,
            "probe": probe.predict(made["cls"].numpy()) == labels,
        }
    rows = []
    for (name, target), made in found.items():
        row = {
            "method": name,
            "target": target,
            "keep": evaluator.keep.get(target, {}).get(name),
            "speedup": made["speedup"],
        }
        for what, values in scores[name, target].items():
            row[what] = float(values.mean())
            if name in FREE:
                mine = scores["learned", target][what]
                low, high = interval(mine, values)
                row |= {
                    f"lead_{what}": 100 * float(mine.mean() - values.mean()),
                    f"low_{what}": low,
                    f"high_{what}": high,
                }
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table("speed", "method", "keep", "measured", "cosine", "zero-shot", "probe", "learned's lead in zero-shot",
                  "in probe", "in cosine x 100")  # fmt: skip
    for row in rows:
        leads = [
            f"{row[f'lead_{what}']:+.2f} [{row[f'low_{what}']:+.2f}, {row[f'high_{what}']:+.2f}]"
            if f"lead_{what}" in row else ""
            for what in ("zero_shot", "probe", "cosine")
        ]  # fmt: skip
        table.add_row(
            f"{row['target']:.0f}x", row["method"], str(row["keep"] or 256), f"{row['speedup']:.2f}x",
            f"{row['cosine']:.4f}", f"{100 * row['zero_shot']:.2f} %", f"{100 * row['probe']:.2f} %", *leads,
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--adapter", default="vit-s14", help="what `tokensieve train select` wrote; default: the shipped one"
    )
    parser.add_argument("--images", type=int, default=2000, help="test images to evaluate on")
    parser.add_argument("--probe", type=int, default=8000, help="training images for the probe")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/records/learned_vs_free.json"))
    args = parser.parse_args()
    check_writable(args.output)
    evaluator = Evaluator(args.adapter)
    train, train_labels = load_cifar10("train")
    test, test_labels = load_cifar10("test")
    features = tower_features(train[: args.probe], evaluator.tower, "vit-s14")
    probe = fit_probe(features.numpy(), train_labels[: args.probe])
    rows = rows_of(evaluator, test[: args.images], test_labels[: args.images], probe, args.batch)
    show(rows)
    config = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    write_record(new_record("learned_vs_free", config, rows, seed=0, threads=torch.get_num_threads()), args.output)
    console.print(f"record: {args.output}")


if __name__ == "__main__":
    main()
