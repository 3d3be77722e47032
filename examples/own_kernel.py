"""An operation of your own, y = x + s z, with a row in the registry: a spec, a kernel and its
configurations, the op that selects among its kernels, and a function that launches what it takes.

    TRITON_INTERPRET=1 python examples/own_kernel.py    # on a GPU without the variable
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.registry.choose import select
from triton_kernels.registry.kernel import Kernel, Op, configures
from triton_kernels.registry.spec import Spec, dtype_name
from triton_kernels.runtime.device import Device, describe


@dataclass(frozen=True)
class ScaledAddSpec(Spec):
    """Of n samples."""

    size: int  # numbers of a sample


@configures("flat")
class Flat(NamedTuple):
    """Its fields are those of `config` in a measured row."""

    block: int  # numbers of a program
    num_warps: int = 4


@triton.jit
def _scaled_add_kernel(
    x_ptr,  # [N]
    z_ptr,  # [N]
    y_ptr,  # [N]
    s,
    N,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, x + s * z, mask=mask)


def _configs(spec: ScaledAddSpec, gpu: Device) -> list[Flat]:
    """Without costs and measured rows the first is taken."""
    blocks = (1024, 4096) if spec.n * spec.size >= 4096 * gpu.num_sms else (1024,)
    return [Flat(block) for block in blocks]


def _launch(config: Flat, x: Tensor, z: Tensor, s: float, y: Tensor) -> None:
    n, block = x.numel(), config.block
    grid = (triton.cdiv(n, block),)
    _scaled_add_kernel[grid](x, z, y, s, n, BLOCK=block, num_warps=config.num_warps)


FLAT = Kernel("flat", Flat, configs=_configs, launch=_launch)
SCALED_ADD = Op("scaled_add", key=("size", "dtype"), kernels=(FLAT,))


def scaled_add(x: Tensor, z: Tensor, s: float) -> Tensor:
    """x + s z of contiguous tensors [N, ...] of one dtype, rounded once."""
    y = torch.empty_like(x)
    if y.numel():
        spec = ScaledAddSpec(len(x), dtype_name(x.dtype), x[0].numel())
        choice = select(SCALED_ADD, spec, describe(x.device))
        choice.kernel.launch(choice.config, x, z, s, y)
    return y


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, z = torch.randn(2, 4, 5, 601, device=device)
    torch.testing.assert_close(scaled_add(x, z, 0.5), x + 0.5 * z)
    print("x + 0.5 z agrees with PyTorch's")
