"""Operands of float32 convolutions in the order and in the parts that tensor cores want.

In four bytes wgmma takes its operands from shared memory only with the index of the sum innermost.
That of an input gradient is CO, which in the filters is outermost. A copy with the two indices
changed, made once, costs one pass over memory; turning the tiles inside the product costs more,
nine times.

A copy of one part is rounded to TF32. One of two parts is for float32 products: `split_to_tf32`.

Filters that lie in one piece of memory are copied by one launch, which a table tells of blocks of
them (`transposed_filters`): so a plan has the copies of a backward pass made before it.
"""

from collections.abc import Sequence
from itertools import accumulate, product
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...registry.kernel import Kernel
from ...registry.spec import ConvSpec
from ...runtime.dependent_launch import await_inputs, overlapping
from ...runtime.layout import is_aligned
from ...tf32 import round_to_tf32, split_to_tf32
from ..configs import ConvOperands
from ..hopper.operands import Operands

_BLOCK = 64  # channels, of both sides, of a block of several filters

_empty = torch.empty  # tests put a function here that returns NaNs
_tables: dict[tuple, Tensor] = {}  # of blocks of several filters; CUDA graphs read them

Given = TypeVar("Given", Operands, ConvOperands)


@triton.jit
def _store_parts(ptrs, v, mask, part_stride, PARTS: tl.constexpr):
    if PARTS == 2:
        big, small = split_to_tf32(v)
        tl.store(ptrs, big, mask=mask)
        tl.store(ptrs + part_stride, small, mask=mask)
    else:
        tl.store(ptrs, round_to_tf32(v), mask=mask)


@triton.jit
def _transpose_block(
    w_ptr, out_ptr, CO, CI, TAPS, tap, co, ci, part_stride, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """One tap of the channels from co and ci on."""
    co += tl.arange(0, BLOCK)
    ci += tl.arange(0, BLOCK)
    mask = (co < CO)[:, None] & (ci < CI)[None, :]
    w = tl.load(w_ptr + (co[:, None] * TAPS + tap) * CI + ci[None, :], mask=mask, other=0.0)
    mask = (ci < CI)[:, None] & (co < CO)[None, :]
    ptrs = out_ptr + (ci[:, None] * TAPS + TAPS - 1 - tap) * CO + co[None, :]
    _store_parts(ptrs, tl.trans(w), mask, part_stride, PARTS)


@triton.jit
def _transpose_weights_kernel(
    w_ptr,  # [CO, TAPS, CI]
    out_ptr,  # [PARTS, CI, TAPS, CO], the taps counted backwards
    CO,
    CI,
    TAPS,
    part_stride,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    await_inputs()
    tap, co, ci = tl.program_id(2), tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    _transpose_block(w_ptr, out_ptr, CO, CI, TAPS, tap, co, ci, part_stride, PARTS, BLOCK)


@triton.jit
def _transpose_filters_kernel(
    w_ptr,  # several [CO, TAPS, CI], each a multiple of 4 elements from here
    out_ptr,  # [CI, TAPS, CO] of each, as above
    table_ptr,  # int64 [blocks, 7]: of w, of out, CO, CI, TAPS, first channels of both sides
    BLOCK: tl.constexpr,
):
    await_inputs()
    table_ptr += tl.program_id(0) * 7
    w_ptr += tl.multiple_of(tl.load(table_ptr), 4)
    out_ptr += tl.multiple_of(tl.load(table_ptr + 1), 4)
    CO = tl.multiple_of(tl.load(table_ptr + 2).to(tl.int32), 4)
    CI = tl.multiple_of(tl.load(table_ptr + 3).to(tl.int32), 4)
    TAPS = tl.load(table_ptr + 4).to(tl.int32)
    co = tl.multiple_of(tl.load(table_ptr + 5).to(tl.int32), BLOCK)
    ci = tl.multiple_of(tl.load(table_ptr + 6).to(tl.int32), BLOCK)
    tap = tl.program_id(1)
    if tap < TAPS:
        _transpose_block(w_ptr, out_ptr, CO, CI, TAPS, tap, co, ci, 0, 1, BLOCK)


@triton.jit
def _split_kernel(x_ptr, out_ptr, num, BLOCK: tl.constexpr):
    await_inputs()
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num
    _store_parts(out_ptr + offs, tl.load(x_ptr + offs, mask=mask, other=0.0), mask, num, 2)


def transpose_weights(
    weight: Tensor,  # float32 [CO, CI, R, S] in channels_last memory
    parts: int,
) -> Tensor:  # float32 [parts, CI, CO, R, S], each part in channels_last memory
    """The filters with which a forward convolution is the input gradient, for which its padding
    has to be R - 1 less that of the forward."""
    co, ci, r, s = weight.shape
    out = _empty((parts, ci, r, s, co), dtype=torch.float32, device=weight.device)
    block = 32
    _transpose_weights_kernel[(triton.cdiv(co, block), triton.cdiv(ci, block), r * s)](
        weight, out, co, ci, r * s, weight.numel(), PARTS=parts, BLOCK=block,
        **overlapping(weight.device),
    )  # fmt: skip
    return out.permute(0, 1, 4, 2, 3)


def with_transposed(operands: Given, kernel: Kernel, spec: ConvSpec) -> Given:
    """The operands, with the copy of the filters that the kernel multiplies; it is made if nobody
    has."""
    if operands.transposed is not None or not kernel.transposes(spec):
        return operands
    return operands._replace(transposed=transpose_weights(operands.weight, 1)[0], follows=True)


def transposed_filters(weights: Sequence[Tensor]) -> list[Tensor]:
    """`transpose_weights` of each, in one part: of all that share a piece of memory in one launch.
    A CUDA graph has that launch if it was made before."""
    pieces: dict[int, list[int]] = {}
    for i, weight in enumerate(weights):
        pieces.setdefault(weight.untyped_storage().data_ptr(), []).append(i)
    made: dict[int, Tensor] = {}
    for piece in pieces.values():
        made |= zip(piece, _transposed_piece([weights[i] for i in piece]), strict=True)
    return [made[i] for i in range(len(weights))]


def _transposed_piece(weights: list[Tensor]) -> list[Tensor]:
    first = min(weights, key=Tensor.data_ptr)
    starts = [(weight.data_ptr() - first.data_ptr()) // 4 for weight in weights]
    shapes, sizes = [weight.shape for weight in weights], [weight.numel() for weight in weights]
    key = first.device, *zip(starts, shapes, strict=True)
    capturing = first.is_cuda and torch.cuda.is_current_stream_capturing()
    if len(weights) == 1 or (capturing and key not in _tables):
        return [transpose_weights(weight, 1)[0] for weight in weights]
    assert all(is_aligned(x) and x.shape[0] % 4 == x.shape[1] % 4 == 0 for x in weights)
    if key not in _tables:
        outs = accumulate(sizes, initial=0)
        rows = [
            (start, out, co, ci, r * s, *block)
            for start, out, (co, ci, r, s) in zip(starts, outs, shapes, strict=False)
            for block in product(range(0, co, _BLOCK), range(0, ci, _BLOCK))
        ]
        _tables[key] = torch.tensor(rows, device=first.device)
    table, taps = _tables[key], max(r * s for *_, r, s in shapes)
    whole = _empty((sum(sizes),), dtype=torch.float32, device=first.device)
    _transpose_filters_kernel[(len(table), taps)](
        first, whole, table, BLOCK=_BLOCK, **overlapping(first.device)
    )
    made = zip(whole.split(sizes), shapes, strict=True)
    return [out.view(ci, r, s, co).permute(0, 3, 1, 2) for out, (co, ci, r, s) in made]


def split(x: Tensor) -> Tensor:  # float32, dense in memory -> float32 [2, ...]
    """The two parts of each number, in the order in which x lies in memory."""
    out = _empty((2, x.numel()), dtype=torch.float32, device=x.device)
    block = 2048
    _split_kernel[(triton.cdiv(x.numel(), block),)](
        x, out, x.numel(), BLOCK=block, **overlapping(x.device)
    )
    return out.as_strided((2, *x.shape), (x.numel(), *x.stride()))
