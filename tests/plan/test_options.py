"""A plan computes what the module does, and its gradients, or says what has no place in it: for
every option of every op that a plan has a line for, and for what a module may do to gradients."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from diffusion import accelerate
from diffusion.plan.graph import PlanError
from tests.plan.called import CASES, Called


def _drawn_alike(net, inputs):
    torch.manual_seed(0)
    return net(*inputs)


def compare(module, inputs):
    """That the module and its plan have the same results, and the same gradients or none."""
    y, z = (_drawn_alike(net, inputs) for net in (accelerate(module), module))
    assert y.shape == z.shape and y.dtype == z.dtype
    torch.testing.assert_close(y.detach(), z.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
    dy = torch.randn_like(z)
    sources = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    ours, theirs = (torch.autograd.grad(out, sources, dy, allow_unused=True) for out in (y, z))
    assert [dx is None for dx in ours] == [dx is None for dx in theirs]
    pairs = [
        (a.to_dense(), b.to_dense()) for a, b in zip(ours, theirs, strict=True) if b is not None
    ]
    # of the largest: that of the gain is a difference of large sums, at times 0
    atol = 1e-5 * max(float(b.nan_to_num(0, 0, 0).abs().max()) for _, b in pairs)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=atol, equal_nan=True)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, of rare options
@pytest.mark.parametrize("name", CASES)
def test_as_pytorch_or_refused(name):
    case = CASES[name]
    module = Called(case)
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in case.inputs]
    if not case.refused:
        compare(module, inputs)
        return
    with pytest.raises(PlanError) as error:
        accelerate(module)(*inputs)
    assert case.refused in str(error.value)


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(4, 4)
        self.free = torch.randn(4, requires_grad=True)

    def forward(self, x):
        return self.function(self, x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 1.0

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy):
        return -dy


def without_gradient(function):
    """function(y), with its gradients off, and y, of y = linear(x)."""

    def run(net, x):
        y = net.linear(x)
        with torch.no_grad():
            z = function(y)
        return y * 2 if z is None else y + z

    return run


def then(function):
    """function(y), and y, of y = linear(x)."""

    def run(net, x):
        y = net.linear(x)
        function(y)
        return y

    return run


def _written_without_gradient(net, x):
    """As a sampler within a forward pass does."""
    with torch.no_grad():
        y = net.linear(x).clamp_(-1, 1)
        y[1:].mul_(2).add_(torch.zeros_like(x).fill_(0.5)[1:])
        z = y.new_zeros(y.shape).scatter_(1, y.argsort(1), y)
    return net.linear(x * z) + y


def _written_both_ways(net, x):
    with torch.no_grad():
        y = torch.zeros_like(x)
    y[1:] = net.linear(x)[1:]
    with torch.no_grad():
        y.mul_(2)
    return y


GRADIENTS = {  # and what is said of those that have no place in a plan
    "no_grad": (without_gradient(lambda y: y * y), ""),
    "inference_mode": (lambda net, x: torch.inference_mode()(lambda: x * 2)() + net.linear(x), ""),
    "detach": (lambda net, x: net.linear(x).detach() * x, ""),
    "detach, a part": (lambda net, x: net.linear(x)[1:].detach() * net.linear(x)[1:], ""),
    "detach_": (lambda net, x: (net.linear(x) * 2).detach_() * x, ""),
    "detached, cloned and written to": (lambda net, x: x.detach().clone().mul_(2) + x, ""),
    "data of a parameter": (lambda net, x: net.linear(x) * net.linear.bias.data, ""),
    "checkpoint": (lambda net, x: checkpoint(net.linear, x, use_reentrant=False), ""),
    "masks under no_grad": (without_gradient(lambda y: ~(y > 0)), ""),
    "a mask written to": (without_gradient(lambda y: (y > 0).logical_not_()), ""),
    "mul_ under no_grad": (without_gradient(lambda y: y.mul_(2)), "mul_ under no_grad"),
    "+= under no_grad": (without_gradient(lambda y: y.__iadd__(2)), "add_ under no_grad"),
    "[] under no_grad": (
        without_gradient(lambda y: y.__setitem__(0, 2)),
        "__setitem__ under no_grad",
    ),
    "out under no_grad": (
        without_gradient(lambda y: torch.mul(y, 2, out=y)),
        "mul under no_grad",
    ),
    "what is made under no_grad": (_written_without_gradient, ""),
    "and then with gradients": (_written_both_ways, "mul_ under no_grad"),
    "mul_ of data": (then(lambda y: y.data.mul_(2)), "mul_ of what has been detached"),
    "add_ of a part": (then(lambda y: y.detach()[0].add_(2)), "add_ of what has been detached"),
    "data is set": (then(lambda y: setattr(y, "data", y.detach() * 2)), "data of a tensor"),
    "requires_grad_": (then(lambda y: y.requires_grad_()), "requires_grad of a tensor, which"),
    "requires_grad is set": (
        lambda net, x: setattr(net.linear.weight, "requires_grad", False) or net.linear(x),
        "requires_grad of a tensor, which the forward sets",
    ),
    "requires_grad is read": (lambda net, x: net.linear(x) * x.requires_grad, "the forward reads"),
    "is_leaf is read": (lambda net, x: net.linear(x) * x.is_leaf, "is_leaf of a tensor"),
    "grad_fn is read": (lambda net, x: x if net.linear(x).grad_fn else -x, "grad_fn of a tensor"),
    "a hook of a tensor": (then(lambda y: y.register_hook(lambda dy: 2 * dy)), "register a hook"),
    "a tensor of its own": (lambda net, x: x * net.free, "neither an argument nor a parameter"),
    "a function of its own": (lambda net, x: Reversed.apply(net.linear(x)), ""),
    "grad": (
        lambda net, x: torch.autograd.grad(net.linear(x).sum(), [x], create_graph=True)[0],
        "grad, which the forward calls",
    ),
    "backward": (
        lambda net, x: net.linear(x).sum().backward() or net.linear(x),
        "backward, which the forward calls",
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_what_a_module_does_to_gradients(name):
    function, refused = GRADIENTS[name]
    module, x = Net(function), torch.randn(3, 4, requires_grad=True)
    if not refused:
        compare(module, [x])
        return
    with pytest.raises(PlanError) as error:
        accelerate(module)(x)
    assert refused in str(error.value)


@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_is_refused(hook):
    module = Net(lambda net, x: net.linear(x))
    getattr(module.linear, hook)(lambda *given: None)
    with pytest.raises(PlanError, match=r"backward hook has no place in a plan \(linear has one\)"):
        accelerate(module)(torch.randn(3, 4))
