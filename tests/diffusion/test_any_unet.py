"""UNets of settings and image sizes that nobody chose, on a GPU: training and evaluation by the
plan, beside float64. A seed is a network."""

import random
from typing import Any

import pytest
import torch

import triton_kernels
from diffusion.plan.inference import sampling_network
from diffusion.runtime.backend import Backend
from triton_kernels import reference
from triton_kernels.runtime.dependent_launch import dependent_launches

from .test_fused_unet_kernels import build, check, conditions

pytestmark = pytest.mark.gpu

_MOST = 2**19  # channels of all pixels of the largest images of a batch


def _network(seed: int) -> tuple[dict[str, Any], tuple[int, int], int, torch.dtype]:
    """Options, the size of images, a batch and a type."""
    rng = random.Random(seed)
    levels = rng.randint(1, 4)
    heads = rng.choice((8, 16, 24, 32, 40, 64))
    channels = heads * rng.choice([k for k in (1, 2, 3, 4, 6) if 16 <= heads * k <= 160])
    mults = sorted(rng.randint(1, 3) for _ in range(levels))
    options: dict[str, Any] = {
        "model_channels": channels,
        "channel_mult": tuple(mults),
        "num_res_blocks": rng.randint(1, 2),
        "num_head_channels": heads,
        "num_groups": rng.choice([g for g in (1, 2, 4, 8, 16, 32) if channels % g == 0]),
        "attention_resolutions": tuple(2**i for i in range(levels) if rng.random() < 0.4),
        "use_new_attention_order": rng.random() < 0.5,
        "use_scale_shift_norm": rng.random() < 0.5,
        "dropout": rng.choice((0.0, 0.0, 0.2)),
        "num_classes": rng.choice((None, 5)),
        "out_channels": rng.choice((3, 3, 6)),
    }
    options[rng.choice(("conv_resample", "resblock_updown", "use_new_attention_order"))] = True
    step = 2 ** (levels - 1)
    h, w = (step * rng.choice((1, 2, 3, 4, 5, 7, 8, 10, 16, 20)) for _ in range(2))
    if rng.random() < 0.4:
        h = w
    while h * w * channels > _MOST:
        h, w = max(step, h // 2 // step * step), max(step, w // 2 // step * step)
    batch = rng.randint(1, max(1, min(9, _MOST // (h * w * channels))))
    return options, (h, w), batch, rng.choice((torch.bfloat16, torch.bfloat16, torch.float16))


@pytest.mark.parametrize("seed", range(12))
def test_training(seed, device):
    options, size, batch, dtype = _network(seed)
    check(options, size, batch, dtype, device)


@pytest.mark.parametrize("seed", range(12))
def test_evaluation(seed, device):
    options, size, batch, dtype = _network(100 + seed)
    backends = (
        Backend("triton", triton_kernels, dtype, allow_tf32=True),
        Backend("torch", reference, dtype, allow_tf32=True),
        Backend("torch", reference, torch.float64),
    )
    models = [build(backend, options, size, device).eval() for backend in backends]
    x, t = torch.randn(batch, *size, 3, device=device), torch.arange(batch, device=device) * 9
    labels = conditions(models[0], batch, device)
    with torch.no_grad(), dependent_launches(batch * size[0] * size[1]):
        ours = sampling_network(models[0])(x, t, labels).double()
        theirs = models[1].forward_nhwc(x, t, labels).double()
        exact = models[2].double().forward_nhwc(x.double(), t, labels)
    errors = [((y - exact).norm() / exact.norm()).item() for y in (ours, theirs)]
    assert errors[0] <= 2 * errors[1], errors
