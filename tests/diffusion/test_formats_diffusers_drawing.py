"""Directories of diffusers: what is drawn from them is what its pipelines draw."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMPipeline,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    HeunDiscreteScheduler,
)
from diffusers.pipelines.ddim import pipeline_ddim
from diffusers.pipelines.ddpm import pipeline_ddpm
from diffusers.schedulers import scheduling_ddpm

from diffusion.errors import ConfigError
from diffusion.formats.trained import load_trained
from diffusion.process.schedule import NoiseSchedule
from diffusion.runs.sampling import sample
from diffusion.runtime.backend import TORCH_FP32
from triton_kernels import reference
from triton_kernels.noise.philox import INITIAL, REVERSE

from .diffusers_models import CPU, OURS, TOLERANCE, ours, theirs, written

SEED = 11


@pytest.fixture
def same_noise(monkeypatch):
    """diffusers draws this project's noise: the initial image, then that of each step."""
    drawn = []

    def normal(shape, *_, **__) -> torch.Tensor:
        n, c, h, w = shape
        k = len(drawn) - 1
        rng, stream = torch.tensor([SEED, max(k, 0)]), REVERSE if drawn else INITIAL
        drawn.append(k)
        return reference.normal((n, h, w, c), rng, stream=stream).permute(0, 3, 1, 2)

    for module in (pipeline_ddpm, pipeline_ddim, scheduling_ddpm):
        monkeypatch.setattr(module, "randn_tensor", normal)


@pytest.mark.parametrize("process", [{}, OURS["film, residual blocks resample"][1]])
@pytest.mark.parametrize("kind", ["ddpm", "ddim"])
def test_pipelines_draw_the_same_images(tmp_path, same_noise, kind, process):
    trained = ours(process=process)
    pipeline = DDPMPipeline.from_pretrained(written(tmp_path, trained))
    options = {}
    if kind == "ddim":
        if process:
            pytest.skip("DDIMPipeline has no learned variance")
        scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
        pipeline = DDIMPipeline(pipeline.unet, scheduler)
        options = {"use_clipped_model_output": False}
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(batch_size=2, num_inference_steps=10, output_type="np").images
    sampler = load_trained(tmp_path, CPU).process.sampler(
        TORCH_FP32, CPU, sampler=kind, steps=10, spacing="leading", **options
    )
    x = sampler.sample(trained.model.forward_nhwc, (2, 8, 8, 3), seed=SEED)
    expected = (x / 2 + 0.5).clamp(0, 1).numpy()
    assert np.linalg.norm(images - expected) < TOLERANCE * np.linalg.norm(expected)
    assert images.std() > 0.1


@pytest.mark.parametrize("kind", ["ddim", "ddpm"])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_what_is_drawn_is_what_their_pipeline_draws(tmp_path, same_noise, spacing, kind):
    """By sample.py as it is called, with images that are clipped, levels that do not join, and
    noise in a last step."""
    if kind == "ddim":
        pipeline = DDIMPipeline(theirs(), DDIMScheduler(timestep_spacing=spacing))
    else:
        scheduler = DDPMScheduler(timestep_spacing=spacing, variance_type="fixed_large")
        pipeline = DDPMPipeline(theirs(), scheduler)
    pipeline.save_pretrained(tmp_path)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(batch_size=2, num_inference_steps=7, output_type="np").images
    settings = {"ckpt": str(tmp_path), "n": 2, "steps": 7, "seed": SEED, "device": "cpu"}
    settings |= {"sampler": kind}
    drawn = np.load(sample(settings | {"out": str(tmp_path / "a.npz")}))["arr_0"]
    assert np.abs(drawn - images * 255).max() < 0.51  # of rounding to levels of 255
    settings |= {"spacing": "leading" if spacing == "trailing" else "trailing"}
    other = np.load(sample(settings | {"out": str(tmp_path / "b.npz")}))
    assert not np.array_equal(other["arr_0"], drawn)


@torch.no_grad()
def test_heun_begins_where_their_scheduler_begins(tmp_path):
    """Of betas whose x_T is not all noise."""
    betas = {"beta_schedule": "scaled_linear", "beta_start": 1e-4, "beta_end": 2e-3}
    scheduler = HeunDiscreteScheduler(**betas, clip_sample=True, timestep_spacing="linspace")
    network = theirs().eval()
    network.save_pretrained(tmp_path / "unet")
    scheduler.save_pretrained(tmp_path / "scheduler")
    trained = load_trained(tmp_path, CPU)
    sampler = trained.sampler(CPU, sampler="heun", steps=3)
    ours = sampler.sample(trained.model.forward_nhwc, (2, 8, 8, 3), seed=SEED)
    scheduler.set_timesteps(3)
    noise = reference.normal((2, 8, 8, 3), torch.tensor([SEED, 0]), stream=INITIAL)
    x = noise.permute(0, 3, 1, 2) * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        x = scheduler.step(network(scheduler.scale_model_input(x, t), t).sample, t, x).prev_sample
    x = x.permute(0, 2, 3, 1)
    assert (ours - x).norm() < TOLERANCE * x.norm()


def test_sample_from_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "model", ours())
    settings = {"ckpt": "model", "n": 2, "steps": 2, "device": "cpu"}
    assert sample(settings) == Path("model_ddim2_0.png")
    assert Path("model_ddim2_0.png").is_file()
    with pytest.raises(ConfigError, match="model says its own"):
        sample(settings | {"model": {"name": "unet"}})
    with pytest.raises(ConfigError, match=r"size=\[16, 16\], but model was trained at \[8, 8\]"):
        sample(settings | {"size": 16})


def test_a_model_without_a_scheduler(tmp_path):
    theirs(sample_size=None).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="does not say the size of its images: give size="):
        load_trained(tmp_path, CPU)
    found = load_trained(tmp_path, CPU, size=16, diffusion={"schedule": "cosine"})
    assert found.image_shape == (16, 16, 3)
    np.testing.assert_array_equal(found.process.schedule.betas, NoiseSchedule.cosine(1000).betas)


def test_other_limits_of_x0_are_said(tmp_path):
    folder = written(tmp_path, ours())
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"clip_sample": False}))
    with pytest.warns(UserWarning, match="sampling with clip=null"):
        load_trained(folder, CPU)
