"""Attention over at most 256 positions for Hopper, in Gluon: a head stays in shared memory.

Where a head is a few tens of KB, a program of one warpgroup takes the whole of it by TMA, and the
two or three programs of a multiprocessor fill each other's gaps: one takes exponentials while
another multiplies. What plain Triton cannot say, and what it gains:

- The forward pass needs no running maximum: all scores of 64 queries are in registers.
- The backward pass makes dq, dk and dv in five products and one set of exponentials, and no program
  needs another's result. dk and dv of 64 keys, and dq of all queries, are in registers. Scores are
  transposed, so that p and ds are operands as they lie there; for dq ds goes through shared memory.
  Where dq is too large for the registers of one warpgroup there are two, with other keys each.
- delta comes from o and do in the same kernel.
- Results take the place of q, k and v in shared memory, from where TMA writes them; the rows of the
  bias gradient are sums of what lies there.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import triton
from torch import Tensor

from ..hopper.descriptors import SUPPORTED, TensorDescriptor, in_boxes, missing
from ..registry.kernel import Kernel, configures
from ..registry.spec import AttentionSpec
from ..runtime.dependent_launch import overlapping
from ..runtime.device import Device
from ..runtime.hardware import BOX_SIDE, VECTOR
from ..runtime.layout import is_aligned
from .operands import BwdOperands, FwdOperands
from .tiles import block_d

if SUPPORTED:
    from .hopper_kernels import attention_bwd_head_kernel, attention_fwd_head_kernel


@configures("head")
class HeadTile(NamedTuple):
    """Of the forward pass, which has all keys of a head in shared memory."""

    keep: int  # queries of a program
    step: int  # keys at a time


# `head` runs only where it was measured to be faster
FWD_HEAD_CONFIGS = (
    HeadTile(64, 128),
    HeadTile(128, 128),
    HeadTile(256, 128),
    HeadTile(256, 256),
)
_HEAD_DIMS = (16, 32, 64)
_WORD = VECTOR // 2  # channels of which strides of TMA are multiples
_MOST_DQ = 256 * 32  # numbers of dq in the registers of a warpgroup; two have twice as many
_SHORT = 256  # positions; kernels for longer heads were not timed with fewer


def _rows(t: int) -> int:
    """Positions in shared memory."""
    return max(64, triton.next_power_of_2(t))


def refuse_heads(
    spec: AttentionSpec, gpu: Device, dims: Sequence[int], padded: bool = False
) -> str | None:
    """Why no kernel for Hopper has them: no such GPU, not in 16 bits, not of these sizes, or not
    for TMA to read. `padded`: these are the sizes of tiles, which a head need not fill."""
    if spec.keys is not None:
        return "keys and values in another tensor than queries"
    if reason := missing(gpu, spec.itemsize):
        return reason
    if padded and (spec.d % _WORD or block_d(spec.d) not in dims):
        least = next(d for d in range(_WORD, dims[-1] + 1, _WORD) if block_d(d) in dims)
        return f"heads of {spec.d} channels; it has multiples of {_WORD}, {least} to {dims[-1]}"
    if not padded and spec.d not in dims:
        return f"heads of {spec.d} channels; it has {', '.join(map(str, dims))}"
    return None if spec.fetchable else "an address or stride that TMA cannot read"


def refuse(spec: AttentionSpec, gpu: Device) -> str | None:
    """Why heads cannot stay in shared memory: `refuse_heads`, or too large."""
    rows = _rows(spec.t)
    if reason := refuse_heads(spec, gpu, _HEAD_DIMS):
        return reason
    if rows > BOX_SIDE or (spec.grad and rows * spec.d > 2 * _MOST_DQ):
        return f"{spec.t} positions of a head of {spec.d} are too many for shared memory"
    return None


def head_tiles(spec: AttentionSpec, gpu: Device) -> list[HeadTile]:
    """The configurations, without those far larger than T."""
    longest = max(128, triton.next_power_of_2(spec.t))
    return [c for c in FWD_HEAD_CONFIGS if max(c.keep, c.step) <= longest]


def is_long(spec: AttentionSpec, gpu: Device) -> bool:
    """Whether a head does not fit shared memory, so that costs decide among the kernels for it."""
    return spec.t >= _SHORT and refuse(spec, gpu) is not None


def in_waves(programs: int, at_a_time: int, start: float, steps: float) -> float:
    """Microseconds of programs that each take `start` plus `steps`."""
    return math.ceil(programs / at_a_time) * (start + steps)


def fetchable(x: Tensor) -> bool:
    """Whether TMA can read x, which other kernels take with any strides and address."""
    return x.is_contiguous() and is_aligned(x)


def _forward(config: HeadTile, operands: FwdOperands) -> None:
    """o and lse of qkv."""
    qkv, _, _, o, lse, constants = operands
    n, t, _ = qkv.shape
    d, rows = constants["D"], _rows(t)
    keep, step = min(config.keep, rows), min(config.step, rows)
    attention_fwd_head_kernel[(n * constants["num_heads"] * triton.cdiv(t, keep),)](
        described(qkv, keep, d), described(qkv, rows, d), described(o, keep, d), lse,
        **shared(constants, "D"), ROWS=rows, KEEP=keep, STEP=step, num_warps=4,
        maxnreg=168 if d < 64 else None,  # so that three programs fit a multiprocessor
        **overlapping(qkv.device, n * t),
    )  # fmt: skip


def _backward(_: tuple, operands: BwdOperands) -> Tensor | None:
    """dqkv, and rows of `BwdOperands`, of all positions."""
    do, qkv, _, _, o, lse, dqkv, _, _, constants = operands
    n, t, _ = qkv.shape
    d, positions, rows = constants["D"], _rows(t), operands.rows(t)
    wide = d == 64  # dq, dk and dv leave no registers for k and v
    num_warps = 4 if positions * d <= _MOST_DQ else 8
    attention_bwd_head_kernel[(n * constants["num_heads"],)](
        described(qkv, positions, d), described(do, positions, d), described(dqkv, positions, d), o,
        lse, rows,
        **shared(constants, "D"), ROWS=positions, BUFFERS=1 if wide else 2, HELD=not wide,
        num_warps=num_warps, **overlapping(qkv.device),
    )  # fmt: skip
    return rows


def shared(constants: dict, *widths: str) -> dict:
    """Of the constants of plain Triton's kernels those that Hopper's have too, with these widths
    of a head."""
    return {name: constants[name] for name in ("num_heads", "scale", "T", "HEADS_QKV", *widths)}


def described(x: Tensor, rows: int, d: int) -> TensorDescriptor:
    """x [N, T, C] in boxes [1, rows, d]."""
    return in_boxes(x, list(x.shape), [1, rows, d])


def by_heads(x: Tensor, rows: int, constants: dict) -> TensorDescriptor:
    """x [N, T, C] as [N, T, C / D, D] in boxes [1, rows, 1, BLOCK_D]. What a box has beyond a head
    is zero where it is read, and is not written."""
    (n, t, c), d = x.shape, constants["D"]
    box = [1, rows, 1, constants["BLOCK_D"]]
    return in_boxes(x, [n, t, c // d, d], box)


HEAD = Kernel("head", HeadTile, refuse, head_tiles, launch=_forward)
HEAD_GRAD = Kernel("head", refuse=refuse, launch=_backward)
