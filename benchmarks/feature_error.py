"""Methods at equal token counts on the real ViT-S/14: relative error of the CLS feature on CIFAR-10 training images.

    python benchmarks/feature_error.py                       a few minutes
    python benchmarks/feature_error.py --images 16 --shares 0.9 -o x.json

Every method keeps the same share at every block, PiToMe's way to count; EViT cuts where it does, and keeps as many
patches on average over the layers. No time is measured. Prints a table and puts it into benchmarks/sieve.md.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from evidence import put_into_page, table

HERE = Path(__file__).parent
PAGE = HERE / "sieve.md"
BEGIN = "<!-- tables: written by benchmarks/feature_error.py -->"
SHARES = (0.95, 0.925, 0.85)
PATCHES, DEPTH = 256, 12
# name in the table: method, options, whether it cuts at every block
ROWS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "tome": ("tome", {}, True),
    "sieve": ("sieve", {}, True),
    "sieve, its own cuts": ("sieve", {}, False),
    "pitome": ("pitome", {}, True),
    "pitome margin=0.75": ("pitome", {"margin": 0.75}, True),
    "pitome margin=0": ("pitome", {"margin": 0.0}, True),
    "pitome proportional=1": ("pitome", {"proportional": 1.0}, True),
    "pitome margin=0 proportional=1": ("pitome", {"margin": 0.0, "proportional": 1.0}, True),
    "evit, its own cuts": ("evit", {}, False),
    "evit fuse=False, its own cuts": ("evit", {"fuse": False}, False),
    "random": ("random", {}, True),
}


def counts(share: float) -> list[int]:
    """Patches after each block."""
    return [round(PATCHES * share ** (block + 1)) for block in range(DEPTH)]


def errors(images: int, shares: list[float], batch: int) -> list[dict[str, Any]]:
    """One row for each method and share: relative error of the feature, mean over images, and layer-average patches."""
    import torch

    import tokensieve
    from tokensieve.zoo import vit_s14
    from tokensieve.zoo.cifar10 import load_cifar10

    model, prepare = vit_s14.vit_s14_openclip(), vit_s14.preprocess()
    pixels = torch.stack([prepare(image) for image in load_cifar10("train")[0][6000 : 6000 + images]])
    found = []
    with torch.inference_mode():
        whole = torch.cat([model(part) for part in pixels.split(batch)])
        for name, (method, options, everywhere) in ROWS.items():
            for share in shares:
                left = counts(share)
                budget: dict[str, Any] = {"keep": left, "at": range(DEPTH)} if everywhere else {}
                budget = budget or {"keep_average": round(sum(left) / DEPTH)}
                with tokensieve.attach(model, method, **budget, **options) as handle:
                    part = torch.cat([model(part) for part in pixels.split(batch)])
                    average = sum(handle.tokens_per_layer) / DEPTH - handle.prefix
                error = ((part - whole).norm(dim=1) / whole.norm(dim=1)).mean().item()
                found.append({"row": name, "share": share, "error": error, "patches_average": average})
                print(f"{name} {share}: {error:.3f}, {average:.1f} patches on average", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--images", type=int, default=64, help="training images (default: 64)")
    add("--shares", type=float, nargs="+", default=list(SHARES), help="kept at every block")
    add("--batch_size", type=int, default=16)
    add("-o", "--output", type=Path, default=HERE / "records" / "feature_error.json", help="the record")
    args = parser.parse_args()
    import torch

    from tokensieve.records import new_record, write_record

    torch.set_num_threads(1)
    found = errors(args.images, args.shares, args.batch_size)
    facts = {"model": "vit-s14", "data": "cifar10 train", "images": args.images}
    write_record(new_record("feature-error", facts, found, threads=1), args.output)
    by = {(row["row"], row["share"]): row["error"] for row in found}
    heads = [f"{share:g} a block, {counts(share)[-1]} at the end" for share in args.shares]
    lines = [[name, *(f"{by[name, share]:.3f}" for share in args.shares)] for name in ROWS]
    text = table(["error of the feature", *heads], lines)
    print(text)
    if args.output == HERE / "records" / "feature_error.json":
        put_into_page(text, PAGE, BEGIN, "sieve against ToMe")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
