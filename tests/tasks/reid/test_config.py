"""Configuration files: the founding script's keys as written, overrides, and errors that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tokensieve.errors import MissingMaterialError, OptionError, UnknownNameError
from tokensieve.tasks.reid.config import ReidConfig, load_config, parse_config

CONFIGS = Path(__file__).parents[3] / "configs"
SEED = """
MODEL:
  USE_SDTPS: True
  SDTPS_SPARSE_RATIO: 0.6
  SDTPS_AGGR_RATIO: 0.3
  SDTPS_BETA: 0.2
  SDTPS_USE_GUMBEL: True
"""


def test_the_founding_keys_load_as_written(tmp_path):
    path = tmp_path / "DeMo_SDTPS.yml"
    path.write_text(SEED)
    m = load_config(path).MODEL
    assert (m.USE_SDTPS, m.SDTPS_SPARSE_RATIO, m.SDTPS_AGGR_RATIO) == (True, 0.6, 0.3)
    assert (m.SDTPS_BETA, m.SDTPS_USE_GUMBEL) == (0.2, True)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/DeMo_SDTPS.yml")), ids=lambda p: p.parent.name)
def test_files_that_come_along(path):
    config = load_config(path)
    assert config.MODEL.USE_SDTPS
    assert (config.MODEL.SDTPS_SPARSE_RATIO, config.MODEL.SDTPS_AGGR_RATIO, config.MODEL.SDTPS_BETA) == (0.5, 0.4, 0.25)
    if path.parent.name != "synthetic":
        assert (config.SOLVER.BASE_LR, config.SOLVER.BACKBONE_LR) == (3.5e-4, 5e-6)
        height, width = config.INPUT.SIZE_TRAIN
        assert height * width == 256 * 128


def test_all_four_are_there():
    assert {p.parent.name for p in CONFIGS.glob("*/DeMo_SDTPS.yml")} == {"RGBNT201", "RGBNT100", "MSVR310", "synthetic"}


def test_overrides_come_last_and_defaults_fill_in():
    pairs = ["MODEL.USE_SDTPS=False", "SOLVER.BASE_LR=1e-3", "INPUT.SIZE_TRAIN=[64, 32]", "MODEL.SDTPS_AT=2"]
    config = parse_config(yaml.safe_load(SEED), [*pairs, "OUTPUT_DIR=here"])
    assert config.MODEL.USE_SDTPS is False
    assert config.SOLVER.BASE_LR == 1e-3
    assert config.INPUT.SIZE_TRAIN == (64, 32)
    assert config.MODEL.SDTPS_AT == 2
    assert config.OUTPUT_DIR == "here"
    assert config.MODEL.SDTPS_BETA == 0.2
    assert parse_config(None) == ReidConfig()


def test_it_survives_json():
    config = parse_config({}, ["INPUT.SIZE_TRAIN=[64,32]", "SOLVER.CLIP_GRAD=null"])
    assert ReidConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("pair", "hint"),
    [("MODEL.USE_SDPTS=True", "MODEL.USE_SDTPS"), ("SOLVER.BASELR=1", "SOLVER.BASE_LR"), ("MODLE.USE_SDTPS=1", "MODEL"),
     ("OUTPUTDIR=x", "OUTPUT_DIR")],
)  # fmt: skip
def test_unknown_keys_get_the_nearest(pair, hint):
    with pytest.raises(UnknownNameError, match=f'unknown configuration key.*Did you mean "{hint}"'):
        parse_config({}, [pair])


@pytest.mark.parametrize(
    ("pair", "message"),
    [("MODEL.SDTPS_BETA=0.7", "MODEL.SDTPS_BETA=0.7"), ("MODEL.SDTPS_SPARSE_RATIO=0", "MODEL.SDTPS_SPARSE_RATIO=0"),
     ("MODEL.USE_SDTPS=perhaps", "MODEL.USE_SDTPS='perhaps'"), ("MODEL.SELECTION=best", "sdtps.*random.*mean"),
     ("SOLVER.IMS_PER_BATCH=30", "not a multiple of DATALOADER"), ("SOLVER.IMS_PER_BATCH=4", "two identities"),
     ("SOLVER.WARMUP_STEPS=100000", "WARMUP_STEPS"), ("MODEL.HEADS=5", "5 HEADS"), ("MODEL", "not KEY=VALUE"),
     ("MODEL=3", "MODEL=3"), ("OUTPUT_DIR.X=3", "OUTPUT_DIR"), ("MODEL.WIDTH=[", "not valid YAML"),
     ("SOLVER.MAX_STEPS=2.5", "SOLVER.MAX_STEPS=2.5"), ("INPUT.SIZE_TRAIN=64", "INPUT.SIZE_TRAIN=64")],
)  # fmt: skip
def test_wrong_values_are_named(pair, message):
    with pytest.raises(OptionError, match=message):
        parse_config({}, [pair])


@pytest.mark.parametrize("text", ["- a\n- b", "just words", "{a: ["])
def test_files_that_are_no_configuration(tmp_path, text):
    path = tmp_path / "c.yml"
    path.write_text(text)
    with pytest.raises(OptionError):
        load_config(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(MissingMaterialError, match=r"none\.yml"):
        load_config(tmp_path / "none.yml")
