"""What a step of the reverse process starts from, in one launch: the image as the stem's
convolution wants it, and the embedding's row of this step out of a table of all of them.

    image[n, p, c] = x[n, p, c] where c < C, else 0
    emb[n, e]      = table[row, index[n], e]
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.layout import check_nhwc, check_shape
from ..tf32 import as_operand

_BLOCK = 4096  # of four warps: all that they load is on its way at once


@triton.jit
def _begin_step_kernel(
    x_ptr,  # [pixels, C]
    image_ptr,  # [pixels, CP], out
    table_ptr,  # float32 [K, U, E] or None
    row_ptr,  # int64 [1]
    index_ptr,  # int64 [N] or None: emb has a row for every u
    emb_ptr,  # float32 [N or U, E], out
    elements,  # of image
    emb_elements,
    image_programs,
    U,
    E,
    C: tl.constexpr,
    CP: tl.constexpr,
    TF32: tl.constexpr,  # the stem is a product in TF32
    BLOCK: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0)
    if pid < image_programs:
        offs = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        channel = offs % CP
        mask = (offs < elements) & (channel < C)
        x = tl.load(x_ptr + offs // CP * C + channel, mask=mask, other=0.0)
        image = as_operand(x, image_ptr.dtype.element_ty, TF32)
        tl.store(image_ptr + offs, image, mask=offs < elements)
    elif table_ptr is not None:
        offs_e = (pid - image_programs) * BLOCK + tl.arange(0, BLOCK)
        mask_e = offs_e < emb_elements
        source = offs_e.to(tl.int64)
        if index_ptr is not None:
            source = tl.load(index_ptr + offs_e // E, mask=mask_e, other=0) * E + offs_e % E
        row = tl.load(row_ptr)
        value = tl.load(table_ptr + row * U * E + source, mask=mask_e, other=0.0)
        tl.store(emb_ptr + offs_e, value, mask=mask_e)


def begin_step(
    x: Tensor,  # [N, H, W, C]
    channels: int,  # of the image
    dtype: torch.dtype,  # of the image
    table: Tensor | None = None,  # float32 [K, U, E]
    row: Tensor | None = None,  # int64 [1], on the device; it must be within [0, K)
    index: Tensor | None = None,  # int64 [N], each within [0, U); None: all of them
    tf32: bool = False,
) -> tuple[Tensor, Tensor | None]:  # [N, H, W, channels]; float32 [N or U, E]
    """(x with zeros behind its channels, table[row, index]); an image in float32 is rounded to TF32
    with `tf32`."""
    check_nhwc("x", x)
    n, h, w, c = x.shape
    image = x.new_empty((n, h, w, channels), dtype=dtype)
    emb, rows, width = None, 0, 1
    if table is not None:
        assert table.dtype == torch.float32 and table.is_contiguous() and table.ndim == 3
        rows, width = table.shape[1:]
        if index is not None:
            check_shape("index", index, n)
        emb = x.new_empty((rows if index is None else n, width), dtype=torch.float32)
    programs = triton.cdiv(image.numel(), _BLOCK)
    emb_elements = 0 if emb is None else emb.numel()
    grid = programs + triton.cdiv(emb_elements, _BLOCK)
    if grid:
        _begin_step_kernel[(grid,)](
            x, image, table, row, index, emb, image.numel(), emb_elements, programs, rows, width, c,
            channels, tf32, _BLOCK, num_warps=4,
            **overlapping(x.device, x[..., 0].numel()),
        )  # fmt: skip
    return image, emb
