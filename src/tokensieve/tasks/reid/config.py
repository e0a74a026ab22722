"""The configuration of re-identification: YAML sections in capitals, KEY=VALUE on top. No torch.

MODEL:
  USE_SDTPS: True
  SDTPS_SPARSE_RATIO: 0.5
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tokensieve.search.settings import ManagerSettings, SearchSettings, contradiction
from tokensieve.utils.settings import Count, Positive, Ratio, Section, Seed, parse_settings
from tokensieve.utils.yaml import read_config

__all__ = ["ReidConfig", "load_config", "parse_config"]


class ModelSection(Section):
    """TRANSFORMER_TYPE: "small" (from scratch, shaped by PATCH, WIDTH, DEPTH, HEADS), "vit-s14" (real weights), or the
    name of an open_clip model, whose weights are the local file PRETRAIN_PATH.

    USE_SDTPS: compress the tokens; False is the baseline, the mean of all. SELECTION: what compresses them: sdtps, or
    to compare it with, as many tokens chosen at random or averaged from neighbours. SDTPS_AT: None, after the backbone;
    a block, between its attention and its MLP, so that later blocks see fewer tokens.
    """

    TRANSFORMER_TYPE: str = "small"
    PRETRAIN_PATH: str = ""
    PATCH: Positive = 8
    WIDTH: Positive = 96
    DEPTH: Positive = 6
    HEADS: Positive = 3
    SIE_CAMERA: bool = True
    USE_SDTPS: bool = True
    SELECTION: Literal["sdtps", "random", "mean"] = "sdtps"
    SDTPS_SPARSE_RATIO: Ratio = 0.5
    SDTPS_AGGR_RATIO: Ratio = 0.4
    SDTPS_BETA: Annotated[float, Field(ge=0, le=0.5)] = 0.25
    SDTPS_USE_GUMBEL: bool = False
    SDTPS_FORMULA: Literal["paper", "convex"] = "paper"
    SDTPS_TAU: Annotated[float, Field(gt=0)] = 0.1
    SDTPS_AT: Count | None = None

    @model_validator(mode="after")
    def _fits(self) -> ModelSection:
        if self.WIDTH % self.HEADS:
            raise ValueError(f"WIDTH {self.WIDTH} cannot be split among {self.HEADS} HEADS")
        if self.TRANSFORMER_TYPE == "small" and self.PRETRAIN_PATH:
            raise ValueError(
                f"PRETRAIN_PATH {self.PRETRAIN_PATH}: TRANSFORMER_TYPE small starts from random weights; "
                "name an open_clip model, or leave it out"
            )
        return self


class InputSection(Section):
    """SIZE_TRAIN: height, width; None is the data set's own. PIXEL_MEAN, PIXEL_STD: None is the backbone's own."""

    SIZE_TRAIN: tuple[Positive, Positive] | None = None
    PIXEL_MEAN: tuple[float, float, float] | None = None
    PIXEL_STD: tuple[float, float, float] | None = None


class DatasetsSection(Section):
    """NAMES: the layout, rgbnt201, rgbnt100, msvr310 or folder. VAL_SHARE: of the training identities."""

    NAMES: str = "rgbnt201"
    ROOT_DIR: str = "data"
    SKIP_BROKEN: bool = False
    VAL_SHARE: Annotated[float, Field(gt=0, lt=1)] = 0.1


class DataloaderSection(Section):
    """NUM_INSTANCE: images of each identity in a batch."""

    NUM_INSTANCE: Annotated[int, Field(ge=2)] = 4
    NUM_WORKERS: Count = 0


class SolverSection(Section):
    """IMS_PER_BATCH: samples, each of all modalities, over all processes. Periods are in steps."""

    IMS_PER_BATCH: Positive = 32
    MAX_STEPS: Positive = 1000
    WARMUP_STEPS: Count = 100
    BASE_LR: Annotated[float, Field(gt=0)] = 3.5e-4
    BACKBONE_LR: Annotated[float, Field(ge=0)] = 5e-6
    WEIGHT_DECAY: Annotated[float, Field(ge=0)] = 1e-4
    CLIP_GRAD: Annotated[float, Field(gt=0)] | None = 1.0
    LABEL_SMOOTH: Annotated[float, Field(ge=0, lt=1)] = 0.1
    ID_LOSS_WEIGHT: Annotated[float, Field(ge=0)] = 0.25
    TRIPLET_LOSS_WEIGHT: Annotated[float, Field(ge=0)] = 1.0
    EVAL_PERIOD: Positive = 200
    CHECKPOINT_PERIOD: Positive = 100
    PRECISION: Literal["auto", "no", "fp16", "bf16"] = "auto"
    SEED: Seed = 0


class TestSection(Section):
    IMS_PER_BATCH: Positive = 64


class ReidConfig(Section):
    """All of it. Every field has a default; `{}` is a configuration. manager_settings, search_settings: of a search."""

    MODEL: ModelSection = ModelSection()
    INPUT: InputSection = InputSection()
    DATASETS: DatasetsSection = DatasetsSection()
    DATALOADER: DataloaderSection = DataloaderSection()
    SOLVER: SolverSection = SolverSection()
    TEST: TestSection = TestSection()
    OUTPUT_DIR: Annotated[str, Field(min_length=1)] = "runs/reid"
    manager_settings: ManagerSettings = ManagerSettings()
    search_settings: SearchSettings = SearchSettings()

    @model_validator(mode="after")
    def _fits(self) -> ReidConfig:
        fault = contradiction(self.manager_settings, self.search_settings)
        if fault:
            raise ValueError(fault)
        return self

    @model_validator(mode="after")
    def _batch(self) -> ReidConfig:
        if self.SOLVER.IMS_PER_BATCH % self.DATALOADER.NUM_INSTANCE:
            raise ValueError(
                f"SOLVER.IMS_PER_BATCH {self.SOLVER.IMS_PER_BATCH} is not a multiple of "
                f"DATALOADER.NUM_INSTANCE {self.DATALOADER.NUM_INSTANCE}"
            )
        if self.SOLVER.IMS_PER_BATCH < 2 * self.DATALOADER.NUM_INSTANCE:
            raise ValueError("SOLVER.IMS_PER_BATCH must hold at least two identities of DATALOADER.NUM_INSTANCE images")
        if self.SOLVER.WARMUP_STEPS > self.SOLVER.MAX_STEPS:
            raise ValueError(f"SOLVER.WARMUP_STEPS {self.SOLVER.WARMUP_STEPS} is more than SOLVER.MAX_STEPS")
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> ReidConfig:
    """The configuration in a YAML file with SECTION.KEY=VALUE on top. What is wrong is an error that names the key."""
    return parse_config(read_config(path), overrides)


def parse_config(data: Any, overrides: Sequence[str] = ()) -> ReidConfig:
    """The same from plain data: {} is all defaults."""
    return parse_settings(ReidConfig, data, overrides)
