"""What each loss of `tokensieve train vlm` is worth: task alone, with the GAN, with distillation, with both, and with
the guides beside them; 3 seeds.

    python benchmarks/vlm_ablation.py                             fifteen short runs, about half an hour on two cores
    python benchmarks/vlm_ablation.py --losses task all --seeds 0 --steps 20 --images 20 -o runs/try --runs runs/try

Started again it goes on where it stopped: a run whose record is there is not repeated, one that was interrupted resumes
from its last checkpoint. Runs differ in the weights of the losses and the seed alone; what is evaluated is the last
step, chosen by nobody, on held-out scenes that neither training nor its validation has drawn. The table is printed and
put into benchmarks/vlm.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

from evidence import put_into_page, run_all, spread, table

HERE = Path(__file__).parent
PAGE = HERE / "vlm.md"
BEGIN = "<!-- tables: written by benchmarks/vlm_ablation.py -->"
LOSSES: dict[str, tuple[float, float, float]] = {  # weights of the adversarial loss, of distillation and of the guides
    "task": (0.0, 0.0, 0.0), "task-gan": (1.0, 0.0, 0.0), "task-distil": (0.0, 25.0, 0.0), "all": (1.0, 25.0, 0.0),
    "all-guided": (1.0, 25.0, 25.0),
}  # fmt: skip
BATCH = 16


def settings(losses: str, seed: int, steps: int, runs: Path) -> list[str]:
    """The KEY=VALUE of one run, on top of the small model's configuration."""
    adversarial, distillation, guides = LOSSES[losses]
    return [f"adv_loss_weight={adversarial}", f"distill_loss_weight={distillation}",
            f"merge_guide_weight={guides}", f"prune_guide_weight={guides}", f"seed={seed}",
            f"batch_size={BATCH}", f"questions={BATCH * steps}", f"eval_every={steps}", "checkpoint_every=50",
            "val_questions=64", f"output_dir={runs / f'{losses}-{seed}'}"]  # fmt: skip


def one_run(losses: str, seed: int, steps: int, images: int, runs: Path, record: Path) -> str:
    """Train, evaluate, write the record. In a process of its own, on one thread."""
    import torch

    torch.set_num_threads(1)
    from tokensieve.records import new_record, write_record
    from tokensieve.tasks.vlm.config import load_config
    from tokensieve.tasks.vlm.train import train_vlm
    from tokensieve.training.checkpoint import checkpoints_in

    config = load_config(None, settings(losses, seed, steps, runs))
    folder = Path(config.output_dir)
    result = train_vlm(config, resume=bool(checkpoints_in(folder / "checkpoints")))
    row = evaluated(folder / "last.safetensors", images)
    facts = {
        "losses": losses,
        "steps": steps,
        "images": images,
        "vlm": config.model_dump(mode="json", exclude={"output_dir"}),
    }
    row["task_loss"] = [round(step["layer_pruners"], 4) for step in result.losses]
    write_record(new_record("vlm-ablation", facts, [row], seed=seed, threads=1), record)
    return f"{losses}, seed {seed}: hard {100 * row['accuracy_hard']:.1f} %, soft {100 * row['accuracy_soft']:.1f} %"


def evaluated(adapter: Path, images: int) -> dict[str, Any]:
    """Accuracy untouched, with tokens really gone, and as trained, on the same held-out questions."""
    from tokensieve.tasks.vlm.answers import Answers, Asker
    from tokensieve.tasks.vlm.compare import scores_of
    from tokensieve.tasks.vlm.evaluate import VlmEvalOptions, attach_reduced, held_out_questions
    from tokensieve.tasks.vlm.load import load_llava
    from tokensieve.tasks.vlm.soft_answers import soft_answers

    model, processor = load_llava(None)
    asker, questions = Asker(processor), held_out_questions(images)
    reduced, handle = attach_reduced(model, VlmEvalOptions(method="two_stage", options={"adapter": str(adapter)}))
    said: dict[str, list[str]] = {}
    for name, asked, attached in (("baseline", model, None), ("hard", reduced, handle)):
        answers = Answers()
        for inputs in asker.batches(questions, 32):
            asker.ask(asked, inputs, answers, attached)
        said[name] = answers.texts
    said["soft"] = soft_answers(asker, model, handle, questions, 32)
    scores = {name: scores_of(texts, questions, "exact") for name, texts in said.items()}
    cost = handle.cost(21)  # text tokens of a usual question here
    return {
        **{f"accuracy_{name}": statistics.mean(values) for name, values in scores.items()},
        "scores": "".join(str(round(s)) for s in scores["hard"]), "questions": len(questions),
        "tokens_average": cost.vision_tokens_average, "patches": handle.patches, "saved": cost.saved,
    }  # fmt: skip


def train_all(args: argparse.Namespace) -> None:
    wanted = [(losses, seed, args.output / f"{losses}-{seed}.json") for seed in args.seeds for losses in args.losses]
    missing = [run for run in wanted if not run[2].is_file()]
    print(f"{len(missing)} runs of {args.steps} steps to do, {args.processes} at a time", flush=True)
    jobs = [(losses, seed, args.steps, args.images, args.runs, record) for losses, seed, record in missing]
    run_all(one_run, jobs, args.processes)


def worth_table(output: Path, losses: list[str], seeds: list[int]) -> str:
    from tokensieve.records import read_record

    found = {name: [read_record(output / f"{name}-{seed}.json") for seed in seeds] for name in losses}
    base = [record.rows[0]["accuracy_hard"] for record in found.get("task", ())]
    rows = []
    for name, records in found.items():
        own = [record.rows[0] for record in records]
        hard = [row["accuracy_hard"] for row in own]
        gains = [100 * (a - b) for a, b in zip(hard, base, strict=False)] if name != "task" else []
        gaps = [100 * (row["accuracy_soft"] - row["accuracy_hard"]) for row in own]
        rows.append([
            name, *(spread([row[f"accuracy_{kind}"] for row in own]) for kind in ("baseline", "hard", "soft")),
            signed(gaps), f"{signed(gains)}, mean {statistics.mean(gains):+.1f}" if gains else "",
            str(records[0].config["steps"]), str(len(records)),
        ])  # fmt: skip
    head = ["losses", "untouched %", "hard %", "soft %", "soft - hard, by seed", "hard against task alone, by seed",
            "steps", "seeds"]  # fmt: skip
    return table(head, rows)


def signed(values: list[float]) -> str:
    return " ".join(f"{value:+.1f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    records = HERE / "records" / "vlm_ablation"
    add("--losses", nargs="+", default=list(LOSSES), choices=list(LOSSES), metavar="L", help=", ".join(LOSSES))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--steps", type=int, default=120)
    add("--images", type=int, default=100, help="held-out images to evaluate on, up to six questions each")
    add("--processes", type=int, default=2, help="runs at a time, one thread each")
    add("--runs", type=Path, default=Path("runs/vlm-ablation"), help="checkpoints; may be deleted")
    add("-o", "--output", type=Path, default=records, help="records of the runs")
    args = parser.parse_args()
    train_all(args)
    text = worth_table(args.output, args.losses, args.seeds)
    print(text)
    page = PAGE if args.output == records else args.output / "tables.md"
    put_into_page(text, page, BEGIN, "Losses of train vlm")
    print(f"\ntable: {page}; records: {args.output}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
