"""Networks that are given a vector: what they learn, how they draw, what is refused."""

import shutil

import numpy as np
import pytest
import torch

import triton_kernels
from diffusion.data import load_dataset
from diffusion.errors import ConfigError
from diffusion.export.run import export
from diffusion.formats.trained import load_trained
from diffusion.models.conditions import Conditions, with_presence
from diffusion.models.layers import set_backend
from diffusion.runs.evaluation import evaluate
from diffusion.runs.sampling import sample
from diffusion.runs.training import train
from diffusion.runtime.backend import Backend
from diffusion.sampling.guidance import guide

from ...end_to_end.run import rows
from ...test_configs import composed
from .runs import CPU, SIZE, SMALL, check_same, drawn, high_noise_loss


def test_a_network_uses_the_vector_that_it_is_given(tmp_path):
    """Which says the colour of each picture."""
    colours = np.random.default_rng(1).uniform(-1, 1, (40, 3)).astype(np.float32)
    noise = np.random.default_rng(2).uniform(-0.1, 0.1, (40, SIZE, SIZE, 3)).astype(np.float32)
    np.save(tmp_path / "pictures.npy", colours[:, None, None] + noise)
    np.save(tmp_path / "colours.npy", colours)
    data = ("dataset=array", f"dataset.path={tmp_path}/pictures.npy", "dataset.layout=nhwc")
    data += (f"dataset.vectors={tmp_path}/colours.npy", "dataset.standardise=false")
    learning = ("train.steps=120", "train.batch_size=8", "optim.lr=1e-2", "optim.warmup=5")
    learning += ("optim.ema_decay=0.9", "dataset.held_out=8", "train.sample_every=0")
    learning += ("train.eval_every=120", "train.log_every=120")
    train(composed(*data, *SMALL, *learning), tmp_path / "run")
    # x_t tells the mean of 64 pixels; the best guess that is linear in it
    variance, sigma = (colours**2).mean(), 3.5 * (10 / 3.5) ** np.array([0.25, 0.75])
    told = sigma**2 / SIZE**2
    unconditional = (4 * variance * told / (variance + told)).mean()
    assert high_noise_loss(tmp_path / "run") < 0.35 * unconditional


def test_vectors_are_numbers_files_and_arrays(vector_run, tmp_path):
    np.save(tmp_path / "two.npy", np.array([[0.5, -1], [1, 2]]))
    images = drawn(vector_run, vector=tmp_path / "two.npy")
    assert np.array_equal(images, drawn(vector_run, vector=np.array([[0.5, -1], [1, 2]])))
    first = drawn(vector_run, vector=[0.5, -1])
    assert np.array_equal(images[::2], first[::2])
    out = tmp_path / "drawn.npz"
    config = {"ckpt": str(vector_run), "n": 3, "steps": 2, "device": "cpu", "seed": 1}
    sample(config | {"out": str(out), "vector": [0.5, -1]})
    assert np.array_equal(np.load(out)["arr_0"], first)
    drawn(vector_run, vector=[0.5, -1], guidance=2.0)


def test_a_vector_of_zeros_is_another_than_none(vector_run):
    model = load_trained(vector_run, CPU).model
    torch.manual_seed(0)
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p)
    x, t = torch.randn(2, SIZE, SIZE, 3), torch.tensor([10, 900])
    given = Conditions(vector=with_presence(torch.zeros(2, 2)))
    with torch.no_grad():
        zeros, nothing = (model.forward_nhwc(x, t, g) for g in (given, given.none()))
        assert (zeros - nothing).abs().max() > 1e-4
        found = guide(model.forward_nhwc, 3.0, None, drops=True)(x, t, given)
    torch.testing.assert_close(found, nothing + 3 * (zeros - nothing))
    with pytest.raises(ValueError, match="a vector is missing; the model has vector_dim=2"):
        model.forward_nhwc(x, t)
    with pytest.raises(ValueError, match=r"shape \(2, 2\); expected \(2, 2 \+ 1\)"):
        model.forward_nhwc(x, t, Conditions(vector=torch.zeros(2, 2)))


def test_vectors_by_the_kernels_and_by_pytorch(vector_run):
    """Forward and every gradient, in the interpreter."""
    models = [load_trained(vector_run, CPU).model.train() for _ in range(2)]
    set_backend(models[1], Backend("triton", triton_kernels))
    x, t = torch.randn(2, SIZE, SIZE, 3), torch.tensor([10, 900])
    given, outputs = Conditions(vector=torch.randn(2, 3)), []
    for model in models:
        torch.manual_seed(0)
        for p in model.parameters():
            p.data += 0.05 * torch.randn_like(p)
        outputs.append(model.forward_nhwc(x, t, given))
        outputs[-1].square().sum().backward()
    check_same(models, outputs)


@pytest.mark.long
def test_a_run_with_vectors_goes_on_and_knows_them(vector_run, pairs, tmp_path):
    row = evaluate({"ckpt": str(vector_run), "metrics": ["loss"], "device": "cpu"})
    trained = rows(vector_run / "held_out.csv")[-1]
    assert row["held_out"] == pytest.approx(float(trained["held_out"]), rel=1e-5)
    assert row["data"] == trained["data"]
    out = tmp_path / "model.pt2"
    export({"ckpt": str(vector_run), "format": "torch_export", "out": str(out)})
    model = load_trained(vector_run, CPU).model
    x, t, vector = torch.randn(3, 3, SIZE, SIZE), torch.arange(3), torch.randn(3, 2)
    expected = model(x, t, Conditions(vector=with_presence(vector)))
    found = torch.export.load(out).module()(x, t, vector)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="vector_dim=0"):
        export({"ckpt": str(vector_run), "format": "unet_cu", "out": str(tmp_path / "a.bin")})
    data = ("dataset=folder", f"dataset.path={pairs[0]}", f"dataset.size={SIZE}", *SMALL)
    data += ("model.condition_dropout=0.3", "dataset.held_out=4", "train.steps=3")
    np.save(tmp_path / "other.npy", np.zeros((24, 3), np.float32))
    with pytest.raises(ConfigError, match="trained with vectors of 2 numbers, .* has 3"):
        train(composed(*data, f"dataset.vectors={tmp_path}/other.npy"), vector_run)
    vectors = vector_run.parent / "vectors.npy"
    run_dir = tmp_path / "run"
    shutil.copytree(vector_run, run_dir)
    train(composed(*data, f"dataset.vectors={vectors}", "train.sample_every=0"), run_dir)
    assert rows(run_dir)[-1]["step"] == "3"


def test_vectors_that_do_not_fit_are_one_line(vector_run, pairs, tmp_path):
    for options, words in (
        ({}, "trained with vectors of 2 numbers: give vector="),
        ({"vector": [1.0, 2.0, 3.0]}, r"shape \[1, 3\]; expected 2 numbers, or a .npy of float32"),
        ({"vector": np.zeros((2, 2, 2))}, r"shape \[2, 2, 2\]; expected 2 numbers"),
        ({"vector": "nothing.npy"}, "does not exist; give 2 numbers"),
        ({"vector": ["a", "b"]}, "is no array"),
        ({"vector": [1.0, float("nan")]}, "not finite"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            drawn(vector_run, **options)
        assert "\n" not in str(caught.value)
    for vectors, words in (
        (np.zeros((3, 2)), r"is float64 of shape \[3, 2\]; expected numbers \[24, D\]"),
        (np.zeros(24), r"of shape \[24\]; expected numbers \[24, D\]"),
        (np.full((24, 2), np.nan), "not finite, first in 0"),
    ):
        np.save(tmp_path / "wrong.npy", vectors)
        with pytest.raises(ConfigError, match=words):
            load_dataset(
                "folder", path=str(pairs[0]), size=SIZE, vectors=str(tmp_path / "wrong.npy")
            )
