"""The optimiser: orthogonal steps against an SVD, the rest against torch's AdamW."""

import pytest
import torch
from torch import nn

from tokensieve.tasks.vlm.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 24, 8), (2, 8, 24)])
def test_orthogonal_keeps_singular_vectors_and_evens_out_values(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    y = orthogonal(x)
    inner = left.mT @ y @ right.mT  # in the singular vectors' frame: diagonal
    assert (inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-3
    big = values > 0.05 * values.amax(-1, keepdim=True)
    found = inner.diagonal(dim1=-2, dim2=-1)[big]
    assert found.min() > 0.6
    assert found.max() < 1.3


def test_the_rest_takes_adamws_steps() -> None:
    torch.manual_seed(0)
    start = [torch.randn(4, 3), torch.randn(5)]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    muon = Muon([], ours, lr=1.0, rest_lr=0.01, weight_decay=0.1)
    adamw = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}],
        lr=0.01, betas=(0.9, 0.98),
    )  # fmt: skip
    for step in range(5):
        for params, optimiser in ((ours, muon), (theirs, adamw)):
            optimiser.zero_grad()
            loss = sum(((p - step) ** 2).sum() for p in params)
            loss.backward()
            optimiser.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_a_matrix_moves_by_its_orthogonal_momentum() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 6))
    before, mean = weight.detach().clone(), torch.zeros(8, 6)
    optimiser = Muon([weight], [], lr=0.1, rest_lr=1.0, weight_decay=0.5, momentum=0.9)
    for _ in range(3):
        gradient = torch.randn(8, 6)
        weight.grad = gradient.clone()
        optimiser.step()
        mean = 0.9 * mean + 0.1 * gradient
        ahead = 0.1 * gradient + 0.9 * mean
        before = before * (1 - 0.1 * 0.5) - 0.1 * 0.2 * 8**0.5 * orthogonal(ahead[None])[0]
        torch.testing.assert_close(weight.detach(), before, atol=1e-5, rtol=1e-5)


def test_what_has_no_gradient_stays() -> None:
    matrix, bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
    Muon([matrix], [bias], lr=0.1, rest_lr=0.1).step()
    assert matrix.eq(1).all()
    assert bias.eq(1).all()


def test_its_state_goes_on() -> None:
    torch.manual_seed(0)

    def run(steps: range, saved: tuple | None) -> tuple:
        params = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]
        optimiser = Muon(params[:1], params[1:], lr=0.1, rest_lr=0.1)
        if saved is not None:
            for p, value in zip(params, saved[0], strict=True):
                p.data.copy_(value)
            optimiser.load_state_dict(saved[1])
        for step in steps:
            for p in params:
                p.grad = torch.sin(torch.arange(p.numel()).float() * (step + 1)).reshape(p.shape)
            optimiser.step()
        return [p.detach().clone() for p in params], optimiser.state_dict()

    whole, _ = run(range(6), None)
    gone_on, _ = run(range(3, 6), run(range(3), None))
    assert all(torch.equal(one, other) for one, other in zip(whole, gone_on, strict=True))
