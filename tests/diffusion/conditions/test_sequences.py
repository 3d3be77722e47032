"""Networks that are given sequences of vectors: what they learn, how they draw, what is refused."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

import triton_kernels
from diffusion.data import load_dataset
from diffusion.data.batches import Batches
from diffusion.errors import ConfigError
from diffusion.export import run as export_run
from diffusion.export.graph import OnnxGraph
from diffusion.export.run import export
from diffusion.formats.trained import load_trained
from diffusion.models.conditions import Conditions, with_null_token
from diffusion.models.layers import set_backend
from diffusion.runs.evaluation import evaluate
from diffusion.runs.sampling import sample
from diffusion.runs.training import train
from diffusion.runtime.backend import Backend
from diffusion.sampling.guidance import guide

from ...end_to_end.run import rows
from ...test_configs import composed
from .runs import (
    CPU,
    SIZE,
    SMALL,
    check_goes_on,
    check_same,
    drawn,
    high_noise_loss,
    pixels,
    telling,
    words,
)


def test_a_network_uses_the_sequence_that_it_is_given(tmp_path):
    """Whose tokens say which of four places of a picture have which colour, in any order, so that
    a place has to find its token."""
    random, half = np.random.default_rng(1), SIZE // 2
    pictures = np.zeros((48, SIZE, SIZE, 1), np.float32)
    tokens, lengths = np.zeros((48, 4, 5), np.float32), np.zeros(48, np.int64)
    for i in range(48):
        places = random.permutation(4)[: random.integers(1, 5)]
        lengths[i] = len(places)
        for j, place in enumerate(places):
            colour = random.choice([-1.0, 1.0])
            y, x = divmod(place, 2)
            pictures[i, y * half :, x * half :][:half, :half] = colour
            tokens[i, j, place], tokens[i, j, 4] = 1, colour
    np.save(tmp_path / "pictures.npy", pictures)
    np.savez(tmp_path / "words.npz", tokens=tokens, lengths=lengths)
    data = ("dataset=array", f"dataset.path={tmp_path}/pictures.npy", "dataset.layout=nhwc")
    data += ("dataset.standardise=false", "dataset.held_out=8")
    data += (f"dataset.context={tmp_path}/words.npz", "model.context_resolutions=[1]")
    learning = ("train.steps=90", "train.batch_size=16", "optim.lr=1e-2", "optim.warmup=5")
    learning += ("optim.ema_decay=0.9", "train.sample_every=0", "train.eval_every=90")
    train(composed(*data, *SMALL, *learning, "train.log_every=90"), tmp_path / "run")
    # x_t tells the mean of the pixels of a place; the best guess that is linear in it
    variance, sigma = (pictures**2).mean(), 3.5 * (10 / 3.5) ** np.array([0.25, 0.75])
    told = sigma**2 / half**2
    unconditional = (4 * variance * told / (variance + told)).mean()
    assert high_noise_loss(tmp_path / "run") < 0.35 * unconditional


def test_sequences_are_files_and_arrays(context_run, tmp_path):
    tokens, lengths = words(2, most=7, seed=3)
    np.savez(tmp_path / "two.npz", tokens=tokens, lengths=lengths)
    images = drawn(context_run, context=tmp_path / "two.npz")
    apart = [x[:length] for x, length in zip(tokens, lengths, strict=True)]
    assert np.array_equal(images, drawn(context_run, context=apart))
    one = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    np.save(tmp_path / "one.npy", one)
    found = [drawn(context_run, context=x) for x in (tmp_path / "one.npy", one, one[None])]
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    out = tmp_path / "drawn.npz"
    config = {"ckpt": str(context_run), "n": 3, "steps": 2, "device": "cpu", "seed": 1}
    sample(config | {"out": str(out), "context": str(tmp_path / "one.npy")})
    assert np.array_equal(np.load(out)["arr_0"], found[0])
    drawn(context_run, context=one, guidance=2.0)
    one_by_one = drawn(context_run, context=apart, batch_size=1)
    assert np.abs(one_by_one.astype(int) - images).max() <= 1


def test_guidance_goes_away_from_no_sequence(context_run):
    model = telling(load_trained(context_run, CPU).model)
    x, t = torch.randn(2, SIZE, SIZE, 3), torch.tensor([10, 900])
    tokens = with_null_token(torch.randn(2, 3, 4), torch.tensor([3, 1]))
    given = Conditions(None, None, None, *tokens)
    with torch.no_grad():
        told, nothing = (model.forward_nhwc(x, t, g) for g in (given, given.none()))
        assert (told - nothing).abs().amax((1, 2, 3)).min() > 1e-3
        found = guide(model.forward_nhwc, 3.0, None, drops=True)(x, t, given)
    torch.testing.assert_close(found, nothing + 3 * (told - nothing))


def test_sequences_by_the_kernels_and_by_pytorch(context_run):
    """Forward and every gradient, in the interpreter."""
    models = [telling(load_trained(context_run, CPU).model.train()) for _ in range(2)]
    set_backend(models[1], Backend("triton", triton_kernels))
    x, t, outputs = torch.randn(2, SIZE, SIZE, 3), torch.tensor([10, 900]), []
    tokens = with_null_token(torch.randn(2, 3, 4), torch.tensor([3, 0]))
    for model in models:
        outputs.append(model.forward_nhwc(x, t, Conditions(None, None, None, *tokens)))
        outputs[-1].square().sum().backward()
    check_same(models, outputs)


@pytest.mark.long
def test_a_run_with_sequences_is_evaluated_and_exported(context_run, tmp_path, monkeypatch):
    row = evaluate({"ckpt": str(context_run), "metrics": ["loss"], "device": "cpu"})
    trained = rows(context_run / "held_out.csv")[-1]
    assert row["held_out"] == pytest.approx(float(trained["held_out"]), rel=1e-5)
    assert row["data"] == trained["data"]
    out = tmp_path / "model.pt2"
    export({"ckpt": str(context_run), "format": "torch_export", "out": str(out)})
    model = load_trained(context_run, CPU).model
    x, t = torch.randn(3, 3, SIZE, SIZE), torch.arange(3)
    tokens, lengths = torch.randn(3, 9, 4), torch.tensor([9, 0, 2])
    given = Conditions(None, None, None, *with_null_token(tokens, lengths))
    found = torch.export.load(out).module()(x, t, tokens, lengths)
    torch.testing.assert_close(found, model(x, t, given), atol=1e-5, rtol=1e-5)
    if find_spec("onnxruntime") is not None:
        out = tmp_path / "model.onnx"
        export({"ckpt": str(context_run), "format": "onnx", "out": str(out)})
        found = OnnxGraph(out)(x, t, tokens, lengths)
        torch.testing.assert_close(found, model(x, t, given), atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(export_run, "require_tensorrt", lambda: None)
    with pytest.raises(ConfigError, match="would have a number of tokens of its own; leave it out"):
        config = {"format": "onnx", "out": str(tmp_path / "a.onnx"), "engine": "a.engine"}
        export({"ckpt": str(context_run)} | config)
    for format, name in (("unet_cu", "a.bin"), ("diffusers", "b")):
        with pytest.raises(ConfigError, match="context_dim=4|context_dim=0"):
            export({"ckpt": str(context_run), "format": format, "out": str(tmp_path / name)})


def test_a_run_with_sequences_goes_on_as_if_it_had_not_stopped(pairs, tmp_path):
    tokens, lengths = words(24)
    np.savez(tmp_path / "words.npz", tokens=tokens, lengths=lengths)
    more = ("model.condition_dropout=0.3", "train.sample_every=0", "train.eval_every=0")
    settings = ("dataset=folder", f"dataset.path={pairs[0]}", f"dataset.size={SIZE}", *SMALL)
    settings += (*more, f"dataset.context={tmp_path}/words.npz", "dataset.flip=true")
    check_goes_on(settings, tmp_path)
    np.save(tmp_path / "wide.npy", np.zeros((24, 2, 6), np.float32))
    with pytest.raises(ConfigError, match="trained with tokens of 4 numbers, .* has 6"):
        other = (f"dataset.context={tmp_path}/wide.npy", "train.steps=5")
        train(composed(*settings, *other), tmp_path / "parts")


@pytest.mark.parametrize("zipped", [False, True], ids=["mapped", "compressed"])
def test_a_large_set_of_sequences_stays_on_disk(zipped, tmp_path):
    """And is gathered with its images, to the same batches."""
    tokens, lengths = words(20)
    np.save(tmp_path / "pictures.npy", pixels(20))
    save = np.savez_compressed if zipped else np.savez
    save(tmp_path / "words.npz", tokens=tokens, lengths=lengths)
    options = {"path": str(tmp_path / "pictures.npy"), "context": str(tmp_path / "words.npz")}
    data = load_dataset("array", layout="nhwc", **options)
    assert isinstance(data.context.rows, np.memmap) != zipped
    found = []
    for most in (2**30, data.images.nbytes):
        batches = Batches(data, 8, 3, CPU, 2, 6, resident_bytes=most)
        assert batches.resident == (most == 2**30)
        for step in range(2):
            batches.load(step)
            found.append([part.clone() for part in batches.sequences(1, 4)])
    for resident, gathered in zip(found[:2], found[2:], strict=True):
        assert resident[0].dtype == torch.float16
        for a, b in zip(*(with_null_token(*x) for x in (resident, gathered)), strict=True):
            assert torch.equal(a, b)


def test_sequences_that_do_not_fit_are_one_line(context_run, image_run, pairs, tmp_path):
    for options, said in (
        ({}, "trained with sequences of tokens of 4 numbers: give context=a .npy"),
        ({"context": np.zeros((2, 3), np.float32)}, "tokens of 3 numbers; expected a .npy"),
        ({"context": np.zeros((2, 2, 2, 4))}, r"\[2, 2, 2, 4\]; expected a .npy"),
        ({"context": "nothing.npy"}, "does not exist"),
        ({"context": [np.zeros((2, 4)), np.zeros((2, 5))]}, r"of shapes \[2, 4\], \[2, 5\]"),
        ({"context": [["a"]]}, "is no sequence of vectors"),
        ({"context": np.full((1, 2, 4), np.nan, np.float32)}, "not finite, first of sample 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            drawn(context_run, **options)
    with pytest.raises(ConfigError, match="trained without one; leave it out"):
        drawn(image_run, condition=pairs[1], context=np.zeros((2, 4), np.float32))
    good = np.zeros((24, 2, 4), np.float32)
    for arrays, said in (
        ({"a": good[:5]}, r"shape \[5, 2, 4\]; expected \[24, L, D\], a sequence for each image"),
        ({"a": good[:, 0]}, r"float32 \[24, 4\]; expected \[24, L, D\]"),
        ({"a": good, "b": good}, "holds a, b; expected a .npy"),
        ({"lengths": np.zeros(24, int)}, "holds lengths; expected a .npy"),
        ({"a": good, "lengths": np.zeros(3, int)}, r"lengths are int64 \[3\]; expected whole"),
        ({"a": good, "lengths": np.full(24, 3)}, "lengths are 3 to 3; expected 0 to 2"),
        ({"a": good, "lengths": np.zeros(24)}, r"lengths are float64 \[24\]; expected whole"),
    ):
        np.savez(tmp_path / "wrong.npz", **arrays)
        with pytest.raises(ConfigError, match=said):
            load_dataset(
                "folder", path=str(pairs[0]), size=SIZE, context=str(tmp_path / "wrong.npz")
            )
