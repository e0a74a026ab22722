"""Fine-tune a ViT with tokens removed, beside the same model with all of them: seconds a step, loss, accuracy.

    python examples/finetune_reduced.py --steps 100 --keep 0.25

The real ViT-S/14 with a new linear head learns CIFAR-10 (`tokensieve data cifar10` fetches it). Both models start from
the same weights and take turns on the same batches. Gradients flow through what stays: attach, then train as ever.
"""

import argparse
import copy
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tokensieve
from tokensieve.zoo.cifar10 import load_cifar10
from tokensieve.zoo.vit_s14 import MEAN, STD, vit_s14_timm


def pixels(images: Tensor, size: int) -> Tensor:
    """(B, 32, 32, 3) uint8 -> (B, 3, size, size), normalised."""
    x = F.interpolate(images.permute(0, 3, 1, 2) / 255.0, size=(size, size), mode="bicubic", antialias=True)
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


class Learner:
    """A model, its optimiser, and what its steps took. `clock` counts the processor's time, not that of others."""

    def __init__(self, name: str, model: nn.Module, lr: float) -> None:
        self.name, self.model = name, model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, x: Tensor, y: Tensor) -> None:
        start = time.process_time()
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.process_time() - start)
        self.losses.append(loss.item())

    @torch.inference_mode()
    def accuracy(self, images: Tensor, labels: Tensor, size: int) -> float:
        self.model.eval()
        right = [
            self.model(pixels(x, size)).argmax(1) == y for x, y in zip(images.split(32), labels.split(32), strict=True)
        ]
        return torch.cat(right).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="sieve")
    parser.add_argument("--keep", type=float, default=0.25, help="the share of patches that remain at the end")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224, help="pixels; a multiple of 14")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--test-images", type=int, default=500, help="0 takes no accuracy")
    args = parser.parse_args()

    torch.manual_seed(0)
    whole = nn.Sequential(vit_s14_timm(args.size), nn.Linear(384, 10))
    learners = [Learner("all tokens", whole, args.lr), Learner("reduced", copy.deepcopy(whole), args.lr)]
    handle = tokensieve.attach(learners[1].model[0], args.method, keep=args.keep)  # type: ignore[index]
    images, labels = map(torch.from_numpy, load_cifar10("train"))
    order = torch.randperm(len(images))
    for i in range(args.steps):
        rows = order[i * args.batch : (i + 1) * args.batch]
        x, y = pixels(images[rows], args.size), labels[rows]
        for learner in learners if i % 2 else reversed(learners):
            learner.step(x, y)
    test, answers = map(torch.from_numpy, load_cifar10("test"))
    for learner in learners:
        took, last = torch.tensor(learner.seconds[1:]).median(), torch.tensor(learner.losses[-10:]).mean()
        line = f"{learner.name:10s} {took:.2f} s a step, loss {last:.3f}"
        if args.test_images:
            right = learner.accuracy(test[: args.test_images], answers[: args.test_images], args.size)
            line += f", accuracy {100 * right:.1f} %"
        print(line)
    ratio = torch.tensor(learners[0].seconds[1:]).median() / torch.tensor(learners[1].seconds[1:]).median()
    print(f"a step is {ratio:.2f}x as fast; MACs allow {handle.cost().possible:.2f}x")


if __name__ == "__main__":
    main()
