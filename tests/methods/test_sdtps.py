"""SDTPS against loops written from the paper's formulas, its known numbers, and its gradients."""

from __future__ import annotations

import math

import pytest
import torch

from tokensieve.errors import OptionError, UnknownNameError
from tokensieve.tasks.reid.sdtps import SDTPS, TokenAggregation, TokenSparse, attention_score, sdtps_counts

NAMES = ("rgb", "nir", "tir")


def inputs(names=NAMES, batch=2, n=20, dim=16, seed=0, grad=False):
    torch.manual_seed(seed)
    tokens = {name: torch.randn(batch, n, dim, requires_grad=grad) for name in names}
    return tokens, {name: torch.randn(batch, dim) for name in names}


def small(**options):
    torch.manual_seed(1)
    return SDTPS(**({"dim": 16, "tokens": 20} | options))


# -- a second way to compute it, one token at a time ------------------------------------------------------------------


def naive_cosines(tokens, feature):
    found = [float(v @ feature / (v.norm() * feature.norm())) for v in tokens]
    low, high = min(found), max(found)
    return [(x - low) / (high - low) for x in found]


def naive_score(sparse, tokens, own, others, total):
    """total: what the attention scores' weights add up to."""
    near_own = naive_cosines(tokens, own)
    near = [naive_cosines(tokens, other) for other in others]
    scores = []
    for i, v in enumerate(tokens):
        attention = (2 * near_own[i] + sum(row[i] for row in near)) / (2 + len(others))
        scores.append((1 - 2 * sparse.beta) * float(torch.sigmoid(sparse.predictor(v))) + total * attention)
    return scores


def naive_sdtps(module, name, tokens, own, others, total):
    sparse, aggregation = module.sparse[name], module.aggregation[name]
    scores = naive_score(sparse, tokens, own, others, total)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    kept, gone = sorted(order[: module.selected]), sorted(order[module.selected :])
    out = []
    for c in range(module.aggregated):
        logits = [float(aggregation.weight(tokens[i])[c] * aggregation.scale) for i in kept]
        mass = [math.exp(x) for x in logits]
        out.append(sum(m / sum(mass) * tokens[i] for m, i in zip(mass, kept, strict=True)))
    mass = [math.exp(scores[i]) for i in gone]
    out.append(sum(m / sum(mass) * tokens[i] for m, i in zip(mass, gone, strict=True)))
    return torch.stack(out), kept, scores


@pytest.mark.parametrize("formula", ["paper", "convex"])
@pytest.mark.parametrize("names", [NAMES, ("rgb", "tir"), ("nir",)], ids=len)
@torch.no_grad()
def test_it_is_what_the_formulas_say(formula, names):
    module = small(formula=formula, beta=0.2)
    for aggregation in module.aggregation.values():
        aggregation.scale.fill_(1.7)
    tokens, features = inputs(names)
    out, selections = module(tokens, features)
    total = 4 * 0.2 if formula == "paper" else 2 * 0.2  # a missing modality leaves the sum of the weights as it is
    for name in names:
        others = [features[other] for other in names if other != name]
        for b in range(2):
            wanted, kept, scores = naive_sdtps(
                module, name, tokens[name][b], features[name][b], [o[b] for o in others], total
            )
            assert selections[name].keep[b].tolist() == kept
            torch.testing.assert_close(selections[name].scores[b], torch.tensor(scores))
            torch.testing.assert_close(out[name][b], wanted)


@pytest.mark.parametrize(
    ("tokens", "sparse", "aggr", "wanted"),
    [(128, 0.5, 0.4, (64, 25)), (196, 0.5, 0.4, (98, 39)), (49, 0.8, 0.6, (40, 23)), (100, 0.07, 0.5, (7, 3)),
     (100, 0.5, 0.58, (50, 29)), (3, 1.0, 1.0, (3, 3))],
)  # fmt: skip
def test_known_counts(tokens, sparse, aggr, wanted):
    assert sdtps_counts(tokens, sparse, aggr) == wanted


def test_known_size_and_parameters():
    module = SDTPS(dim=512, tokens=128)
    assert sum(p.numel() for p in module.parameters()) == 365_157
    assert sum(p.numel() for p in module.sparse["rgb"].parameters()) == 65_793
    assert sum(p.numel() for p in module.aggregation["nir"].parameters()) == 55_926
    tokens, features = inputs(batch=1, n=128, dim=512)
    out, selections = module(tokens, features)
    assert {name: tuple(x.shape) for name, x in out.items()} == dict.fromkeys(NAMES, (1, 26, 512))
    assert selections["tir"].keep.shape == (1, 64)
    assert module.out_tokens == 26


def test_the_selection_as_data_gives_the_selected_and_the_extra_token():
    module = small()
    tokens, features = inputs()
    out, selections = module(tokens, features)
    applied, _ = selections["rgb"].apply(tokens["rgb"])
    assert applied.shape == (2, 11, 16)
    torch.testing.assert_close(applied[:, -1], out["rgb"][:, -1])
    torch.testing.assert_close(
        applied[:, :10], tokens["rgb"].gather(1, selections["rgb"].keep[..., None].expand(-1, -1, 16))
    )
    assert not any(t.requires_grad for t in (selections["rgb"].scores, selections["rgb"].extra))


def test_a_missing_modality_counts_no_more():
    module = small().eval()
    tokens, features = inputs()
    two = {name: tokens[name] for name in ("rgb", "tir")}
    out, selections = module(two, {name: features[name] for name in two})
    assert set(out) == set(selections) == set(two)
    _, all_selections = module(tokens, features)
    assert not torch.equal(selections["rgb"].scores, all_selections["rgb"].scores)
    pair = SDTPS(dim=16, tokens=20, modalities=("rgb", "tir")).eval()
    pair.load_state_dict({k: v for k, v in module.state_dict().items() if ".nir." not in k})
    again, _ = pair(two, {name: features[name] for name in two})
    torch.testing.assert_close(again["tir"], out["tir"], rtol=0, atol=0)


def test_nothing_left_out_makes_no_extra_token():
    module = small(sparse_ratio=1.0, use_gumbel=True)
    tokens, features = inputs()
    out, selections = module(tokens, features)
    assert out["rgb"].shape == (2, 8, 16)
    assert module.out_tokens == 8
    assert selections["rgb"].keep[0].tolist() == list(range(20))


# -- degenerate scores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_a_blank_modality_scores_the_same_everywhere(scale):
    torch.manual_seed(0)
    blank = (torch.randn(1, 1, 512) * scale).expand(1, 50, 512)
    feature = torch.randn(1, 512)
    feature = feature - (feature @ blank[0, 0]) / (blank[0, 0] @ blank[0, 0]) * blank[0, 0]  # cosine 0: only rounding
    for tokens, near in ((blank, feature), (torch.zeros(1, 50, 512), feature), (torch.randn(1, 50, 512), 0 * feature)):
        assert torch.equal(attention_score(tokens, near[:, None]), torch.full((1, 1, 50), 0.5))


def test_scores_span_zero_to_one_for_each_image():
    tokens, features = inputs(batch=3)
    near = torch.stack([features["nir"], features["tir"]], dim=1)
    found = attention_score(tokens["rgb"] * torch.tensor([1.0, 5.0, 0.01])[:, None, None], near)
    assert found.amin(2).tolist() == [[0.0] * 2] * 3
    assert found.amax(2).tolist() == [[1.0] * 2] * 3


def test_an_image_does_not_depend_on_its_batch_mates():
    module = small().eval()
    tokens, features = inputs(batch=3)
    out, _ = module(tokens, features)
    alone, _ = module({k: v[1:2] for k, v in tokens.items()}, {k: v[1:2] for k, v in features.items()})
    torch.testing.assert_close(alone["nir"], out["nir"][1:2])


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_without_gumbel_the_predictor_learns_through_the_extra_token_alone():
    module = small()
    tokens, features = inputs(grad=True)
    for x in features.values():
        x.requires_grad_()
    out, _ = module(tokens, features)
    weight = module.sparse["rgb"].predictor[0].weight
    (aggregated,) = torch.autograd.grad(out["rgb"][:, :-1].square().sum(), weight, allow_unused=True, retain_graph=True)
    (extra,) = torch.autograd.grad(out["rgb"][:, -1].square().sum(), weight, retain_graph=True)
    assert aggregated is None or not aggregated.any()
    assert extra.abs().sum() > 0
    (own,) = torch.autograd.grad(out["rgb"].square().sum(), tokens["rgb"], retain_graph=True)
    assert (own.abs().sum(-1) > 0).all()  # every token: selected, or in the extra one
    assert torch.autograd.grad(out["rgb"].sum(), list(features.values()), allow_unused=True) == (None,) * 3


def test_with_gumbel_the_predictor_learns_from_what_is_selected():
    module = small(use_gumbel=True)
    tokens, features = inputs()
    out, _ = module(tokens, features)
    (grad,) = torch.autograd.grad(out["rgb"][:, :-1].square().sum(), module.sparse["rgb"].predictor[0].weight)
    assert grad.abs().sum() > 0


def test_the_gate_pulls_in_what_would_help():
    """Tokens are one-hot but one; the loss wants that one. Following the gradient of the scores it gets selected."""
    torch.manual_seed(0)
    sparse, aggregation = TokenSparse(8, 0.5, beta=0.0, use_gumbel=True, tau=0.3), TokenAggregation(8, 1)
    with torch.no_grad():
        aggregation.weight[-1].weight.zero_()
    tokens = torch.eye(8)[None]
    target = tokens[0, 5]
    optimiser = torch.optim.Adam(sparse.parameters(), 0.02)
    for _ in range(60):
        found = sparse(tokens, torch.zeros(1, 8))
        loss = -(aggregation(found.tokens, found.gate)[0, 0] @ target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    sparse.eval()
    assert sparse.score(tokens, torch.zeros(1, 8))[0].argmax() == 5


def test_the_noise_is_the_same_in_choice_and_gradient():
    """The gate is one exactly for the selected tokens of a noisy draw, and the draw differs from the noise-free one."""
    sparse = TokenSparse(16, use_gumbel=True, tau=0.5)
    tokens, features = inputs()
    sets = set()
    for _ in range(8):
        found = sparse(tokens["rgb"], features["rgb"], [features["nir"]])
        assert torch.equal(found.gate, found.reduction.mask(20).float())
        sets.add(tuple(found.reduction.keep[0].tolist()))
    assert len(sets) > 1
    sparse.eval()
    assert sparse(tokens["rgb"], features["rgb"]).gate is None
    assert len({tuple(sparse(tokens["rgb"], features["rgb"]).reduction.keep[0].tolist()) for _ in range(4)}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gated_over_all_equals_gathered(dtype):
    """The masked softmax of training and the softmax over the gathered tokens of inference."""
    torch.manual_seed(0)
    aggregation = TokenAggregation(16, 5).to(dtype)
    tokens = 3 * torch.randn(3, 20, 16, dtype=dtype)
    keep = torch.rand(3, 20).topk(10).indices.sort().values
    gate = torch.zeros(3, 20).scatter(1, keep, 1.0)
    gathered = tokens.gather(1, keep[..., None].expand(-1, -1, 16))
    torch.testing.assert_close(aggregation(tokens, gate), aggregation(gathered), rtol=0, atol=1e-6)


def test_training_and_inference_agree_where_the_choice_does():
    module = small(use_gumbel=True, tau=1e-9)  # no noise to speak of
    tokens, features = inputs()
    trained, chosen = module(tokens, features)
    inferred, chosen_again = module.eval()(tokens, features)
    for name in NAMES:
        assert torch.equal(chosen[name].keep, chosen_again[name].keep)
        torch.testing.assert_close(trained[name], inferred[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("height", [1.0, 50.0, 5000.0])
def test_gradients_stay_bounded_whatever_the_logits(height):
    """Logits of dropped tokens far above those of selected ones: no inf, no explosion."""
    torch.manual_seed(0)
    aggregation = TokenAggregation(16, 4)
    with torch.no_grad():
        aggregation.scale.fill_(height)
    tokens = torch.randn(2, 20, 16, requires_grad=True)
    gate = torch.zeros(2, 20).scatter(1, torch.arange(10).expand(2, -1), 1.0).requires_grad_()
    out = aggregation(tokens, gate)
    out.sum().backward()
    assert out.isfinite().all()
    assert tokens.grad.isfinite().all()
    # dropping or keeping one token moves a mean of tokens by no more than the tokens are apart
    assert gate.grad.abs().max() <= 4 * 16 * 2 * tokens.abs().max()


@pytest.mark.parametrize("gumbel", [False, True])
def test_half_precision_stays_finite(gumbel):
    module = small(use_gumbel=gumbel).half()
    tokens, features = inputs()
    tokens = {name: (300 * x).half().requires_grad_() for name, x in tokens.items()}
    out, _ = module(tokens, {name: (300 * x).half() for name, x in features.items()})
    assert all(x.dtype == torch.float16 and x.isfinite().all() for x in out.values())
    sum(x.float().mean() for x in out.values()).backward()
    assert all(x.grad.isfinite().all() for x in tokens.values())
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [({"beta": 0.6}, "beta=0.6"), ({"sparse_ratio": 0.0}, "sparse_ratio=0.0"), ({"aggr_ratio": 1.5}, "aggr_ratio=1.5"),
     ({"sparse_ratio": 0.1, "aggr_ratio": 0.1}, "leave none"), ({"modalities": ("rgb", "rgb")}, "each once"),
     ({"tau": 0.0}, "tau=0.0"), ({"dim": 2}, "dim=2")],
)  # fmt: skip
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(OptionError, match=message):
        small(**options)


def test_an_unknown_formula_gets_the_nearest():
    with pytest.raises(UnknownNameError, match='Did you mean "convex"'):
        small(formula="convec")


def test_inputs_that_do_not_fit_are_named():
    module = small()
    tokens, features = inputs()
    with pytest.raises(OptionError, match="no modality is there"):
        module({}, {})
    with pytest.raises(OptionError, match="lacks tir"):
        module(tokens, {name: features[name] for name in ("rgb", "nir")})
    with pytest.raises(UnknownNameError, match='Did you mean "nir"'):
        module({"nirr": tokens["nir"]}, {"nirr": features["nir"]})
    with pytest.raises(OptionError, match=r"\(2, 19, 16\), expected \(B, 20, 16\)"):
        module({"rgb": tokens["rgb"][:, 1:]}, {"rgb": features["rgb"]})
    with pytest.raises(OptionError, match="global feature"):
        module({"rgb": tokens["rgb"]}, {"rgb": features["rgb"][:1]})
