"""Samplers: recorded steps of guided-diffusion, whole chains of diffusers, reproducibility.

The toy denoisers are smooth and pixelwise, so that a chain has an exact answer in float64 and
float32 does not amplify its rounding.
"""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from diffusion.backend import TORCH_FP32
from diffusion.build import SAMPLERS, make_sampler
from diffusion.errors import ConfigError
from diffusion.sampler import DDPM, ddim_table, ddpm_table
from diffusion.schedule import make_schedule
from triton_kernels import reference
from triton_kernels.philox import INITIAL, REVERSE

if find_spec("diffusers"):  # a machine that runs the tests marked gpu alone may lack it
    from diffusers import DDIMScheduler, DDPMScheduler
    from diffusers.schedulers import scheduling_ddpm

SEED = 11


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


def _toy(prediction, learned):
    """A denoiser over NHWC for any dtype; the same function of x and t whoever calls it."""

    def denoiser(x, t, labels=None):
        phase = (t.to(x.dtype) * 0.013)[:, None, None, None]
        out = 0.8 * torch.sin(x + phase) + 0.1 * x
        if prediction == "epsilon":  # most of x_t is noise, so x_0 is clipped only now and then
            out = x * (1 - 0.05 * torch.cos(phase)) - 0.02 * torch.sin(3 * x)
        if learned:
            out = torch.cat((out, torch.sin(2 * x - phase)), dim=-1)
        return out

    return denoiser


def _chain_of_diffusers(scheduler, denoiser, shape, steps, monkeypatch, **step_options):
    """The loop of diffusers' pipelines in float64 over NHWC-ordered noise of this project."""
    n, h, w, c = shape
    rng = torch.tensor([SEED, 0])
    x = reference.normal(shape, rng, stream=INITIAL).double().permute(0, 3, 1, 2)
    scheduler.set_timesteps(steps)
    for k, t in enumerate(scheduler.timesteps):
        z = reference.normal(shape, rng + torch.tensor([0, k]), stream=REVERSE)
        z = z.double().permute(0, 3, 1, 2)
        monkeypatch.setattr(scheduling_ddpm, "randn_tensor", lambda *_, z=z, **__: z)
        if isinstance(scheduler, DDIMScheduler):
            step_options["variance_noise"] = z
        output = denoiser(x.permute(0, 2, 3, 1), t.expand(n)).permute(0, 3, 1, 2)
        x = scheduler.step(output, t, x, **step_options).prev_sample
    return x.permute(0, 2, 3, 1)


def _compare(x, expected):
    # for the rounding of 50 steps in float32 and of diffusers' float32 alpha_bar
    error = (x - expected).norm() / expected.norm()
    assert torch.isfinite(x).all() and error < 1e-5, f"relative error {error:.2e}"


def _exact(scheduler, schedule):
    """diffusers keeps alpha_bar in float32. With cosine's small first betas that alone moves a
    chain by 2e-5, so it is given the float64 values, which leaves the arithmetic to compare."""
    scheduler.alphas_cumprod = torch.tensor(schedule.alphas_cumprod)
    return scheduler


SHAPE = (2, 3, 5, 3)


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
    denoiser = _toy(prediction, variance == "learned_range")
    if spacing == "trailing":
        # the documented difference: diffusers adds noise in a last step with t > 0
        monkeypatch.setattr(
            scheduler,
            "_get_variance",
            _silent_at(scheduler, 19, learned=variance == "learned_range"),
        )
    if name == "cosine":
        scheduler = _exact(scheduler, schedule)
    expected = _chain_of_diffusers(scheduler, denoiser, SHAPE, 50, monkeypatch)
    sampler = make_sampler(
        schedule, TORCH_FP32, "ddpm", steps=50, spacing=spacing, clip=clip,
        prediction=prediction, variance=variance,
    )  # fmt: skip
    _compare(sampler.sample(denoiser, SHAPE, seed=SEED), expected)


def _silent_at(scheduler, timestep, *, learned):
    original = scheduler._get_variance

    def variance(t, *args, **kwargs):
        value = original(t, *args, **kwargs)
        # the learned variance is a logarithm
        return value if t != timestep else torch.full_like(value, -1e4 if learned else 0)

    return variance


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
    denoiser = _toy(prediction, False)
    expected = _chain_of_diffusers(
        scheduler, denoiser, SHAPE, 50, monkeypatch, eta=eta,
        use_clipped_model_output=use_clipped_model_output,
    )  # fmt: skip
    sampler = make_sampler(
        schedule, TORCH_FP32, "ddim", steps=50, spacing=spacing, clip=clip, eta=eta,
        prediction=prediction, use_clipped_model_output=use_clipped_model_output,
    )  # fmt: skip
    _compare(sampler.sample(denoiser, SHAPE, seed=SEED), expected)


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
    denoiser = _toy(prediction, False)
    expected = _chain_of_diffusers(scheduler, denoiser, SHAPE, steps, monkeypatch, eta=eta)
    joined, theirs = (
        make_sampler(
            schedule, TORCH_FP32, "ddim", steps=steps, spacing=spacing, clip=clip, eta=eta,
            prediction=prediction, use_clipped_model_output=False, joined=joined,
        ).sample(denoiser, SHAPE, seed=SEED)
        for joined in (True, False)
    )  # fmt: skip
    _compare(theirs, expected)
    assert (joined - expected).norm() > 1e-3 * expected.norm()


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
        own, theirs = {"variance": variance}, {}
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
    if kind == "ddpm":  # the documented difference, see above
        last = sampler.timesteps[-1].item()
        monkeypatch.setattr(
            scheduler, "_get_variance", _silent_at(scheduler, last, learned=learned)
        )
    denoiser = _toy(prediction, learned)
    expected = _chain_of_diffusers(
        _exact(scheduler, schedule), denoiser, SHAPE, steps, monkeypatch, **theirs
    )
    _compare(sampler.sample(denoiser, SHAPE, seed=SEED), expected)


def test_the_toy_is_clipped_and_the_dialects_differ():
    """The chains above exercise what they vary."""
    make = dict(
        schedule=make_schedule("linear", 1000), backend=TORCH_FP32, sampler="ddim", steps=50
    )
    chains = [
        make_sampler(**make, clip=clip, use_clipped_model_output=own).sample(
            _toy("epsilon", False), SHAPE, seed=SEED
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
    theirs = _chain_of_diffusers(scheduler, _toy("epsilon", False), SHAPE, 50, monkeypatch)
    sampler = make_sampler(
        make_schedule("linear", 1000),
        TORCH_FP32,
        steps=50,
        spacing="trailing",
        variance="fixed_large",
    )
    ours = sampler.sample(_toy("epsilon", False), SHAPE, seed=SEED)
    z = reference.normal(SHAPE, torch.tensor([SEED, 49]), stream=REVERSE)
    _compare(ours + z * sampler.schedule.betas[0] ** 0.5, theirs)


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
    return _toy(sampler.prediction, sampler.variance in ("learned_range", "learned"))


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
        ({"sampler": "ddmp"}, "sampler=ddmp is unknown; choose one of ddpm, ddim, heun, dpmpp_2m"),
        ({"sampler": "ddim", "eta": 1.5}, "eta=1.5"),
        ({"eta": 0.5}, "eta=0.5 has no meaning with sampler=ddpm"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"steps": 101}, "at most 100"),
        ({"steps": 5, "spacing": "even"}, "spacing=even"),
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
        sampler.sample(_toy("epsilon", learned), (1, 2, 2, 3), seed=0)


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
