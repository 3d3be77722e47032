"""What `benchmarks.sweep_configs` times of the norms of a plan: every kernel of them.

`norm_apply` and `norm_backward` are of training steps of 1 to 128 images, `norm_of_sums` of
evaluations of 1 to 64. x is not in the L2 cache.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.harness import drawn
from triton_kernels.norm.from_partials import NORM_OF_SUMS, norm_of_sums
from triton_kernels.norm.inline_statistics import (
    NORM_APPLY,
    NORM_BACKWARD,
    norm_apply,
    norm_backward,
)
from triton_kernels.norm.tables import NormGrads, Statistics, norm_table
from triton_kernels.reductions.row_sums import RowSums
from triton_kernels.registry.kernel import Op
from triton_kernels.registry.spec import NormSpec
from triton_kernels.runtime.dependent_launch import dependent_launches

OPS = {op.name: op for op in (NORM_APPLY, NORM_BACKWARD, NORM_OF_SUMS)}
_MOST_ELEMENTS = 2**26
# (rows and columns, channels, tiles that an image is in its partial sums)
_IMAGES = (
    (8, (192, 256, 512, 768), (1, 2, 4)),
    (16, (128, 192, 384, 512), (1, 2, 4, 8, 16)),
    (32, (64, 128, 256, 384), (4, 8, 16, 32)),
    (64, (64, 128, 192, 320), (16, 32, 64)),
)
_EPS = 1e-5


def specs(name: str) -> list[NormSpec]:
    """Of the op of this name, in a number of tiles that is always the same."""
    found = []
    for side, channels, tiles in _IMAGES:
        for n in (1, 4, 16, 64) if name == "norm_of_sums" else (1, 8, 32, 128):
            for c in channels:
                k = random.Random(f"{name} {n} {side} {c}").choice(tiles)
                spec = NormSpec(n, "bf16", side, side, c, activation="silu", tiles=(k,))
                found.append(replace(spec, grad=name == "norm_backward"))
    return [spec for spec in found if spec.elements <= _MOST_ELEMENTS]


def runner(op: Op, spec: NormSpec, device: torch.device) -> Callable[[tuple], Tensor]:
    """What computes it with a configuration, on random numbers."""
    n, h, w, c = spec.n, spec.h, spec.w, spec.c
    x, dz = (drawn(device, n, h, w, c, dtype=torch.bfloat16) for _ in range(2))
    partials = drawn(device, n, *spec.tiles, 2, c).abs()
    weight, bias, grad = drawn(device, c), drawn(device, c), torch.zeros(2 * c, device=device)
    norm = Statistics((partials,), (spec.pixels,), spec.groups, weight, bias, _EPS)
    table = norm_table(*norm)  # a group has one mean, and one deviation
    out = torch.empty_like(dz)

    def run(config: tuple) -> Tensor:
        with dependent_launches(n * spec.pixels):
            if op is NORM_APPLY:
                return norm_apply(x, None, norm, spec.activation, config=config)[0]
            if op is NORM_OF_SUMS:
                return norm_of_sums(x, None, norm, spec.activation, config=config)[0]
            given = partials, table, spec.groups, NormGrads(*grad.split(c))
            how = dict.fromkeys(("sums", "rows"), RowSums(grad))
            return norm_backward(dz, x, *given, **how, out=out, config=config)[0]

    return run
