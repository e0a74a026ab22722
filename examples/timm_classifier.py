"""What each method costs a timm classifier, on one image: how far the logits move, and what the MACs allow.

    python examples/timm_classifier.py photo.jpg --model deit_small_patch16_224 --pretrained

Without --pretrained the weights are random: good enough to see it run.
"""

import argparse
from pathlib import Path

import torch
from PIL import Image

import tokensieve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", type=Path)
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--keep", type=float, default=0.5, help="the share of patches that remain at the end")
    args = parser.parse_args()
    if not args.image.is_file():
        parser.error(f"there is no file {args.image}")

    import timm  # after tokensieve: it corrects torchvision beside a CPU torch (docs/install.md)
    import timm.data

    model = timm.create_model(args.model, pretrained=args.pretrained).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    image = transform(Image.open(args.image).convert("RGB")).unsqueeze(0)
    with torch.inference_mode():
        whole = model(image)
        for name in sorted(set(tokensieve.list_methods("encoder")) - {"learned"}):  # that one needs a trained file
            with tokensieve.attach(model, name, keep=args.keep) as handle:
                logits = model(image)
            same = "same class" if logits.argmax() == whole.argmax() else "other class"
            cosine = torch.nn.functional.cosine_similarity(logits, whole).item()
            print(f"{name:10s} {handle.cost().possible:.2f}x possible, cosine of the logits {cosine:.3f}, {same}")


if __name__ == "__main__":
    main()
