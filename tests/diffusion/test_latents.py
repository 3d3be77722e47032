"""Latents: encoded by an autoencoder of diffusers, drawn from their moments, decoded again."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import diffusion
from diffusion.data import load_dataset
from diffusion.data.autoencoder import Autoencoder, draw_codes
from diffusion.data.batches import Batches
from diffusion.data.packed import load_packed
from diffusion.data.parts import _Parts
from diffusion.data.values import Latents
from diffusion.errors import ConfigError
from diffusion.runs.evaluation import evaluate
from diffusion.runs.prepare import prepare
from diffusion.runs.sampling import sample
from triton_kernels import reference
from triton_kernels.noise.draw import normal
from triton_kernels.noise.philox import LATENT

diffusers = pytest.importorskip("diffusers")

CPU = torch.device("cpu")
TINY = {
    "name": "unet",
    "model_channels": 32,
    "channel_mult": [1, 2],
    "num_res_blocks": 1,
    "attention_resolutions": [],
}
QUICK = {"batch_size": 4, "sample_every": 0, "tensorboard": False, "precision": "fp32"}
SAMPLE = {"sampler": "ddim", "steps": 2, "device": "cpu", "precision": "fp32", "n": 3}


def autoencoder(folder, **changes):
    """A small one with random weights, which halves the sides once."""
    torch.manual_seed(0)
    settings = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (8, 16),
        "norm_num_groups": 4,
        "latent_channels": 4,
        "scaling_factor": 0.25,
        "shift_factor": 0.125,
    }
    vae = diffusers.AutoencoderKL(**settings | changes)
    vae.save_pretrained(folder)
    return vae.eval()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Photos of 16x16 in two classes, an autoencoder, and the file of latents."""
    folder = tmp_path_factory.mktemp("latents")
    vae = autoencoder(folder / "vae")
    noise = np.random.default_rng(0)
    for i in range(10):
        path = folder / "photos" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
    written(folder)
    return folder, vae


def written(folder, name="a.packed", **settings):
    settings = {"src": str(folder / "photos"), "encode": str(folder / "vae"), **settings}
    prepare(out=str(folder / name), device="cpu", **settings)
    return folder / name


def test_moments_are_those_of_diffusers(place):
    folder, vae = place
    data, photos = load_packed(folder / "a.packed"), load_dataset("folder", path=folder / "photos")
    data.check()
    assert data.image_shape == (8, 8, 4) and torch.equal(data.labels, photos.labels)
    assert data.class_names == ("a", "b") and isinstance(data.values, Latents)
    x = photos.images.permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        moments = vae.encode(x).latent_dist
    mean, log_variance = data.images[torch.arange(10)].permute(0, 3, 1, 2).chunk(2, dim=1)
    torch.testing.assert_close(mean, (moments.mean - 0.125) * 0.25, rtol=1e-4, atol=1e-5)
    deviation = torch.exp(0.5 * log_variance)
    torch.testing.assert_close(deviation, moments.std * 0.25, rtol=1e-4, atol=1e-6)


def test_channels_of_a_configuration_have_a_mean_each(tmp_path):
    autoencoder(tmp_path, latents_mean=[1.0, 2, 3, 4], latents_std=[1.0, 2, 4, 8])
    found = Autoencoder(tmp_path, CPU)
    assert (found.mean, found.deviation) == ([1, 2, 3, 4], [4, 8, 16, 32])


def test_codes_are_drawn_anew_from_their_moments():
    moments = torch.tensor([1.0, -2.0, 0.0, -1.5]).expand(2000, 2, 2, 4)
    codes = draw_codes(moments, torch.randn(2000, 2, 2, 2, generator=torch.manual_seed(0)))
    torch.testing.assert_close(codes.mean((0, 1, 2)), moments[0, 0, 0, :2], rtol=0, atol=0.05)
    wanted = torch.exp(0.5 * moments[0, 0, 0, 2:])
    torch.testing.assert_close(codes.std((0, 1, 2)), wanted, rtol=0.03, atol=0)


@pytest.mark.parametrize("ops", [reference.normal, normal], ids=["torch", "triton"])
def test_the_noise_of_a_code_is_that_of_its_place_in_the_batch(ops):
    """Another than that of x_t, and the same on both backends, in every process."""
    rng = torch.tensor([3, 7])
    whole = ops((6, 4, 4, 2), rng, stream=LATENT)
    part = ops((2, 4, 4, 2), rng, stream=LATENT, first=3)
    assert torch.equal(whole[3:5], part)
    torch.testing.assert_close(whole, reference.normal((6, 4, 4, 2), rng, stream=LATENT))
    assert not torch.allclose(whole, ops((6, 4, 4, 2), rng))


@pytest.mark.parametrize("resident_bytes", [0, 2**30], ids=["gathered", "resident"])
def test_a_step_sees_codes_and_not_moments(place, monkeypatch, resident_bytes):
    folder, _ = place
    data = load_packed(folder / "a.packed")
    batches = Batches(data, 4, 0, CPU, resident_bytes=resident_bytes)
    batches.load(5)
    images, index, _ = batches.part(1, 2)
    step = make_step(batches)
    step._rng.copy_(torch.tensor([0, 5]))
    codes = step._codes(images, index, 1)
    rows = data.images[torch.from_numpy(batches._indices(5)[1:3])]
    noise = reference.normal((2, 8, 8, 4), torch.tensor([0, 5]), stream=LATENT, first=1)
    assert batches.are_moments and torch.equal(codes, draw_codes(rows, noise))


def make_step(batches):
    """As far as codes are concerned."""
    from types import SimpleNamespace

    from diffusion.runtime.backend import TORCH_FP32
    from diffusion.training.train_step import TrainStep

    step = TrainStep.__new__(TrainStep)
    step.objective = SimpleNamespace(backend=TORCH_FP32)
    step.batches, step._rng = batches, torch.zeros(2, dtype=torch.int64)
    return step


@pytest.fixture(scope="module")
def trained(place):
    folder, vae = place
    dataset = diffusion.preset("dataset", "latents", path=str(folder / "a.packed"), held_out=2)
    settings = QUICK | {"steps": 4, "save_every": 2, "sample_every": 2, "sample_count": 2}
    settings |= {"sample_steps": 1}
    model = TINY | {"num_classes": 2}
    diffusion.train(folder / "run", dataset=dataset, model=model, device="cpu", **settings)
    return folder, vae


def test_what_is_drawn_is_decoded(trained):
    folder, vae = trained
    ckpt = {"ckpt": str(folder / "run"), **SAMPLE}
    sample(ckpt | {"out": str(folder / "x.npz")})
    sample(ckpt | {"out": str(folder / "x.npy"), "decoder": "none"})
    with np.load(folder / "x.npz") as file:
        images, labels = file["arr_0"], file["arr_1"]
    codes = torch.from_numpy(np.load(folder / "x.npy"))
    assert images.shape == (3, 16, 16, 3) and images.dtype == np.uint8
    assert labels.tolist() == [0, 1, 0] and codes.shape == (3, 8, 8, 4)
    with torch.no_grad():
        decoded = vae.decode(codes.permute(0, 3, 1, 2)).sample.permute(0, 2, 3, 1)
    wanted = ((decoded.clamp(-1, 1) + 1) * 127.5).round().numpy()
    assert np.abs(images - wanted).max() <= 1
    found = diffusion.load(folder / "run", device="cpu", precision="fp32")
    sampler = found.sampler(CPU, sampler="ddim", steps=2)
    x = sampler.sample(found.model.forward_nhwc, (3, 8, 8, 4), seed=0, labels=torch.arange(3) % 2)
    torch.testing.assert_close(codes, x / 0.25 + 0.125, rtol=1e-4, atol=1e-4)
    assert sampler.clip is None and np.array_equal(diffusion.sample(found, 3, steps=2), images)
    assert Image.open(folder / "run/samples/step_00000004.png").size[0] > 2 * 16
    out = sample(ckpt | {"out": str(folder / "pictures")})
    assert Image.open(out / "000002.png").size == (16, 16)


def test_images_are_encoded_to_begin_from(trained, tmp_path):
    """Pictures by the run's autoencoder, at their size; a code is drawn where a pixel of it is."""
    folder, _ = trained
    found = diffusion.load(folder / "run", device="cpu", precision="fp32")
    codes = Autoencoder(folder / "vae", CPU)
    photo = folder / "photos/a/0.png"
    pixels = np.array(Image.open(photo))[None]
    mean = codes.codes(torch.from_numpy(pixels)) / 0.25 + 0.125
    mask = np.zeros((16, 16), np.uint8)
    mask[5, 8] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    drawn = np.zeros((8, 8), bool)
    drawn[2, 4] = True
    options = {"sampler": "euler", "steps": 3, "decoder": "none"}
    for given in (photo, pixels, mean.numpy()):
        x = diffusion.sample(found, 2, init=given, mask=tmp_path / "mask.png", **options)
        np.testing.assert_allclose(x[:, ~drawn], mean[0][~drawn].expand(2, -1, -1), atol=1e-4)
        assert np.abs(x[0, drawn] - x[1, drawn]).max() > 0.1
    pictures = diffusion.sample(found, 2, steps=20, init=folder / "photos/b", strength=0.05)
    others = torch.from_numpy(load_dataset("folder", path=folder / "photos/b").images.numpy())
    decoded = (codes.decode(codes.codes(others) / 0.25 + 0.125).clamp(-1, 1).numpy() + 1) * 127.5
    for i in range(2):
        own, other = (np.abs(pictures[i] - decoded[k]).mean() for k in (i, 1 - i))
        assert own < 0.5 * other
    with pytest.raises(ConfigError, match="has to be encoded, and /nowhere is no folder"):
        lost = replace(found, values=replace(found.values, autoencoder="/nowhere"))
        diffusion.sample(lost, 1, steps=1, init=photo, decoder="none", strength=0.5)


def test_a_run_that_goes_on_ends_with_the_same_bits(trained, tmp_path):
    """Codes are a function of step and place, as all that is random."""
    folder, _ = trained
    run = tmp_path / "run"
    shutil.copytree(folder / "run", run)
    shutil.rmtree(run / "checkpoints/step_00000004")
    dataset = diffusion.preset("dataset", "latents", path=str(folder / "a.packed"), held_out=2)
    settings = QUICK | {"steps": 4, "save_every": 2, "sample_count": 0}
    model = TINY | {"num_classes": 2}
    diffusion.train(run, dataset=dataset, model=model, device="cpu", **settings)
    name = "checkpoints/step_00000004/model.safetensors"
    assert (run / name).read_bytes() == (folder / "run" / name).read_bytes()


def test_the_autoencoder_may_move_but_not_change(trained, tmp_path):
    folder, _ = trained
    shutil.copytree(folder / "vae", tmp_path / "moved")
    autoencoder(tmp_path / "other", scaling_factor=0.5)
    settings = QUICK | {"steps": 5, "sample_count": 0, "resume": str(folder / "run")}
    model = TINY | {"num_classes": 2}
    for name in ("moved", "other"):
        written(folder, f"{name}.packed", encode=str(tmp_path / name))
        dataset = diffusion.preset("dataset", "latents", path=str(folder / f"{name}.packed"))
        if name == "moved":
            diffusion.train(tmp_path / "a", dataset=dataset, model=model, device="cpu", **settings)
            values = diffusion.load(tmp_path / "a", device="cpu").values
            assert values.autoencoder == str(tmp_path / "moved")
            continue
        with pytest.raises(
            ConfigError, match="was trained on latents of .*moved|vae.* has latents"
        ):
            diffusion.train(tmp_path / "b", dataset=dataset, model=model, device="cpu", **settings)


def test_the_held_out_loss_is_of_codes(trained):
    folder, _ = trained
    ckpt = {"ckpt": str(folder / "run"), "device": "cpu", "precision": "fp32"}
    row = evaluate(ckpt | {"metrics": ["loss"]})
    assert row["images"] == 2 and np.isfinite(row["held_out"])
    for settings in ({}, {"reference": str(folder / "photos"), "metrics": ["fid", "loss"]}):
        with pytest.raises(ConfigError, match="give reference=FOLDER of the images, and loss in"):
            evaluate(ckpt | settings)


def test_without_the_autoencoder(trained, tmp_path):
    folder, _ = trained
    found = diffusion.load(folder / "run", device="cpu")
    found = replace(found, values=replace(found.values, autoencoder="/nowhere/vae"))
    with pytest.raises(ConfigError, match="/nowhere/vae is no .*; give decoder=FOLDER, or decoder"):
        diffusion.sample(found, 1, steps=1)
    diffusion.sample(found, 1, steps=1, decoder=str(folder / "vae"))
    ckpt = {"ckpt": str(folder / "run"), **SAMPLE}
    autoencoder(tmp_path / "other", layers_per_block=2)
    with pytest.warns(UserWarning, match="is not the autoencoder that encoded the data"):
        sample(ckpt | {"decoder": str(tmp_path / "other"), "out": str(tmp_path / "b.npz")})
    autoencoder(tmp_path / "wide", latent_channels=6)
    with pytest.warns(UserWarning), pytest.raises(ConfigError, match="decodes 6 channels; .* 4"):
        sample(ckpt | {"decoder": str(tmp_path / "wide")})


def test_wrong_settings_are_one_line(place, tmp_path):
    folder, _ = place
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet/config.json").write_text('{"_class_name": "UNet2DModel"}')
    for name, text in (
        ("empty", '{"_class_name": "AutoencoderKL"}'),
        ("endless", '{"_class_name": "AutoencoderKL", "layers_per_block": 10000000}'),
        ("deep", "[" * 100_000),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    for settings, message in (
        ({"encode": str(tmp_path / "nothing")}, "has no config.json"),
        ({"encode": str(tmp_path / "unet")}, "holds UNet2DModel; expected an AutoencoderKL"),
        ({"encode": str(tmp_path / "empty")}, "cannot be read as an autoencoder"),
        ({"encode": str(tmp_path / "endless")}, "layers_per_block=10000000; expected a whole"),
        ({"encode": str(tmp_path / "deep")}, "deep/config.json is damaged: maximum recursion"),
        ({"channels": 1}, "set channels=3, not 1"),
        ({"size": 15}, "multiples of 2; the images are 15x15"),
        ({"src": str(folder / "a.packed")}, "encode=.* is for images"),
        ({"name": "b.bin"}, "holds images of 8 bits; give out=FILE.packed"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            written(folder, **{"name": "b.packed", **settings})
        assert "\n" not in str(error.value)
    dataset = {"name": "packed", "path": str(folder / "a.packed")}
    with pytest.raises(ConfigError, match="set dataset.flip=false"):
        diffusion.train(tmp_path / "run", dataset=dataset, model=TINY, device="cpu", **QUICK)
    assert sorted(p.name for p in folder.iterdir() if "b." in p.name or "writing" in p.name) == []


def test_encoding_goes_on_after_a_kill(place, monkeypatch):
    folder, _ = place
    monkeypatch.setattr("diffusion.data.parts.PART", 4)
    whole = written(folder, "c.packed").read_bytes()

    class Killed(BaseException):
        pass

    def write(self, part, report, original=_Parts._write):
        if part == 2:
            raise Killed
        original(self, part, report)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(_Parts, "_write", write)
        written(folder, "d.packed")
    assert written(folder, "d.packed").read_bytes() == whole
