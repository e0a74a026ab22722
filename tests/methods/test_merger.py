"""merger against a loop, its gradients, its files, and what it may be asked."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tokensieve
from tokensieve.core.view import TokenView
from tokensieve.errors import BudgetError, MissingMaterialError, OptionError, RecordError, UnsupportedModelError
from tokensieve.methods import make_method
from tokensieve.methods.trained.adapter_file import about_adapter, adapter_tensors
from tokensieve.methods.trained.merger import PART, Merger, TokenMerger, gumbel
from tokensieve.testing.vlm import tiny_llava

torch.set_num_threads(1)


def network(kind: str = "simple", **more) -> TokenMerger:
    torch.manual_seed(0)
    return TokenMerger(12, 10, inner=16, heads=4, kind=kind, **more).eval()


def view(n: int = 9, text: int = 4, batch: int = 2) -> TokenView:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(batch, 1 + n, 12, generator=generator)
    words = torch.randn(batch, text, 10, generator=generator)
    return TokenView.of(tokens, text=words)


def normed(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_centres_are_weighted_means_as_a_loop_makes_them(tau) -> None:
    net, seen, keep = network(temperature=tau), view(), 4
    found = Merger(adapter=net).reduce(seen, keep)
    out, size = found.apply(seen.tokens, 1)
    _, heavier = found.apply(seen.tokens, 1, size=torch.full((2, 9), 3.0))
    query, key = net.query.weight.detach().numpy(), net.key.weight.detach().numpy()
    for b in range(2):
        x = seen.x[b].numpy()
        score = net.importance(seen.x)[b].detach().numpy()
        cosine = [[x[i] @ x[j] / np.linalg.norm(x[i]) / np.linalg.norm(x[j]) for j in range(9)] for i in range(9)]
        price = []
        for i in range(9):
            better = [cosine[i][j] for j in range(9) if score[j] > score[i]]
            price.append(math.log(1 - max(better, default=-1.0)) + 0.35 * score[i])
        kept = sorted(np.argsort(-np.array(price))[:keep].tolist())
        assert found.keep[b].tolist() == kept
        ranked = sorted(price, reverse=True)
        middle = (ranked[keep - 1] + ranked[keep]) / 2
        weight = [1 / (1 + math.exp(-(s - middle) / tau)) for s in price]
        let_in = 1 / (1 + math.exp(-net.blend.item()))
        weight = [max(1e-6, w if j in kept else w * let_in) for j, w in enumerate(weight)]
        share, belongs = np.zeros((keep, 9)), np.zeros((keep, 9))
        for j in range(9):
            logits = [
                (normed(x[j]) @ query.T @ (key @ normed(x[c])) / 4 + 10 * cosine[j][c]) / tau + math.log(weight[c])
                for c in kept
            ]
            soft = np.exp(np.array(logits) - max(logits))
            belongs[:, j] = soft / soft.sum()
            share[:, j] = weight[j] * belongs[:, j]
        wanted = (share / share.sum(1, keepdims=True)) @ x
        assert np.allclose(out[b, 1:].detach().numpy(), wanted, atol=1e-4)
        assert np.allclose(size[b].detach().numpy(), belongs.sum(1), atol=1e-4)
        assert np.allclose(heavier[b].detach().numpy(), 3 * belongs.sum(1), atol=1e-4)
    assert torch.equal(out[:, :1], seen.tokens[:, :1])
    assert torch.allclose(found.mix.sum(-1), torch.ones(2, keep))


def test_equal_tokens_stay_what_they_are() -> None:
    """A sum instead of a mean would grow with the cluster."""
    tokens = torch.randn(1, 1, 12, generator=torch.Generator().manual_seed(0)).expand(1, 8, 12).clone()
    out, _ = Merger(adapter=network()).reduce(TokenView.of(tokens, prefix=0, has_cls=False), 3).apply(tokens)
    assert torch.allclose(out, tokens[:, :3], atol=1e-5)


@pytest.mark.parametrize("kind", ["simple", "question_aware"])
def test_every_weight_of_the_importance_network_learns(kind) -> None:
    net, seen = network(kind), view()
    out, _ = Merger(adapter=net).reduce(seen, 4).apply(seen.tokens, 1)
    out.square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        if name not in ("importance.last.bias",):  # a shift of all scores chooses the same
            assert parameter.grad.abs().sum() > 0, name


def test_only_the_question_aware_one_reads_the_question() -> None:
    seen, other = view(), view()
    other.text = other.text.flip(1) * 3 + 1
    for kind, same in (("simple", True), ("question_aware", False)):
        merger = Merger(adapter=network(kind))
        assert torch.equal(merger.reduce(seen, 4).scores, merger.reduce(other, 4).scores) is same


def test_padding_of_a_question_changes_nothing() -> None:
    seen, longer = view(), view()
    longer.text = torch.cat([seen.text, torch.full((2, 3, 10), 7.0).cumsum(2)], 1)
    longer.text_valid = torch.tensor([[True] * 4 + [False] * 3] * 2)
    merger = Merger(adapter=network("question_aware"))
    assert torch.allclose(merger.reduce(seen, 4).scores, merger.reduce(longer, 4).scores, atol=1e-6)


def test_noise_in_training_only() -> None:
    net, seen = network(), view()
    merger = Merger(adapter=net)
    still = [merger.reduce(seen, 4).keep for _ in range(3)]
    assert all(torch.equal(still[0], one) for one in still)
    net.train()
    torch.manual_seed(0)
    drawn = [merger.reduce(seen, 4).keep for _ in range(8)]
    assert any(not torch.equal(still[0], one) for one in drawn)
    assert all(one.shape == (2, 4) for one in drawn)


def test_gumbel_noise_draws_from_the_softmax() -> None:
    torch.manual_seed(0)
    score = torch.tensor([0.0, 1.0, 2.0]).expand(20000, -1)
    first = (score + gumbel(score)).argmax(1).bincount() / 20000
    assert torch.allclose(first, score[0].softmax(0), atol=0.02)


def test_sparsity_is_the_distance_of_the_mean_probability_from_the_ratio() -> None:
    net = network(ratio=0.25, temperature=2.0)
    assert float(net.sparsity(torch.zeros(3, 5))) == pytest.approx(0.0625)
    assert float(net.sparsity(torch.full((3, 5), 2 * math.log(1 / 3)))) == pytest.approx(0.0, abs=1e-9)


def test_all_kept_is_the_identity_and_budgets_are_checked() -> None:
    seen, merger = view(), Merger(adapter=network())
    out, _ = merger.reduce(seen, 9).apply(seen.tokens, 1)
    assert torch.equal(out, seen.tokens)
    for wrong in (0, 10):
        with pytest.raises(BudgetError):
            merger.reduce(seen, wrong)


def write(path, net: TokenMerger, **shape) -> None:
    save_file(adapter_tensors({PART: net}), path, metadata=about_adapter({PART: net.shape() | shape}, {"step": 1}))


def test_a_file_gives_the_same_merger_back(tmp_path) -> None:
    net, seen = network("question_aware", ratio=0.4, temperature=0.3), view()
    write(tmp_path / "best.safetensors", net)
    for place in (tmp_path, tmp_path / "best.safetensors"):
        merger = make_method("merger", adapter=place)
        assert merger.own_keep() == 0.4
        found, wanted = merger.reduce(seen, 4), Merger(adapter=net).reduce(seen, 4)
        assert torch.equal(found.mix, wanted.mix)


def test_wrong_files_are_named(tmp_path) -> None:
    with pytest.raises(OptionError, match="tokensieve train vlm"):
        make_method("merger")
    with pytest.raises(MissingMaterialError, match="nowhere"):
        make_method("merger", adapter=tmp_path / "nowhere")
    file = tmp_path / "merger.safetensors"
    write(file, network())
    with pytest.raises(OptionError, match="no layer_pruners"):
        make_method("pruner", adapter=file)
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(RecordError, match=r"merger\.safetensors: truncated or not a"):
        make_method("merger", adapter=file)
    write(file, network(), inner=32)
    with pytest.raises(RecordError, match=r"has shape|is missing|not part"):
        make_method("merger", adapter=file)
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(RecordError, match="format None"):
        make_method("merger", adapter=file)


def test_a_merger_of_another_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"width 12.*are 32 and 48"):
        tokensieve.attach(tiny_llava().model, Merger(adapter=network()))
