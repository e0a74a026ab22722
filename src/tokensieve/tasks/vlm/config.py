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

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tokensieve.errors import MissingMaterialError, OptionError, UnknownNameError, nearest
from tokensieve.tasks.vlm.default import SMALL_LLAVA

__all__ = ["GENERATED", "LLAVA_15", "SMALL", "VlmConfig", "load_config", "parse_config"]

LLAVA_15 = "llava-hf/llava-1.5-7b-hf"
GENERATED = "generated"  # as data: scenes and questions made on the fly
Ratio = Annotated[float, Field(gt=0, le=1)]
Above0 = Annotated[float, Field(gt=0)]
From0 = Annotated[float, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Optimizer(_Section):
    lr: Above0


class Optimizers(_Section):
    token_merger: Optimizer = Optimizer(lr=2e-5)
    layer_pruners: Optimizer = Optimizer(lr=2e-5)
    discriminator: Optimizer = Optimizer(lr=5e-4)


class DlSettings(_Section):
    """batch_size: questions, over all processes. eval_every, checkpoint_every: steps. precision: on a GPU only."""

    epochs: Positive = 1
    batch_size: Positive = 12
    optimizers: Optimizers = Optimizers()
    warmup_steps: Count = 20
    clip_grad: Above0 | None = 1.0
    eval_every: Positive = 200
    checkpoint_every: Positive = 200
    precision: Literal["auto", "no", "fp16", "bf16"] = "auto"
    seed: Count = 0


class TrainerSettings(_Section):
    dl_settings: DlSettings = DlSettings()


class MethodSettings(_Section):
    """merge_ratio, target_merge_tokens: what stage 1 leaves, as a share and as a count; one says the other.

    pruner_keep: the share of the tokens that come to a pruner that it leaves. adv_loss_weight: 0 switches the
    discriminator off. distill_loss_weight: of the unpruned model's answers. straight_through: keep masks of 0 and 1 in
    training; False: relaxed ones. image_max_size: longest side of an image, which is scaled down to it.
    """

    merger_type: Literal["simple", "question_aware"] = "simple"
    merge_ratio: Ratio | None = None
    target_merge_tokens: Positive | None = None
    merge_sparsity_weight: From0 = 1e-4
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


class ManagerSettings(_Section):
    mode: Literal["single", "optuna", "ray"] = "single"
    available_gpus: tuple[Count, ...] | None = None
    gpus_per_subtask: Positive | None = None

    @model_validator(mode="after")
    def _fits(self) -> ManagerSettings:
        if self.available_gpus and self.gpus_per_subtask and self.gpus_per_subtask > len(self.available_gpus):
            raise ValueError(
                f"gpus_per_subtask {self.gpus_per_subtask} is more than the {len(self.available_gpus)} available_gpus"
            )
        return self


class SearchSettings(_Section):
    enable: bool = False
    n_trials: Positive = 50


class BackboneSettings(_Section):
    """name: "small-llava", which is shipped; a folder of `save_pretrained`; or a name that transformers knows."""

    name: str = LLAVA_15


class DatasetSettings(_Section):
    """train, val: JSONL files of questions (docs/vlm.md), or "generated", so many questions, val_questions."""

    train: str = ""
    val: str = ""
    questions: Positive = 20000
    val_questions: Positive = 384


class VlmConfig(_Section):
    """All of it. Every field has a default; `{}` is a configuration, for LLaVA-1.5."""

    trainer_settings: TrainerSettings = TrainerSettings()
    method_settings: MethodSettings = MethodSettings()
    manager_settings: ManagerSettings = ManagerSettings()
    search_settings: SearchSettings = SearchSettings()
    backbone_settings: BackboneSettings = BackboneSettings()
    dataset_settings: DatasetSettings = DatasetSettings()
    output_dir: str = "outputs"

    @model_validator(mode="after")
    def _fits(self) -> VlmConfig:
        if self.search_settings.enable and self.manager_settings.mode == "single":
            raise ValueError('search_settings.enable is true, but manager_settings.mode is "single": give "optuna"')
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
            "epochs": 1, "batch_size": 16, "eval_every": 250, "checkpoint_every": 250,
            "optimizers": {
                "token_merger": {"lr": 1e-3}, "layer_pruners": {"lr": 1e-3}, "discriminator": {"lr": 5e-4},
            },
        }
    },
    "method_settings": {
        "merger_type": "question_aware", "merge_ratio": 0.5, "target_merge_tokens": 72, "merge_sparsity_weight": 1e-4,
        "pruning_layers": [2, 4, 6], "pruner_keep": 0.75, "pruner_d_internal": 64, "pruner_num_heads": 4,
        "pruner_type": "cross_attention", "temperature": 1.0, "temperature_min": 0.1, "temperature_anneal_rate": 0.5,
        "adv_loss_weight": 1.0, "task_loss_weight": 25.0, "distill_loss_weight": 25.0, "disc_reinit_prob": 0.01,
    },
    "manager_settings": {"mode": "single"},
    "backbone_settings": {"name": SMALL_LLAVA},
    "dataset_settings": {"train": GENERATED, "val": GENERATED, "questions": 12800, "val_questions": 384},
    "output_dir": "outputs",
}  # fmt: skip


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> VlmConfig:
    """The configuration in a YAML file with SECTION.KEY=VALUE on top; None: the small model's. What is wrong is an
    error that names the key. A key that only one section has may be given without it: merge_ratio=0.4.
    """
    if path is None:
        return parse_config(SMALL, overrides)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise MissingMaterialError(f"--config {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise OptionError(f"--config {path} is no text file") from None
    return parse_config(_yaml(text, f"--config {path}"), overrides)


def parse_config(data: Any, overrides: Sequence[str] = ()) -> VlmConfig:
    """The same from plain data: {} is all defaults."""
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise OptionError("a configuration is a mapping of sections such as method_settings and trainer_settings")
    tree = _copied(data)
    for pair in overrides:
        _override(tree, pair)
    try:
        return VlmConfig.model_validate(tree)
    except ValidationError as error:
        raise _explained(error) from None


def _copied(value: Any) -> Any:
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise OptionError(f"{where} is no YAML: {' '.join(str(error).split())[:200]}") from None


def _override(tree: dict[str, Any], pair: str) -> None:
    key, equals, value = pair.partition("=")
    if not equals or not key:
        raise OptionError(f"{pair!r} is no KEY=VALUE, such as method_settings.merge_ratio=0.4")
    whole = [known for known in _keys(VlmConfig) if known.endswith(f".{key}")]
    *sections, name = (whole[0] if len(whole) == 1 else key).split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise OptionError(f"{pair!r}: {section} is no section")
    tree[name] = _yaml(value, pair)


def _keys(section: type[BaseModel], before: str = "") -> list[str]:
    """Every key with its sections, as it is written in KEY=VALUE."""
    found = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, _Section):
            found += _keys(kind, f"{before}{name}.")
        else:
            found.append(f"{before}{name}")
    return found


def _explained(error: ValidationError) -> Exception:
    """The first fault, in one line, with the nearest right name where a key is unknown."""
    fault = error.errors()[0]
    place = [str(part) for part in fault["loc"]]
    key = ".".join(place)
    if fault["type"] == "extra_forbidden":
        return UnknownNameError(f"unknown configuration key {key!r}.{nearest(key, _near(place))}")
    message = fault["msg"].removeprefix("Value error, ")
    where = f"{key}={fault['input']!r}: " if key and fault["type"] != "value_error" else ""
    return OptionError(f"configuration: {where}{message}")


def _near(place: list[str]) -> list[str]:
    """The keys that could have been meant: those of the same section; of none, the sections and every last name."""
    before = ".".join(place[:-1])
    here: type[BaseModel] = VlmConfig
    for name in place[:-1]:
        here = here.model_fields[name].annotation  # type: ignore[assignment]
    if not before:
        return sorted({*here.model_fields, *(key.rsplit(".", 1)[-1] for key in _keys(VlmConfig))})
    return [f"{before}.{name}" for name in here.model_fields]
