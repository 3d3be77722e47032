"""Rectified flow: its equations, written out, and the whole chains of diffusers' schedulers."""

import json
import math

import numpy as np
import pytest
import torch
from diffusers import DDPMPipeline, FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler

from diffusion.errors import ConfigError
from diffusion.export.run import export
from diffusion.factory import Process
from diffusion.formats.diffusers_directory import read_diffusers
from diffusion.formats.trained import load_trained
from diffusion.policies.policy import load_policy
from diffusion.process.edm import normal_draws
from diffusion.process.objective import Objective
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32
from triton_kernels import reference
from triton_kernels.noise.philox import INITIAL

from . import test_export
from .test_export import checkpoint, policy_checkpoint
from .toy_chains import SEED, SHAPE, compare, toy

CPU = torch.device("cpu")
RNG = torch.tensor([3, 7])
FLOW = {"schedule": "flow", "prediction": "velocity"}
LOGIT_NORMAL = FLOW | {"p_mean": 0.5, "p_std": 0.8}


def objective_of(process):
    return Objective(
        process.schedule, TORCH_FP32, process.prediction, draws=process.draws(),
        weights=process.weights(),
    )  # fmt: skip


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [FLOW, FLOW | {"shift": 3.0}, LOGIT_NORMAL], ids=str)
def test_the_loss_is_that_of_the_velocity(settings):
    images = torch.randint(256, (64, 4, 5, 3), dtype=torch.uint8)
    x_0, noise = reference.gather_images(images), reference.normal(images.shape, RNG)
    seen = {}

    def network(x, t, labels):
        seen.update(x=x, t=t)
        return torch.sin(3 * x)

    loss, _ = objective_of(Process(**settings)).loss(network, images, RNG)
    t = (seen["t"].double() / 1000)[:, None, None, None]
    assert t.std() > 0.1
    torch.testing.assert_close(seen["x"].double(), (1 - t) * x_0 + t * noise, rtol=2e-6, atol=2e-6)
    expected = (torch.sin(3 * seen["x"].double()) - (noise - x_0)).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("total", [10, 1000])
def test_times_are_drawn_evenly_or_logit_normal(total):
    schedule = make_schedule("flow", total)
    np.testing.assert_allclose(schedule.times, np.arange(1, total + 1) / total)
    assert schedule.timestep_map.tolist() == list(range(1, total + 1))
    assert Process(**FLOW, num_timesteps=total).draws() is None
    drawn = schedule.times[Process(**LOGIT_NORMAL, num_timesteps=total).draws()]
    assert drawn.max() < 1  # where a logit-normal has no density
    if total == 1000:
        logit = np.log(drawn / (1 - drawn))
        assert abs(logit.mean() - 0.5) < 2e-3 and abs(logit.std() - 0.8) < 2e-3
        for deviations, share in ((-2, 0.02275), (0, 0.5), (1, 0.84134), (3, 0.99865)):
            assert (logit < 0.5 + 0.8 * deviations).mean() == pytest.approx(share, abs=0.003)


def test_a_shift_moves_levels_and_not_what_is_drawn():
    """Half of the draws of a centred logit-normal are below t = 1/2, which a shift of 3 moves to
    3/4: Esser et al., 2024, eq. 23, for 9 times as many pixels."""
    schedule, plain = make_schedule("flow", 1000, shift=3.0), make_schedule("flow", 1000)
    t = plain.times
    np.testing.assert_allclose(schedule.times, 3 * t / (1 + 2 * t))
    assert schedule.times[499] == pytest.approx(0.75)
    draws = Process(**FLOW, p_mean=0.0, p_std=1.0, shift=3.0).draws()
    assert np.array_equal(draws, normal_draws(plain.sigmas, 0.0, 1.0))
    assert np.median(schedule.times[draws]) == pytest.approx(0.75, abs=1e-3)


@pytest.mark.parametrize(
    ("weights", "of_snr"),
    [
        ({"min_snr_gamma": 5.0}, lambda snr: np.minimum(snr, 5)),
        ({"soft_min_snr_gamma": 4.0}, lambda snr: 4 * snr / (4 + snr)),
        ({"p2_gamma": 1.0}, lambda snr: snr / (1 + snr)),
        ({"p2_gamma": 0.5, "p2_k": 3.0}, lambda snr: snr / np.sqrt(3 + snr)),
    ],
    ids=["min-SNR", "soft min-SNR", "P2", "P2 of k=3"],
)
@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction", "velocity"])
def test_weights_are_on_the_error_of_x0(weights, of_snr, prediction):
    schedule = "flow" if prediction == "velocity" else "cosine"
    process = Process(schedule=schedule, num_timesteps=50, prediction=prediction, **weights)
    signal, noise = process.schedule.signal_and_noise
    snr, (_, b) = (signal / noise) ** 2, process.schedule.x0_from_output(prediction)
    np.testing.assert_allclose(process.weights(), of_snr(snr) * b**2, rtol=1e-9)
    # of an error of 1 in the output, x_0 says another by b
    images, t = torch.rand(4, 3, 5, 3), torch.tensor([0, 20, 48, 49])
    loss, parts = objective_of(process).loss(lambda x, *_: x, images, RNG, t=t)
    expected = parts["mse"] * torch.tensor(process.weights()[t.numpy()]).float()
    torch.testing.assert_close(loss, expected)


def test_p2_of_epsilon_is_what_its_paper_says():
    """1 / (k + SNR)^gamma on the plain error of epsilon."""
    process = Process(schedule="linear", p2_gamma=1.0, p2_k=2.0)
    np.testing.assert_allclose(process.weights(), 1 / (2 + process.schedule.snr))


def test_the_best_velocity_is_that_of_the_data():
    """For images of one value each, x_0 = mu: v = (x_t - mu) / t has no error."""
    images = torch.full((64, 2, 2, 1), 0.3)

    def exact(x, t, labels):
        return (x - 0.3) / (t.float() / 1000)[:, None, None, None]

    loss, _ = objective_of(Process(**FLOW)).loss(exact, images, RNG)
    assert loss.max() < 1e-8


# --- sampling -------------------------------------------------------------------------------------


def chain_of(scheduler, denoiser, steps, sigmas=None):
    """The loop of diffusers' pipelines."""
    scheduler.set_timesteps(steps, **({} if sigmas is None else {"sigmas": sigmas}))
    noise = reference.normal(SHAPE, torch.tensor([SEED, 0]), stream=INITIAL)
    x = noise.permute(0, 3, 1, 2)
    for t in scheduler.timesteps:
        output = denoiser(x.permute(0, 2, 3, 1), t.expand(len(x))).permute(0, 3, 1, 2)
        x = scheduler.step(output, t, x).prev_sample
    return x.permute(0, 2, 3, 1)


def sampler_of(shift, **options):
    process = Process(**FLOW, shift=shift)
    return process.sampler(TORCH_FP32, CPU, clip=None, **options)


@pytest.mark.parametrize("steps", [1, 2, 20, 50])
@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("spacing", [None, "trailing", "karras"])
def test_euler_is_that_of_diffusers(steps, shift, spacing):
    scheduler = FlowMatchEulerDiscreteScheduler(
        1000, shift=shift, use_karras_sigmas=spacing == "karras"
    )
    if spacing == "karras" and steps == 1:
        pytest.skip("diffusers divides by steps - 1")
    sigmas = np.linspace(1, 1 / steps, steps) if spacing == "trailing" else None  # Flux's pipeline
    denoiser = toy("v_prediction", False)
    expected = chain_of(scheduler, denoiser, steps, sigmas)
    sampler = sampler_of(shift, sampler="euler", steps=steps, spacing=spacing)
    assert (sampler.timesteps - scheduler.timesteps).abs().max() < 1e-3  # of 1000, in float32
    compare(sampler.sample(denoiser, SHAPE, seed=SEED), expected)


@pytest.mark.parametrize("steps", [10, 20])  # of fewer float32 leaves both 3e-5: 1 / t is 1,000
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_heun_is_that_of_diffusers(steps, shift):
    denoiser = toy("v_prediction", False)
    expected = chain_of(FlowMatchHeunDiscreteScheduler(1000, shift=shift), denoiser, steps)
    sampler = sampler_of(shift, sampler="heun", steps=steps)
    compare(sampler.sample(denoiser, SHAPE, seed=SEED), expected)


def test_ddim_without_noise_is_euler():
    chains = [
        sampler_of(2.0, sampler=name, steps=10).sample(toy("v_prediction", False), SHAPE, seed=1)
        for name in ("ddim", "euler")
    ]
    assert torch.equal(*chains)
    process = Process(schedule="cosine")
    chains = [
        process.sampler(TORCH_FP32, CPU, sampler=name, steps=10, spacing="leading").sample(
            toy("epsilon", False), SHAPE, seed=1
        )
        for name in ("ddim", "euler")
    ]
    torch.testing.assert_close(*chains, rtol=1e-3, atol=1e-3)  # DDIM has a rounding of its own


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_2m"])
def test_chains_end_in_the_data(sampler):
    """Of x_0 ~ N(mu, s^2), whose flow is known: x_0 = mu + s x_1 for x_1 at t = 1."""
    mu, s = 0.3, 0.5

    def exact(x, t, labels):
        t = (t.double() / 1000)[:, None, None, None]
        variance = (1 - t) ** 2 * s**2 + t**2
        mean_of_x0 = mu + (1 - t) * s**2 / variance * (x - (1 - t) * mu)
        return (x - mean_of_x0) / t

    x = reference.normal(SHAPE, torch.tensor([SEED, 0]), stream=INITIAL)
    errors = []
    for steps in (20, 40, 80):
        drawn = sampler_of(1.0, sampler=sampler, steps=steps, spacing="trailing").sample(
            exact, SHAPE, seed=SEED
        )
        errors.append((drawn - (mu + s * x)).abs().max().item())
    order = math.log2(errors[0] / errors[-1]) / 2
    assert errors[-1] < 0.03 and order > 0.9, errors


def test_an_image_is_clipped():
    denoiser = toy("v_prediction", False)
    kept = Process(**FLOW).sampler(TORCH_FP32, CPU, sampler="euler", steps=20, clip=0.2)
    x = kept.sample(denoiser, SHAPE, seed=SEED)
    assert x.abs().max() <= 0.2 + 1e-6  # the last step gives x_0 itself


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"prediction": "epsilon"},
            "prediction=epsilon is wrong with diffusion.schedule=flow",
        ),
        ({"variance": "learned_range"}, "diffusion.variance=learned_range is wrong with"),
        ({"shift": 0}, "diffusion.shift=0 is not possible; give a number above 0"),
        ({"beta_start": 0.1}, "schedule=flow has no option beta_start; it has shift"),
        ({"sigma_data": 0.5}, "diffusion.sigma_data=0.5 is not for a flow"),
        ({"schedule": "cosine"}, "diffusion.prediction=velocity is wrong with .*schedule=cosine"),
        ({"schedule": "cosine", "prediction": "epsilon", "shift": 3}, "cosine has no option shift"),
        ({"p2_k": 1.0}, "diffusion.p2_k=1.0 goes with diffusion.p2_gamma"),
        ({"p2_gamma": 1.0, "min_snr_gamma": 5}, "min_snr_gamma and diffusion.p2_gamma are both"),
        ({"soft_min_snr_gamma": -1}, "min_snr_gamma=-1; expected a number above 0, such as 5"),
        (
            {"timestep_sampler": "loss"},
            "timestep_sampler=loss is unknown; choose one of null,",
        ),
        (
            {"timestep_sampler": "loss_second_moment", "num_timesteps": 5000},
            "at most 4096 timesteps; diffusion.num_timesteps=5000",
        ),
        (
            {"timestep_sampler": "loss_second_moment", "p_mean": 0.0, "p_std": 1.0},
            "both say how timesteps are drawn; set p_mean and p_std to null",
        ),
    ],
    ids=str,
)
def test_wrong_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        Process(**(FLOW | settings))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": "ddpm"}, "sampler=ddpm draws noise in every step.*choose one of euler, heun"),
        ({"sampler": "ddim", "eta": 0.5}, "eta=0.5 has no meaning with a flow"),
        ({"sampler": "euler", "spacing": "guided"}, "spacing=guided is not for a flow; choose one"),
        ({"sampler": "euler", "steps": "ddim10"}, "steps=ddim10 is not possible"),
        ({"sampler": "euler", "steps": 0}, "steps=0 is not possible"),
    ],
    ids=str,
)
def test_wrong_samplers(options, message):
    with pytest.raises(ConfigError, match=message):
        Process(**FLOW).sampler(TORCH_FP32, CPU, **options)


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Of a flow with a shift."""
    model = test_export.MODEL | {"conv_resample": True}
    monkeypatch.setattr(test_export, "MODEL", model)
    return checkpoint(tmp_path / "run", diffusion=FLOW | {"shift": 2.0})


def test_a_directory_of_diffusers_draws_the_same(run, tmp_path):
    out = tmp_path / "directory"
    export({"ckpt": str(run), "format": "diffusers", "out": str(out)})
    process = read_diffusers(out, ema=True).process
    assert process.is_flow and process.schedule.shift == 2 and process.prediction == "velocity"
    trained = load_trained(out, CPU)
    sampler = trained.sampler(CPU, sampler="ddim", steps=5, clip=None)
    x = torch.randn(2, 8, 8, 3, generator=torch.manual_seed(0))
    ours = sampler.sample(trained.model.forward_nhwc, x.shape, seed=0, x=x)
    pipeline = DDPMPipeline.from_pretrained(out)
    assert type(pipeline.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    pipeline.scheduler.set_timesteps(5)
    theirs = x.permute(0, 3, 1, 2)
    with torch.no_grad():
        for t in pipeline.scheduler.timesteps:
            output = pipeline.unet(theirs, t).sample
            theirs = pipeline.scheduler.step(output, t, theirs).prev_sample
    torch.testing.assert_close(ours, theirs.permute(0, 2, 3, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("option", ["use_dynamic_shifting", "shift_terminal", "invert_sigmas"])
def test_flows_of_diffusers_that_are_none_here(run, tmp_path, option):
    out = tmp_path / "directory"
    export({"ckpt": str(run), "format": "diffusers", "out": str(out)})
    path = out / "scheduler" / "scheduler_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {option: True}))
    with pytest.raises(ConfigError, match=f"has {option}=true, which no flow here has"):
        load_trained(out, CPU)
    path.write_text(json.dumps(config | {"shift": "large"}))
    with pytest.raises(ConfigError, match="num_train_timesteps=1000 and shift=large; expected"):
        load_trained(out, CPU)


@pytest.mark.long
def test_an_exported_program_says_the_times(tmp_path):
    out, shifted = tmp_path / "denoiser.pt2", FLOW | {"shift": 2.0}
    run = checkpoint(tmp_path / "run", diffusion=shifted, **test_export.ONE_LEVEL)
    export({"ckpt": str(run), "format": "torch_export", "out": str(out)})
    extra = {"denoiser.json": ""}
    torch.export.load(out, extra_files=extra)
    about = json.loads(extra["denoiser.json"])
    t = np.arange(1, 1001) / 1000
    np.testing.assert_allclose(about["flow_times"], 2 * t / (1 + t))
    assert about["prediction"] == "velocity" and "betas" not in about


def test_weights_for_programs_without_flows_say_so(run, tmp_path):
    with pytest.warns(UserWarning, match="trained with a schedule that is not .*prediction=veloc"):
        export({"ckpt": str(run), "format": "guided_diffusion", "out": str(tmp_path / "a.pt")})


def test_a_policy_acts_by_euler(tmp_path):
    path = policy_checkpoint(tmp_path / "run", diffusion=FLOW | {"num_timesteps": 10})
    policy = load_policy(path, device="cpu")
    assert type(policy.sampler).__name__ == "Euler"
    actions = policy.act(np.zeros((2, 2, 3), np.float32), seed=0)
    assert actions.shape == (2, 1, 2) and actions.isfinite().all()
