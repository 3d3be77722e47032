"""Convolutions of few images as they come in an evaluation: of filters that lie in memory.

A network for which it matters has more filters than the L2 cache holds, and each of its
convolutions is followed by a launch that adds the parts of the sum, or reads the result.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import harness, stopwatch
from triton_kernels.conv.few import CONV_FEW, conv_few
from triton_kernels.conv.split import CONV_SPLIT, conv_split
from triton_kernels.registry.kernel import Op
from triton_kernels.registry.spec import ConvSpec
from triton_kernels.runtime.dependent_launch import await_inputs, dependent_launches, overlapping

OPS = CONV_SPLIT, CONV_FEW
_BYTES = 160e6  # of filters, of which an L2 cache has a third
_FEWEST, _MOST, _REPLAYS = 4, 40, 7
_BLOCK = 512


@triton.jit
def _add_kernel(
    parts_ptr,  # [PARTS, TOTAL]
    y_ptr,  # [TOTAL], out
    total,
    parts,
    BLOCK: tl.constexpr,
):
    await_inputs()
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        acc += tl.load(parts_ptr + part * total + offs, mask=offs < total, other=0.0)
    tl.store(y_ptr + offs, acc.to(y_ptr.dtype.element_ty), mask=offs < total)


class Cold:
    """One convolution of a spec, of several sets of filters in turn."""

    def __init__(self, op: Op, spec: ConvSpec, device: torch.device) -> None:
        assert op in OPS
        size = spec.taps * spec.k * spec.c * spec.itemsize
        count = min(max(math.ceil(_BYTES / size), _FEWEST), _MOST)
        self.op, self.spec = op, spec
        dtype = torch.float32 if spec.itemsize == 4 else torch.bfloat16
        self.x = harness.drawn(device, spec.n, spec.h, spec.w, spec.k, dtype=dtype)
        filters = spec.c, spec.r, spec.s, spec.k
        self.filters = [harness.drawn_filters(device, *filters, dtype=dtype) for _ in range(count)]
        self.bias = torch.zeros(spec.c, device=device)
        self.residual = None
        if spec.residual:
            self.residual = harness.drawn(device, spec.n, spec.h, spec.w, spec.c, dtype=dtype)

    def __call__(self, config: tuple, filters: int = 0) -> Tensor:
        """[N, H, W, C], of one set of filters; of parts [N, C, H * W]."""
        x, weight = self.x, self.filters[filters]
        if self.op is CONV_SPLIT:
            parts = conv_split(x, weight, allow_tf32=self.spec.dtype != "fp32", config=config)
        else:
            options = {"stats": self.spec.stats, "allow_tf32": self.spec.dtype != "fp32"}
            options["residual"] = self.residual
            parts = conv_few(x, weight, self.bias, **options, config=config)[0][None]
        y = torch.empty(parts.shape[1:], dtype=x.dtype, device=x.device)
        total = y.numel()
        _add_kernel[(triton.cdiv(total, _BLOCK),)](
            parts, y, total, parts.shape[0], _BLOCK, num_warps=4, **overlapping(x.device)
        )
        return y

    def time(self, config: tuple) -> float:
        """Microseconds of the convolution and of what adds its parts."""
        graph, count = torch.cuda.CUDAGraph(), len(self.filters)
        with dependent_launches():
            self(config)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                for i in range(count):
                    self(config, i)
        return stopwatch.time_steps(lambda _: graph.replay(), _REPLAYS, warm_up=1).median / count
