"""The configuration of two-stage pruning: the seed's file, its small twin, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tokensieve.core.cost import decoder_shape
from tokensieve.errors import BudgetError, MissingMaterialError, OptionError, UnknownNameError
from tokensieve.tasks.vlm.backbone import Sizes, empty_model, sizes_of
from tokensieve.tasks.vlm.config import SMALL, VlmConfig, load_config, parse_config
from tokensieve.tasks.vlm.plan import saved_share, tokens_per_layer, wasted_layers
from tokensieve.tasks.vlm.train import plan_only

CONFIGS = Path(__file__).parents[3] / "configs"
SEED = CONFIGS / "vision_token_pruning.yaml"
LLAMA_7B = decoder_shape(4096, 11008, 32)
LLAVA = Sizes(patches=576, merged=288, depth=32, width=4096, vision_width=1024, projector=4096 * (1024 + 4096))


def test_the_file_for_llava_says_what_it_says() -> None:
    config = load_config(SEED)
    assert config.dl.optimizers.token_merger.lr == 2e-5  # "2e-05", a text
    assert config.dl.optimizers.discriminator.lr == 5e-4
    assert config.method.merge_sparsity_weight == 1e-4  # PyYAML reads 1e-4 as a text
    assert config.method.pruning_layers == (10, 20, 31)
    assert (config.dl.epochs, config.dl.batch_size) == (1, 12)


def test_the_small_file_is_what_runs_without_one() -> None:
    assert load_config(CONFIGS / "vision_token_pruning_small.yaml") == load_config(None) == parse_config(SMALL)


def test_numbers_may_be_texts() -> None:
    config = parse_config({"method_settings": {"merge_ratio": "0.4", "pruner_num_heads": "8"}}, ["batch_size='6'"])
    assert (config.method.merge_ratio, config.method.pruner_num_heads, config.dl.batch_size) == (0.4, 8, 6)


def test_overrides_need_no_section_where_one_has_the_key() -> None:
    config = load_config(SEED, ["merge_ratio=0.4", "trainer_settings.dl_settings.epochs=2", "output_dir=x"])
    assert (config.method.merge_ratio, config.dl.epochs, config.output_dir) == (0.4, 2, "x")


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ({"method_settings": {"merge_ration": 0.5}}, UnknownNameError, 'Did you mean "method_settings.merge_ratio"'),
        ({"method_setting": {}}, UnknownNameError, 'Did you mean "method_settings"'),
        (
            {"trainer_settings": {"dl_settings": {"optimizers": {"token_merge": {"lr": 1}}}}},
            UnknownNameError,
            "optimizers.token_merger",
        ),
        ({"method_settings": {"merge_ratio": 1.5}}, OptionError, "merge_ratio=1.5"),
        ({"method_settings": {"merger_type": "clever"}}, OptionError, "simple"),
        ({"method_settings": {"temperature_min": 2}}, OptionError, "temperature_min 2 is above temperature 1"),
        ({"method_settings": {"pruner_d_internal": 10}}, OptionError, "cannot be split among 4"),
        ({"method_settings": {"pruning_layers": [3, 3]}}, OptionError, "each layer once"),
        ({"method_settings": {"adv_loss_weight": 0, "task_loss_weight": 0}}, OptionError, "nothing would be learned"),
        ({"search_settings": {"enable": True}}, OptionError, "manager_settings.mode"),
        ({"search_settings": {"enable": False}, "manager_settings": {"mode": "ray"}}, OptionError, "enable is false"),
        ({"manager_settings": {"available_gpus": [0], "gpus_per_subtask": 2}}, OptionError, "more than the 1"),
        ([1], OptionError, "mapping"),
    ],
)
def test_what_is_wrong_is_named(data, error, words) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(")):
        parse_config(data)


def test_files_that_are_none(tmp_path) -> None:
    with pytest.raises(MissingMaterialError, match="nowhere"):
        load_config(tmp_path / "nowhere")
    (tmp_path / "a.yaml").write_text("a: [1")
    with pytest.raises(OptionError, match="not valid YAML"):
        load_config(tmp_path / "a.yaml")
    with pytest.raises(UnknownNameError, match='Did you mean "merge_ratio"'):
        load_config(SEED, ["merge_ration=0.4"])
    with pytest.raises(OptionError, match="not KEY=VALUE"):
        load_config(SEED, ["merge_ratio"])


def test_every_key_of_the_seed_is_known() -> None:
    text = """
trainer_settings: {dl_settings: {epochs: 1, batch_size: 12, optimizers: {token_merger: {lr: "2e-05"}}}}
method_settings: {merger_type: "simple", max_vision_tokens: 1200, image_max_size: 800, disc_reinit_prob: 0.1}
manager_settings: {mode: "optuna", available_gpus: [0, 1, 2, 3], gpus_per_subtask: 2}
search_settings: {enable: true, n_trials: 50}
"""
    config = parse_config(yaml.safe_load(text))
    assert isinstance(config, VlmConfig)
    assert config.search_settings.n_trials == 50
    assert "layers" in str(plan_only(config))


# -- against the model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llava():
    return empty_model(parse_config({}))


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        (["merge_ratio=0.6"], OptionError, "merge_ratio=0.6 of 576 tokens is 346, but target_merge_tokens=288"),
        (["target_merge_tokens=600"], OptionError, "has 576 tokens"),
        (["pruning_layers=[10,32]"], OptionError, "32 is none of this model's layers 0 to 31"),
        (["max_vision_tokens=300"], BudgetError, "every image of this model has 576 tokens"),
    ],
)
def test_what_contradicts_the_model_is_refused(llava, more, error, words) -> None:
    with pytest.raises(error, match=words):
        sizes_of(load_config(SEED, more), llava)


def test_ratio_and_count_say_each_other(llava) -> None:
    assert sizes_of(load_config(SEED, ["merge_ratio=0.6", "target_merge_tokens=346"]), llava).merged == 346
    assert sizes_of(parse_config({"method_settings": {"target_merge_tokens": 200}}), llava).merged == 200
    assert sizes_of(parse_config({"method_settings": {"merge_ratio": 0.25}}), llava).merged == 144
    assert sizes_of(load_config(SEED), llava) == LLAVA


def test_layer_31_of_32_is_hardly_worth_it() -> None:
    def saved(layers):
        return saved_share(LLAMA_7B, 576, tokens_per_layer(288, 32, layers, 0.65), 65)

    assert saved([10, 20, 31]) == pytest.approx(0.604, abs=5e-4)
    assert saved([10, 20]) == pytest.approx(0.602, abs=5e-4)
    assert [layer for layer, *_ in wasted_layers(LLAMA_7B, LLAVA, [10, 20, 31], 0.65, 65)] == [31]
    assert wasted_layers(LLAMA_7B, LLAVA, [5, 15, 25], 0.65, 65) == []


def test_a_plan_of_llava_needs_no_weights() -> None:
    plan = str(plan_only(load_config(SEED)))
    assert "576 -> 288 tokens" in plan
    assert "288 " * 10 + "187 " * 10 + "121 " * 11 + "78 vision" in plan
    assert "60.4 %" in plan
    assert "warning: pruning at layer 31 saves 0.2 % of the FLOPs (60.4 % with it, 60.2 % without)" in plan
