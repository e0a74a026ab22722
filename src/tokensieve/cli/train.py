"""Train the parts that can be learned.

align:  the projections of the embedded CLIP (ViT-S/14 + MiniLM), LiT-style, on captions of CIFAR-10 training images.
reid:   re-identification from RGB, NIR and TIR, tokens compressed by SDTPS.
select: which patches to keep, for `--method learned`, by distillation on unlabelled images.
vlm:    which vision tokens a LLaVA model keeps: a merger before its language model, pruners inside it.
smol:   SmolLaVA, of ViT-S/14 and SmolLM2-135M: its projector and a LoRA, on questions about photos.
vlm-base: the small LLaVA that is there without downloading one, from nothing, on generated questions.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokensieve.cli.parts import run_part

# word -> the file beside this one that has `add_arguments(parser)`, `run(args)` and EPILOG
PARTS = {
    "align": "train_align",
    "reid": "train_reid",
    "select": "train_select",
    "smol": "train_smol",
    "vlm": "train_vlm",
    "vlm-base": "train_vlm_base",
}
EPILOG = """examples:
  tokensieve train align                                 10,500 images, half an hour on two cores, once
  tokensieve train align --images 20000 -o runs/align.safetensors
  tokensieve train reid --config configs/synthetic/DeMo_SDTPS.yml
  tokensieve train select                                on CIFAR-10 training images, for 2x and 3x
  tokensieve train select --photos DIR --keep 0.25 --steps 1000 -o runs/select.safetensors
  tokensieve train vlm --dry-run                         what would be trained, tokens per layer, FLOPs
  tokensieve train smol                                  a language model that sees, hours on one core, once
  tokensieve train vlm-base                              the small LLaVA from nothing, an hour on one core, once
  tokensieve train select --resume                       go on after an interruption
  torchrun --nproc_per_node 2 -m tokensieve.cli train reid --config FILE    one run on two devices (docs/scaling.md)
  tokensieve eval --method learned --adapter runs/select.safetensors --keep 0.25

`tokensieve train align --help`, and so on, lists the flags of each."""


def main(argv: Sequence[str]) -> int:
    return run_part("train", argv, PARTS, __doc__, EPILOG)
