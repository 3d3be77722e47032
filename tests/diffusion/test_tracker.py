"""train.track: what stand-ins of Weights & Biases and trackio are told of a run."""

import importlib.machinery
import sys
import types

import pytest

from diffusion.errors import ConfigError
from diffusion.runs.training import train

from ..end_to_end.run import TINY
from ..test_configs import composed


@pytest.fixture(params=["wandb", "trackio"])
def tracker(request, monkeypatch):
    module = types.ModuleType(request.param)
    module.__spec__ = importlib.machinery.ModuleSpec(request.param, None)
    module.begun, module.logged, module.finished = [], [], 0

    def finish():
        module.finished += 1

    module.init = lambda **options: module.begun.append(options)
    module.log = lambda values, step: module.logged.append((step, values))
    module.Image, module.finish = lambda picture: picture.size, finish
    monkeypatch.setitem(sys.modules, request.param, module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def test_a_run_and_what_goes_on_with_it(tracker, tmp_path, monkeypatch):
    name, run_dir = tracker.__name__, tmp_path / "a" / "run"
    settings = (*TINY, f"train.track={name}", "train.sample_every=2")
    train(composed(*settings, "train.steps=2"), run_dir)
    assert [step for step, _ in tracker.logged] == [1, 2, 2] and tracker.finished == 1
    numbers, pictures = tracker.logged[1][1], tracker.logged[2][1]
    names = ("loss", "lr", "grad_norm", "images_per_s", "skipped_steps", "gpu_gib")
    assert {f"train/{name}" for name in names} == set(numbers)
    assert pictures["samples"][0] > 8
    begun = tracker.begun[0]
    assert begun["project"] == "triton-diffusion" and "-a-run-20" in begun["name"]
    assert begun["config"]["train"]["steps"] == 2
    assert ("id" in begun) == (name == "wandb")

    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    train(composed(*settings, "train.steps=3"), run_dir)
    again = tracker.begun[1]
    assert again["name"] == begun["name"] and again["resume"] == "allow"
    assert again["project"] == "mine" and tracker.logged[3][0] == 3


def test_it_has_to_be_known_and_installed(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="train.track=wandv is unknown; choose one of wandb"):
        train(composed(*TINY, "train.track=wandv"), tmp_path)
    monkeypatch.setattr("diffusion.tracking.tracker.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="train.track=trackio is not installed: pip install"):
        train(composed(*TINY, "train.track=trackio"), tmp_path)
