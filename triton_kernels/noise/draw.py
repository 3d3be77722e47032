"""Random draws: normal noise, and the timesteps and mirror flips of a training batch.

Every value is a function of (seed, step, global sample index, stream) alone; see `philox`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.device import is_rehearsal
from ..runtime.layout import check_device
from ..runtime.library import op
from .philox import BLOCK, FLIP, NOISE, TIMESTEP, check_rng, normals, philox_words


@triton.jit(do_not_specialize=["first"])
def _normal_kernel(
    out_ptr,  # float32 [N, elements]
    rng_ptr,  # int64 [2]: seed, step
    first,
    elements,
    chunks,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    n = (pid // chunks).to(tl.int64)
    start = (pid % chunks) * BLOCK
    z = normals(
        tl.load(rng_ptr), tl.load(rng_ptr + 1), first + n, start + tl.arange(0, BLOCK), STREAM
    )  # [4 * BLOCK]
    offs = 4 * start + tl.arange(0, 4 * BLOCK)
    tl.store(out_ptr + n * elements + offs, z, mask=offs < elements)


@triton.jit(do_not_specialize=["first"])
def _draw_integers_kernel(
    out_ptr,  # [N]: of 0 to limit - 1
    rng_ptr,  # int64 [2]
    first,
    n,
    limit,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs, word = first_words(rng_ptr, first, STREAM, BLOCK)
    value = tl.umulhi(word, (word * 0 + limit).to(tl.uint32))  # (word * limit) >> 32
    tl.store(out_ptr + offs, value.to(out_ptr.dtype.element_ty), mask=offs < n)


@triton.jit
def first_words(rng_ptr, first, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    """Word 0 of each of BLOCK samples, and the samples' places in the batch."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    quad = tl.zeros([BLOCK], tl.int32)
    word, _, _, _ = philox_words(
        tl.load(rng_ptr), tl.load(rng_ptr + 1), first + offs.to(tl.int64), quad, STREAM
    )
    return offs, word


@op("normal", lambda shape, rng, *_: rng.new_empty(shape, dtype=torch.float32))
def _normal(shape: list[int], rng: Tensor, stream: int, first: int) -> Tensor:
    out = rng.new_empty(shape, dtype=torch.float32)
    if out.numel() > 0:
        elements = math.prod(shape[1:])
        chunks = triton.cdiv(elements, 4 * BLOCK)
        grid = (shape[0] * chunks,)
        _normal_kernel[grid](out, rng, first, elements, chunks, STREAM=stream, BLOCK=BLOCK)
    return out


def _draw_integers(
    rng: Tensor, n: int, limit: int, first: int, stream: int, dtype: torch.dtype
) -> Tensor:  # [N]
    """Each is (word * limit) >> 32."""
    out = rng.new_empty(n, dtype=dtype)
    if n > 0:
        grid = (triton.cdiv(n, BLOCK),)
        _draw_integers_kernel[grid](out, rng, first, n, limit, STREAM=stream, BLOCK=BLOCK)
    return out


@op("draw_timesteps", lambda rng, n, *_: rng.new_empty(n, dtype=torch.int64))
def _draw_timesteps(rng: Tensor, n: int, num_timesteps: int, first: int) -> Tensor:
    out = _draw_integers(rng, n, num_timesteps, first, TIMESTEP, torch.int64)
    if is_rehearsal():  # PyTorch's own ops look them up in tables
        out.zero_()
    return out


@op("draw_flips", lambda rng, n, _: rng.new_empty(n, dtype=torch.bool))
def _draw_flips(rng: Tensor, n: int, first: int) -> Tensor:
    return _draw_integers(rng, n, 2, first, FLIP, torch.bool)


def normal(
    shape: tuple[int, ...],  # [N, ...]; elements are counted in this order
    rng: Tensor,  # int64 [2]: seed, step
    *,
    stream: int = NOISE,  # what for: numbers of two purposes are independent
    first: int = 0,
) -> Tensor:  # float32
    """Standard normal noise (Box and Muller 1958, of Philox's words; Salmon et al. 2011). Sample n
    is a function of (seed, step, first + n, stream) alone. ValueError: a negative size."""
    check_device("rng", rng)
    check_rng(rng)
    if not shape or min(shape) < 0:
        raise ValueError(f"shape is {tuple(shape)}; expected [N, ...], none of them negative")
    return _normal(shape, rng, stream, first)


def draw_timesteps(
    rng: Tensor,  # int64 [2]: seed, step
    n: int,
    num_timesteps: int,
    *,
    first: int = 0,
) -> Tensor:  # int64 [N]
    """Uniform timesteps in [0, num_timesteps): (word * num_timesteps) >> 32, with one word of 32
    bits a sample. ValueError: num_timesteps is not from 1 to 2^31 - 1."""
    check_device("rng", rng)
    check_rng(rng)
    if not 0 < num_timesteps < 2**31:
        raise ValueError(f"num_timesteps is {num_timesteps}; expected 1 to 2^31 - 1")
    return _draw_timesteps(rng, n, num_timesteps, first)


def draw_flips(
    rng: Tensor,  # int64 [2]: seed, step
    n: int,
    *,
    first: int = 0,
) -> Tensor:  # bool [N]
    """Fair coins, of which samples are to be mirrored: the top bit of a word a sample."""
    check_device("rng", rng)
    check_rng(rng)
    return _draw_flips(rng, n, first)
