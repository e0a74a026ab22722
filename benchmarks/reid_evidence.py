"""What SDTPS does for re-identification: variants x seeds on synthetic people; tables and records.

    python benchmarks/reid_evidence.py                                      about an hour on two quiet cores
    python benchmarks/reid_evidence.py --variants baseline sdtps --seeds 0 --steps 50 -o runs/try --runs runs/try

Started again it goes on where it stopped: a run whose record is there is not repeated, one that was interrupted resumes
from its last checkpoint. Each run chooses its best step on training people that were held out, and is evaluated on
people (query and gallery) that neither has seen, then again with modalities missing.
Speed is measured at the end, interleaved with the untouched model. Tables are printed and put into benchmarks/reid.md.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from evidence import put_into_page, run_all, spread, table

HERE = Path(__file__).parent
PAGE = HERE / "reid.md"
BEGIN = "<!-- tables: written by benchmarks/reid_evidence.py -->"
MIDDLE = 1  # of four blocks
VARIANTS: dict[str, tuple[str, ...]] = {
    "baseline": ("MODEL.USE_SDTPS=False",),
    "sdtps": (),
    "sdtps-convex": ("MODEL.SDTPS_FORMULA=convex",),
    "sdtps-gumbel": ("MODEL.SDTPS_USE_GUMBEL=True",),
    "sdtps-gumbel-convex": ("MODEL.SDTPS_USE_GUMBEL=True", "MODEL.SDTPS_FORMULA=convex"),
    "random": ("MODEL.SELECTION=random",),
    "mean": ("MODEL.SELECTION=mean",),
    f"sdtps-at-{MIDDLE}": (f"MODEL.SDTPS_AT={MIDDLE}",),
    f"random-at-{MIDDLE}": (f"MODEL.SDTPS_AT={MIDDLE}", "MODEL.SELECTION=random"),
    f"mean-at-{MIDDLE}": (f"MODEL.SDTPS_AT={MIDDLE}", "MODEL.SELECTION=mean"),
}
# smaller than the default configuration, so that all runs fit in an hour
SETTINGS = (
    "INPUT.SIZE_TRAIN=[64, 32]", "MODEL.DEPTH=4", "MODEL.WIDTH=96", "MODEL.HEADS=3", "DATASETS.VAL_SHARE=0.2",
    "SOLVER.EVAL_PERIOD=100", "SOLVER.CHECKPOINT_PERIOD=50",
)  # fmt: skip
PEOPLE: dict[str, Any] = {"identities": 60, "cameras": 4, "images": 4, "seed": 0, "test_share": 0.4}


def settings(variant: str, seed: int, steps: int, data: Path, runs: Path) -> list[str]:
    """The KEY=VALUE of one run, on top of configs/synthetic/DeMo_SDTPS.yml."""
    return [*SETTINGS, f"SOLVER.MAX_STEPS={steps}", f"SOLVER.WARMUP_STEPS={steps // 10}", f"SOLVER.SEED={seed}",
            f"DATASETS.ROOT_DIR={data}", f"OUTPUT_DIR={runs / f'{variant}-{seed}'}", *VARIANTS[variant]]  # fmt: skip


def one_run(variant: str, seed: int, steps: int, data: Path, runs: Path, record: Path) -> str:
    """Train, evaluate, write the record. In a process of its own, on one thread."""
    import torch

    torch.set_num_threads(1)
    from tokensieve.records import new_record, write_record
    from tokensieve.tasks.reid.config import load_config
    from tokensieve.tasks.reid.train import build_task, train_reid
    from tokensieve.training.checkpoint import checkpoints_in

    config = load_config(HERE.parent / "configs/synthetic/DeMo_SDTPS.yml", settings(variant, seed, steps, data, runs))
    task = build_task(config)
    folder = Path(config.OUTPUT_DIR)
    result = train_reid(config, task=task, resume=bool(checkpoints_in(folder / "checkpoints")))
    rows = evaluated(folder / "best.safetensors", task.data)
    cost = task.model.cost()
    facts = {
        "variant": variant, "tokens": task.model.backbone.patches, "tokens_out": task.model.tokens_out(),
        "macs": cost.macs, "macs_full": cost.macs_full, "own_macs": task.model.compressor_macs(),
        "parameters": sum(p.numel() for p in task.model.parameters()), "best_step": result.best_step,
        "validation": result.validations, "loss": [round(x["reid"], 5) for x in result.losses],
    }  # fmt: skip
    plain = config.model_dump(mode="json", exclude={"OUTPUT_DIR": True, "DATASETS": {"ROOT_DIR"}})
    kept = {"reid": plain, "people": PEOPLE, "facts": facts}
    write_record(new_record("reid", kept, rows, seed=seed, threads=1), record)
    return f"{variant}, seed {seed}: mAP {100 * rows[0]['mAP']:.1f} %, R1 {100 * rows[0]['R1']:.1f} %"


def evaluated(checkpoint: Path, data: Any) -> list[dict[str, Any]]:
    """Query against gallery, with all modalities and with each set of them missing."""
    from tokensieve.tasks.reid.evaluate import evaluate
    from tokensieve.tasks.reid.features import extract_all
    from tokensieve.tasks.reid.model import load_checkpoint
    from tokensieve.tasks.reid.runs import missing_sets

    model, _ = load_checkpoint(checkpoint)
    splits = {"query": data.query, "gallery": data.gallery}
    labels = {name: ([s.pid for s in part], [s.camera for s in part]) for name, part in splits.items()}
    rows = []
    for missing in ((), *missing_sets("all", model.modalities)):
        found = extract_all(model, splits, missing=missing)
        metrics = evaluate(found["query"], *labels["query"], found["gallery"], *labels["gallery"])
        left = [name for name in model.modalities if name not in missing]
        rows.append({"left": left, "missing": list(missing), **metrics.named()})
    return rows


def measure_speed(rounds: int) -> list[dict[str, Any]]:
    """The middle cut against keeping all: the runs' own model, and a ViT-S/14 on 252 x 126 pixels."""
    import torch

    from tokensieve.tasks.bench.timing import interleave, quartiles, ratio
    from tokensieve.tasks.reid.config import load_config
    from tokensieve.tasks.reid.model import ReidModel

    torch.set_num_threads(1)
    shapes = {
        f"small, 64 x 32, block {MIDDLE} of 4": ((64, 32), SETTINGS, MIDDLE),
        "ViT-S/14, 252 x 126, block 3 of 12": ((252, 126), ("MODEL.TRANSFORMER_TYPE=vit-s14",), 3),
    }
    variants = {"all": ("MODEL.USE_SDTPS=False",), "sdtps": ("MODEL.SDTPS_AT={}",), "sdtps after the backbone": (),
                "random": ("MODEL.SDTPS_AT={}", "MODEL.SELECTION=random")}  # fmt: skip
    rows = []
    for name, (size, more, at) in shapes.items():
        models = {}
        for variant, pairs in variants.items():
            chosen = [*more, *(pair.format(at) for pair in pairs)]
            config = load_config(HERE.parent / "configs/synthetic/DeMo_SDTPS.yml", chosen)
            models[variant] = ReidModel(config, size, ("rgb", "nir", "tir"), 30, 4, pretrained=False).eval()
        for batch in (1, 4):
            images = {m: torch.randn(batch, 3, *size) for m in ("rgb", "nir", "tir")}
            times = interleave({v: partial(m, images) for v, m in models.items()}, rounds)
            for variant, model in models.items():
                low, _, high = quartiles([b / o for b, o in zip(times["all"], times[variant], strict=True)])
                fact = {"model": name, "batch": batch, "variant": variant, "possible": model.cost().possible}
                rows.append(fact | {"speedup": ratio(times["all"], times[variant]), "low": low, "high": high})
    return rows


# -- tables ------------------------------------------------------------------------------------------------------------


def read_runs(records: Path, variants: list[str], seeds: list[int]) -> dict[str, list[Any]]:
    """Variant -> its records by seed, those that are there."""
    from tokensieve.records import read_record

    paths = {v: [records / f"{v}-{seed}.json" for seed in seeds] for v in variants}
    found = {v: [read_record(path) for path in some if path.is_file()] for v, some in paths.items()}
    return {variant: runs for variant, runs in found.items() if runs}


def lead(runs: list[Any], base: list[Any]) -> str:
    """mAP against the baseline of the same seed, in points: mean and deviation of the differences."""
    by_seed = {run.seed: run.rows[0]["mAP"] for run in base}
    differences = [100 * (run.rows[0]["mAP"] - by_seed[run.seed]) for run in runs if run.seed in by_seed]
    if not differences:
        return ""
    deviation = statistics.stdev(differences) if len(differences) > 1 else math.nan
    return f"{statistics.mean(differences):+.1f}" + ("" if math.isnan(deviation) else f" ± {deviation:.1f}")


def quality_table(found: dict[str, list[Any]]) -> str:
    rows = []
    for variant, runs in found.items():
        facts = runs[0].config["facts"]
        own = f" + {facts['own_macs'] / 1e6:.1f}" if facts["own_macs"] else ""
        rows.append(
            [variant, f"{facts['tokens']} -> {facts['tokens_out']}", f"{facts['macs'] / 1e6:.1f}{own}",
             *(spread([run.rows[0][name] for run in runs]) for name in ("mAP", "R1", "mINP")),
             "" if variant == "baseline" else lead(runs, found.get("baseline", [])), str(len(runs))]
        )  # fmt: skip
    return table(["variant", "tokens a modality", "MMACs a sample", "mAP %", "R1 %", "mINP %", "mAP against baseline",
                  "seeds"], rows)  # fmt: skip


def missing_table(found: dict[str, list[Any]]) -> str:
    sets = [row["left"] for row in next(iter(found.values()))[0].rows]
    rows = [
        [variant, *(spread([run.rows[i]["mAP"] for run in runs]) for i in range(len(sets)))]
        for variant, runs in found.items()
    ]
    return table(["mAP % with only", *("+".join(left) for left in sets)], rows)


def speed_table(rows: list[dict[str, Any]]) -> str:
    return table(
        ["model", "samples a batch", "variant", "measured", "quartiles", "possible by MACs"],
        [[row["model"], str(row["batch"]), row["variant"], f"{row['speedup']:.2f}x",
          f"{row['low']:.2f} to {row['high']:.2f}", f"{row['possible']:.2f}x"] for row in rows],
    )  # fmt: skip


def train_all(args: argparse.Namespace, data: Path) -> None:
    missing = [
        (v, seed) for seed in args.seeds for v in args.variants if not (args.output / f"{v}-{seed}.json").is_file()
    ]
    print(f"{len(missing)} runs of {args.steps} steps to do, {args.processes} at a time", flush=True)
    jobs = [(v, seed, args.steps, data, args.runs, args.output / f"{v}-{seed}.json") for v, seed in missing]
    run_all(one_run, jobs, args.processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="V", help=", ".join(VARIANTS))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--steps", type=int, default=600)
    add("--processes", type=int, default=2, help="runs at a time, one thread each")
    add("--rounds", type=int, default=20, help="of the speed measurement; 0 leaves it out")
    add("--runs", type=Path, default=Path("runs/reid-evidence"), help="data, checkpoints and models; may be deleted")
    add("-o", "--output", type=Path, default=HERE / "records" / "reid", help="records of the runs")
    add("--page", type=Path, help="page to put the tables into (default: benchmarks/reid.md for the default records)")
    args = parser.parse_args()
    from tokensieve.records import new_record, read_record, write_record
    from tokensieve.tasks.reid.synthetic import SyntheticConfig, write_synthetic

    data = args.runs / "people"
    if not (data / "test").is_dir():
        write_synthetic(data, SyntheticConfig(**PEOPLE))
    train_all(args, data)
    speed = args.output / "speed.json"
    if args.rounds and not speed.is_file():
        write_record(new_record("reid-speed", {"rounds": args.rounds}, measure_speed(args.rounds), threads=1), speed)
    found = read_runs(args.output, args.variants, args.seeds)
    parts = [quality_table(found), missing_table(found)]
    parts += [speed_table(read_record(speed).rows)] if speed.is_file() else []
    text = "\n\n".join(parts)
    print(text)
    page = args.page or (PAGE if args.output == HERE / "records" / "reid" else args.output / "tables.md")
    put_into_page(text, page, BEGIN, "Re-identification with SDTPS")
    print(f"\ntables: {page}; records: {args.output}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
