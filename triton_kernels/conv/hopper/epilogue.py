"""What the epilogues of the Gluon kernels read for each channel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
