"""Dropout (Srivastava et al. 2014) whose mask is drawn again in backward:

    y = x / (1 - p) where a uniform draw u >= p, else 0;     dx = dy / (1 - p) at the same elements

The draw is Philox keyed by (seed, step, first + n, layer) (see `philox`), so backward makes the
mask again from its counter, and the reference keeps exactly the same elements. A program handles
4 * BLOCK elements of one sample, four from each evaluation of Philox.

A kernel that has the elements in registers can drop them there: it is told by a `Mask` and asks
`kept`. One whose threads do not hold four neighbouring channels would evaluate Philox four times
for what one evaluation gives: it reads the mask as bits, which the kernel that dropped has stored.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import compiled
from ..runtime.layout import check_nhwc
from ..runtime.library import derivative, once_differentiable, op
from .philox import BLOCK, DROPOUT, check_rng, philox_words

WORD = 64  # channels whose bits are in a word


class Mask(NamedTuple):
    """Which elements of a tensor [N, H, W, C] are kept."""

    p: float  # of dropping one
    rng: Tensor  # int64 [2]: seed, step
    layer: int
    first: int = 0  # global index of sample 0
    # int64 [N, H, W, C / 64, rounded up] or None: bit i of word j is whether element 64 j + i of a
    # pixel is kept; bits behind its last channel say nothing. Who drops writes them, and who drops
    # again may read them instead of drawing.
    words: Tensor | None = None


def mask_arguments(mask: Mask | None) -> tuple[Tensor | None, int, int, float]:
    """rng, first, stream and p, as kernels take them; with None for rng nothing is dropped."""
    if mask is None:
        return None, 0, 0, 0.0
    return mask.rng, mask.first, DROPOUT | mask.layer << 8, mask.p


@triton.jit
def bytes_of_words(C):
    """Of a pixel with so many channels, in `Mask.words`."""
    return (C + 63) // 64 * 8


@triton.jit
def keeps(words, p):
    """Whether the elements that these words are drawn for are kept."""
    return (words >> 8).to(tl.float32) * (2.0**-24) >= p


@triton.jit
def kept(rng_ptr, sample, quad, stream, p):
    """For the quads [..., K] of a sample which of their elements are kept: bool [..., 4 K]."""
    w0, w1, w2, w3 = philox_words(tl.load(rng_ptr), tl.load(rng_ptr + 1), sample, quad, stream)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # w0 w1 w2 w3 of each quad
    return keeps(words, p)


@triton.jit
def kept_bits(rng_ptr, sample, quad, stream, p):
    """The same as numbers, of which bit i is for the i-th element of a quad: int32 [..., K]."""
    w0, w1, w2, w3 = philox_words(tl.load(rng_ptr), tl.load(rng_ptr + 1), sample, quad, stream)
    low = keeps(w0, p).to(tl.int32) | keeps(w1, p).to(tl.int32) << 1
    return _once(low | keeps(w2, p).to(tl.int32) << 2 | keeps(w3, p).to(tl.int32) << 3)


@triton.jit
def spread_bits(four):
    """int32 [..., K] of `kept_bits` as bool [..., 4 K]."""
    return (
        tl.interleave(tl.interleave(four, four >> 2), tl.interleave(four >> 1, four >> 3)) & 1
    ) != 0


@triton.jit
def _once(x):
    """x, of which the compiler may not compute a second one: where two stores want it in different
    threads, it would draw twice rather than move bits between them."""
    if compiled():
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, False, 1)
    else:
        return x


@triton.jit(do_not_specialize=["first", "stream"])
def _dropout_kernel(
    x_ptr,  # [N, elements]
    y_ptr,  # [N, elements]
    rng_ptr,  # int64 [2]: seed, step
    first,
    stream,
    elements,
    chunks,
    p,
    factor,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    n = (pid // chunks).to(tl.int64)
    start = (pid % chunks) * BLOCK
    quad = start + tl.arange(0, BLOCK)
    keep = kept(rng_ptr, first + n, quad, stream, p)
    offs = 4 * start + tl.arange(0, 4 * BLOCK)
    mask = offs < elements
    x = tl.load(x_ptr + n * elements + offs, mask=mask, other=0.0).to(tl.float32)
    y = tl.where(keep, x * factor, 0.0)
    tl.store(y_ptr + n * elements + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@op("dropout", lambda x, *_: x.new_empty(x.shape), differentiable=True)
def _dropout(x: Tensor, p: float, rng: Tensor, layer: int, first: int) -> Tensor:
    y = x.new_empty(x.shape)
    elements = x[0].numel() if x.shape[0] else 0
    chunks = triton.cdiv(elements, 4 * BLOCK)
    _dropout_kernel[(x.shape[0] * chunks,)](
        x, y, rng, first, DROPOUT | layer << 8, elements, chunks, p, 1 / (1 - p), BLOCK
    )
    return y


@derivative(of=_dropout)
class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, rng, layer, first):
        ctx.save_for_backward(rng)  # which raises if rng has moved on before backward
        ctx.args = p, layer, first
        return _dropout.below_autograd(x, p, rng, layer, first)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        p, layer, first = ctx.args
        (rng,) = ctx.saved_tensors
        dx = _dropout(dy.contiguous(), p, rng, layer, first)  # dy may be an expanded gradient
        return dx, None, None, None, None


def dropout(
    x: Tensor,  # [N, H, W, C]
    p: float,  # share that is dropped
    rng: Tensor,  # int64 [2]: seed, step
    *,
    layer: int,  # two layers draw independently
    first: int = 0,
) -> Tensor:  # [N, H, W, C], dtype of x
    """x / (1 - p) where a uniform draw is >= p, else 0 (Srivastava et al. 2014). The draws of
    sample n are a function of (seed, step, first + n, layer); backward draws them again.

    Raises ValueError unless 0 <= p < 1 and 0 <= layer < 2^23, and for a wrong layout or rng.
    """
    check_nhwc("x", x)
    check_rng(rng)
    if not 0 <= p < 1:
        raise ValueError(f"p is {p}; expected 0 <= p < 1")
    if not 0 <= layer < 1 << 23:
        raise ValueError(f"layer is {layer}; expected 0 <= layer < 2^23")
    return _dropout(x, p, rng, layer, first)
