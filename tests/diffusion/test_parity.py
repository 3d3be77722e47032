"""Chains of diffusers that its pipelines hardly make: few steps, all the steps, spacings that do
not divide the chain, other names of a variance. More are in test_sampler_parity.py and in
test_solvers.py.

In float64 on both sides, so that the arithmetic alone is compared, and over any number of steps.
"""

from dataclasses import replace

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler

from diffusion.factory import make_sampler
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32
from triton_kernels import reference
from triton_kernels.noise.philox import INITIAL

from .toy_chains import SEED, SHAPE, chain_of_diffusers, exact, silent_at, toy

BETAS = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
SPACINGS = ["leading", "trailing", "linspace"]
PREDICTIONS = ["epsilon", "sample", "v_prediction"]


def chain(name, sampler, denoiser, **options):
    """Ours in float64: the noise alone is float32, as on the other side."""
    made = make_sampler(
        make_schedule(name, 1000), replace(TORCH_FP32, dtype=torch.float64), sampler, **options
    )
    made.rows = torch.tensor(made.table())
    x = reference.normal(SHAPE, torch.tensor([SEED, 0]), stream=INITIAL).double()
    return made, made.sample(denoiser, SHAPE, seed=SEED, x=x)


def same(ours, theirs, tolerance):
    assert torch.isfinite(theirs).all()
    error = (ours - theirs).norm() / theirs.norm()
    assert error <= tolerance, f"relative error {error:.1e}"


@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("variance", ["fixed_small", "fixed_small_log", "fixed_large"])
def test_ddpm_of_any_length(variance, spacing, steps, monkeypatch):
    if steps == 1 and spacing == "linspace":
        pytest.skip("diffusers' one step of linspace starts at 0, this project's at the end")
    if steps == 1000 and (variance, spacing) != ("fixed_large", "leading"):
        pytest.skip("one chain of a thousand steps will do")
    denoiser = toy("epsilon", False)
    ours = variance.removesuffix("_log")
    made, x = chain("linear", "ddpm", denoiser, steps=steps, spacing=spacing, variance=ours)
    scheduler = DDPMScheduler(1000, variance_type=variance, timestep_spacing=spacing)
    last = int(made.timesteps[-1])
    if last > 0:  # the documented difference: diffusers adds noise in a last step above 0
        monkeypatch.setattr(scheduler, "_get_variance", silent_at(scheduler, last, learned=False))
    exact(scheduler, make_schedule("linear", 1000))
    scheduler.betas = 1 - scheduler.alphas_cumprod[1:] / scheduler.alphas_cumprod[:-1]
    theirs = chain_of_diffusers(scheduler, denoiser, SHAPE, steps, monkeypatch)
    assert made.timesteps.tolist() == scheduler.timesteps.tolist()
    same(x, theirs, 1e-9)


class Gap:
    """Stands for the number of steps where DDIMScheduler takes T // steps for the distance of two
    timesteps; here it is what the distance is."""

    def __init__(self, distance):
        self.distance = distance

    def __rfloordiv__(self, total):
        return self.distance


@pytest.mark.parametrize("steps", [2, 49])
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize(("eta", "clip"), [(0.0, 1.0), (0.3, None)])
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_ddim_of_any_spacing(name, eta, clip, prediction, spacing, steps, monkeypatch):
    """The scheduler's own arithmetic from each timestep to the next that is visited."""
    denoiser = toy(prediction, False)
    made, x = chain(
        name, "ddim", denoiser, steps=steps, spacing=spacing, clip=clip, eta=eta,
        prediction=prediction, use_clipped_model_output=False,
    )  # fmt: skip
    scheduler = DDIMScheduler(
        1000,
        beta_schedule=BETAS[name],
        clip_sample=clip is not None,
        prediction_type=prediction,
        timestep_spacing=spacing,
    )
    exact(scheduler, make_schedule(name, 1000))
    scheduler.final_alpha_cumprod = torch.tensor(1.0, dtype=torch.float64)
    visited = [*made.timesteps.tolist(), -1]
    step = scheduler.step

    def along(output, t, *args, **kwargs):
        k = visited.index(int(t))
        scheduler.num_inference_steps = Gap(visited[k] - visited[k + 1])
        return step(output, t, *args, **kwargs)

    monkeypatch.setattr(scheduler, "step", along)
    theirs = chain_of_diffusers(scheduler, denoiser, SHAPE, steps, monkeypatch, eta=eta)
    assert visited[:-1] == scheduler.timesteps.tolist()
    # x_0 from epsilon is a difference at the scale of sigma
    same(x, theirs, 1e-9 + 2**-52 * made.schedule.sigmas.max() ** 2)
