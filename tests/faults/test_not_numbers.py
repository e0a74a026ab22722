"""Settings that are not numbers, in Python as on the command line."""

from __future__ import annotations

import pytest
import torch

import tokensieve
from tokensieve.errors import BudgetError, OptionError, TokensieveError
from tokensieve.tasks.clip.align import AlignConfig
from tokensieve.tasks.clip.select import SelectConfig
from tokensieve.tasks.reid.config import parse_config as reid_config
from tokensieve.tasks.vlm.base import BaseConfig
from tokensieve.tasks.vlm.config import parse_config as vlm_config
from tokensieve.testing import tiny_model
from tokensieve.training import FitConfig

NOT_NUMBERS = (float("nan"), float("inf"))


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_attach(value: float) -> None:
    model = tiny_model("openclip").model
    with pytest.raises(OptionError, match="text has NaN or infinite"):
        tokensieve.attach(model, "cdpruner", keep=0.5, text=torch.full((2, 16), value))
    with pytest.raises(OptionError, match="fuse_weight"):
        tokensieve.attach(model, "anchor", keep=0.5, mode="fuse", fuse_weight=value)
    for budget in ("keep", "keep_average"):
        with pytest.raises(BudgetError, match=f"{budget}={value}"):
            tokensieve.attach(model, "sieve", **{budget: value})


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_configurations(value: float) -> None:
    for make in (
        lambda: AlignConfig(lr=value), lambda: SelectConfig(lr=value), lambda: SelectConfig(tau=value),
        lambda: SelectConfig(kl=value), lambda: BaseConfig(lr=value), lambda: BaseConfig(tower_lr=value),
        lambda: reid_config({"SOLVER": {"BASE_LR": value}}), lambda: reid_config({"MODEL": {"SDTPS_TAU": value}}),
        lambda: vlm_config({"method_settings": {"task_loss_weight": value}}),
    ):  # fmt: skip
        with pytest.raises(TokensieveError, match=str(value)):
            make()
    with pytest.raises(OptionError, match="clip"):
        FitConfig(steps=1, clip=float("nan"))
