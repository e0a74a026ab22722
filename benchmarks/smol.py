"""How often SmolLaVA is right, by kind of question, beside what the wording alone gives away.

    python benchmarks/smol.py                        300 pictures of test photos; an hour on one quiet core
    python benchmarks/smol.py --images 40 -o runs/smol.json

Writes a record, and the table of benchmarks/smol.md from it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from evidence import put_into_page, table

HERE = Path(__file__).parent
BEGIN = "<!-- tables: written by benchmarks/smol.py -->"
SEED = 2_000_000  # far from the seeds of training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--adapter", type=Path, help="what `tokensieve train smol` wrote (default: the shipped one)")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "records" / "smol.json")
    args = parser.parse_args()

    import torch

    from tokensieve.records import new_record, write_record
    from tokensieve.tasks.vlm.smol.evaluate import blind_answers, evaluate_smol, shares_by_kind
    from tokensieve.tasks.vlm.smol.model import load_smol_llava
    from tokensieve.tasks.vlm.smol.questions import KINDS

    rows: list[dict[str, Any]] = [
        {"who": "commonest answer to the wording", **shares_by_kind(blind_answers(1500, args.images, SEED))}
    ]
    model, processor = load_smol_llava(args.adapter)
    cases = (("256 tokens", 16, "all"), ("pooled to 64", 8, "all"), ("256 tokens, unseen pairs", 16, "unseen"))
    for who, side, combinations in cases:
        found = evaluate_smol(model, processor.tokenizer, args.images, SEED, side, combinations)
        rows.append({"who": who, **shares_by_kind(found)})
        print(rows[-1], flush=True)
    facts = {"images": args.images, "seed": SEED, "adapter": str(args.adapter or "shipped")}
    write_record(new_record("smol", facts, rows, seed=SEED, threads=torch.get_num_threads()), args.output)
    columns = [*KINDS, "all"]
    body = [[str(row["who"]), *(_percent(row.get(kind)) for kind in columns), str(row["questions"])] for row in rows]
    shown = table(["", *columns, "questions"], body)
    print(shown)
    if args.output == HERE / "records" / "smol.json":
        text = f"{args.images} pictures of test photos.\n\n{shown}"
        put_into_page(text, HERE / "smol.md", BEGIN, "SmolLaVA")


def _percent(value: float | int | str | None) -> str:
    return "-" if value is None else f"{100 * float(value):.1f}"


if __name__ == "__main__":
    main()
