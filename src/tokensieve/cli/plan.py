"""Cost on paper: GPU hours and money of a job with and without token reduction, from MACs, bytes and what is assumed.

Nothing is run and no weights are needed. A LLaVA is asked one question an image: its prefill is bound by arithmetic,
its decoding by the slower of memory and arithmetic, its batch by the cache. All assumptions are printed, each with its
flag. KEY=VALUE are options of the method.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from tokensieve.cli.parts import show
from tokensieve.errors import OptionError
from tokensieve.records import check_writable, new_record, write_record
from tokensieve.tasks.arguments import add_budget_flags, blocks, keep_or_default, option_pairs
from tokensieve.tasks.plan.gpus import GPUS, find_gpu
from tokensieve.tasks.plan.rates import Rates

if TYPE_CHECKING:
    from rich.table import Table

EPILOG = """examples:
  tokensieve plan --model ViT-L-14-336 --images 1e9 --method sieve --keep 0.4 --gpu a100
  tokensieve plan --model ViT-B-16 --images 5e8 --method tome --keep 0.3 --gpu l4 --price 0.55
  tokensieve plan --model llava-1.5-7b --images 1e6 --method fastv --keep_average 0.33 --gpu a100 --answer 32
  tokensieve plan --model llava-1.5-13b --method two_stage --keep_average 0.22 --gpu h100 merge_keep=0.5"""


def number(text: str) -> float:
    """ "1e9", "500000" or "1_000"."""
    value = float(text)
    if not value >= 1 or value == float("inf"):
        raise ValueError(text)
    return value


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("options", nargs="*", metavar="KEY=VALUE", help="options of the method")
    add("--model", default="ViT-L-14-336", metavar="NAME",
        help="of open_clip, or llava-1.5-7b, llava-1.5-13b, or a LLaVA's folder (default: ViT-L-14-336)")  # fmt: skip
    add("--images", type=number, default=1e6, metavar="N", help="how many; for a LLaVA, questions (default: 1e6)")
    add("--method", default="sieve", metavar="NAME", help="see `tokensieve methods` (default: sieve)")
    add_budget_flags(parser)
    add("--at", type=blocks, metavar="BLOCKS", help="where tokens leave (default: the method's)")
    add("--schedule", metavar="NAME", help="how they leave over the depth (default: the method's)")
    add("--gpu", default="a100", metavar="NAME", help=f"{', '.join(GPUS)} (default: a100)")
    add("--gpus", type=int, default=1, metavar="N", help="that many of them, for the days it takes (default: 1)")
    add("--price", type=float, metavar="USD", help="of a GPU for an hour (default: a round figure, printed)")
    assumed = Rates(find_gpu("a100"))
    add("--utilisation", type=float, default=assumed.utilisation, metavar="SHARE",
        help=f"of the GPU's arithmetic that the untouched model gets (default: {assumed.utilisation})")  # fmt: skip
    add("--gained", type=float, default=assumed.gained, metavar="SHARE",
        help=f"of the possible speed-up that is got: `gained` of `bench` (default: {assumed.gained})")  # fmt: skip
    add("--bandwidth_use", type=float, default=assumed.bandwidth_use, metavar="SHARE",
        help=f"of the memory's bandwidth that decoding gets (default: {assumed.bandwidth_use})")  # fmt: skip
    add("--memory_use", type=float, default=assumed.memory_use, metavar="SHARE",
        help=f"of the memory for weights and cache (default: {assumed.memory_use})")  # fmt: skip
    add("--text", type=int, default=65, metavar="T", help="LLaVA: text tokens of a question (default: 65)")
    add("--answer", type=int, default=64, metavar="T", help="LLaVA: tokens of an answer (default: 64)")
    add("--batch", type=int, metavar="B", help="LLaVA: questions decoded together (default: as many as fit)")
    add("-o", "--output", metavar="FILE", help="write the record here, as JSON")


def run(args: Namespace) -> int:
    if args.gpus < 1:
        raise OptionError(f"--gpus {args.gpus}: at least 1")
    rates = Rates(
        find_gpu(args.gpu), args.utilisation, args.gained, args.bandwidth_use, args.memory_use, args.price
    )  # fmt: skip
    if args.output:
        check_writable(args.output)
    reduction = _reduction(args)
    from tokensieve.tasks.plan.vlm import is_vlm_name, plan_vlm

    if is_vlm_name(args.model):
        more = {"text": args.text, "answer": args.answer, "batch": args.batch}
        rows = plan_vlm(args.model, args.images, rates, reduction, **more)
        show(_vlm_table(args, rows))
    else:
        from tokensieve.tasks.plan.encoder import plan_encoder

        rows = plan_encoder(args.model, args.images, rates, reduction)
        show(_encoder_table(args, rows))
    _sum_up(args, rates, rows)
    if args.output:
        config = {name: value for name, value in vars(args).items() if name != "output"}
        write_record(new_record("plan", config | {"dollars_an_hour": rates.dollars_an_hour}, rows), args.output)
        print(f"record: {args.output}")
    return 0


def _reduction(args: Namespace) -> dict[str, Any]:
    """What `attach` takes."""
    options = option_pairs(args.options)
    return {
        "method": args.method, "keep": keep_or_default(args, options), "keep_average": args.keep_average, "at": args.at,
        "schedule": args.schedule, **options,
    }  # fmt: skip


def _table(title: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> Table:
    """columns: head -> how to format a row, with the row's names in braces."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for head in columns:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(form.format(**row) for form in columns.values()))
    return table


def _encoder_table(args: Namespace, rows: list[dict[str, Any]]) -> Table:
    columns = {
        "reduction": "{reduction}", "tokens at the end": "{tokens_end}", "GMACs an image": "{gmacs:.1f}",
        "images/s a GPU": "{images_per_second:,.0f}", "GPU hours": "{gpu_hours:,.1f}", "US dollars": "{dollars:,.0f}",
        "possible": "{possible:.2f}x", "speed-up": "{speedup:.2f}x",
    }  # fmt: skip
    return _table(f"{args.model} over {args.images:,.0f} images on {args.gpu}", columns, rows)


def _vlm_table(args: Namespace, rows: list[dict[str, Any]]) -> Table:
    columns = {
        "reduction": "{reduction}", "vision tokens": "{vision_tokens:.1f}", "prefill TMACs": "{prefill_tmacs:.2f}",
        "prefill ms": "{prefill_ms:.1f}", "KV MB": "{kv_mb:.0f}", "batch that fits": "{batch_fits}", "batch": "{batch}",
        "decode ms a step": "{decode_ms:.1f}", "tokens/s": "{decode_tokens_per_second:,.0f}",
        "GPU hours": "{gpu_hours:,.1f}", "US dollars": "{dollars:,.0f}", "speed-up": "{speedup:.2f}x",
    }  # fmt: skip
    return _table(f"{args.model}, {args.images:,.0f} questions with an image each, on {args.gpu}", columns, rows)


def _sum_up(args: Namespace, rates: Rates, rows: list[dict[str, Any]]) -> None:
    """What is saved, and what all of it rests on."""
    before, after = rows
    if args.batch is not None and "batch" in before and min(before["batch"], after["batch"]) < args.batch:
        print(f"--batch {args.batch} does not fit: {before['batch']} without, {after['batch']} with")
    hours, dollars = before["gpu_hours"] - after["gpu_hours"], before["dollars"] - after["dollars"]
    word = "saved" if hours >= 0 else "lost"
    print(
        f"{word}: {abs(hours):,.1f} GPU hours, {abs(dollars):,.0f} dollars ({100 * hours / before['gpu_hours']:.0f} %)"
    )
    if args.gpus > 1:
        days = [row["gpu_hours"] / args.gpus / 24 for row in rows]
        print(f"on {args.gpus} GPUs, all of them busy: {days[0]:,.2f} days without, {days[1]:,.2f} with")
    gpu, own = rates.gpu, "yours" if args.price is not None else "assumed; give yours as --price"
    print("assumed:")
    lines = [
        f"{gpu.name}: {gpu.teraflops:g} dense fp16 Tflop/s, {gpu.memory:g} GB at {gpu.bandwidth:g} GB/s (data sheet)",
        f"the untouched model gets {100 * rates.utilisation:.0f} % of the arithmetic (--utilisation)",
        f"{100 * rates.gained:.0f} % of the speed-up that the MACs make possible is got (--gained; measure: bench)",
        f"{rates.dollars_an_hour:g} dollars a GPU hour ({own})",
    ]
    if before["part"] == "vlm":
        lines += [
            f"{args.text} text tokens a question (--text), {args.answer} tokens an answer (--answer), fp16 or bf16",
            f"decoding gets {100 * rates.bandwidth_use:.0f} % of the bandwidth (--bandwidth_use)",
            f"weights and cache fill {100 * rates.memory_use:.0f} % of the memory (--memory_use), activations the rest",
            "prefill counts the vision tower, not what the method itself computes",
        ]
    else:
        lines.append("the image tower alone; reading and decoding the images keep up with it")
    print("\n".join(f"  - {line}" for line in lines))
