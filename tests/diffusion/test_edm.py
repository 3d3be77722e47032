"""EDM's preconditioning, loss and sampling (Karras et al., 2022): its equations, written out, and
the chains of diffusers' schedulers for it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import EDMDPMSolverMultistepScheduler, EDMEulerScheduler

from diffusion.errors import ConfigError
from diffusion.factory import Process
from diffusion.formats.diffusers_schedulers import scheduler_config
from diffusion.process.edm import DRAWS, normal_draws
from diffusion.process.objective import Objective
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32
from triton_kernels import reference
from triton_kernels.noise.philox import INITIAL

from .toy_chains import SEED, SHAPE, toy

CPU = torch.device("cpu")
RNG = torch.tensor([3, 7])
SAMPLERS = ("ddpm", "ddim", "heun", "dpmpp_2m")
EDM = {
    "schedule": "edm",
    "prediction": "v_prediction",
    "sigma_data": 0.5,
    "p_mean": -1.2,
    "p_std": 1.2,
}


# --- training -------------------------------------------------------------------------------------


def test_noise_levels_are_drawn_as_edm_draws_them():
    sigmas = make_schedule("edm", 1000).sigmas * 0.5
    np.testing.assert_allclose(sigmas[[0, -1]], (0.002, 80))
    np.testing.assert_allclose(np.diff(np.log(sigmas)), np.log(40000) / 999)
    drawn = np.log(sigmas[normal_draws(sigmas, -1.2, 1.2)])
    assert len(drawn) == DRAWS and abs(drawn.mean() + 1.2) < 1e-4 and abs(drawn.std() - 1.2) < 1e-4
    # whole deviations to either side, within half of a level
    for deviations, share in ((-2, 0.02275), (-1, 0.15866), (0, 0.5), (1, 0.84134), (3, 0.99865)):
        assert (drawn < -1.2 + 1.2 * deviations).mean() == pytest.approx(share, abs=0.002)


def test_the_loss_is_that_of_edm():
    process = Process(**EDM)
    objective = Objective(
        process.schedule, TORCH_FP32, "v_prediction", sigma_data=0.5, draws=process.draws()
    )
    images = torch.randint(256, (64, 4, 5, 3), dtype=torch.uint8)
    y, n = reference.gather_images(images), reference.normal(images.shape, RNG)
    seen = {}

    def network(x, t, labels):
        seen.update(x=x, t=t)
        return torch.sin(3 * x)

    loss, _ = objective.loss(network, images, RNG)
    sigma = torch.exp(4 * seen["t"].double())[:, None, None, None]
    assert sigma.std() > 0.1
    c_in = (sigma**2 + 0.25) ** -0.5
    torch.testing.assert_close(seen["x"].double(), c_in * (y + sigma * n), rtol=2e-6, atol=2e-6)
    # D = c_skip x + c_out F, weighted by 1 / c_out^2
    c_skip, c_out = 0.25 * c_in**2, 0.5 * sigma * c_in
    denoised = c_skip * (y + sigma * n) - c_out * torch.sin(3 * seen["x"].double())
    expected = ((denoised - y) ** 2 / c_out**2).mean(dim=(1, 2, 3))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_batch_may_be_split():
    process, images = Process(**EDM), torch.randint(256, (6, 4, 5, 3), dtype=torch.uint8)
    objective = Objective(
        process.schedule, TORCH_FP32, "v_prediction", sigma_data=0.5, draws=process.draws()
    )
    whole, _ = objective.loss(lambda x, *_: x, images, RNG)
    first, rest = (
        objective.loss(lambda x, *_: x, images[i:j], RNG, first=i)[0] for i, j in ((0, 2), (2, 6))
    )
    torch.testing.assert_close(torch.cat((first, rest)), whole)


@pytest.mark.gpu
def test_backends_agree():
    import triton_kernels

    process = Process(**EDM)
    objectives = [
        Objective(
            process.schedule, backend, "v_prediction", device="cuda", sigma_data=0.5,
            draws=process.draws(),
        )
        for backend in (TORCH_FP32, replace(TORCH_FP32, name="triton", ops=triton_kernels))
    ]  # fmt: skip
    images, rng = torch.randint(256, (64, 4, 5, 3), dtype=torch.uint8).cuda(), RNG.cuda()
    losses = [
        objective.loss(lambda x, t, _: torch.sin(x + t[:, None, None, None]), images, rng)[0]
        for objective in objectives
    ]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [("ddim", EDMEulerScheduler), ("dpmpp_2m", EDMDPMSolverMultistepScheduler)],
)
def test_chains_of_diffusers(name, kind):
    """Its schedulers keep levels and c_noise in float32: they are given what they are told here."""
    steps = 18
    sampler = Process(**EDM).sampler(TORCH_FP32, CPU, sampler=name, steps=steps, clip=None)
    scheduler = kind(prediction_type="v_prediction")  # sigma_data 0.5, 0.002 to 80, Karras' levels
    scheduler.set_timesteps(steps)
    sigmas = np.append(0.5 * sampler.schedule.sigmas[::-1], 0)
    np.testing.assert_allclose(scheduler.sigmas, sigmas, rtol=1e-5)
    torch.testing.assert_close(
        scheduler.timesteps.float(),
        sampler.timesteps.float(),
        rtol=1e-5,
        atol=1e-6,
    )
    scheduler.sigmas = torch.tensor(sigmas)
    denoiser = toy("v_prediction", False)
    noise = reference.normal(SHAPE, torch.tensor([SEED, 0]), stream=INITIAL).double()
    x = noise.permute(0, 3, 1, 2) * sigmas[0]
    for told, t in zip(sampler.timesteps, scheduler.timesteps, strict=True):
        given = scheduler.scale_model_input(x, t).permute(0, 2, 3, 1)
        output = denoiser(given, told.expand(len(x))).permute(0, 3, 1, 2)
        x = scheduler.step(output, t, x).prev_sample
    start = noise * sigmas[0] / (sigmas[0] ** 2 + 0.25) ** 0.5
    ours = sampler.sample(denoiser, SHAPE, seed=SEED, x=start.float())
    torch.testing.assert_close(ours.double(), x.permute(0, 2, 3, 1).double(), rtol=2e-5, atol=2e-5)


def test_heun_is_its_algorithm_1():
    """With F and the preconditioning of table 1, from sigma = 80 in 18 steps with rho = 7."""
    steps, denoiser = 18, toy("v_prediction", False)
    sampler = Process(**EDM).sampler(TORCH_FP32, CPU, sampler="heun", steps=steps, clip=None)
    ramp = torch.arange(steps, dtype=torch.float64) / (steps - 1)
    t = (80 ** (1 / 7) + ramp * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    torch.testing.assert_close(sampler.timesteps[::2].double(), t.log() / 4, rtol=1e-5, atol=1e-6)

    def derivative(x, sigma):
        c_in = (sigma**2 + 0.25) ** -0.5
        told = (sigma.log() / 4).expand(len(x))
        denoised = 0.25 * c_in**2 * x - 0.5 * sigma * c_in * denoiser(c_in * x, told)
        return (x - denoised) / sigma

    noise = reference.normal(SHAPE, torch.tensor([SEED, 0]), stream=INITIAL)
    x, t = noise.double() * t[0], torch.cat((t, t.new_zeros(1)))
    for now, then in zip(t[:-1], t[1:], strict=True):
        d = derivative(x, now)
        further = x + (then - now) * d
        if then > 0:
            further = x + (then - now) * (d + derivative(further, then)) / 2
        x = further
    start = (noise * 80 / (80**2 + 0.25) ** 0.5).float()
    ours = sampler.sample(denoiser, SHAPE, seed=SEED, x=start)
    torch.testing.assert_close(ours.double(), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("schedule", ["linear", "edm"])
def test_sigma_data_is_the_unit_of_the_images(name, prediction, schedule):
    """A chain in units of 0.5 is that in units of 1, but for the unit of what comes out."""
    options = {"sampler": name, "steps": 9, "spacing": "karras"}
    process = {"schedule": schedule, "prediction": prediction}
    scaled = Process(**process, sigma_data=0.5).sampler(TORCH_FP32, CPU, **options, clip=0.5)
    whole = Process(**process).sampler(TORCH_FP32, CPU, **options, clip=1.0)
    if schedule == "edm":  # the levels depend on it, too
        whole.schedule, whole.timesteps = scaled.schedule, scaled.timesteps
        whole.rows = torch.tensor(whole.table(), dtype=torch.float32)
    denoiser = toy(prediction, False)
    ours, units = (s.sample(denoiser, SHAPE, seed=SEED) for s in (scaled, whole))
    torch.testing.assert_close(ours, 0.5 * units, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_perfect_denoiser_gives_back_the_image(name):
    sampler = Process(**EDM).sampler(TORCH_FP32, CPU, sampler=name, steps=6)
    y = torch.linspace(-0.9, 0.9, 2 * 3 * 5 * 3).view(SHAPE)

    def denoiser(x, t, labels):  # v of x in units of 0.5
        alpha = 0.5 / (torch.exp(8 * t.double()) + 0.25).sqrt()[:, None, None, None]
        return (alpha * x - 2 * y) / (1 - alpha**2).sqrt()

    torch.testing.assert_close(
        sampler.sample(denoiser, SHAPE, seed=SEED).float(), y, rtol=0, atol=2e-3
    )


def test_samplers_take_its_levels_unless_told_otherwise():
    process = Process(**EDM)
    assert process.sampler(TORCH_FP32, CPU, sampler="heun", steps=4).spacing == "karras"
    named = process.sampler(TORCH_FP32, CPU, sampler="ddim", steps=4, spacing="leading")
    assert named.spacing == "leading"
    assert Process().sampler(TORCH_FP32, CPU, sampler="ddim", steps=4).spacing == "guided"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sigma_data": 0}, "sigma_data=0; expected a number above 0"),
        ({"prediction": "sample"}, "goes with prediction epsilon or v_prediction"),
        ({"variance": "learned_range"}, "these are v_prediction and learned_range"),
        ({"p_std": None}, "p_mean and diffusion.p_std go together"),
        ({"p_std": 0.0}, "p_std above 0"),
        ({"sigma_min": 90.0}, "sigma_min=90.0 and sigma_max=80.0 are not possible"),
        (
            {"num_timesteps": 1},
            "num_timesteps=1 is not possible; give a whole number",
        ),
        ({"beta_start": 0.1}, "schedule=edm has no option beta_start"),
        ({"schedule": "linear", "sigma_max": 9.0}, "schedule=linear has no option sigma_max"),
    ],
    ids=str,
)
def test_wrong_settings(options, words):
    with pytest.raises(ConfigError, match=words):
        Process(**EDM | options)


def test_diffusers_has_no_such_ddpm_scheduler():
    with pytest.raises(ConfigError, match="diffusion=edm cannot be written"):
        scheduler_config(Process(**EDM))
