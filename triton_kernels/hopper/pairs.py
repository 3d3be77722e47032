"""Conversions between float32 and 16-bit types, two numbers per instruction."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def widen_pairs(x):
    """To float32. A bfloat16 is the upper half of one: an instruction each, where the compiler by
    itself takes two for every second number."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t;"
            " and.b32 t, $2, 0xffff0000; mov.b32 $1, t; }",
            "=f,=f,r",
            [x],
            gl.float32,
            True,
            2,
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def round_pairs(x, dtype: gl.constexpr):
    """float32 to `dtype`; to bfloat16 two numbers an instruction."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, True, 2
        )
    else:
        return x.to(dtype)
