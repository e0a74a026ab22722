"""Your own method in one class: keep the patches with the largest norm. Then check it, name it and use it.

python examples/your_own_method.py
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import tokensieve
from tokensieve.testing import check_method
from tokensieve.zoo import vit_s14


@dataclass(kw_only=True)
class LargestNorm(tokensieve.Selector):
    """Keep the patches whose residual stream has the largest norm. `power` only shows what an option looks like."""

    power: float = 2.0

    def score(self, view: tokensieve.TokenView, keep: int) -> Tensor:
        return view.x.norm(dim=-1) ** self.power


def main() -> None:
    check_method(LargestNorm)  # budget, order, batch invariance, precision, removal: an error says which rule failed
    tokensieve.register_method("largest-norm", LargestNorm)
    model = vit_s14.vit_s14_timm()
    images = torch.randn(2, 3, 224, 224)
    with torch.inference_mode(), tokensieve.attach(model, "largest-norm", keep=0.5, fold=True) as handle:
        features = model(images)
    print(f"features {tuple(features.shape)}, possible {handle.cost().possible:.2f}x")


if __name__ == "__main__":
    main()
