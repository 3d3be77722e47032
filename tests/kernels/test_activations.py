"""Activations and derivatives against float64 PyTorch, far into both tails."""

import pytest
import torch
import triton
import triton.language as tl

from triton_kernels.activations import (
    ACTIVATIONS,
    activate,
    activate_affine_grad,
    activate_grad,
    check_activation,
    rounded_grad,
)
from triton_kernels.reference import ACTIVATION_FUNCTIONS

# exp overflows where 1 / (1 + exp) is meant to be 0; NumPy, under the interpreter, warns of it
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")


@triton.jit
def _both_kernel(z_ptr, y_ptr, dz_ptr, ACT: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + offs)
    tl.store(y_ptr + offs, activate(z, ACT))
    tl.store(dz_ptr + offs, activate_grad(z, ACT))


def _both(z, act):
    y, dz = torch.full_like(z, torch.nan), torch.full_like(z, torch.nan)
    _both_kernel[(z.numel() // 256,)](z, y, dz, act, 256)
    return y, dz


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_value_and_derivative(act, device):
    z = torch.cat((torch.linspace(-12, 12, 960), torch.linspace(-100, 100, 64))).to(device)
    exact = z.double().requires_grad_()
    want = ACTIVATION_FUNCTIONS[act](exact)
    (want_dz,) = torch.autograd.grad(want.sum(), exact)
    y, dz = _both(z, act)
    # a few float32 roundings of numbers of the size of z, and of 1
    torch.testing.assert_close(y.double(), want.detach(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(dz.double(), want_dz, rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_extreme_values(act, device):
    """Every finite z has the limit's value: 0 or z, and derivative 0 or 1."""
    z = torch.tensor([1e3, 1e4, 1e10, 1e20, 3e38], device=device).repeat(64)[:256]
    for sign in (1, -1):
        y, dz = _both(sign * z, act)
        passes = sign > 0 or act == "identity"
        assert torch.equal(y, sign * z if passes else torch.zeros_like(z))
        assert torch.equal(dz, torch.full_like(z, float(passes)))


@triton.jit
def _affine_kernel(x_ptr, out_ptr, g, b, ACT: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, activate_affine_grad(tl.load(x_ptr + offs), g, b, ACT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_derivative_of_an_affine_term(act, dtype, device):
    """Where the result will be bfloat16, silu' may be of tanh.approx, right to 2^-11 (PTX ISA).
    It is (1 + t + h (1 - t^2)) / 2, so that this counts |t (1 - 2 h t)| / 2 times."""
    x, g, b = torch.linspace(-12, 12, 1024).to(device), 1.5, -0.25
    z = (g * x.double() + b).requires_grad_()
    (want,) = torch.autograd.grad(ACTIVATION_FUNCTIONS[act](z).sum(), z)
    got = torch.full_like(x, torch.nan)
    _affine_kernel[(4,)](x, got, g, b, rounded_grad(act, dtype), 256)
    h = z.detach() / 2
    t = torch.tanh(h)
    tanh = 2**-12 * (t * (1 - 2 * h * t)).abs() if act == "silu" and dtype != torch.float32 else 0
    assert ((got.double() - want).abs() <= tanh + 1e-6 * want.abs() + 1e-5).all()


def test_unknown_name():
    with pytest.raises(ValueError, match="'swish'; expected one of identity, relu, silu"):
        check_activation("swish")


def test_the_reference_has_the_same_names():
    assert tuple(ACTIVATION_FUNCTIONS) == ACTIVATIONS
