"""The kernel of `elementwise`: a program computes BLOCK_M pixels by BLOCK_C channels."""

import triton
import triton.language as tl

from ..activations import activate, activate_grad
from ..runtime.dependent_launch import await_inputs


@triton.jit
def _act(a, WHICH: tl.constexpr, GRAD: tl.constexpr):
    """The WHICH-th of `activations.ACTIVATIONS`, whose names a tuple of steps cannot have."""
    if WHICH == 1:
        y = activate_grad(a, "relu") if GRAD else activate(a, "relu")
    elif WHICH == 2:
        y = activate_grad(a, "silu") if GRAD else activate(a, "silu")
    elif WHICH == 3:
        y = activate_grad(a, "gelu") if GRAD else activate(a, "gelu")
    elif WHICH == 4:
        y = activate_grad(a, "gelu_tanh") if GRAD else activate(a, "gelu_tanh")
    else:
        tl.static_assert(WHICH == 5, "unknown activation")
        y = activate_grad(a, "mish") if GRAD else activate(a, "mish")
    return y


@triton.jit
def _step(a, b, OP: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
    """A step, see `steps`."""
    if OP == 0:
        y = a + b
    elif OP == 1:
        y = a * b
    elif OP == 2:
        y = a / b
    elif OP == 3:
        y = a * P + Q
    elif OP == 4:  # a NaN stays one
        y = tl.where(a < P, P, tl.where(a > Q, Q, a))
    elif OP == 5:
        y = tl.where((b >= P) & (b <= Q), a, 0.0)
    elif OP == 6:
        y = _act(a, P, False)
    elif OP == 7:
        y = a * _act(b, P, True)
    else:
        tl.static_assert(OP == 8, "unknown step")
        y = a
        if P == 0:
            y = a.to(tl.bfloat16).to(tl.float32)
        elif P == 1:
            y = a.to(tl.float16).to(tl.float32)
    return y


@triton.jit
def _read(ptr, rows, cols, mask, pixels, C, HAS: tl.constexpr):
    """Of this tile [BLOCK_M, BLOCK_C], or of length 1 where a tensor is the same along an axis."""
    if HAS == 0:
        x = tl.load(ptr + rows * C + cols, mask=mask, other=0.0)
    elif HAS == 1:
        x = tl.load(ptr + cols, mask=cols < C, other=0.0)
    elif HAS == 2:
        x = tl.load(ptr + rows // pixels * C + cols, mask=mask, other=0.0)
    elif HAS == 3:
        x = tl.load(ptr + rows + cols * 0, mask=mask, other=0.0)
    else:
        x = tl.load(ptr + rows * 0 + cols * 0)
    return x.to(tl.float32)


@triton.jit
def elementwise_kernel(
    x0_ptr,  # tensors that are read, or None
    x1_ptr,
    x2_ptr,
    x3_ptr,
    x4_ptr,
    x5_ptr,
    x6_ptr,
    x7_ptr,
    y0_ptr,  # [M, C] each, or None
    y1_ptr,
    y2_ptr,
    y3_ptr,
    M,
    C,
    pixels,  # of an image
    CB,  # blocks of columns
    STEPS: tl.constexpr,
    HAS: tl.constexpr,  # of each tensor that is read
    RESULTS: tl.constexpr,  # the place of each that is written
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    await_inputs()
    pid = tl.program_id(0)
    cols = (pid % CB * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    rows = ((pid // CB).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    mask = (rows < M) & (cols < C)
    read = (x0_ptr, x1_ptr, x2_ptr, x3_ptr, x4_ptr, x5_ptr, x6_ptr, x7_ptr)
    written = (y0_ptr, y1_ptr, y2_ptr, y3_ptr)
    values = ()
    for i in tl.static_range(len(HAS)):
        values = values + (_read(read[i], rows, cols, mask, pixels, C, HAS[i]),)
    for i in tl.static_range(len(STEPS)):
        a, b = values[STEPS[i][1]], values[STEPS[i][2]]
        values = values + (_step(a, b, STEPS[i][0], STEPS[i][3], STEPS[i][4]),)
    for i in tl.static_range(len(RESULTS)):
        tl.store(written[i] + rows * C + cols, values[RESULTS[i]], mask=mask)
