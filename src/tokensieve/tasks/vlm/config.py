"""The configuration of two-stage pruning: YAML sections, KEY=VALUE on top. No torch.

method_settings:
  merger_type: question_aware
  merge_ratio: 0.5
  pruning_layers: [10, 20, 31]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tokensieve.search.settings import ManagerSettings, SearchSettings, contradiction
from tokensieve.tasks.vlm.default import SMALL_LLAVA
from tokensieve.utils.settings import Count, Positive, Ratio, Section, Seed, parse_settings
from tokensieve.utils.yaml import read_config

__all__ = ["GENERATED", "LLAVA_15", "SMALL", "VlmConfig", "load_config", "parse_config"]

LLAVA_15 = "llava-hf/llava-1.5-7b-hf"
GENERATED = "generated"  # as data: scenes and questions made on the fly
Above0 = Annotated[float, Field(gt=0)]
From0 = Annotated[float, Field(ge=0)]


class Optimizer(Section):
    lr: Above0


class Optimizers(Section):
    token_merger: Optimizer = Optimizer(lr=2e-5)
    layer_pruners: Optimizer = Optimizer(lr=2e-5)
    discriminator: Optimizer = Optimizer(lr=5e-4)


class DlSettings(Section):
    """batch_size: questions, over all processes. eval_every, checkpoint_every: steps. precision: on a GPU only."""

    epochs: Positive = 1
    batch_size: Positive = 12
    optimizers: Optimizers = Optimizers()
    warmup_steps: Count = 20
    clip_grad: Above0 | None = 1.0
    eval_every: Positive = 200
    checkpoint_every: Positive = 200
    precision: Literal["auto", "no", "fp16", "bf16"] = "auto"
    seed: Seed = 0


class TrainerSettings(Section):
    dl_settings: DlSettings = DlSettings()


class MethodSettings(Section):
    """merge_ratio, target_merge_tokens: what stage 1 leaves, as a share and as a count; one says the other.

    budget_spread: every step of training draws what stage 1 leaves, up to so much more or less (1: half to twice), so
    that what is learned serves other budgets too. pruner_keep: what a pruner leaves of the tokens that come to it.
    adv_loss_weight: 0 switches the discriminator off. distill_loss_weight: of the unpruned model's answers.
    merge_guide_weight, prune_guide_weight: of teaching merger and pruners how much each token matters to the unpruned
    model's answer. straight_through: keep masks of 0 and 1 in training; False: relaxed ones. image_max_size: longest
    side of an image, which is scaled down to it.
    """

    merger_type: Literal["simple", "question_aware"] = "simple"
    merge_ratio: Ratio | None = None
    target_merge_tokens: Positive | None = None
    merge_sparsity_weight: From0 = 1e-4
    budget_spread: From0 = 0.0
    merge_guide_weight: From0 = 0.0
    prune_guide_weight: From0 = 0.0
    pruning_layers: tuple[Count, ...] = (10, 20, 31)
    pruner_keep: Ratio = 0.65
    pruner_d_internal: Positive = 512
    pruner_num_heads: Positive = 4
    pruner_type: Literal["cross_attention"] = "cross_attention"
    temperature: Above0 = 1.0
    temperature_min: Above0 = 0.1
    temperature_anneal_rate: Ratio = 0.5
    adv_loss_weight: From0 = 1.0
    task_loss_weight: From0 = 25.0
    distill_loss_weight: From0 = 0.0
    disc_reinit_prob: Annotated[float, Field(ge=0, le=1)] = 0.01
    straight_through: bool = True
    max_vision_tokens: Positive | None = None
    image_max_size: Positive | None = None

    @model_validator(mode="after")
    def _fits(self) -> MethodSettings:
        if self.pruner_d_internal % self.pruner_num_heads:
            raise ValueError(
                f"pruner_d_internal {self.pruner_d_internal} cannot be split among {self.pruner_num_heads} "
                "heads (pruner_num_heads)"
            )
        if self.temperature_min > self.temperature:
            raise ValueError(f"temperature_min {self.temperature_min:g} is above temperature {self.temperature:g}")
        if not self.pruning_layers or len(set(self.pruning_layers)) != len(self.pruning_layers):
            raise ValueError(f"pruning_layers {list(self.pruning_layers)}: each layer once, and at least one")
        if not (self.adv_loss_weight or self.task_loss_weight or self.distill_loss_weight):
            raise ValueError(
                "adv_loss_weight, task_loss_weight and distill_loss_weight are all 0: nothing would be learned"
            )
        return self


class BackboneSettings(Section):
    """name: "small-llava", which is shipped; a folder of `save_pretrained`; or a name that transformers knows."""

    name: str = LLAVA_15


class DatasetSettings(Section):
    """train, val: JSONL files of questions (docs/vlm.md), or "generated", that many questions, val_questions."""

    train: str = ""
    val: str = ""
    questions: Positive = 20000
    val_questions: Positive = 384


class VlmConfig(Section):
    """All of it. Every field has a default; `{}` is a configuration, for LLaVA-1.5."""

    trainer_settings: TrainerSettings = TrainerSettings()
    method_settings: MethodSettings = MethodSettings()
    manager_settings: ManagerSettings = ManagerSettings()
    search_settings: SearchSettings = SearchSettings()
    backbone_settings: BackboneSettings = BackboneSettings()
    dataset_settings: DatasetSettings = DatasetSettings()
    output_dir: Annotated[str, Field(min_length=1)] = "outputs"

    @model_validator(mode="after")
    def _fits(self) -> VlmConfig:
        fault = contradiction(self.manager_settings, self.search_settings)
        if fault:
            raise ValueError(fault)
        return self

    @property
    def dl(self) -> DlSettings:
        return self.trainer_settings.dl_settings

    @property
    def method(self) -> MethodSettings:
        return self.method_settings


# What is trained where no file is named: configs/vision_token_pruning_small.yaml says the same
SMALL: dict[str, Any] = {
    "trainer_settings": {
        "dl_settings": {
            "epochs": 1, "batch_size": 16, "eval_every": 150, "checkpoint_every": 75,
            "optimizers": {
                "token_merger": {"lr": 1e-3}, "layer_pruners": {"lr": 1e-3}, "discriminator": {"lr": 5e-4},
            },
        }
    },
    "method_settings": {
        "merger_type": "question_aware", "merge_ratio": 0.42, "target_merge_tokens": 60, "merge_sparsity_weight": 1e-4,
        "budget_spread": 1.0,
        "merge_guide_weight": 25.0, "pruning_layers": [2, 4, 6], "pruner_keep": 0.85,
        "prune_guide_weight": 25.0, "pruner_d_internal": 64,
        "pruner_num_heads": 4, "pruner_type": "cross_attention", "temperature": 1.0, "temperature_min": 0.1,
        "temperature_anneal_rate": 0.2,
        "adv_loss_weight": 1.0, "task_loss_weight": 25.0, "distill_loss_weight": 25.0, "disc_reinit_prob": 0.01,
    },
    "manager_settings": {"mode": "single"},
    "backbone_settings": {"name": SMALL_LLAVA},
    "dataset_settings": {"train": GENERATED, "val": GENERATED, "questions": 7200, "val_questions": 384},
    "output_dir": "outputs",
}  # fmt: skip


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> VlmConfig:
    """The configuration in a YAML file with SECTION.KEY=VALUE on top; None: the small model's. What is wrong is an
    error that names the key.
    """
    return parse_config(SMALL if path is None else read_config(path), overrides)


def parse_config(data: Any, overrides: Sequence[str] = ()) -> VlmConfig:
    """The same from plain data: {} is all defaults."""
    return parse_settings(VlmConfig, data, overrides)
