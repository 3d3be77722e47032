"""A clean batch of the data set, and the same with the noise of its timesteps."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.layout import DTYPES
from ..runtime.library import op
from .checks import check_batch, check_process
from .chunks import BLOCK, NUM_WARPS, locate
from .process import clean, coefficients, noise


@triton.jit(do_not_specialize=["first"])
def _q_sample_kernel(
    images_ptr,  # uint8 or float32 [M, H, W, C]
    index_ptr,  # int64 [N] or None
    flip_ptr,  # bool [N] or None
    t_ptr,  # int64 [N]
    table_ptr,  # float32 [T, 2]
    rng_ptr,  # int64 [2]
    x_ptr,  # [N, H, W, C], out
    first,
    elements,
    chunks,
    W: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n, start = locate(chunks, BLOCK)
    offs = 4 * start + tl.arange(0, 4 * BLOCK)
    mask = offs < elements
    x = clean(images_ptr, index_ptr, flip_ptr, n, offs, mask, elements, W, C)
    if table_ptr is not None:  # without a table this is gather_images
        a, s = coefficients(t_ptr, table_ptr, n)
        x = a * x + s * noise(tl.load(rng_ptr), tl.load(rng_ptr + 1), first, n, start, BLOCK)
    tl.store(x_ptr + n * elements + offs, x.to(x_ptr.dtype.element_ty), mask=mask)


def _noised(images, index, flip, t, table, rng, first, dtype):
    n = images.shape[0] if index is None else index.shape[0]
    height, width, c = images.shape[1:]
    x = images.new_empty((n, height, width, c), dtype=dtype)
    if x.numel() > 0:
        elements = height * width * c
        chunks = triton.cdiv(elements, 4 * BLOCK)
        _q_sample_kernel[(n * chunks,)](
            images, index, flip, t, table, rng, x, first, elements, chunks,
            W=width, C=c, BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
    return x


def _fake_batch(images, index, dtype):
    n = images.shape[0] if index is None else index.shape[0]
    return images.new_empty((n, *images.shape[1:]), dtype=dtype)


@op("gather_images", lambda images, index, _: _fake_batch(images, index, torch.float32))
def _gather_images(images: Tensor, index: Tensor | None, flip: Tensor | None) -> Tensor:
    return _noised(images, index, flip, None, None, None, 0, torch.float32)


@op("q_sample", lambda images, index, *rest: _fake_batch(images, index, rest[-1]))
def _q_sample(
    images: Tensor,
    index: Tensor | None,
    flip: Tensor | None,
    t: Tensor,
    table: Tensor,
    rng: Tensor,
    first: int,
    dtype: torch.dtype,
) -> Tensor:
    return _noised(images, index, flip, t, table, rng, first, dtype)


def gather_images(
    images: Tensor,  # uint8 or float32 [M, H, W, C]
    index: Tensor | None = None,  # int64 [N]; None: all of them, in order
    flip: Tensor | None = None,  # bool [N]
) -> Tensor:  # float32 [N, H, W, C]; uint8 is mapped to x / 127.5 - 1
    """The clean batch x_0. Every index must be within [0, M), which is not checked."""
    check_batch(images, index, flip)
    return _gather_images(images, index, flip)


def q_sample(
    images: Tensor,  # uint8 or float32 [M, H, W, C]
    t: Tensor,  # int64 [N]
    table: Tensor,  # float32 [T, 2]: sqrt(alpha_bar), sqrt(1 - alpha_bar)
    rng: Tensor,  # int64 [2]: seed, step
    *,
    first: int = 0,
    index: Tensor | None = None,  # int64 [N]
    flip: Tensor | None = None,  # bool [N]
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # [N, H, W, C], dtype
    """x_t = sqrt(alpha_bar_t) x_0 + sqrt(1 - alpha_bar_t) epsilon (Ho et al. 2020, eq. 4). The
    noise of sample n is keyed by (seed, step, first + n). Every index must be within [0, M) and
    every t within [0, T), which is not checked."""
    n = check_batch(images, index, flip)
    check_process(n, t, table, rng)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; expected float32, float16 or bfloat16")
    return _q_sample(images, index, flip, t, table, rng, first, dtype)
