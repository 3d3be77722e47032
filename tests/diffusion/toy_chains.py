"""Whole chains with a network that is a formula, and those of diffusers' schedulers beside them.

The toy denoisers are smooth and pixelwise, so that a chain has an exact answer in float64 and
float32 does not amplify its rounding.
"""

from importlib.util import find_spec

import torch

from triton_kernels import reference
from triton_kernels.noise.philox import INITIAL, REVERSE

if find_spec("diffusers"):  # a machine that runs the tests marked gpu alone may lack it
    from diffusers import DDIMScheduler
    from diffusers.schedulers import scheduling_ddpm

SEED = 11
SHAPE = (2, 3, 5, 3)


def toy(prediction, learned):
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


def chain_of_diffusers(scheduler, denoiser, shape, steps, monkeypatch, **step_options):
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


def compare(x, expected):
    # for the rounding of 50 steps in float32 and of diffusers' float32 alpha_bar
    error = (x - expected).norm() / expected.norm()
    assert torch.isfinite(x).all() and error < 1e-5, f"relative error {error:.2e}"


def exact(scheduler, schedule):
    """diffusers keeps alpha_bar in float32. With cosine's small first betas that alone moves a
    chain by 2e-5, so it is given the float64 values, which leaves the arithmetic to compare."""
    scheduler.alphas_cumprod = torch.tensor(schedule.alphas_cumprod)
    return scheduler


def silent_at(scheduler, timestep, *, learned):
    original = scheduler._get_variance

    def variance(t, *args, **kwargs):
        value = original(t, *args, **kwargs)
        # the learned variance is a logarithm
        return value if t != timestep else torch.full_like(value, -1e4 if learned else 0)

    return variance
