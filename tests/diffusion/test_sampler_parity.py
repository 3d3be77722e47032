"""Samplers beside others: recorded steps of guided-diffusion, whole chains of diffusers."""

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from diffusion.factory import make_sampler
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32
from triton_kernels import reference
from triton_kernels.noise.philox import REVERSE

from .toy_chains import SEED, SHAPE, chain_of_diffusers, compare, exact, toy

if find_spec("diffusers"):  # a machine that runs the tests marked gpu alone may lack it
    from diffusers import DDIMScheduler, DDPMScheduler


def _nhwc(x):
    return x.permute(0, 2, 3, 1).contiguous()


# --- guided-diffusion -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, steps, variance",
    [
        pytest.param("linear_1000", None, "fixed_small", id="linear_1000"),
        pytest.param("linear_learned_250", "250", "learned_range", id="linear_learned_250"),
    ],
)
@pytest.mark.parametrize(
    "recorded, options",
    [
        ("p_sample", {}),
        ("mean", {}),
        ("ddim_eta0", {"sampler": "ddim"}),
        ("ddim_eta1", {"sampler": "ddim", "eta": 1.0}),
    ],
)
def test_recorded_step(golden, monkeypatch, name, steps, variance, recorded, options):
    g = load_file(golden / f"process_{name}.safetensors")
    xt, output, z = _nhwc(g["xt"]), _nhwc(g["model_output"]), _nhwc(g["z"])
    expected = _nhwc(g[recorded])
    sampler = make_sampler(
        make_schedule("linear", 1000), TORCH_FP32, steps=steps, variance=variance, **options
    )
    if recorded == "mean":
        z = torch.zeros_like(z)
    for n, t in enumerate(g["t"].tolist()):
        one = slice(n, n + 1)
        monkeypatch.setattr(reference, "normal", lambda *_, one=one, **__: z[one])
        row = torch.tensor([sampler.num_steps - 1 - t])
        seen = []

        def denoiser(x, timesteps, labels, one=one, seen=seen):
            seen.append(timesteps)
            return output[one]

        x = sampler.step(denoiser, xt[one], row, torch.tensor([0, 0]))
        torch.testing.assert_close(x, expected[one], rtol=1e-5, atol=1e-5)
        assert seen[0].tolist() == [g["timestep_map"][t].item()]


# --- diffusers ------------------------------------------------------------------------------------

SPACINGS = ("leading", "trailing", "linspace")
PREDICTIONS = ("epsilon", "sample", "v_prediction")
VARIANCES = ("fixed_small", "fixed_large", "learned_range")


@pytest.mark.parametrize(
    ("variance", "prediction", "spacing"),
    # a Latin square: every pair of two options once
    [(VARIANCES[(i + j) % 3], PREDICTIONS[i], SPACINGS[j]) for i in range(3) for j in range(3)],
)
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_ddpm_chain_of_diffusers(name, clip, variance, prediction, spacing, monkeypatch):
    schedule = make_schedule(name, 1000)
    scheduler = DDPMScheduler(
        1000,
        beta_schedule={"linear": "linear", "cosine": "squaredcos_cap_v2"}[name],
        variance_type=variance,
        clip_sample=clip is not None,
        prediction_type=prediction,
        timestep_spacing=spacing,
    )
    denoiser = toy(prediction, variance == "learned_range")
    if name == "cosine":
        scheduler = exact(scheduler, schedule)
    expected = chain_of_diffusers(scheduler, denoiser, SHAPE, 50, monkeypatch)
    sampler = make_sampler(
        schedule, TORCH_FP32, "ddpm", steps=50, spacing=spacing, clip=clip,
        prediction=prediction, variance=variance, noisy_end=True,
    )  # fmt: skip
    compare(sampler.sample(denoiser, SHAPE, seed=SEED), expected)


@pytest.mark.parametrize(
    "spacing, total", [("leading", 1000), ("trailing", 1000), ("linspace", 50)]
)
@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize(
    ("eta", "clip", "use_clipped_model_output"),
    # every pair of two options
    [(0.0, 1.0, True), (0.0, None, False), (1.0, 1.0, False), (1.0, None, True)],
)
def test_ddim_chain_of_diffusers(
    use_clipped_model_output, clip, eta, prediction, spacing, total, monkeypatch
):
    # diffusers' DDIM joins the timesteps of linspace only if it visits all of them
    schedule = make_schedule("linear", total, beta_start=1e-4, beta_end=0.02)
    scheduler = DDIMScheduler(
        total,
        clip_sample=clip is not None,
        prediction_type=prediction,
        timestep_spacing=spacing,
    )
    denoiser = toy(prediction, False)
    expected = chain_of_diffusers(
        scheduler, denoiser, SHAPE, 50, monkeypatch, eta=eta,
        use_clipped_model_output=use_clipped_model_output,
    )  # fmt: skip
    sampler = make_sampler(
        schedule, TORCH_FP32, "ddim", steps=50, spacing=spacing, clip=clip, eta=eta,
        prediction=prediction, use_clipped_model_output=use_clipped_model_output,
    )  # fmt: skip
    compare(sampler.sample(denoiser, SHAPE, seed=SEED), expected)


@pytest.mark.parametrize("steps", [7, 30])
@pytest.mark.parametrize("spacing", ["trailing", "linspace"])
@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize("clip", [1.0, None])
def test_ddim_chain_of_diffusers_whose_levels_do_not_join(
    clip, eta, prediction, spacing, steps, monkeypatch
):
    schedule = make_schedule("linear", 1000)
    scheduler = DDIMScheduler(
        clip_sample=clip is not None, prediction_type=prediction, timestep_spacing=spacing
    )
    denoiser = toy(prediction, False)
    expected = chain_of_diffusers(scheduler, denoiser, SHAPE, steps, monkeypatch, eta=eta)
    joined, theirs = (
        make_sampler(
            schedule, TORCH_FP32, "ddim", steps=steps, spacing=spacing, clip=clip, eta=eta,
            prediction=prediction, use_clipped_model_output=False, joined=joined,
        ).sample(denoiser, SHAPE, seed=SEED)
        for joined in (True, False)
    )  # fmt: skip
    compare(theirs, expected)
    assert (joined - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("steps", [2, 3, 50])
def test_ddim_chain_of_diffusers_over_levels_close_to_zero(steps, spacing, monkeypatch):
    """1 - alpha_bar of 4e-5, of which float32 would keep three digits, with epsilon made again."""
    schedule = make_schedule("cosine", 1000)
    scheduler = DDIMScheduler(
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        timestep_spacing=spacing,
    )
    denoiser, options = toy("v_prediction", False), {"eta": 1.0, "use_clipped_model_output": True}
    expected = chain_of_diffusers(
        exact(scheduler, schedule), denoiser, SHAPE, steps, monkeypatch, **options
    )
    sampler = make_sampler(
        schedule, TORCH_FP32, "ddim", steps=steps, spacing=spacing, prediction="v_prediction",
        joined=False, **options,
    )  # fmt: skip
    compare(sampler.sample(denoiser, SHAPE, seed=SEED), expected)


@pytest.mark.parametrize(
    ("steps", "spacing"), [(20, "karras"), ("5,5,10", "guided"), (7, "guided")], ids=str
)
def test_levels_join_in_spacings_that_diffusers_does_not_have(steps, spacing):
    """Whose steps are not T // steps apart: chains of levels that do not meet end in noise."""
    options = {"steps": steps, "spacing": spacing, "use_clipped_model_output": False}
    joined, theirs = (
        make_sampler(make_schedule("linear", 1000), TORCH_FP32, "ddim", joined=joined, **options)
        for joined in (True, False)
    )
    assert torch.equal(joined.rows, theirs.rows)


OTHERS = {
    "diffusion policy": ("cosine", 100, 100, 1.0, "epsilon", "fixed_small"),
    "scaled linear": ("scaled_linear", 100, 16, 0.5, "v_prediction", "fixed_large"),
    "sigmoid": ("sigmoid", 333, 7, 2.0, "sample", "learned_range"),
    "few noise levels": ("linear", 37, 37, None, "epsilon", "learned_range"),
    "one step": ("scaled_linear", 50, 1, 1.0, "v_prediction", "fixed_small"),
    "many noise levels": ("sigmoid", 2000, 13, None, "sample", "fixed_large"),
}


@pytest.mark.parametrize("kind", ["ddpm", "ddim"])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_chains_of_diffusers(case, spacing, kind, monkeypatch):
    """Other schedules, lengths and limits of x_0."""
    name, total, steps, clip, prediction, variance = case
    ends = {} if name == "cosine" else {"beta_start": 1e-3, "beta_end": 0.03}
    schedule = make_schedule(name, total, **ends)
    options = {
        "beta_schedule": {"cosine": "squaredcos_cap_v2"}.get(name, name),
        "clip_sample": clip is not None,
        "clip_sample_range": clip or 1.0,
        "prediction_type": prediction,
        "timestep_spacing": spacing,
    }
    if name == "sigmoid":  # which DDIMScheduler does not know
        options |= {"beta_schedule": "linear", "trained_betas": schedule.betas.tolist()}
    if kind == "ddpm":
        scheduler = DDPMScheduler(total, variance_type=variance, **options, **ends)
        own, theirs = {"variance": variance, "noisy_end": True}, {}
    else:
        variance = "fixed_small"
        scheduler = DDIMScheduler(total, **options, **ends)
        own = {"eta": 0.3, "use_clipped_model_output": False, "joined": False}
        theirs = {"eta": 0.3}
    learned = variance == "learned_range"
    sampler = make_sampler(
        schedule, TORCH_FP32, kind, steps=steps, spacing=spacing, clip=clip,
        prediction=prediction, **own,
    )  # fmt: skip
    denoiser = toy(prediction, learned)
    expected = chain_of_diffusers(
        exact(scheduler, schedule), denoiser, SHAPE, steps, monkeypatch, **theirs
    )
    compare(sampler.sample(denoiser, SHAPE, seed=SEED), expected)


def test_the_toy_is_clipped_and_the_dialects_differ():
    """The chains above exercise what they vary."""
    make = dict(
        schedule=make_schedule("linear", 1000), backend=TORCH_FP32, sampler="ddim", steps=50
    )
    chains = [
        make_sampler(**make, clip=clip, use_clipped_model_output=own).sample(
            toy("epsilon", False), SHAPE, seed=SEED
        )
        for clip, own in ((1.0, True), (1.0, False), (None, True), (None, False))
    ]
    assert (chains[0] - chains[1]).abs().max() > 1e-3
    assert (chains[1] - chains[3]).abs().max() > 1e-3
    # without clipping the two are the same up to the rounding that guided-diffusion's has
    assert (chains[2] - chains[3]).norm() < 1e-4 * chains[3].norm()


def test_diffusers_adds_noise_in_a_last_step_above_zero(monkeypatch):
    """The documented difference, in case diffusers changes."""
    scheduler = DDPMScheduler(1000, variance_type="fixed_large", timestep_spacing="trailing")
    theirs = chain_of_diffusers(scheduler, toy("epsilon", False), SHAPE, 50, monkeypatch)
    sampler = make_sampler(
        make_schedule("linear", 1000),
        TORCH_FP32,
        steps=50,
        spacing="trailing",
        variance="fixed_large",
    )
    ours = sampler.sample(toy("epsilon", False), SHAPE, seed=SEED)
    z = reference.normal(SHAPE, torch.tensor([SEED, 49]), stream=REVERSE)
    compare(ours + z * sampler.schedule.betas[0] ** 0.5, theirs)
