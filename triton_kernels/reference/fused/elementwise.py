"""Steps over whole tensors, as `triton_kernels.elementwise.steps` defines them."""

import torch

from ...activations import ACTIVATIONS
from ...elementwise import steps as of
from .. import ACTIVATION_FUNCTIONS


def elementwise(tensors, has, steps, results, shape):
    """The results that are wanted: of their places, in their types."""
    n, *between, c = shape
    ones = [1] * len(between)
    sizes = (tuple(shape), (1, *ones, c), (n, *ones, c), (n, *between, 1), (1, *ones, 1))
    wide = any(x.dtype == torch.float64 for x in tensors)
    exact = torch.float64 if wide else torch.float32
    values = [x.reshape(sizes[kind]).to(exact) for x, kind in zip(tensors, has, strict=True)]
    for op, a, b, p, q in steps:
        values.append(_FORMULAS[op](values[a], values[b], p, q))
    return [values[at].expand(*shape).to(dtype).contiguous() for at, dtype in results]


def _act_grad(a, b, p, q):
    with torch.enable_grad():
        x = b.detach().requires_grad_()
        y = ACTIVATION_FUNCTIONS[ACTIVATIONS[p]](x)
    return a * torch.autograd.grad(y, x, torch.ones_like(y))[0]


_FORMULAS = {
    of.ADD: lambda a, b, p, q: a + b,
    of.MUL: lambda a, b, p, q: a * b,
    of.DIV: lambda a, b, p, q: a / b,
    of.AFFINE: lambda a, b, p, q: a * p + q,
    of.CLAMP: lambda a, b, p, q: a.clamp(p, q),
    of.CLAMP_GRAD: lambda a, b, p, q: torch.where((b >= p) & (b <= q), a, 0.0),
    of.ACT: lambda a, b, p, q: ACTIVATION_FUNCTIONS[ACTIVATIONS[p]](a),
    of.ACT_GRAD: _act_grad,
    of.ROUND: lambda a, b, p, q: a.to(of.ROUNDED[p]).to(a.dtype),
}
