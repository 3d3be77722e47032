"""What the epilogues of the Gluon kernels read, and how they round and write."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...hopper.compat import tma_load


@gluon.jit
def load_bias(bias_ptr, extra_bias_ptr, emb_ptr, stride_emb, n, offs):
    """What is added to the channels `offs` of image n, but for what every pixel has of its own."""
    bias = gl.load(bias_ptr + offs)
    if extra_bias_ptr is not None:
        bias += gl.load(extra_bias_ptr + offs)
    if emb_ptr is not None:
        bias += gl.load(emb_ptr + n.to(gl.int64) * stride_emb + offs)
    return bias


@gluon.jit
def load_table(table_ptr, n, offs, C):
    """mean, rstd, g and b of the channels `offs` of image n."""
    table_ptr += n.to(gl.int64) * 4 * C + offs
    mean = gl.load(table_ptr)
    rstd = gl.load(table_ptr + C)
    g = gl.load(table_ptr + 2 * C)
    b = gl.load(table_ptr + 3 * C)
    return mean, rstd, g, b


@gluon.jit
def load_beside(
    desc1, desc2, stages, bar, n, h0, c0, border,
    GROUP: gl.constexpr, ROWS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """What the epilogue reads beside a tile of ROWS rows, of one tensor or of two that are
    concatenated, to where it will write."""
    mbarrier.expect(bar, ROWS * W * 128)
    for j in gl.static_range(ROWS):
        buf = stages.index(GROUP * ROWS + j)
        if desc2 is None:
            tma_load(desc1, [n, h0 + j, 0, c0], bar, buf)
        else:
            left = c0 < border
            right = c0 >= border
            tma_load(desc1, [n, h0 + j, 0, c0], bar, buf, left)
            tma_load(desc2, [n, h0 + j, 0, c0 - border], bar, buf, right)
