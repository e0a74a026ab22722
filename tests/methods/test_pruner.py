"""pruner, two_stage with both, and the forward that they are trained through, on a tiny LLaVA of the real classes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import tokensieve
from tokensieve.errors import OptionError, UnsupportedModelError
from tokensieve.methods import make_method
from tokensieve.methods.trained.adapter_file import about_adapter, adapter_tensors
from tokensieve.methods.trained.merger import Merger, TokenMerger
from tokensieve.methods.trained.pruner import LayerPruners, Pruner
from tokensieve.methods.two_stage import TwoStage
from tokensieve.models.decoder.soft import Softness, attach_soft
from tokensieve.testing.vlm import tiny_llava

torch.set_num_threads(1)
ROWS = [(3, 1, 5), (6, 1, 2)]


def networks() -> tuple[TokenMerger, LayerPruners]:
    torch.manual_seed(0)
    merger = TokenMerger(32, 48, inner=16, heads=4, kind="question_aware", temperature=0.5).eval()
    return merger, LayerPruners(48, 6, [2, 4], 36, inner=16, heads=4, keep=0.6).eval()


def both() -> TwoStage:
    merger, pruners = networks()
    return TwoStage(first=Merger(adapter=merger), second=Pruner(adapter=pruners))


def frozen(attention: str = "sdpa"):
    tiny = tiny_llava(attention)
    tiny.model.requires_grad_(False)
    return tiny


@torch.no_grad()
def test_budgets_are_exact_and_as_trained() -> None:
    tiny = frozen()
    with tokensieve.attach(tiny.model, both()) as handle:
        tiny.model.generate(**tiny.prompts(ROWS), max_new_tokens=2)
        assert handle.stats.vision_tokens_per_layer == [18, 18, 10, 10, 6, 6]  # 36 x 0.5, x 0.6, x 0.6
    with tokensieve.attach(tiny.model, Pruner(adapter=networks()[1])) as handle:
        tiny.model.generate(**tiny.prompts(ROWS), max_new_tokens=2)
        assert handle.stats.vision_tokens_per_layer == [36, 36, 21, 21, 12, 12]


def test_a_budget_on_average_keeps_the_proportion_of_the_stages() -> None:
    """Trained: 18 18 10 10 6 6, that is 11 1/3 of 36 on average."""
    tiny = frozen()
    for average, first, mean in ((11, 17, 11.0), (22, 35, 22.0), (0.15, 8, 5.0), (0.9, 36, 32.0)):
        with tokensieve.attach(tiny.model, both(), keep_average=average) as handle:
            assert handle.counts(36)[-1] == first
            assert sum(handle.vision_tokens_per_layer) / 6 == pytest.approx(mean, abs=1.0)
    fixed = TwoStage(first=both().first, second=both().second, merge_keep=0.5)
    with tokensieve.attach(tiny.model, fixed, keep_average=9) as handle:
        assert handle.counts(36)[-1] == 18


@torch.no_grad()
def test_heads_see_the_residual_stream_before_their_layer() -> None:
    """Scores of the first head, from transformers' own hidden states."""
    tiny, (_, pruners) = frozen(), networks()
    inputs = tiny.prompts([ROWS[0]])
    states = tiny.model(**inputs, output_hidden_states=True).hidden_states[2]
    wanted = pruners(2, states[:, 3:39], states[:, 39:], None)
    with tokensieve.attach(tiny.model, Pruner(adapter=pruners)) as handle:
        tiny.model(**inputs)
        assert torch.allclose(handle.scores[2], wanted, atol=1e-5)
        assert handle.kept[2][0].tolist() == sorted(wanted[0].topk(21).indices.tolist())


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    tiny = frozen()
    with tokensieve.attach(tiny.model, both()):
        batch = tiny.model(**tiny.prompts(ROWS)).logits[:, -1]
        singles = [tiny.model(**tiny.prompts([row])).logits[0, -1] for row in ROWS]
    assert torch.allclose(batch, torch.stack(singles), atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_trained_forward_is_the_one_that_prunes(attention) -> None:
    tiny, method = frozen(attention), both()
    inputs = tiny.prompts(ROWS)
    with torch.no_grad(), tokensieve.attach(tiny.model, method) as handle:
        hard, kept = tiny.model(**inputs, use_cache=False).logits[:, -1], handle.kept
    with attach_soft(tiny.model, method, Softness(tau=0.5)) as handle:
        soft = tiny.model(**inputs, use_cache=False).logits[:, -1]
        assert all(torch.equal(kept[layer], handle.kept[layer]) for layer in (-1, 2, 4))
        assert handle.stats.tokens_per_layer == [18 + 8] * 6  # nothing leaves inside the language model
    assert torch.allclose(hard, soft, atol=1e-4)
    with attach_soft(tiny.model, method, Softness(tau=0.5, straight_through=False)):
        relaxed = tiny.model(**inputs, use_cache=False).logits[:, -1]
    assert (relaxed - hard).abs().max() > 1e-2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_reach_every_part(attention) -> None:
    tiny, (merger, pruners) = frozen(attention), networks()
    method = TwoStage(first=Merger(adapter=merger), second=Pruner(adapter=pruners))
    with attach_soft(tiny.model, method, Softness(tau=0.5)):
        tiny.model(**tiny.prompts(ROWS), use_cache=False).logits[:, -1].square().sum().backward()
    for net in (merger, pruners):
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None, name
            if not name.endswith("last.bias"):
                assert parameter.grad.abs().sum() > 0, name
    assert all(p.grad is None for p in tiny.model.parameters())


def test_an_answer_is_no_question() -> None:
    """What follows the prompt changes no choice."""
    tiny, method = frozen(), both()
    inputs = tiny.prompts([ROWS[0]])
    prompt = torch.arange(44).expand(1, -1) < 41
    kept = []
    for token in (5, 9):
        inputs["input_ids"][:, 41:] = token
        with torch.no_grad(), attach_soft(tiny.model, method, Softness(prompt=prompt)) as handle:
            tiny.model(**inputs, use_cache=False)
            kept.append(handle.scores)
    assert all(torch.equal(kept[0][layer].nan_to_num(), kept[1][layer].nan_to_num()) for layer in (-1, 2, 4))
    short = {name: value if name == "pixel_values" else value[:, :41] for name, value in inputs.items()}
    with torch.no_grad(), tokensieve.attach(tiny.model, method) as handle:
        tiny.model(**short)
    for layer in (-1, 2, 4):
        assert torch.allclose(handle.scores[layer], kept[0][layer], atol=1e-5, equal_nan=True)


def test_what_cannot_be_trained_is_said() -> None:
    tiny, method = frozen(), both()
    with attach_soft(tiny.model, method, Softness()):
        with pytest.raises(OptionError, match="use_cache=False"):
            tiny.model(**tiny.prompts(ROWS), use_cache=True)
        with pytest.raises(OptionError, match="equally many images"):
            tiny.model(**tiny.prompts([(3, 1, 5), (3, 2, 5)]), use_cache=False)


def test_files_layers_and_models(tmp_path) -> None:
    merger, pruners = networks()
    parts = {"token_merger": merger, "layer_pruners": pruners}
    shapes = {name: part.shape() for name, part in parts.items()}
    save_file(adapter_tensors(parts), tmp_path / "best.safetensors", metadata=about_adapter(shapes, {}))
    tiny = frozen()
    inputs = tiny.prompts(ROWS)
    with torch.no_grad():
        with tokensieve.attach(tiny.model, "two_stage", adapter=tmp_path):
            loaded = tiny.model(**inputs).logits[:, -1]
        with tokensieve.attach(tiny.model, both()):
            assert torch.equal(loaded, tiny.model(**inputs).logits[:, -1])
        with (
            tokensieve.attach(tiny.model, "pruner", adapter=tmp_path, keep=0.5, at=3),
            pytest.raises(OptionError, match="no pruner was trained for layer 3, only for 2, 4"),
        ):
            tiny.model(**inputs)
    with pytest.raises(OptionError, match="adapter= makes both stages"):
        make_method("two_stage", adapter=tmp_path, first="random")
    with pytest.raises(UnsupportedModelError, match="6 layers and width 8, this one has 6 layers and width 48"):
        tokensieve.attach(tiny.model, Pruner(adapter=LayerPruners(8, 6, [2], 36, inner=8)))
    with pytest.raises(OptionError, match="10 cannot be split among 4"):
        LayerPruners(48, 6, [2], 36, inner=10)
