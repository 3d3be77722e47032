"""Conditions that a network was not trained with, and that it was and does not get."""

from pathlib import Path

import numpy as np
import pytest

from diffusion.errors import ConfigError
from diffusion.export.run import export
from diffusion.runs.benchmark import benchmark
from diffusion.runs.evaluation import evaluate
from diffusion.runs.training import train

from ...test_configs import composed
from .runs import SIZE, SMALL, drawn

# --- what is refused ------------------------------------------------------------------------------


def test_what_does_not_fit_is_one_line(image_run, pairs, tmp_path):
    def refused(words: str, **options) -> None:
        with pytest.raises(ConfigError, match=words) as caught:
            drawn(image_run, **options)
        assert "\n" not in str(caught.value)

    refused("trained with a condition of 3 channels: give condition=FILE or FOLDER of images")
    refused("does not exist; give an image", condition=tmp_path / "nothing")
    wrong = np.zeros((2, SIZE, SIZE, 1), np.uint8)
    refused(r"uint8 of shape \[2, 8, 8, 1\]; expected uint8 \[M, 8, 8, 3\]", condition=wrong)
    refused("expected uint8", condition=np.zeros((2, SIZE, SIZE, 3), np.float32))
    refused("expected uint8", condition=np.zeros((SIZE, SIZE + 1, 3), np.uint8))
    refused("no image that can be decoded", condition=Path(__file__))
    for name, words in (("diffusers", "hands nothing on"), ("unet_cu", "unet.cu.s format needs")):
        with pytest.raises(ConfigError, match=words):
            export(
                {"ckpt": str(image_run), "format": name, "out": str(tmp_path / "out.bin")}
                | ({"out": str(tmp_path / "out")} if name == "diffusers" else {})
            )
    with pytest.raises(ConfigError, match="was trained with a condition"):
        benchmark({"ckpt": str(image_run), "device": "cpu", "out": str(tmp_path / "timed")})
    with pytest.raises(ConfigError, match="says nothing of the condition"):
        settings = {"ckpt": str(image_run), "metrics": ["loss"], "device": "cpu"}
        evaluate(settings | {"reference": str(pairs[0])})


def test_a_condition_for_a_network_without_one(tmp_path, pairs):
    data = ("dataset=folder", f"dataset.path={pairs[0]}", f"dataset.size={SIZE}")
    train(composed(*data, *SMALL, "train.steps=1", "train.sample_every=0"), tmp_path / "run")
    with pytest.raises(ConfigError, match="was trained without one; leave it out"):
        drawn(tmp_path / "run", condition=pairs[1])
    with pytest.raises(ConfigError, match="needs a network with classes"):
        drawn(tmp_path / "run", guidance=2.0)
    with pytest.raises(ConfigError, match="condition_dropout=0.1, but data set .* no condition"):
        train(composed(*data, *SMALL, "model.condition_dropout=0.1"), tmp_path / "other")
