"""A small task to train in tests, also by a script of its own: `python toy_task.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from tokensieve.training import FitConfig, Step, Validation, fit
from tokensieve.utils.tensor_files import save_tensors

CONFIG = FitConfig(steps=24, warmup=4, validate_every=8, checkpoint_every=5, seed=3, log_every=1)


class Toy:
    """Two optimisers that work against each other: one learns to predict, one to guess the other's predictions.

    Draws from the global generators at every step (dropout), so that a resumed run shows whether they were put back.
    """

    def __init__(self, lr=0.05, wait=0.0):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.critic = nn.Linear(1, 1)
        self.modules = {"net": self.net, "critic": self.critic}
        self.optimisers = {
            "net": torch.optim.Adam(self.net.parameters(), lr),
            "critic": torch.optim.SGD(self.critic.parameters(), lr / 5, momentum=0.9),
        }
        self.seen, self.wait = [], wait

    def batches(self, start):
        step = start
        while True:
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(8, 4, generator=draw)
            yield {"x": x, "y": x.sum(1, keepdim=True), "step": step}
            step += 1

    def step(self, batch, step):
        assert batch["step"] == step
        assert self.net.training
        self.seen.append([g["lr"] for o in self.optimisers.values() for g in o.param_groups])
        out = self.net(batch["x"])
        guess = self.critic(out)
        return Step({"net": F.mse_loss(out, batch["y"]) - 0.01 * guess.mean(), "critic": F.mse_loss(guess, batch["y"])},
                    {"extra": guess.detach().mean()})  # fmt: skip

    def validate(self):
        assert not self.net.training
        x = torch.ones(4, 4)
        error = float((self.net(x) - 4.0).square().mean())
        return Validation(-error, {"error": error})

    def facts(self):
        return {"toy": True}

    def export(self, path: Path):
        save_tensors(path, dict(self.net.state_dict()), {"format": "toy"})


if __name__ == "__main__":
    torch.set_num_threads(1)
    fit(Toy(), CONFIG, Path(sys.argv[1]), tick=lambda step: print(step, flush=True))
