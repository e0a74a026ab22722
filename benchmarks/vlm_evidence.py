"""Methods that take vision tokens out of a LLaVA, all at the same layer-average tokens, on the same held-out questions.

    python benchmarks/vlm_evidence.py                                     the shipped small model, training-free methods
    python benchmarks/vlm_evidence.py --adapter outputs/checkpoints       the learned two_stage as well
    python benchmarks/vlm_evidence.py --model DIR --images 20 --methods random fastv -o runs/try

Started again it goes on where it stopped: a run whose record is there is not repeated, unless its model, adapter or
questions were others. Differences are paired by question, their intervals drawn by image. Tables are printed and put
into benchmarks/vlm.md.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

from evidence import put_into_page, table

HERE = Path(__file__).parent
PAGE = HERE / "vlm.md"
BEGIN = "<!-- tables: written by benchmarks/vlm_evidence.py -->"
UNTOUCHED, LEARNED = "none", "two_stage"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # what is left out is averaged into what is most like it
    "divprune-fold": ("divprune", {"fold": True}), "cdpruner-fold": ("cdpruner", {"fold": True}),
    # where the default departs from the released code, that code's way
    "cdpruner-released": ("cdpruner", {"relevance": "released"}),
    "prumerge-released": ("prumerge", {"merge": "released"}),
}  # fmt: skip
FREE = (
    "random", "grid", "divprune", "cdpruner", "vispruner", "visionzip", "prumerge", "tome", "sieve", "fastv",
    "pyramiddrop", "sparsevlm", "prior_tr", "v2drop", "otprune", *VARIANTS,
)  # fmt: skip
BUDGETS = (0.5, 0.33, 0.22)


def digest(path: Path) -> str:
    """Of a file, or of the weights in a folder."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


class Bench:
    """One model, its questions, and the untouched model's answers to them."""

    def __init__(self, model: Path | None, adapter: Path | None, images: int, batch: int, output: Path) -> None:
        from tokensieve.tasks.vlm.answers import Asker
        from tokensieve.tasks.vlm.default import small_llava_folder
        from tokensieve.tasks.vlm.evaluate import EVAL_SEED, held_out_questions, plan_of
        from tokensieve.tasks.vlm.load import load_llava
        from tokensieve.tasks.vlm.smol.data import photo_questions
        from tokensieve.tasks.vlm.smol.model import SMOL, shipped_adapter

        smol = str(model) == SMOL
        self.adapter, self.batch, self.output = adapter, batch, output
        self.model, processor = load_llava(None if model is None else str(model))
        self.asker = Asker(processor)
        self.questions = photo_questions(images, EVAL_SEED) if smol else held_out_questions(images)
        self.plan = plan_of(self.model)
        weights = shipped_adapter() if smol else model or small_llava_folder()
        self.facts: dict[str, Any] = {
            "model": digest(weights), "images": images, "questions": len(self.questions),
            "seed": EVAL_SEED,
        }  # fmt: skip

    def facts_of(self, method: str, budget: float | None) -> dict[str, Any]:
        learned = {"adapter": digest(self.adapter)} if method == LEARNED and self.adapter else {}
        return {**self.facts, **learned, "method": method, "keep_average": budget}

    def record(self, method: str, budget: float | None) -> Any:
        """The record of a run: as it is there, or measured now."""
        from tokensieve.records import new_record, read_record, write_record

        path = self.output / (f"{method}.json" if budget is None else f"{method}-{budget}.json")
        facts = self.facts_of(method, budget)
        if path.is_file() and (found := read_record(path)).config == facts:
            return found
        row = self.measure(method, budget)
        found = new_record("vlm", facts, [row], seed=self.facts["seed"], threads=1)
        write_record(found, path)
        what = f"accuracy {row['accuracy']:.4f}, {row['seconds']:.0f} s" if row["possible"] else row["why"]
        print(f"{method} {budget or ''}: {what}", flush=True)
        return found

    def measure(self, method: str, budget: float | None) -> dict[str, Any]:
        """Accuracy by type and cost; answers are kept, so that runs can be compared question by question."""
        import time

        from tokensieve.errors import BudgetError
        from tokensieve.tasks.vlm.answers import Answers
        from tokensieve.tasks.vlm.compare import Comparison, figures_of
        from tokensieve.tasks.vlm.evaluate import VlmEvalOptions, attach_reduced

        model, handle, start = self.model, None, time.perf_counter()
        if method != UNTOUCHED:
            name, more = VARIANTS.get(method, (method, {}))
            if method == LEARNED:
                more = {"adapter": str(self.adapter)}
            try:
                model, handle = attach_reduced(
                    self.model, VlmEvalOptions(method=name, keep_average=budget, options=more)
                )
                handle.counts(handle.patches)
            except BudgetError as error:
                return {"possible": False, "why": str(error)}
        answers = Answers()
        for inputs in self.asker.batches(self.questions, self.batch):
            self.asker.ask(model, inputs, answers, handle)
        plain = answers.texts if method == UNTOUCHED else self.record(UNTOUCHED, None).rows[0]["answers"]
        found = Comparison(self.questions, answers.texts, plain)
        figures = figures_of(answers, self.plan, handle is not None)
        for name in ("first_token_ms", "decode_tokens_per_second", "overhead_ms"):
            del figures[name]  # times mean nothing outside a quiet run beside the untouched model
        return {
            "possible": True, **found.metrics(), **figures, "answers": answers.texts,
            "scores": "".join(str(round(s)) for s in found.scores), "seconds": time.perf_counter() - start,
        }  # fmt: skip


# -- tables ------------------------------------------------------------------------------------------------------------


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def difference(row: dict[str, Any], other: dict[str, Any], images: list[str]) -> str:
    """In points, with the 95 % interval."""
    from tokensieve.tasks.vlm.paired import paired_interval

    own, its = ([float(c) for c in r["scores"]] for r in (row, other))
    mean, low, high = (100 * x for x in paired_interval(own, its, images))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def detail_table(bench: Bench, base: dict[str, Any], rows: dict[str, dict[str, Any]]) -> str:
    """All methods at one budget, the best first."""
    kinds = [name for name in base if name.startswith("accuracy, ")]
    images = [q.name for q in bench.questions]
    there = {method: row for method, row in rows.items() if row["possible"]}
    best = LEARNED if LEARNED in there else max(there, key=lambda m: there[m]["accuracy"])
    order = sorted(there, key=lambda m: -there[m]["accuracy"])
    lines = [_line(UNTOUCHED, base, base, kinds, ["", ""])]
    for method in order:
        row = there[method]
        against = "" if method == best else difference(row, there[best], images)
        lines.append(_line(method, row, base, kinds, [difference(row, base, images), against]))
    lines += [[method, *["-"] * (len(kinds) + 8)] for method, row in rows.items() if not row["possible"]]
    head = ["method", "all", *(k.removeprefix("accuracy, ") for k in kinds), "loyalty", "tokens, average",
            "MACs saved", "with tower", "KV bytes", "points against untouched", f"against {best}"]  # fmt: skip
    return table(head, lines)


def _line(method: str, row: dict[str, Any], base: dict[str, Any], kinds: list[str], more: list[str]) -> list[str]:
    saved = [f"{percent(1 - row[name] / base[name])} %" for name in ("gmacs", "gmacs_with_tower")]
    return [method, percent(row["accuracy"]), *(percent(row[kind]) for kind in kinds), percent(row["loyalty"]),
            f"{row['tokens_average']:.1f}", *saved, f"{row['kv_bytes']:,}", *more]  # fmt: skip


def overview(base: dict[str, Any], found: dict[float, dict[str, dict[str, Any]]]) -> str:
    """Accuracy of all methods at all budgets."""
    methods = list(next(iter(found.values())))
    rows = [
        [method, *(percent(rows[method]["accuracy"]) if rows[method]["possible"] else "-" for rows in found.values())]
        for method in methods
    ]
    heads = [f"{100 * budget:.0f} % kept" for budget in found]
    return table(["accuracy, %", *heads], [[UNTOUCHED, *[percent(base["accuracy"])] * len(found)], *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    records = HERE / "records" / "vlm"
    add("--model", type=Path, help="folder of a LLaVA, or smol (default: the shipped small one); for smol name -o too")
    add("--adapter", type=Path, help="what `tokensieve train vlm` wrote: the learned two_stage runs too")
    add("--methods", nargs="+", default=list(FREE), choices=list(FREE), metavar="M", help=", ".join(FREE))
    add("--budgets", nargs="+", type=float, default=list(BUDGETS), help="kept on layer average")
    add("--images", type=int, default=200, help="held-out images, up to six questions each (default: 200)")
    add("--batch_size", type=int, default=32)
    add("-o", "--output", type=Path, default=records, help="records of the runs")
    add("--page", type=Path, help="page to put the tables into (default: benchmarks/vlm.md for the default records)")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    bench = Bench(args.model, args.adapter, args.images, args.batch_size, args.output)
    base = bench.record(UNTOUCHED, None).rows[0]
    methods = [*args.methods, *([LEARNED] if args.adapter else [])]
    found: dict[float, dict[str, dict[str, Any]]] = {budget: {} for budget in args.budgets}
    for method in methods:
        for budget in args.budgets:
            found[budget][method] = bench.record(method, budget).rows[0]
    facts = bench.facts
    parts = [f"{facts['images']} held-out images, {facts['questions']:,} questions; model {facts['model']}.",
             overview(base, found)]  # fmt: skip
    for budget, rows in found.items():
        parts += [f"### {100 * budget:.0f} % kept on layer average", detail_table(bench, base, rows)]
    text = "\n\n".join(parts)
    print(text)
    page = args.page or (PAGE if args.output == records else args.output / "tables.md")
    put_into_page(text, page, BEGIN, "Vision-language models")
    print(f"\ntables: {page}; records: {args.output}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
