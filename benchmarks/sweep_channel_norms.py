"""What `benchmarks.sweep_configs` times of the norms over channels: every tile of LayerNorm of one
image, whose gradient has another tensor added, and of RMSNorm with FiLM and silu. x is not in the
L2 cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import drawn
from triton_kernels.norm.channel_norm import (
    CHANNEL_NORM,
    CHANNEL_NORM_GRAD,
    channel_norm_backward,
    channel_norm_forward,
)
from triton_kernels.registry.spec import ChannelNormSpec

OPS = {op.name: op for op in (CHANNEL_NORM, CHANNEL_NORM_GRAD)}
# (images, pixels, channels); of one image LayerNorm
_IMAGES = (
    *((1, 65536, c) for c in (72, 320)),
    *((1, 16384, c) for c in (384, 512, 640)),
    *((1, 8192, c) for c in (1024, 1536)),
    *((1, 4096, c) for c in (320, 1280, 2048)),
    *((1, 32768, 768), (1, 2048, 768), (1, 1024, 1280)),
    *((32, 4096, 64), (32, 1024, 128), (32, 256, 256), (32, 64, 512), (32, 64, 768), (32, 16, 512)),
    *((8, 4096, 128), (16, 1024, 256), (64, 256, 384), (128, 64, 512), (128, 256, 256)),
)


def specs(name: str) -> list[ChannelNormSpec]:
    """Of the op of this name."""
    grad = name == CHANNEL_NORM_GRAD.name
    return [
        ChannelNormSpec(n, "bf16", pixels, c, centred=True, grad=grad, add=grad)
        if n == 1
        else ChannelNormSpec(n, "bf16", pixels, c, eps_in="max", activation="silu", grad=grad)
        for n, pixels, c in _IMAGES
    ]


def runner(spec: ChannelNormSpec, device: torch.device) -> Callable[[tuple], Tensor]:
    """What computes it with a configuration, on random numbers."""
    shape = spec.n, spec.pixels, 1, spec.c
    x, dy, add = (drawn(device, *shape, dtype=torch.bfloat16) for _ in range(3))
    weight, bias = drawn(device, spec.c), drawn(device, spec.c)
    film = None if spec.centred else drawn(device, spec.n, 2 * spec.c, dtype=torch.bfloat16)
    params = weight, bias, *((None, None) if film is None else film.chunk(2, 1))
    how = {"centred": spec.centred, "eps_in": spec.eps_in, "activation": spec.activation}

    def run(config: tuple) -> Tensor:
        if not spec.grad:
            return channel_norm_forward(x, params, eps=1e-5, config=config, **how)
        given = {"add": add if spec.add else None, "sums": True, "config": config}
        of_x = True, False, False, False, False  # the others need another launch
        return channel_norm_backward(dy, x, params, of_x, eps=1e-5, **how, **given).dx

    return run
