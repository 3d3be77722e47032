"""Guidance as sample.py has it: which settings draw what, and which are refused."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from diffusion.errors import ConfigError
from diffusion.factory import SAMPLERS
from diffusion.formats.checkpoint import save_checkpoint
from diffusion.formats.weights import save_guided
from diffusion.models.flat_parameters import FlatParameters
from diffusion.runs.sampling import sample
from triton_diffusion.entry import CONFIGS

from .classes import TINY, tiny

# --- as sample.py does it -------------------------------------------------------------------------


def _config(**given):
    config = yaml.safe_load((CONFIGS / "sample.yaml").read_text())
    for key in ("defaults", "hydra", "plugin"):
        del config[key]
    return config | {"device": "cpu", "n": 4, "steps": 3} | given


@pytest.fixture
def weights(tmp_path) -> Path:
    path = tmp_path / "weights.pt"
    save_guided(path, tiny(label_dropout=0.1, in_channels=3, out_channels=3))
    return path


def _drawn(weights, **given):
    out = weights.parent / "out.npz"
    model = {"name": "unet", **TINY, "label_dropout": 0.1}
    sample(_config(ckpt=str(weights), model=model, size=8, out=str(out), **given))
    return np.load(out)["arr_0"]


@pytest.mark.parametrize("name", SAMPLERS)
def test_sample_with_guidance(weights, name):
    plain = _drawn(weights, sampler=name, spacing="karras")
    guided = _drawn(weights, sampler=name, spacing="karras", guidance=4)
    assert plain.shape == guided.shape == (4, 8, 8, 3)
    assert (plain != guided).any()


def test_sample_with_every_kind_of_guidance(weights, tmp_path):
    """Each changes the images; of a smaller network as well."""
    smaller = tmp_path / "run"
    options = {"name": "unet", **TINY, "label_dropout": 0.1, "channel_mult": [1]}
    state = {"step": 1, "image_shape": [8, 8, 3]}
    config = {"model": options, "diffusion": {}, "train": {"precision": "fp32"}}
    network = tiny(label_dropout=0.1, in_channels=3, out_channels=3, channel_mult=[1])
    save_checkpoint(smaller / "checkpoints", FlatParameters(network), state, config, keep=1)
    given = (
        {},
        {"guidance": 3},
        {"guidance": 3, "guidance_interval": [0.2, 5]},
        {"guidance": 3, "guidance_rescale": 0.7},
        {"guidance": 3, "negative": 1},
        {"guidance": 3, "guide": str(smaller)},
    )
    drawn = [_drawn(weights, sampler="euler", **options) for options in given]
    for i, a in enumerate(drawn):
        assert all((a != b).any() for b in drawn[:i]), given[i]


def test_what_a_weaker_network_has_to_share(weights, tmp_path):
    for name, options, diffusion, words in (
        ("size", {"image_size": 16}, {}, "has images of shape .16, 16, 3.; weights has .8, 8, 3."),
        ("classes", {"num_classes": 4}, {}, "a number of classes of 4; weights has 3"),
        ("v", {}, {"prediction": "v_prediction"}, "has prediction v_prediction; weights has eps"),
        ("cosine", {}, {"schedule": "cosine"}, "was trained on other levels of noise than weights"),
    ):
        model = {"name": "unet", **TINY, "label_dropout": 0.1, **options}
        size = model.pop("image_size", 8)
        network = tiny(label_dropout=0.1, in_channels=3, out_channels=3, **options)
        state = {"step": 1, "image_shape": [size, size, 3]}
        config = {"model": model, "diffusion": diffusion, "train": {"precision": "fp32"}}
        folder = tmp_path / name
        save_checkpoint(folder / "checkpoints", FlatParameters(network), state, config, keep=1)
        with pytest.raises(ConfigError, match=words):
            _drawn(weights, guidance=2, guide=str(folder))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"sampler": "rk4"},
            "sampler=rk4 is unknown; choose one of ddpm, ddim, euler, heun, dpmpp",
        ),
        ({"spacing": "even"}, "spacing=even is unknown; choose one of guided, leading, trailing"),
        ({"sampler": "heun", "eta": 0.5}, "eta=0.5 has no meaning with sampler=heun"),
        ({"eta": "some"}, "eta=some"),
        ({"guidance": -2}, "guidance=-2"),
        ({"guidance_interval": [0.2, 5]}, r"interval=\(0.2, 5\) has no effect with guidance=1"),
        (
            {"guidance": 2, "guidance_interval": [5, 1]},
            r"guidance_interval=\[5, 1\] is not possible",
        ),
        ({"guidance": 2, "guidance_interval": [1]}, "expected a list of 2 numbers"),
        (
            {"guidance": 2, "guidance_rescale": 1.5},
            "guidance_rescale=1.5 is not possible; give a nu",
        ),
        ({"guidance_rescale": 0.5}, "guidance_rescale=0.5 has no effect with guidance=1"),
        ({"negative": 1}, "negative=1 has no effect with guidance=1"),
        ({"guidance": 2, "negative": 3}, "negative=3 is unknown; the model has 3 classes: 0 to 2"),
        ({"guide": "nowhere"}, "guide=nowhere has no effect with guidance=1"),
        ({"guide": "nowhere", "guidance": 2, "negative": 1}, "guide=nowhere goes without negative"),
        ({"guide": "nowhere", "guidance": 2}, "nowhere does not exist"),
        ({"model": {"name": "unet", **TINY}, "guidance": 2}, "in the file"),
    ],
)
def test_wrong_settings(weights, given, message):
    model = {"name": "unet", **TINY, "label_dropout": 0.1}
    with pytest.raises(ConfigError, match=message):
        sample(_config(**{"ckpt": str(weights), "model": model, "size": 8} | given))


def test_guidance_of_a_model_without_a_null_class(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plain.pt"
    save_guided(path, tiny(num_classes=None, in_channels=3, out_channels=3))
    model = {"name": "unet", **TINY, "num_classes": None}
    config = _config(ckpt=str(path), model=model, size=8)
    with pytest.raises(ConfigError, match="guidance=2 needs a network with classes"):
        sample(config | {"guidance": 2})
    assert not list(tmp_path.glob("*.png"))
    assert sample(config) == Path("plain_ddim3_0.png")
