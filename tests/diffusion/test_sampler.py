"""Samplers: what holds of every chain, whatever the sampler, the batch and the backend."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from diffusion.errors import ConfigError
from diffusion.factory import SAMPLERS, make_sampler
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32
from diffusion.sampling.sampler import DDPM, ddim_table, ddpm_table
from triton_kernels import reference
from triton_kernels.noise.philox import INITIAL, REVERSE

from .toy_chains import SEED, toy

# --- properties -----------------------------------------------------------------------------------

CASES = [
    {"sampler": "ddpm"},
    {"sampler": "ddpm", "variance": "fixed_large", "prediction": "v_prediction"},
    {"sampler": "ddpm", "variance": "learned_range", "prediction": "sample", "clip": None},
    {"sampler": "ddpm", "variance": "learned"},
    {"sampler": "ddim"},
    {"sampler": "ddim", "eta": 0.7, "variance": "learned_range"},
    {"sampler": "ddim", "eta": 1.0, "use_clipped_model_output": False, "spacing": "trailing"},
    {"sampler": "heun"},
    {"sampler": "heun", "prediction": "v_prediction", "variance": "learned_range"},
    {"sampler": "dpmpp_2m"},
    {"sampler": "dpmpp_2m", "prediction": "sample", "spacing": "leading", "clip": None},
]
NAMES = ["-".join(str(value) for value in case.values()) for case in CASES]


def _sampler(name="linear", backend=TORCH_FP32, **case):
    return make_sampler(make_schedule(name, 200), backend, **{"steps": 6, **case})


def _toy_of(sampler):
    return toy(sampler.prediction, sampler.variance in ("learned_range", "learned"))


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_batch_split_changes_nothing(case, name):
    sampler = _sampler(name, **case)
    whole = sampler.sample(_toy_of(sampler), (5, 3, 4, 1), seed=SEED, first=7)
    assert whole.dtype == torch.float32 and torch.isfinite(whole).all()
    for cuts in ([2, 3], [1] * 5):
        first, parts = 7, []
        for n in cuts:
            parts.append(sampler.sample(_toy_of(sampler), (n, 3, 4, 1), seed=SEED, first=first))
            first += n
        assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(sampler.sample(_toy_of(sampler), (5, 3, 4, 1), seed=SEED + 1), whole)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
@pytest.mark.parametrize(
    "total, steps", [(1000, None), (1000, "ddim50"), (4000, "10,15,20"), (30, 1)]
)
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_tables_are_finite_and_end_without_noise(name, total, steps, case):
    sampler = make_sampler(
        make_schedule(name, total), TORCH_FP32, steps=steps, **case | {"spacing": "guided"}
    )
    assert sampler.rows.shape == (sampler.num_steps, 8)
    assert torch.isfinite(sampler.rows).all()
    assert sampler.rows[-1, 5] == 0 and (sampler.rows[:, 5] >= 0).all()
    heun = case["sampler"] == "heun"  # which evaluates twice at all but the noisiest
    assert (sampler.timesteps[:: 2 if heun else 1].diff() < 0).all()


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_perfect_denoiser_gives_back_the_image(case):
    """Every chain ends at the x_0 that the denoiser sees in x_t, whatever the noise was."""
    sampler = _sampler("cosine", **case)
    x_0 = torch.rand(2, 3, 4, 1) * 2 - 1
    schedule = make_schedule("cosine", 200)
    alpha_bar = torch.tensor(schedule.alphas_cumprod)

    def denoiser(x, t, labels):
        a, s = alpha_bar[t[0]].sqrt(), (1 - alpha_bar[t[0]]).sqrt()
        epsilon = (x.double() - a * x_0) / s
        out = {"epsilon": epsilon, "sample": x_0, "v_prediction": a * epsilon - s * x_0}
        out = out[sampler.prediction].float()
        learned = sampler.variance in ("learned_range", "learned")
        return torch.cat((out, 0 * out - 0.5), -1) if learned else out

    x = sampler.sample(denoiser, x_0.shape, seed=SEED)
    torch.testing.assert_close(x, x_0, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_ddim_with_eta_one_is_ddpm(name):
    """Song et al., 2021, section 4.1: the same Markov chain, if x_0 is not clipped."""
    schedule = make_schedule(name, 100)
    ddpm = ddpm_table(schedule, "sample", "fixed_small")
    ddim = ddim_table(schedule, "sample", eta=1.0, use_clipped_model_output=False)
    # x_0 is the output: c and e both multiply it
    np.testing.assert_allclose(ddim[:, 2] + ddim[:, 4], ddpm[:, 2], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(ddim[:, 3], ddpm[:, 3], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(ddim[:, 5], ddpm[:, 5], rtol=1e-6)


@pytest.mark.parametrize("spacing", ["leading", "trailing", "karras"])
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_is_an_ancestral_step_of_euler_in_units_of_noise(eta, spacing):
    """In y = x / sqrt(alpha_bar), whose noise has the deviation sigma, as k-diffusion samples: down
    along the line through x_0, to where noise of deviation `up` leads back to the next level."""
    schedule, denoiser = make_schedule("linear", 1000), toy("epsilon", False)
    options = {"steps": 50, "spacing": spacing, "clip": None, "eta": eta}
    sampler = make_sampler(schedule, TORCH_FP32, "ddim", **options)
    alpha_bar = sampler.schedule.alphas_cumprod
    sigmas = np.append(0.0, np.sqrt(1 / alpha_bar - 1))
    shape, rng = (2, 3, 5, 3), torch.tensor([SEED, 0])
    y = reference.normal(shape, rng, stream=INITIAL).double() / alpha_bar[-1] ** 0.5
    for row in range(50):
        now, to = sigmas[50 - row], sigmas[49 - row]
        t = torch.tensor([sampler.schedule.timestep_map[49 - row]] * 2)
        slope = denoiser(y / (1 + now**2) ** 0.5, t)
        up = eta * to * (1 - (to / now) ** 2) ** 0.5
        y = y + ((to**2 - up**2) ** 0.5 - now) * slope
        if up:
            rng = torch.tensor([SEED, row])
            y = y + up * reference.normal(shape, rng, stream=REVERSE).double()
    error = (sampler.sample(denoiser, shape, seed=SEED) - y).norm() / y.norm()
    assert error < 1e-5  # of float32, in 50 steps


def test_what_the_denoiser_is_given():
    backend = replace(TORCH_FP32, dtype=torch.bfloat16)
    sampler = make_sampler(make_schedule("linear", 1000), backend, steps="ddim4")
    labels, seen, done = torch.tensor([1, 0]), [], []

    def denoiser(x, t, y):
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and y is labels
        assert t.dtype == torch.int64 and t.is_contiguous() and not x.requires_grad
        seen.append(t.tolist())
        return x.requires_grad_(False) * torch.ones(1, dtype=x.dtype, requires_grad=True)

    x = sampler.sample(
        denoiser, (2, 3, 4, 1), seed=0, labels=labels, progress=lambda *a: done.append(a)
    )
    assert seen == [[750, 750], [500, 500], [250, 250], [0, 0]]
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert x.dtype == torch.float32 and not x.requires_grad


def test_x_replaces_the_initial_noise_and_is_left_alone():
    sampler = _sampler(sampler="ddim")
    x = reference.normal((2, 3, 4, 1), torch.tensor([SEED, 0]), stream=INITIAL)
    before = x.clone()
    given = sampler.sample(_toy_of(sampler), x.shape, seed=99, x=x)
    assert torch.equal(given, sampler.sample(_toy_of(sampler), x.shape, seed=SEED))
    assert torch.equal(x, before)
    with pytest.raises(ValueError, match="x has shape"):
        sampler.sample(_toy_of(sampler), (3, 3, 4, 1), seed=0, x=x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 2**63}, "seed is 9223372036854775808; expected a whole number"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": 0, "first": -1}, "first is -1"),
        ({"seed": 0, "first": 2**32 - 1}, r"first is 4294967295; expected .* to 2\^32 - 2"),
    ],
    ids=str,
)
def test_counters_that_would_draw_the_noise_of_others(options, message):
    sampler = _sampler()
    with pytest.raises(ValueError, match=message):
        sampler.sample(_toy_of(sampler), (2, 3, 4, 1), **options)


def test_seeds_and_numbers_as_large_as_they_may_be():
    sampler, toy_ = _sampler(), _toy_of(_sampler())
    drawn = [
        sampler.sample(toy_, (1, 3, 4, 1), seed=seed, first=first)
        for seed in (-(2**63), -1, 2**40, 2**63 - 1)
        for first in (0, 2**31, 2**32 - 1)
    ]
    assert all(torch.isfinite(x).all() for x in drawn)
    assert len({tuple(x.flatten().tolist()) for x in drawn}) == len(drawn)


@pytest.mark.parametrize("name", SAMPLERS)
def test_one_row_tensor_serves_every_step(name):
    """As a captured graph uses it: the row is advanced in place on the device."""
    sampler = _sampler(sampler=name)
    denoiser, rng, row = _toy_of(sampler), torch.tensor([SEED, 0]), torch.tensor([0])
    x = reference.normal((2, 3, 4, 1), rng, stream=INITIAL)
    memory = sampler.new_memory(x)
    for _ in range(sampler.num_steps):
        x = sampler.step(denoiser, x, row, rng, memory=memory)
        row += 1
    assert torch.equal(x, sampler.sample(denoiser, x.shape, seed=SEED))


def test_a_sampler_can_override_table_and_step():
    class HalfNoise(DDPM):
        """DDPM with half the deviation, and every step counted."""

        steps_made = 0

        def table(self):
            table = super().table()
            table[:, 5] /= 2
            return table

        def step(self, *args, **kwargs):
            self.steps_made += 1
            return super().step(*args, **kwargs)

    sampler = HalfNoise(make_schedule("linear", 100), TORCH_FP32, steps=4)
    x = sampler.sample(_toy_of(sampler), (1, 2, 2, 1), seed=0)
    assert sampler.steps_made == 4 and torch.isfinite(x).all()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sampler": "ddmp"}, "sampler=ddmp is unknown; choose one of ddpm, ddim, euler, heun"),
        ({"sampler": "ddim", "eta": 1.5}, "eta=1.5"),
        ({"eta": 0.5}, "eta=0.5 has no meaning with sampler=ddpm"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"steps": 101}, "at most 100"),
        ({"steps": 5, "spacing": "even"}, "spacing=even"),
        ({"sampler": "heun", "steps": "ddim5"}, "steps=ddim5 goes with spacing=guided"),
        ({"steps": [1, 1], "spacing": "trailing"}, "guided, and spacing is trailing; give a whole"),
        ({"steps": "five", "spacing": "trailing"}, "steps=five is not possible"),
        ({"prediction": "eps"}, "prediction=eps"),
        ({"variance": "small"}, "variance=small"),
        ({"sampler": "ddim", "variance": "small"}, "variance=small"),
    ],
)
def test_errors_name_the_value(options, message):
    with pytest.raises(ConfigError, match=message):
        make_sampler(make_schedule("linear", 100), TORCH_FP32, **options)


@pytest.mark.parametrize("variance, learned", [("fixed_small", True), ("learned_range", False)])
def test_wrong_number_of_output_channels(variance, learned):
    sampler = _sampler(variance=variance)
    with pytest.raises(ConfigError, match=f"variance={variance} needs a model output of shape"):
        sampler.sample(toy("epsilon", learned), (1, 2, 2, 3), seed=0)


# --- on the GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_backends_agree(case):
    import triton_kernels

    triton = replace(TORCH_FP32, name="triton", ops=triton_kernels)
    chains = []
    for backend in (TORCH_FP32, triton):
        sampler = _sampler(backend=backend, device="cuda", **case)
        chains.append(sampler.sample(_toy_of(sampler), (3, 5, 7, 3), seed=SEED))
    torch.testing.assert_close(*chains, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLERS)
def test_no_host_synchronisation_within_the_loop(name):
    import triton_kernels

    backend = replace(TORCH_FP32, name="triton", ops=triton_kernels)
    sampler = _sampler(backend=backend, device="cuda", sampler=name)
    denoiser, rng = _toy_of(sampler), torch.tensor([SEED, 0], device="cuda")
    row, x = torch.tensor([0], device="cuda"), torch.randn(2, 3, 4, 1, device="cuda")
    memory = sampler.new_memory(x)
    sampler.step(denoiser, x, row, rng, memory=memory)  # compile first
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.step(denoiser, x, row, rng, memory=memory)
    finally:
        torch.cuda.set_sync_debug_mode("default")
