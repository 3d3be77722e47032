"""Activations and their derivatives as jit functions, for the epilogue or prologue of any kernel.

    identity   z
    relu       max(z, 0)
    silu       z s(z),   s(z) = 1 / (1 + exp(-z))
    gelu       z Phi(z),   Phi(z) = (1 + erf(z / sqrt 2)) / 2         (Hendrycks and Gimpel 2016)
    gelu_tanh  z (1 + tanh u) / 2 = z s(2u),  u = sqrt(2 / pi) (z + 0.044715 z^3)
    mish       z tanh(ln(1 + exp z))                                 (Misra 2019)

`z` is a float32 tensor of any shape and the name is a constexpr string, so that only the chosen
branch is compiled. Every function is finite for every finite z. tanh is written with exp: there is
nothing here that the interpreter lacks.

A pass over memory has time for about thirty instructions an element, and exp and the quotient of
s(z) would take thirteen of them. On a GPU they are `ex2.approx.ftz` and `rcp.approx.ftz`, which are
as exact (2 ulp and 1 ulp, PTX ISA) and leave out what denormal numbers want: five. Phi(-|z|) is

    exp(-z^2 / 2) (a1 t + ... + a5 t^5) / 2,   t = 1 / (1 + p |z| / sqrt 2),

off by less than 7.5e-8 (Abramowitz and Stegun 1964, 7.1.26); gelu' needs the same exponential.

A warp's instruction of either kind takes eight clocks. Where a result is rounded to bfloat16 anyway
silu' is of one instead of two (`rounded_grad`): s = (1 + t) / 2, t = tanh(z / 2) by `tanh.approx`.
PTX promises a t right to 2^-11, hence silu' to 2^-12 |t (1 - z t)|, 7e-4 at z = 4; rounding changes
a number about 1 by up to 2^-9 = 2e-3. On an H200 silu' was right to 9e-6 for |z| < 24.
"""

import torch
import triton
import triton.language as tl

ACTIVATIONS = ("identity", "relu", "silu", "gelu", "gelu_tanh", "mish")

_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
_P_SQRT_HALF = tl.constexpr(0.3275911 * 0.7071067811865476)
_HALF_A1 = tl.constexpr(0.254829592 / 2)
_HALF_A2 = tl.constexpr(-0.284496736 / 2)
_HALF_A3 = tl.constexpr(1.421413741 / 2)
_HALF_A4 = tl.constexpr(-1.453152027 / 2)
_HALF_A5 = tl.constexpr(1.061405429 / 2)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
_2_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
_GELU_CUBIC = tl.constexpr(0.044715)
# s(2u) is 0 or 1 in float32 beyond this z, and z^3 is still far from overflow
_GELU_TANH_LIMIT = tl.constexpr(16.0)
# tanh(ln(1 + e^z)) is 1 in float32 beyond this z, and e^(4z) is still far from overflow
_MISH_LIMIT = tl.constexpr(20.0)


def check_activation(name: str) -> None:
    """Raise ValueError unless `name` is one of `ACTIVATIONS`."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation is {name!r}; expected one of {', '.join(ACTIVATIONS)}")


def rounded_grad(name: str, dtype: torch.dtype) -> str:
    """The activation by the name under which `activate_affine_grad` is quickest, for a product that
    is then rounded to `dtype`."""
    return "silu_tanh" if name == "silu" and dtype == torch.bfloat16 else name


@triton.constexpr_function
def compiled() -> bool:
    """Not by the interpreter, which has no instructions of a GPU."""
    return not triton.knobs.runtime.interpret


@triton.jit
def _approximate(z, INSTRUCTION: tl.constexpr):
    return tl.inline_asm_elementwise(
        INSTRUCTION + " $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _exp2(x):
    if compiled():
        return _approximate(x, "ex2.approx.ftz.f32")
    else:
        return tl.exp2(x)


@triton.jit
def _reciprocal(x):
    if compiled():
        return _approximate(x, "rcp.approx.ftz.f32")
    else:
        return 1.0 / x


@triton.jit
def _logistic(z):
    return _reciprocal(1.0 + _exp2(z * _MINUS_LOG2_E))


@triton.jit
def _normal(z):
    """Phi(z) and exp(-z^2 / 2)"""
    e = _exp2(z * z * (0.5 * _MINUS_LOG2_E))
    t = _reciprocal(1.0 + tl.abs(z) * _P_SQRT_HALF)
    a = (((t * _HALF_A5 + _HALF_A4) * t + _HALF_A3) * t + _HALF_A2) * t + _HALF_A1
    below = a * t * e
    return tl.where(z < 0, below, 1.0 - below), e


@triton.jit
def activate(z, ACT: tl.constexpr):
    """act(z)."""
    if ACT == "identity":
        return z
    elif ACT == "relu":
        return tl.where(z < 0, 0.0, z)  # a NaN stays one
    elif ACT == "silu":
        return z * _logistic(z)
    elif ACT == "gelu":
        phi, _ = _normal(z)
        return z * phi
    elif ACT == "gelu_tanh":
        v = tl.minimum(tl.maximum(z, -_GELU_TANH_LIMIT), _GELU_TANH_LIMIT)
        return z * _logistic((v + v * v * v * _GELU_CUBIC) * _2_SQRT_2_OVER_PI)
    else:
        tl.static_assert(ACT == "mish", "unknown activation")
        # tanh(ln(1 + e)) = m / (m + 2) with m = (1 + e)^2 - 1 = e (e + 2)
        e = tl.exp(tl.minimum(z, _MISH_LIMIT))
        m = e * (e + 2)
        return z * (m / (m + 2))


@triton.jit
def activate_grad(z, ACT: tl.constexpr):
    """d act(z) / dz; relu's is 0 at 0."""
    if ACT == "identity":
        return z * 0 + 1
    elif ACT == "relu":
        return tl.where(z > 0, 1.0, 0.0)
    elif ACT == "silu":
        s = _logistic(z)
        return s * (1 + z * (1 - s))
    elif ACT == "gelu":
        phi, e = _normal(z)
        return phi + z * (e * _INV_SQRT_2PI)
    elif ACT == "gelu_tanh":
        v = tl.minimum(tl.maximum(z, -_GELU_TANH_LIMIT), _GELU_TANH_LIMIT)
        s = _logistic((v + v * v * v * _GELU_CUBIC) * _2_SQRT_2_OVER_PI)
        slope = (1 + v * v * _GELU_CUBIC * 3) * _2_SQRT_2_OVER_PI  # d(2u) / dz
        return s + v * s * (1 - s) * slope
    else:
        tl.static_assert(ACT == "mish", "unknown activation")
        # t + z s(z) (1 - t^2) with t = m / (m + 2), s = e / (1 + e),
        # 1 - t^2 = 4 (1 + e)^2 / (m + 2)^2
        v = tl.minimum(z, _MISH_LIMIT)
        e = tl.exp(v)
        m = e * (e + 2)
        return (m + v * (4 * e * (1 + e) / (m + 2))) / (m + 2)


@triton.jit
def activate_affine(x, g, b, ACT: tl.constexpr):
    """act(x g + b), as `activate_affine_grad` is its derivative."""
    if ACT != "silu_tanh":
        return activate(x * g + b, ACT)
    elif compiled():
        h = x * (0.5 * g) + 0.5 * b
        t = _approximate(h, "tanh.approx.f32")
        return h * t + h
    else:
        return activate(x * g + b, "silu")


@triton.jit
def activate_affine_grad(x, g, b, ACT: tl.constexpr):
    """act'(x g + b), where g and b are of few numbers that stand for many. `ACT` may also be what
    `rounded_grad` returns."""
    if ACT != "silu_tanh":
        return activate_grad(x * g + b, ACT)
    elif compiled():
        # with h = z / 2 and t = tanh(h): s(z) = (1 + t) / 2, so act'(z) = (1 + t + h (1 - t^2)) / 2
        h = x * (0.5 * g) + 0.5 * b
        t = _approximate(h, "tanh.approx.f32")
        return (h * (1.0 - t * t) + t) * 0.5 + 0.5
    else:
        return activate_grad(x * g + b, "silu")
