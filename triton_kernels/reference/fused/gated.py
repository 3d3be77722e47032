"""Products of the halves of a tensor, of which one goes through an activation."""

import torch

from .. import ACTIVATION_FUNCTIONS


def gated_forward(x, activation, gate=1):
    """h act(g), where h and g are the halves of x [..., 2C], and g is this one."""
    halves = x.chunk(2, dim=-1)
    return halves[1 - gate] * ACTIVATION_FUNCTIONS[activation](halves[gate])


def gated_backward(dy, x, activation, gate=1):
    """Its gradient of x."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = gated_forward(x, activation, gate)
    return torch.autograd.grad(y, x, dy)[0]
