"""The mask of dropout as bits, for kernels whose threads do not hold four neighbouring channels:
those would evaluate Philox four times for what one evaluation gives.

Bit i of word j of a pixel says whether its channel 64 j + i is kept; bits behind its last channel
say nothing. The draws are those of `dropout`. A sixteenth of a tensor in 16 bits is written, and
read once. In a plan the pass that drops has written them; `mask_words` draws them where it has not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dropout import Mask, keeps, mask_arguments
from .philox import philox_words

_BLOCK = 128  # halves of words of a program
CHANNELS = 64  # of a word

_empty = torch.empty  # tests put a function here that returns -1 everywhere


def mask_words(mask: Mask, shape: tuple[int, ...]) -> Tensor:  # int64 [N, H, W, words]
    """Which elements of a tensor of this shape, [N, H, W, C], are kept. C is a multiple of 4."""
    n, h, w, c = shape
    assert c % 4 == 0
    if mask.words is not None:
        return mask.words
    words = triton.cdiv(c, CHANNELS)
    bits = _empty((n, h, w, words), dtype=torch.int64, device=mask.rng.device)
    halves = 2 * h * w * words
    chunks = triton.cdiv(halves, _BLOCK)
    _mask_words_kernel[(n * chunks,)](
        bits.view(torch.int32),
        *mask_arguments(mask),
        halves,
        chunks,
        2 * words,
        c // 4,
        BLOCK=_BLOCK,
    )
    return bits


@triton.jit
def _bit(words, p):
    return keeps(words, p).to(tl.int32)


@triton.jit(do_not_specialize=["first", "stream"])
def _mask_words_kernel(
    bits_ptr,  # int32 [N, halves of words]
    rng_ptr,  # int64 [2]: seed, step
    first,
    stream,
    p,
    halves,
    chunks,
    of_pixel,  # of these
    quads,  # elements of a pixel, in fours, which share a draw
    BLOCK: tl.constexpr,
):
    n = (tl.program_id(0) // chunks).to(tl.int64)
    half = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    first_quad = half // of_pixel * quads + half % of_pixel * 8
    quad = tl.arange(0, 8)[None, :]
    seed, step = tl.load(rng_ptr), tl.load(rng_ptr + 1)
    w0, w1, w2, w3 = philox_words(seed, step, first + n, first_quad[:, None] + quad, stream)
    four = _bit(w0, p) | _bit(w1, p) << 1 | _bit(w2, p) << 2 | _bit(w3, p) << 3
    bits = tl.sum(four << (4 * quad), axis=1)  # of distinct bits: no carry
    tl.store(bits_ptr + n * halves + half, bits, mask=half < halves)
