"""Big data: peak memory against the number of images, and throughput against plain open_clip on the same shards.

    python benchmarks/big_data.py                    a quarter of an hour on one core; writes records/big_data.json
    python benchmarks/big_data.py --images 500 2000 --rounds 2 --photos 64

Memory: `tokensieve extract clip` in fresh processes over 5,000 and 50,000 generated images, a tiny ViT. Throughput: one
process, the same shards read by webdataset and encoded by open_clip, then by `extract clip`, in turn; the ratio of each
pair. Once with the tiny ViT, where reading is what takes time, once with a ViT-S/16 at 224 pixels, untouched and
reduced. Models are loaded before.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tokensieve  # noqa: F401  before open_clip: it corrects torchvision's import
from tokensieve.records import new_record, write_record
from tokensieve.tasks.bench.timing import quartiles
from tokensieve.tasks.clip.config import BASELINE, SieveConfig
from tokensieve.tasks.clip.extract import ExtractConfig, extract_clip
from tokensieve.tasks.clip.load import Loader
from tokensieve.tasks.clip.shards import find_shards

import open_clip  # isort: skip

RECORD = Path(__file__).with_name("records") / "big_data.json"
PER_SHARD = 1000
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
MODELS = {
    "bench-tiny": {"image_size": 32, "layers": 4, "width": 64, "head_width": 16, "patch_size": 4},
    "bench-small": {"image_size": 224, "layers": 12, "width": 384, "head_width": 64, "patch_size": 16},
}
SIEVE = SieveConfig(method="sieve", keep=0.4)
_CHILD = """
import json, resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[3])
import big_data
big_data.add_models(Path(sys.argv[4]))
from tokensieve.cli.main import main
weights = str(Path(sys.argv[4]) / "bench-tiny.pt")
words = [sys.argv[1], "-o", sys.argv[2], "--num_workers", "0", "--model", "bench-tiny", "--pretrained", weights]
code = main(["extract", "clip", *words])
now = [line for line in open("/proc/self/status") if line.startswith("VmRSS")][0]
print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "end": int(now.split()[1])}))
sys.exit(code)
"""


def add_models(folder: Path) -> None:
    """The two models as open_clip knows them, with weights in the folder."""
    for name, vision in MODELS.items():
        config = folder / "configs" / f"{name}.json"
        config.parent.mkdir(parents=True, exist_ok=True)
        if not config.exists():
            config.write_text(json.dumps({"embed_dim": 32, "vision_cfg": vision, "text_cfg": TEXT}))
    open_clip.add_model_config(folder / "configs")
    for name in MODELS:
        weights = folder / f"{name}.pt"
        if not weights.exists():
            torch.manual_seed(0)
            torch.save(open_clip.create_model(name).state_dict(), weights)


def write_shards(folder: Path, images: int, side: int, per_shard: int) -> str:
    """Generated JPEGs in .tar files; the pattern that names them."""
    from PIL import Image

    folder.mkdir(parents=True)
    shards = -(-images // per_shard)
    draw = np.random.default_rng(0)
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:06d}.tar", "w") as tar:
            for number in range(shard * per_shard, min(images, (shard + 1) * per_shard)):
                coarse = draw.integers(0, 255, (side // 8, side // 8, 3), dtype=np.uint8)
                out = io.BytesIO()
                Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(out, "JPEG")
                info = tarfile.TarInfo(f"{number:08d}.jpg")
                info.size = len(out.getvalue())
                tar.addfile(info, io.BytesIO(out.getvalue()))
    return f"{folder}/{{{0:06d}..{shards - 1:06d}}}.tar"


def memory(folder: Path, images: int) -> dict[str, Any]:
    """Resident memory of a fresh process that extracts that many: its peak (importing torch is part of it), and at the
    end."""
    pattern = write_shards(folder / f"set-{images}", images, 32, PER_SHARD)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [pattern, str(folder / f"out-{images}"), str(Path(__file__).parent), str(folder)]
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _CHILD, *words], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    peak, end = (json.loads(done.stdout.splitlines()[-1])[name] / 1024 for name in ("peak", "end"))
    seconds = time.perf_counter() - start
    written = sum(path.stat().st_size for path in (folder / f"out-{images}").iterdir()) / 2**20
    row = {"part": "memory", "images": images, "peak_mib": round(peak, 1), "end_mib": round(end, 1)}
    row["written_mib"] = round(written, 1)
    print(f"{images} images: peak {peak:.1f} MiB, at the end {end:.1f}, features {written:.1f} MiB, {seconds:.0f} s")
    shutil.rmtree(folder / f"set-{images}")
    return row


def plain(model: str, folder: Path, pattern: str) -> Callable[[], int]:
    """open_clip and webdataset as their readmes have it."""
    import webdataset

    net, _, transform = open_clip.create_model_and_transforms(model, pretrained=str(folder / f"{model}.pt"))
    net.eval()

    @torch.inference_mode()
    def run() -> int:
        data = webdataset.WebDataset(pattern, shardshuffle=False).decode("pil").to_tuple("__key__", "jpg")
        loader = torch.utils.data.DataLoader(data.map_tuple(str, transform).batched(64), batch_size=None)
        found = [net.encode_image(images) for _, images in loader]
        return len(torch.cat(found))

    return run


def ours(model: str, folder: Path, pattern: str, config: SieveConfig) -> Callable[[], int]:
    settings = ExtractConfig(
        model=model, pretrained=str(folder / f"{model}.pt"), reduction=config, batch_size=64, workers=0
    )

    loader = Loader()

    def run() -> int:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            return extract_clip(settings, find_shards([pattern]), Path(out), loader=loader).images

    return run


def throughput(model: str, folder: Path, pattern: str, rounds: int) -> list[dict[str, Any]]:
    """Each of ours against plain, in turn first and second."""
    base = plain(model, folder, pattern)
    rows = []
    for name, config in (("none", BASELINE), ("sieve 0.4", SIEVE)):
        mine = ours(model, folder, pattern, config)
        ratios = []
        for turn in range(rounds + 1):
            pair = (base, mine) if turn % 2 else (mine, base)
            seconds = {}
            for run in pair:
                start = time.perf_counter()
                images = run()
                seconds[run] = time.perf_counter() - start
            if turn:  # the first is a warm-up
                ratios.append(seconds[base] / seconds[mine])
        low, mid, high = quartiles(ratios)
        rows.append(
            {"part": "throughput", "model": model, "method": name, "images": images, "rounds": rounds,
             "ratio": mid, "ratio_low": low, "ratio_high": high}
        )  # fmt: skip
        print(f"{model}, {name}: {mid:.2f}x plain open_clip ({low:.2f} to {high:.2f}), {images} images a turn")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs=2, default=[5_000, 50_000], metavar="N", help="fewer and more")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--photos", type=int, default=128, help="images of 224 pixels a turn (default: 128)")
    parser.add_argument("-o", "--output", type=Path, default=RECORD)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        add_models(folder)
        rows = [memory(folder, images) for images in args.images]
        small = write_shards(folder / "tiny", 2000, 32, PER_SHARD)
        rows += throughput("bench-tiny", folder, small, args.rounds)
        photos = write_shards(folder / "photos", args.photos, 224, args.photos // 2)
        rows += throughput("bench-small", folder, photos, args.rounds)
    config = {"images": args.images, "rounds": args.rounds, "photos": args.photos, "models": MODELS}
    write_record(new_record("big_data", config, rows, seed=0, threads=1), args.output)
    print(f"record: {args.output}")


if __name__ == "__main__":
    main()
