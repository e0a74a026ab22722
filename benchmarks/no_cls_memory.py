"""Peak memory of reduced towers without CLS: importance is then the attention received, which needs every query.

A SigLIP tower of ViT-B's width with random weights (timm's classes), on one image of 1,024 pixels: 4,096 patches of 16.
Each run is a process of its own. "activations" is the peak above what is resident before the forward, so that weights
and libraries hide nothing; "process" is the peak of it all.

    python benchmarks/no_cls_memory.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import tokensieve
from tokensieve.records import check_writable, new_record, write_record
from tokensieve.utils.torchvision import declare_missing_schemas

METHODS = ("sieve", "evit", "vispruner", "anchor", "tome")
KEEP, TARGET = 0.5, 1.15
# tensors straight from the system and back to it: what is freed does not count
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
console = Console(width=100)


def siglip(side: int, depth: int) -> nn.Module:
    """A tower of ViT-B's width without CLS, pooled by attention, for images of `side` pixels."""
    declare_missing_schemas()
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    return VisionTransformer(
        img_size=side, patch_size=16, embed_dim=768, depth=depth, num_heads=12, class_token=False, global_pool="map",
        num_classes=0,
    ).eval()  # fmt: skip


def status(name: str) -> int:
    """Bytes of an entry of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(method: str | None, side: int, depth: int) -> dict[str, int]:
    """Peaks of one forward, in this process."""
    model, x = siglip(side, depth), torch.randn(1, 3, side, side)
    with torch.inference_mode():
        small = siglip(128, 2)
        with tokensieve.attach(small, method or "random", keep=KEEP):
            small(torch.randn(1, 3, 128, 128))  # pages in the code
        if method is not None:
            tokensieve.attach(model, method, keep=KEEP)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        model(x)
    return {"activations": status("VmHWM") - before, "process": status("VmHWM")}


def in_process(method: str | None, side: int, depth: int) -> dict[str, int]:
    command = [sys.executable, __file__, "--one", method or "", "--side", str(side), "--depth", str(depth)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | _ALLOCATOR)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=1024, help="pixels")
    parser.add_argument("--depth", type=int, default=4, help="blocks; peaks hardly depend on it")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/records/no_cls_memory.json"))
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.one or None, args.side, args.depth)))
        return
    check_writable(args.output)
    patches = (args.side // 16) ** 2
    stock = in_process(None, args.side, args.depth)
    rows: list[dict[str, Any]] = [{"method": "untouched", "ratio": 1.0} | stock]
    table = Table("method", "activations, MiB", "ratio", "process, MiB", "ratio", title=f"{patches:,} patches")
    table.add_row("untouched", f"{stock['activations'] / 2**20:.0f}", "", f"{stock['process'] / 2**20:.0f}", "")
    for method in METHODS:
        found = in_process(method, args.side, args.depth)
        ratio, whole = (found[name] / stock[name] for name in ("activations", "process"))
        rows.append({"method": method, "ratio": ratio, "process_ratio": whole, "met": ratio <= TARGET} | found)
        sizes = f"{found['activations'] / 2**20:.0f}", f"{found['process'] / 2**20:.0f}"
        table.add_row(method, sizes[0], f"{ratio:.2f}", sizes[1], f"{whole:.2f}")
    console.print(table)
    config = {"side": args.side, "patches": patches, "depth": args.depth, "keep": KEEP, "target": TARGET}
    write_record(new_record("no_cls_memory", config, rows, seed=0, threads=torch.get_num_threads()), args.output)
    console.print(f"record: {args.output}")


if __name__ == "__main__":
    main()
