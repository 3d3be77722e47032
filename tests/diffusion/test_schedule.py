"""Schedules and respacings: closed forms, guided-diffusion's recorded chains, diffusers' steps."""

import math

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    HeunDiscreteScheduler,
)
from safetensors.torch import load_file

from diffusion.errors import ConfigError
from diffusion.process.schedule import NoiseSchedule, make_schedule, space_timesteps


def _sections(num_timesteps, section_counts):
    """Sections as guided-diffusion takes them, in Python floats: each index is the rounded running
    sum of the stride, whose rounding errors decide the ties."""
    size, extra = divmod(num_timesteps, len(section_counts))
    kept, start = [], 0
    for i, count in enumerate(section_counts):
        length = size + (i < extra)
        stride = (length - 1) / (count - 1) if count > 1 else 1
        position = 0.0
        for _ in range(count):
            kept.append(start + round(position))
            position += stride
        start += length
    return kept


@pytest.mark.parametrize("name, steps", [("linear_1000", 1000), ("linear_learned_250", "250")])
def test_chain_of_guided_diffusion(golden, name, steps):
    recorded = load_file(golden / f"process_{name}.safetensors")
    schedule = make_schedule("linear", 1000).respace(steps)
    np.testing.assert_array_equal(schedule.timestep_map, recorded["timestep_map"].numpy())
    np.testing.assert_allclose(schedule.betas, recorded["betas"].numpy(), rtol=1e-12)


def test_linear_ends():
    betas = make_schedule("linear", 1000).betas
    assert betas[0] == pytest.approx(1e-4) and betas[-1] == pytest.approx(0.02)
    betas = make_schedule("linear", 500).betas
    assert betas[0] == pytest.approx(2e-4) and betas[-1] == pytest.approx(0.04)
    betas = make_schedule("linear", 500, beta_start=1e-4, beta_end=None).betas
    assert betas[0] == 1e-4 and betas[-1] == pytest.approx(0.04)


def test_cosine_closed_form():
    schedule = make_schedule("cosine", 1000)

    def f(t):
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    # the product of the betas telescopes, except for the last beta, which is capped
    t = np.array([0, 1, 500, 998])
    expected = [f((i + 1) / 1000) / f(0) for i in t]
    np.testing.assert_allclose(schedule.alphas_cumprod[t], expected, rtol=1e-9)
    assert schedule.betas[-1] == 0.999


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ("linear", "linear"),
        ("scaled_linear", "scaled_linear"),
        ("sigmoid", "sigmoid"),
        ("cosine", "squaredcos_cap_v2"),
    ],
)
def test_betas_of_diffusers(ours, theirs):
    betas = DDPMScheduler(1000, beta_schedule=theirs).betas.double().numpy()
    np.testing.assert_allclose(make_schedule(ours, 1000).betas, betas, rtol=2e-6)
    if ours != "cosine":
        ends = {"beta_start": 0.00085, "beta_end": 0.012}
        betas = DDPMScheduler(300, beta_schedule=theirs, **ends).betas.double().numpy()
        np.testing.assert_allclose(make_schedule(ours, 300, **ends).betas, betas, rtol=2e-6)


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("total, steps", [(1000, 50), (1000, 1000), (1000, 37), (1000, 1), (50, 7)])
def test_timesteps_of_diffusers(spacing, total, steps):
    for scheduler in (DDPMScheduler, DDIMScheduler):
        theirs = scheduler(total, timestep_spacing=spacing)
        theirs.set_timesteps(steps)
        ours = space_timesteps(total, steps, spacing)[::-1]
        np.testing.assert_array_equal(ours, theirs.timesteps.numpy())


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("total, steps", [(1000, 50), (1000, 999), (1000, 37), (1000, 1), (50, 7)])
def test_timesteps_above_zero_are_those_of_a_multistep_solver(spacing, total, steps):
    theirs = DPMSolverMultistepScheduler(total, timestep_spacing=spacing)
    theirs.set_timesteps(steps)
    ours = space_timesteps(total, steps, spacing, above_zero=True)[::-1]
    np.testing.assert_array_equal(ours, theirs.timesteps.numpy())


@pytest.mark.parametrize("karras", [False, True])
@pytest.mark.parametrize("steps", [50, 28, 1])
def test_levels_between_those_of_the_chain(steps, karras):
    theirs = HeunDiscreteScheduler(
        1000, beta_start=1e-4, beta_end=0.02, use_karras_sigmas=karras and steps > 1
    )
    theirs.set_timesteps(steps)
    base = make_schedule("linear", 1000)
    ours = base.respace(steps, "karras" if karras else "linspace", fractional=True)
    if steps == 1:  # linspace is timestep 0 alone, karras begins with the noisiest level
        assert ours.timestep_map.tolist() == [999 if karras else 0]
        return
    np.testing.assert_allclose(ours.sigmas[::-1], theirs.sigmas[:-1:2], rtol=2e-4)
    np.testing.assert_allclose(ours.timestep_map[::-1], theirs.timesteps[::2], atol=0.02)
    whole = base.respace(steps, "karras").timestep_map
    assert whole.dtype == np.int64
    if karras:
        np.testing.assert_array_equal(whole, np.round(ours.timestep_map))


def test_karras_levels():
    base = make_schedule("cosine", 1000)
    levels = base.respace(5, "karras")
    roots = levels.sigmas ** (1 / 7)
    np.testing.assert_allclose(np.diff(roots), roots[1] - roots[0], rtol=1e-9)
    np.testing.assert_allclose(levels.sigmas[[0, -1]], base.sigmas[[0, -1]], rtol=1e-9)
    assert base.respace(None, "karras").num_timesteps == 1000
    assert base.respace(None, "leading") is base


def test_karras_levels_of_a_respaced_chain_tell_the_first_one():
    base = make_schedule("linear", 1000)
    halved = base.respace("ddim500").respace(9, "karras", fractional=True)
    whole = base.respace(9, "karras", fractional=True)
    assert np.abs(halved.timestep_map - whole.timestep_map).max() < 2


@pytest.mark.parametrize("total", [50, 100, 1000])
def test_trailing_never_has_a_step_too_many(total):
    # np.arange with a fractional stride gives 62 counts of 1000 an extra element, timestep -1
    for steps in range(1, total + 1):
        kept = space_timesteps(total, steps, "trailing")
        assert len(kept) == steps and kept[0] >= 0 and kept[-1] == total - 1
        assert (np.diff(kept) > 0).all()


@pytest.mark.parametrize(
    "total, steps, counts",
    [
        (1000, 250, [250]),
        (1000, "25", [25]),
        (1000, 1, [1]),
        (300, "10,15,20", [10, 15, 20]),
        (1000, "90,60,60,20,20", [90, 60, 60, 20, 20]),  # ADM's own setting
        (103, [3, 2, 0, 1], [3, 2, 0, 1]),  # sections of 26, 26, 26, 25
        (7, 7, [7]),
    ],
    ids=str,
)
def test_sections_of_guided_diffusion(total, steps, counts):
    kept = space_timesteps(total, steps)
    assert kept.dtype == np.int64
    assert kept.tolist() == _sections(total, counts)


def test_running_sum_decides_a_tie():
    # position 7 of the second section is 7 * 99 / 14 = 49.5; the running sum stays just below
    assert space_timesteps(300, "10,15,20")[17] == 149


@pytest.mark.parametrize("count, stride", [(50, 20), (25, 40), (1000, 1), (84, 12), (2, 500)])
def test_ddim_stride(count, stride):
    kept = space_timesteps(1000, f"ddim{count}")
    assert kept.tolist() == list(range(0, 1000, stride)) and len(kept) == count


def test_respacing_keeps_alpha_bar():
    for base in (make_schedule("linear", 1000), make_schedule("cosine", 400)):
        for steps in (1, 37, "10,0,20", "ddim100"):
            short = base.respace(steps)
            kept = base.alphas_cumprod[short.timestep_map]
            np.testing.assert_allclose(short.alphas_cumprod, kept, rtol=1e-10)


def test_respacing_twice_points_at_the_first_chain():
    twice = make_schedule("linear", 1000).respace("ddim100").respace(10, "leading")
    assert twice.timestep_map.tolist() == list(range(0, 1000, 100))


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_posterior_is_bayes(name):
    """q(x_{t-1} | x_t, x_0) from the product of two Gaussians, computed by precision weighting."""
    s = make_schedule(name, 100)
    t = slice(1, None)
    alpha, prior = 1 - s.betas[t], 1 - s.alphas_cumprod_prev[t]
    precision = alpha / s.betas[t] + 1 / prior
    np.testing.assert_allclose(s.posterior_variance[t], 1 / precision, rtol=1e-9)
    c, d = s.posterior_mean()
    np.testing.assert_allclose(
        c[t], np.sqrt(s.alphas_cumprod_prev[t]) / prior / precision, rtol=1e-9
    )
    np.testing.assert_allclose(d[t], np.sqrt(alpha) / s.betas[t] / precision, rtol=1e-9)
    assert c[0] == pytest.approx(1) and d[0] == 0


@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
def test_x0_from_output_inverts_the_target(prediction):
    s = make_schedule("linear", 1000)
    x0, epsilon = 0.3, -1.2
    signal, noise = np.sqrt(s.alphas_cumprod), np.sqrt(1 - s.alphas_cumprod)
    target = {
        "epsilon": epsilon,
        "sample": x0,
        "v_prediction": signal * epsilon - noise * x0,
    }[prediction]
    a, b = s.x0_from_output(prediction)
    np.testing.assert_allclose(a * (signal * x0 + noise * epsilon) + b * target, x0, rtol=1e-9)


def test_variances():
    s = make_schedule("linear", 1000)
    small, _ = s.log_variance_range("fixed_small")
    large, _ = s.log_variance_range("fixed_large")
    low, high = s.log_variance_range("learned_range")
    assert small[0] == small[1] == np.log(s.posterior_variance[1])
    assert large[0] == small[0]
    np.testing.assert_array_equal(large[1:], np.log(s.betas[1:]))
    np.testing.assert_array_equal(low, small)
    np.testing.assert_array_equal(high, np.log(s.betas))
    assert (s.log_variance_range("fixed_large")[0] == large).all()  # no state was changed


def test_training_table():
    s = make_schedule("cosine", 30)
    table = s.training_table("cpu")
    assert table.shape == (30, 2) and table.dtype == torch.float32
    torch.testing.assert_close(table.square().sum(1), torch.ones(30))
    np.testing.assert_allclose(table[:, 0].numpy() ** 2, s.alphas_cumprod, rtol=1e-5)


_LINEAR = NoiseSchedule.linear(1000)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: make_schedule("linar"), "schedule=linar is unknown; choose one of linear, scaled"),
        (lambda: make_schedule("cosine", beta_end=0.1), "no option beta_end; it has max_beta"),
        (lambda: make_schedule("linear", 0), "num_timesteps=0"),
        (lambda: make_schedule("linear", 10), "num_timesteps=10 is too small .* at least 21"),
        (lambda: NoiseSchedule(np.array([0.5, 1.0])), "strictly between 0 and 1"),
        (lambda: make_schedule("linear", 10.5), "num_timesteps=10.5"),
        (lambda: NoiseSchedule(np.array([0.1, 0.2]), np.array([0])), "timestep_map has 1"),
        (lambda: NoiseSchedule(np.array([])), "at least one"),
        (lambda: _LINEAR.respace(1001), "at most 1000"),
        (lambda: _LINEAR.respace(1001, "leading"), "give 1 to 1000"),
        (lambda: _LINEAR.respace(0), "steps=0"),
        (lambda: _LINEAR.respace(-3, "trailing"), "steps=-3"),
        (lambda: _LINEAR.respace("0,0"), "takes no step"),
        (lambda: _LINEAR.respace("10,x"), "steps=10,x"),
        (lambda: _LINEAR.respace("600,1"), "give at most 500"),
        (lambda: _LINEAR.respace("ddim37"), "nearest that exist: ddim36, ddim38"),
        (lambda: _LINEAR.respace("ddim"), "steps=ddim"),
        (lambda: _LINEAR.respace("ddim50", "leading"), "steps=ddim50"),
        (lambda: _LINEAR.respace(1000, "linspace", above_zero=True), "give 1 to 999"),
        (lambda: _LINEAR.respace(0, "karras"), "steps=0"),
        (lambda: _LINEAR.respace(50, "even"), "spacing=even is unknown; choose one of guided"),
        (lambda: _LINEAR.x0_from_output("eps"), "prediction=eps is unknown; choose one of epsilon"),
        (lambda: _LINEAR.log_variance_range("small"), "variance=small is unknown"),
    ],
)
def test_errors_name_the_value(make, message):
    with pytest.raises(ConfigError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
