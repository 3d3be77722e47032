"""Heun and DPM-Solver++(2M): whole chains of diffusers, the papers' algorithms, convergence.

diffusers' schedulers keep alpha_bar and the noise levels in float32, which alone moves a chain of
the cosine schedule by up to 8e-3: the first levels are 2e4 and x_0 is a difference at that scale.
So they are given the same numbers in float64, and the arithmetic is left to compare.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    HeunDiscreteScheduler,
)

from diffusion.errors import ConfigError
from diffusion.factory import make_sampler
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32
from diffusion.sampling.solvers import dpmpp_2m_table, heun_table
from triton_kernels import reference
from triton_kernels.noise.philox import INITIAL

from .toy_chains import SEED, SHAPE, compare, exact, toy

BETAS = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
PREDICTIONS = ["epsilon", "sample", "v_prediction"]
SPACINGS = ["leading", "trailing", "linspace", "karras"]
STEPS = 20


def _noise():
    """x_T, float64 NCHW."""
    x = reference.normal(SHAPE, torch.tensor([SEED, 0]), stream=INITIAL)
    return x.double().permute(0, 3, 1, 2)


def _ask(denoiser, x, t):
    """The denoiser over NCHW."""
    return denoiser(x.permute(0, 2, 3, 1), t.expand(len(x))).permute(0, 3, 1, 2)


def _begin(scheduler, sampler, sigmas, timestep_error):
    """Start a chain of diffusers on the sampler's levels, which are its own up to rounding."""
    scheduler.set_timesteps(STEPS)
    scheduler.set_begin_index(0)  # and not where a timestep that occurs twice occurs second
    np.testing.assert_allclose(scheduler.sigmas, sigmas, rtol=1e-6)
    assert (scheduler.timesteps - sampler.timesteps).abs().max() <= timestep_error
    scheduler.sigmas = torch.tensor(sigmas)
    scheduler.timesteps = sampler.timesteps


def _spacing(spacing):
    karras = spacing == "karras"
    return {"use_karras_sigmas": karras, "timestep_spacing": "linspace" if karras else spacing}


# --- DPM-Solver++(2M) -----------------------------------------------------------------------------


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("lower_order_final", [True, False])
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_dpmpp_2m_chain_of_diffusers(name, lower_order_final, clip, prediction, spacing):
    schedule = make_schedule(name, 1000)
    scheduler = DPMSolverMultistepScheduler(
        1000,
        beta_schedule=BETAS[name],
        prediction_type=prediction,
        thresholding=clip is not None,
        lower_order_final=lower_order_final,
        **_spacing(spacing),
    )
    denoiser = toy(prediction, False)
    sampler = make_sampler(
        schedule, TORCH_FP32, "dpmpp_2m", steps=STEPS, spacing=spacing, clip=clip,
        prediction=prediction,
    )  # fmt: skip
    # the documented difference: with karras and cosine it truncates the timesteps
    truncated = name == "cosine" and spacing == "karras"
    exact(scheduler, schedule)
    _begin(scheduler, sampler, np.append(sampler.schedule.sigmas[::-1], 0), float(truncated))
    x = _noise()
    for t in scheduler.timesteps:
        x = scheduler.step(_ask(denoiser, x, t), t, x).prev_sample
    compare(sampler.sample(denoiser, SHAPE, seed=SEED), x.permute(0, 2, 3, 1))


@pytest.mark.parametrize("spacing", SPACINGS[:3])
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_dpmpp_2m_chain_of_diffusers_as_it_is(steps, prediction, spacing):
    """Short chains, and float32 constants, which the linear schedule bears."""
    scheduler = DPMSolverMultistepScheduler(
        1000, prediction_type=prediction, timestep_spacing=spacing
    )
    scheduler.set_timesteps(steps)
    denoiser, x = toy(prediction, False), _noise()
    for t in scheduler.timesteps:
        x = scheduler.step(_ask(denoiser, x, t), t, x).prev_sample
    sampler = make_sampler(
        make_schedule("linear", 1000), TORCH_FP32, "dpmpp_2m", steps=steps, spacing=spacing,
        clip=None, prediction=prediction,
    )  # fmt: skip
    assert sampler.timesteps.tolist() == scheduler.timesteps.tolist()
    compare(sampler.sample(denoiser, SHAPE, seed=SEED), x.permute(0, 2, 3, 1))


def test_dpmpp_2m_in_the_formulation_of_edm():
    """diffusers' solver for EDM's networks, which lives on x / alpha and has no schedule."""
    schedule = make_schedule("linear", 1000)
    sampler = make_sampler(
        schedule, TORCH_FP32, "dpmpp_2m", steps=STEPS, spacing="karras", clip=None,
        prediction="sample",
    )  # fmt: skip
    scheduler = EDMDPMSolverMultistepScheduler(
        sigma_min=schedule.sigmas[0], sigma_max=schedule.sigmas[-1], sigma_data=0.5
    )
    scheduler.set_timesteps(STEPS)
    sigmas = np.append(sampler.schedule.sigmas[::-1], 0)
    np.testing.assert_allclose(scheduler.sigmas, sigmas, rtol=2e-6)
    scheduler.sigmas = torch.tensor(sigmas)
    denoiser, x = toy("sample", False), _noise() * (1 + sigmas[0] ** 2) ** 0.5
    steps = zip(scheduler.timesteps, sampler.timesteps, sigmas[:-1], strict=True)
    for theirs, ours, sigma in steps:
        denoised = _ask(denoiser, x / (1 + sigma**2) ** 0.5, ours)
        c_skip = 0.25 / (sigma**2 + 0.25)
        c_out = sigma * 0.5 / (sigma**2 + 0.25) ** 0.5
        x = scheduler.step((denoised - c_skip * x) / c_out, theirs, x).prev_sample
    compare(sampler.sample(denoiser, SHAPE, seed=SEED), x.permute(0, 2, 3, 1))


# --- Heun -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_heun_chain_of_diffusers(name, clip, prediction, spacing):
    schedule = make_schedule(name, 1000)
    scheduler = HeunDiscreteScheduler(
        1000,
        beta_start=1e-4,
        beta_end=0.02,
        beta_schedule=BETAS[name],
        prediction_type=prediction,
        clip_sample=clip is not None,
        **_spacing(spacing),
    )
    denoiser = toy(prediction, False)
    sampler = make_sampler(
        schedule, TORCH_FP32, "heun", steps=STEPS, spacing=spacing, clip=clip,
        prediction=prediction,
    )  # fmt: skip
    assert sampler.num_steps == 2 * STEPS - 1
    sigmas = sampler.schedule.sigmas[::-1]
    exact(scheduler, schedule)
    _begin(scheduler, sampler, np.append(np.repeat(sigmas, 2)[1:], 0), 1e-4)
    x = _noise() * (1 + sigmas[0] ** 2) ** 0.5
    for t in scheduler.timesteps:
        output = _ask(denoiser, scheduler.scale_model_input(x, t), t)
        x = scheduler.step(output, t, x).prev_sample
    compare(sampler.sample(denoiser, SHAPE, seed=SEED), x.permute(0, 2, 3, 1))


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("name", ["linear", "scaled_linear"])
def test_heun_chain_of_diffusers_from_its_own_start(name, spacing):
    """As its pipelines begin, with the ends of Rombach et al., whose x_T is not all noise."""
    schedule = make_schedule(name, 1000, beta_start=8.5e-4, beta_end=0.012)
    scheduler = HeunDiscreteScheduler(1000, beta_schedule=name, **_spacing(spacing))
    sampler = make_sampler(
        schedule, TORCH_FP32, "heun", steps=STEPS, spacing=spacing, clip=None, noise_alone=True
    )
    sigmas = np.append(np.repeat(sampler.schedule.sigmas[::-1], 2)[1:], 0)
    exact(scheduler, schedule)
    _begin(scheduler, sampler, sigmas, 1e-4)
    denoiser, x = toy("epsilon", False), _noise() * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        output = _ask(denoiser, scheduler.scale_model_input(x, t), t)
        x = scheduler.step(output, t, x).prev_sample
    compare(sampler.sample(denoiser, SHAPE, seed=SEED), x.permute(0, 2, 3, 1))


@pytest.mark.parametrize("steps", [1, 2, 9])
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_heun_is_algorithm_1_of_edm(name, spacing, steps):
    """Karras et al., 2022, with s(t) = 1 and sigma(t) = t, and no churn. In float64: so few steps
    over so many orders of magnitude amplify the last bits."""
    sampler = make_sampler(
        make_schedule(name, 1000), replace(TORCH_FP32, dtype=torch.float64), "heun", steps=steps,
        spacing=spacing, prediction="sample",
    )  # fmt: skip
    sampler.rows = torch.tensor(sampler.table())
    sampler.timesteps = sampler.timesteps.double()
    denoiser, told = toy("sample", False), sampler.timesteps[::2]
    t = torch.tensor([*sampler.schedule.sigmas[::-1], 0])

    def derivative(x, i):
        x_0 = _ask(denoiser, x / (1 + t[i] ** 2).sqrt(), told[i]).clamp(-1, 1)
        return (x - x_0) / t[i]

    x = _noise() * (1 + t[0] ** 2).sqrt()
    for i in range(steps):
        d = derivative(x, i)
        x_next = x + (t[i + 1] - t[i]) * d
        if t[i + 1] != 0:
            x_next = x + (t[i + 1] - t[i]) * (d + derivative(x_next, i + 1)) / 2
        x = x_next
    ours = sampler.sample(denoiser, SHAPE, seed=SEED, x=_noise().permute(0, 2, 3, 1))
    torch.testing.assert_close(ours, x.permute(0, 2, 3, 1), rtol=1e-9, atol=1e-9)


# --- properties -----------------------------------------------------------------------------------


def _errors(name, steps):
    """Errors of chains of so many steps for data N(0, 0.5^2), whose ODE has a closed form: x_0 is
    s^2 / (s^2 + sigma^2) y, and y(sigma) proportional to sqrt(s^2 + sigma^2), with y = x / alpha.
    The last step, to sigma = 0, is the same for all."""
    variance, errors = 0.25, []
    for count in steps:
        sampler = make_sampler(
            make_schedule("linear", 1000), TORCH_FP32, name, steps=count, spacing="karras",
            clip=None, prediction="sample",
        )  # fmt: skip
        sigmas = torch.tensor(sampler.schedule.sigmas[::-1].copy())
        in_turn = iter(sigmas.repeat_interleave(2)[1:] if name == "heun" else sigmas)

        def denoiser(x, t, labels, in_turn=in_turn):
            sigma = next(in_turn)
            return x * variance / (variance + sigma**2) * (1 + sigma**2).sqrt()

        x = _noise().permute(0, 2, 3, 1).float()
        got = sampler.sample(denoiser, SHAPE, seed=SEED, x=x)
        first, last = sigmas[0], sigmas[-1]
        y = x * (1 + first**2).sqrt() * ((variance + last**2) / (variance + first**2)).sqrt()
        exact = y * variance / (variance + last**2)
        errors.append(((got - exact).norm() / exact.norm()).item())
    return np.array(errors)


def test_order_of_convergence():
    """Halving the steps' size quarters the error of a solver of second order and halves DDIM's."""
    steps = (16, 32, 64)
    first, heun, dpmpp = (_errors(name, steps) for name in ("ddim", "heun", "dpmpp_2m"))
    assert ((1.8 < first[:-1] / first[1:]) & (first[:-1] / first[1:] < 2.3)).all(), first
    assert (heun[:-1] / heun[1:] > 3.5).all() and heun[-1] < first[-1] / 5, heun
    assert (dpmpp[:-1] / dpmpp[1:] > 3.5).all() and dpmpp[-1] < first[-1] / 5, dpmpp


@pytest.mark.parametrize("table", [heun_table, dpmpp_2m_table])
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_rows_keep_the_signal(table, name):
    """If every x_0 is the image, x_t = alpha_t x_0 + ... goes on to alpha_{t-1} x_0 + ..."""
    schedule = make_schedule(name, 1000).respace(30)
    alpha = np.sqrt(schedule.alphas_cumprod)
    rows = table(schedule, "sample")
    if table is heun_table:
        np.testing.assert_allclose(rows[1::2, 2] + rows[1::2, 4], 0, atol=1e-12)
        rows = rows[::2]
    c, d, e = rows[:, 2], rows[:, 3], rows[:, 4]
    np.testing.assert_allclose(c + d * alpha[::-1] + e, np.append(alpha[-2::-1], 1), rtol=1e-9)


def test_the_second_half_of_a_learned_variance_is_unused():
    for name in ("heun", "dpmpp_2m"):
        chains = [
            make_sampler(
                make_schedule("cosine", 100), TORCH_FP32, name, steps=5, variance=variance
            ).sample(toy("epsilon", variance == "learned_range"), SHAPE, seed=SEED)
            for variance in ("fixed_small", "learned_range")
        ]
        assert torch.equal(*chains)


@pytest.mark.parametrize("name", ["ddpm", "ddim", "heun", "dpmpp_2m"])
def test_karras_levels_serve_every_sampler(name):
    sampler = make_sampler(
        make_schedule("linear", 200), TORCH_FP32, name, steps=7, spacing="karras"
    )
    assert sampler.timesteps.is_floating_point() == (name == "heun")
    x = sampler.sample(toy("epsilon", False), SHAPE, seed=SEED)
    assert torch.isfinite(x).all() and x.abs().max() <= 1.001


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "dpmpp_2m", "eta": 0.5}, "eta=0.5 has no meaning with sampler=dpmpp_2m"),
        ({"sampler": "heun", "eta": 1.0}, "use sampler=ddim"),
        ({"sampler": "heun", "clip": "yes"}, "clip=yes"),
        ({"sampler": "dpmpp_2m", "steps": 100, "spacing": "linspace"}, "give 1 to 99"),
        ({"sampler": "heun", "steps": "ten", "spacing": "karras"}, "steps=ten"),
        ({"sampler": "heun", "steps": 0, "spacing": "linspace"}, "steps=0"),
        ({"sampler": "heun", "spacing": "even"}, "spacing=even is unknown"),
    ],
)
def test_errors_name_the_value(options, message):
    with pytest.raises(ConfigError, match=message):
        make_sampler(make_schedule("linear", 100), TORCH_FP32, **options)


@pytest.mark.long
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_few_steps_of_a_solver_are_worth_more_of_ddim(name):
    """With the spacing each has by itself, on a mixture of narrow Gaussians, where every chain has
    a known limit: that of 500 steps of Heun."""
    schedule = make_schedule(name, 1000)
    log_sigmas = np.log(schedule.sigmas)
    centres = torch.tensor([-0.8, -0.3, 0.1, 0.7])

    def denoiser(x, t, labels):
        variance = np.exp(2 * np.interp(t[0], np.arange(1000), log_sigmas))
        y = x.double() * (1 + variance) ** 0.5
        total = 0.05**2 + variance
        weights = torch.softmax(-((y[..., None] - centres) ** 2) / (2 * total), dim=-1)
        x_0 = (weights * (centres * variance + y[..., None] * 0.05**2) / total).sum(-1)
        return ((y - x_0) / variance**0.5).float()

    shape = (32, 4, 4, 1)

    def chain(sampler, steps, spacing=None):
        made = make_sampler(schedule, TORCH_FP32, sampler, steps=steps, spacing=spacing)
        return made.sample(denoiser, shape, seed=SEED)

    limit = chain("heun", 500, "linspace")
    error = {
        (sampler, steps): (chain(sampler, steps) - limit).abs().mean()
        for sampler, steps in (("ddim", 20), ("dpmpp_2m", 20), ("ddim", 50), ("heun", 25))
    }
    assert error["dpmpp_2m", 20] < 0.9 * error["ddim", 20]
    if name == "cosine":
        assert error["heun", 25] < error["ddim", 50]
