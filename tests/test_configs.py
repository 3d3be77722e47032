"""Every choice of every group composes and builds."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from configs.entry import CONFIGS, plain
from diffusion.backend import TORCH_FP32
from diffusion.build import Process, build_model, check_keys, construct
from diffusion.optimizer import OptimizerSettings
from diffusion.trainer import TrainSettings


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def composed(*overrides: str) -> dict:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return plain(compose("train", overrides=list(overrides)))


def build(config: dict) -> torch.nn.Module:
    construct(TrainSettings, config["train"], "train")
    construct(OptimizerSettings, config["optim"], "optim")
    process = construct(Process, config["diffusion"], "diffusion")
    size = config["dataset"]["size"] or 64
    size = (size, size) if isinstance(size, int) else tuple(size)
    with torch.device("meta"):
        return build_model(
            config["model"], TORCH_FP32, size, 3, process.learns_variance, torch.device("meta")
        )


GROUPS = ("dataset", "model", "diffusion", "optim", "experiment")
ALL = [(group, choice) for group in GROUPS for choice in choices(group)]


def test_every_group_has_choices():
    assert {group for group, _ in ALL} == set(GROUPS)
    assert all(Path(CONFIGS / group).is_dir() for group in GROUPS)


@pytest.mark.parametrize(("group", "choice"), ALL, ids=[f"{g}={c}" for g, c in ALL])
def test_choice_composes_and_builds(group, choice):
    config = composed(f"{group}={choice}")
    assert sum(p.numel() for p in build(config).parameters()) > 0


def test_defaults_in_yaml_are_those_in_the_code():
    """The YAML lists every setting of a constructor, so that --cfg job shows them all."""
    config = composed()
    for group, make in (("train", TrainSettings), ("optim", OptimizerSettings)):
        assert set(config[group]) == set(make.__dataclass_fields__)
    check_keys(config["diffusion"], ["schedule", "num_timesteps", "prediction", "variance"], "d")
