"""Find the photo that a sentence describes, with an encoder that drops tokens as it goes.

    python examples/clip_search.py photos/ "a dog on a beach" --model ViT-B-16 --pretrained openai --keep 0.4

--pretrained takes one of open_clip's tags or a checkpoint file.
"""

import argparse
from pathlib import Path

import torch
from PIL import Image

import tokensieve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sentence")
    parser.add_argument("--model", default="ViT-B-16")
    parser.add_argument("--pretrained", default="openai")
    methods = sorted(set(tokensieve.list_methods("encoder")) - {"learned"})  # that one needs a trained file
    parser.add_argument("--method", default="sieve", choices=methods)
    parser.add_argument("--keep", type=float, default=0.4, help="the share of patches that remain at the end")
    args = parser.parse_args()
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")

    import open_clip  # after tokensieve: it corrects torchvision beside a CPU torch (docs/install.md)

    model, _, preprocess = open_clip.create_model_and_transforms(args.model, pretrained=args.pretrained or None)
    model.eval()
    paths = sorted(p for p in args.folder.iterdir() if p.suffix.lower() in {".jpg", ".jpeg", ".png", ".webp"})
    if not paths:
        parser.error(f"no photos in {args.folder}")
    images = torch.stack([preprocess(Image.open(p).convert("RGB")) for p in paths])
    with torch.inference_mode(), tokensieve.attach(model, args.method, keep=args.keep) as handle:
        features = model.encode_image(images)
        text = model.encode_text(open_clip.get_tokenizer(args.model)([args.sentence]))
    scores = torch.nn.functional.cosine_similarity(features, text)
    print(f"{handle.cost().possible:.2f}x fewer MACs, tokens by layer: {handle.cost().tokens_per_layer}")
    for i in scores.argsort(descending=True)[:5].tolist():
        print(f"{scores[i]:.3f}  {paths[i]}")


if __name__ == "__main__":
    main()
