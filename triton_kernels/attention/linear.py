"""Linear attention of images, with or without a memory, forward and backward; `linear_kernels` has
the formulas. A pass over positions is one launch, and between two of them is a small one that adds
up what programs have left: three launches forward, three backward and one for a memory.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..reductions.column_sum import column_sum, sum_partials
from ..registry.choose import select
from ..registry.cost import of_passes
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import AttentionSpec, dtype_name, precision_of
from ..runtime.dependent_launch import overlapping
from ..runtime.device import Device, describe
from .linear_kernels import (
    linear_attention_kernel,
    linear_bwd_kv_kernel,
    linear_bwd_q_kernel,
    linear_context_kernel,
    linear_merge_kernel,
)

Memory = tuple[Tensor, Tensor] | None  # keys and values [M, H, D]
MOST_WIDE = 64  # channels of a head whose sums fit registers
MOST_MEMORY = 64


@configures("split_positions")
class SplitPositions(NamedTuple):
    """What a program reads at once."""

    positions: int
    num_warps: int


def _refuse(spec: AttentionSpec, gpu: Device) -> str | None:
    if spec.d > MOST_WIDE:
        return f"heads of {spec.d} channels; at most {MOST_WIDE}"
    memory = spec.seen - spec.t
    return (
        f"a memory of {memory} positions; at most {MOST_MEMORY}" if memory > MOST_MEMORY else None
    )


def _configs(spec: AttentionSpec, gpu: Device) -> list[SplitPositions]:
    """Of float32 tiles are shorter, for each product of it may be three. Products of 32 positions
    and 64 channels do not overlap on Hopper."""
    most = 64 if spec.itemsize == 2 else 1024 // triton.next_power_of_2(spec.d)
    tiles = dict.fromkeys(max(16, positions) for positions in (most, 2 * most, most // 2))
    return [SplitPositions(positions, 4) for positions in tiles]


def _cost(spec: AttentionSpec, gpu: Device, config: SplitPositions) -> float:
    return of_passes(spec.bytes, 3)


_KEY = ("t", "d", "dtype")
_KERNELS = (Kernel("split_positions", SplitPositions, _refuse, _configs, _cost),)
LINEAR_ATTENTION = Op("linear_attention", _KEY, _KERNELS)
LINEAR_ATTENTION_GRAD = Op("linear_attention_bwd", _KEY, _KERNELS)


class _Cut(NamedTuple):
    """How a sum over positions is cut."""

    splits: int  # programs a head
    chunk: int  # positions of one


def _cut(spec: AttentionSpec, config: SplitPositions, gpu: Device) -> _Cut:
    """As many programs as keep the GPU busy."""
    tiles = triton.cdiv(spec.t, config.positions)
    each = max(1, triton.cdiv(tiles * spec.n, gpu.busy))
    return _Cut(triton.cdiv(tiles, each), each * config.positions)


def _spec(q: Tensor, memory: Memory, allow_tf32: bool, grad: bool) -> AttentionSpec:
    n, t, heads, d = q.shape
    keys = t + (0 if memory is None else memory[0].shape[0])
    return AttentionSpec(n * heads, dtype_name(q.dtype, allow_tf32), t, d, grad, keys=keys)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of positions, and of heads, whose channels lie side by side."""
    for x in tensors:
        assert x.stride(3) == 1 and x.stride(0) == x.shape[1] * x.stride(1), x.stride()
    return *(x.stride(1) for x in tensors), *(x.stride(2) for x in tensors)


def _of_memory(memory: Memory) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Keys and values, how many, and the block of them."""
    if memory is None:
        return None, None, 0, 16
    k, v = (x.contiguous() for x in memory)  # of a few positions, in any strides
    return k, v, k.shape[0], max(16, triton.next_power_of_2(k.shape[0]))


def linear_attention_forward(
    q: Tensor,  # [N, T, H, D], of any strides of heads and positions, and so are k and v
    k: Tensor,
    v: Tensor,
    memory: Memory,
    scale: float,
    *,
    allow_tf32: bool = True,  # of float32
) -> tuple[Tensor, Tensor, Tensor]:
    """o [N, T, H, D], contiguous; and what backward wants: the context, float32 [N, H, D, D], and
    the logarithms of the sums over positions, float32 [N, H, D], in base 2."""
    n, t, heads, d = q.shape
    device, spec = q.device, _spec(q, memory, allow_tf32, grad=False)
    o = q.new_empty(q.shape)
    context = q.new_empty((n, heads, d, d), dtype=torch.float32)
    lse = q.new_empty((n, heads, d), dtype=torch.float32)
    gpu, block_d = describe(device), max(16, triton.next_power_of_2(d))
    memory_k, memory_v, m, block_m = _of_memory(memory)

    def run(config: SplitPositions) -> Tensor:
        splits, chunk = _cut(spec, config, gpu)
        acc = context.new_empty((n, heads, splits, d, d))
        sums = context.new_empty((n, heads, splits, 2, d))
        options = {"num_warps": config.num_warps, "num_stages": 2} | overlapping(device)
        precision = precision_of(q.dtype, allow_tf32)
        linear_context_kernel[(n * heads * splits,)](
            k, v, memory_k, memory_v, acc, sums, *_strides(k, v), t, m, d, heads, splits, chunk,
            config.positions, block_d, block_m, precision, **options,
        )  # fmt: skip
        linear_merge_kernel[(n * heads,)](
            acc, sums, context, lse, d, splits, block_d, **overlapping(device)
        )
        linear_attention_kernel[(n * heads * splits,)](
            q, context, o, *_strides(q), scale, t, d, heads, splits, chunk, config.positions,
            block_d, precision, **options,
        )  # fmt: skip
        return o

    run(select(LINEAR_ATTENTION, spec, gpu, run).config)
    return o, context, lse


def linear_attention_backward(
    do: Tensor,  # [N, T, H, D], contiguous
    q: Tensor,  # as forward
    k: Tensor,
    v: Tensor,
    memory: Memory,
    scale: float,
    context: Tensor,
    lse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],  # out: those of q, k and v, with their strides
    *,
    allow_tf32: bool = True,
) -> Memory:
    """The gradients of the memory, float32."""
    n, t, heads, d = q.shape
    device, spec = q.device, _spec(q, memory, allow_tf32, grad=True)
    gpu, block_d = describe(device), max(16, triton.next_power_of_2(d))
    memory_k, memory_v, m, block_m = _of_memory(memory)
    dq, dk, dv = grads
    assert _strides(dq, dk, dv) == _strides(q, k, v)
    each = [None if memory is None else context.new_empty((n, m, heads, d)) for _ in range(2)]

    def run(config: SplitPositions) -> Tensor:
        splits, chunk = _cut(spec, config, gpu)
        options = {"num_warps": config.num_warps, "num_stages": 2} | overlapping(device)
        tile, precision = (config.positions, block_d), precision_of(q.dtype, allow_tf32)
        d_context = context.new_empty(context.shape)
        parts = context.new_empty((splits, *context.shape)) if splits > 1 else d_context
        linear_bwd_q_kernel[(n * heads * splits,)](
            q, do, context, dq, parts, *_strides(q), scale, t, d, heads, splits, chunk, *tile,
            precision, **options,
        )  # fmt: skip
        sum_partials(parts.view(splits, -1), d_context.view(-1)) if splits > 1 else None
        linear_bwd_kv_kernel[(n * heads * splits,)](
            k, v, memory_k, memory_v, context, d_context, lse, dk, dv, *each, *_strides(k, v),
            t, m, d, heads, splits, chunk, *tile, block_m, precision, **options,
        )  # fmt: skip
        return dk

    run(select(LINEAR_ATTENTION_GRAD, spec, gpu, run).config)
    if memory is None:
        return None
    summed = [context.new_empty((m, heads, d)) for _ in range(2)]
    for of_samples, total in zip(each, summed, strict=True):
        column_sum(of_samples.view(n, -1), total.view(-1))
    return tuple(summed)
