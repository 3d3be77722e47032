"""Modules that bring autograd.Functions along: results and gradients are theirs."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import Function

from diffusion import accelerate
from diffusion.plan.build import plan
from diffusion.plan.graph import PlanError
from diffusion.plan.trace import trace
from tests.plan.compare import compare


class Softmax(Function):
    """As EDM's attention has one."""

    @staticmethod
    def forward(ctx, q, k, scale):
        w = torch.einsum("ncq,nck->nqk", q, k * scale).softmax(2)
        ctx.save_for_backward(q, k, w)
        ctx.scale = scale
        return w

    @staticmethod
    def backward(ctx, dw):
        q, k, w = ctx.saved_tensors
        dz = w * (dw - (dw * w).sum(2, keepdim=True)) * ctx.scale
        q, k = q.to(dz.dtype), k.to(dz.dtype)  # which under autocast need not be one
        dq = torch.einsum("nck,nqk->ncq", k, dz)
        return dq, torch.einsum("ncq,nqk->nck", q, dz), None


class Rounded(Function):
    """Its gradient is that of what was rounded, and not what PyTorch would make of it."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.mul(4).round() / 4

    @staticmethod
    def backward(ctx, dy):
        return dy * 0.5


class Halves(Function):
    """Of two results, in the newer form; one is part of the argument."""

    @staticmethod
    def forward(x, gain):
        return x[:, :2], x[:, 2:] * gain

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, da, db):
        x, gain = ctx.saved_tensors
        return torch.cat([2 * da, db * gain], 1), (db * x[:, 2:]).sum().reshape(gain.shape)


class Chosen(Function):
    """With a result that has no gradient, and an argument that gets none."""

    @staticmethod
    def forward(ctx, x, table):
        index = (x[:, None] - table[:, None, None]).abs().argmin(1)
        ctx.mark_non_differentiable(index)
        return table[index], index

    @staticmethod
    def backward(ctx, dy, _):
        return dy, None


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.conv, self.gain = nn.Conv2d(3, 4, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.function(self.conv(x), self.gain)


class Kept(Function):
    """A checkpoint as guided-diffusion has it: backward computes once more."""

    @staticmethod
    def forward(ctx, run, length, *args):
        ctx.run, ctx.inputs, ctx.parameters = run, list(args[:length]), list(args[length:])
        return ctx.run(*ctx.inputs)

    @staticmethod
    def backward(ctx, *grads):
        ctx.inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        with torch.enable_grad():
            result = ctx.run(*(x.view_as(x) for x in ctx.inputs))
        made = torch.autograd.grad(result, ctx.inputs + ctx.parameters, grads, allow_unused=True)
        return None, None, *made


def kept(y, gain):
    def run(a, b):
        return (a * gain).sin() * b

    return Kept.apply(run, 2, y, y.square(), gain)


class Turned(Function):
    """Which writes to its argument, as k-diffusion turns queries by their places."""

    @staticmethod
    def forward(x, angle):
        a, b = x.chunk(2, 1)
        rotated = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        a.copy_(rotated[0])
        b.copy_(rotated[1])
        return x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, dy):
        return Turned.apply(dy.clone(), -ctx.saved_tensors[0]), None


def turned(y, gain):
    """All of a tensor, and a part of another, which is read where it was written."""
    z, angle = 3 * y, gain.detach()
    Turned.apply(z[:, :2], angle)
    return Turned.apply(y, angle) + z.square() * gain


CASES = {
    "attention": lambda y, gain: Softmax.apply(y.flatten(2), gain * y.flatten(2), 0.5),
    "straight through": lambda y, gain: Rounded.apply(y) * gain,
    "transposed": lambda y, gain: Rounded.apply(y.transpose(1, 3)) * gain,
    "two results": lambda y, gain: Halves.apply(y, gain),
    "a part": lambda y, gain: Halves.apply(y, gain)[1].square(),
    "written to": turned,
    "a checkpoint": kept,
    "two in a row": lambda y, gain: kept(kept(y, gain).cos(), gain),
    "an index": lambda y, gain: Chosen.apply(y[:, 0] * gain, y.new_tensor([-1.0, 0.0, 1.0])),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name):
    torch.manual_seed(0)
    module, x = Net(CASES[name]).double(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    results = module(x) if isinstance(module(x), tuple) else (module(x),)
    fast = accelerate(module)
    ours = fast(x) if isinstance(fast(x), tuple) else (fast(x),)
    parameters = list(module.parameters())
    grads = []
    for made in (results, ours):
        loss = sum((y * y.detach().cos()).sum() for y in made if y.requires_grad)
        grads.append(torch.autograd.grad(loss, parameters))
    for a, b in zip((*results, *grads[0]), (*ours, *grads[1]), strict=True):
        assert a.requires_grad == b.requires_grad
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-12)
    if name != "an index":
        compared = compare(module, (x,))
        assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9


class Noisy(Rounded):
    @staticmethod
    def forward(ctx, x):
        return x + torch.randn_like(x)


class Unsaid(Turned):
    """Which writes, and does not say so."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])


class Called(Rounded):
    @staticmethod
    def forward(ctx, x, function):
        return function(x)


class Doubled(Kept):
    """Which is given a function, and has another gradient."""

    @staticmethod
    def backward(ctx, *grads):
        return tuple(None if dx is None else 2 * dx for dx in Kept.backward(ctx, *grads))


class Marked(Rounded):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.mark_non_differentiable(y)
        return y


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda y, gain: Noisy.apply(y), "in an autograd.Function, which is called twice, draws"),
        (lambda y, gain: Unsaid.apply(y, gain), "writes to what it does not return"),
        (lambda y, gain: Called.apply(y, torch.sin), "that is given a function"),
        (lambda y, gain: Doubled.apply(torch.sin, 1, y), "that is given a function"),
        (lambda y, gain: Marked.apply(y), "marks a result"),
    ],
)
def test_what_no_plan_could_call(function, why):
    with pytest.raises(PlanError, match=why):
        accelerate(Net(function))(torch.randn(1, 3, 6, 6))
    assert Function.apply.__func__.__module__ == "torch.autograd.function"


@pytest.mark.parametrize("name", ["attention", "straight through", "two results"])
def test_under_autocast(name):
    """PyTorch casts what the function's forward calls, and nothing in its backward: no further from
    float64 than twice what the module is."""
    torch.manual_seed(0)
    module, x = Net(CASES[name]), torch.randn(2, 3, 6, 6)
    exact = copy.deepcopy(module).double()
    found = []
    for net, given in ((exact, x.double()), (module, x), (accelerate(module), x)):
        with torch.autocast("cpu", torch.bfloat16, enabled=net is not exact):
            y = net(given)
        ys = y if isinstance(y, tuple) else (y,)
        loss = sum((z.double() * z.detach().double().cos()).sum() for z in ys)
        found.append((ys, torch.autograd.grad(loss, list(net.parameters()))))
    for exact, theirs, ours in zip(*((*ys, *grads) for ys, grads in found), strict=True):
        assert theirs.dtype == ours.dtype
        budget = 2 * (theirs - exact).norm() + 1e-3 * exact.norm()
        assert (ours - exact).norm() <= budget


class Seen(Function):
    """Of two numbers that say whether casts are made."""

    @staticmethod
    def forward(ctx, x):
        return x * (2 if torch.is_autocast_enabled("cpu") else 1)

    @staticmethod
    def backward(ctx, dy):
        return dy * (3 if torch.is_autocast_enabled("cpu") else 1)


@pytest.mark.parametrize("casts", [False, True])
def test_the_forward_of_a_function_alone_is_under_autocast(casts):
    net, x = Net(lambda y, gain: Seen.apply(y) * gain), torch.randn(1, 3, 6, 6)
    grads = []
    for run in (net, accelerate(net)):
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            y = run(x)
        grads.append((y, *torch.autograd.grad(y.float().sum(), [net.conv.bias, net.gain])))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)


class Third(Function):
    """The gradient that autograd would find, but for `factor`, from which nothing tells it."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.sin()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0].cos() * ctx.factor, None


class Limited(Third):
    """Which limits gradients that are large."""

    @staticmethod
    def backward(ctx, dy):
        return dy.clamp(-10, 10) * ctx.saved_tensors[0].cos(), None


@pytest.mark.parametrize(
    ("function", "whole"),
    [
        (lambda y, gain: Third.apply(y, 1.0) * gain, False),
        (lambda y, gain: Third.apply(y, 1.1) * gain, True),
        (lambda y, gain: Limited.apply(y, 1.0) * gain, True),
        (lambda y, gain: Rounded.apply(y) * gain, True),
    ],
)
def test_what_has_the_gradient_of_its_forward_is_what_it_calls(function, whole):
    graph = trace(Net(function), (torch.randn(2, 3, 6, 6),)).graph
    own = [n for n in graph.nodes if "OwnFunction" in str(n.attrs.get("target", ""))]
    assert bool(own) == whole


class Attended(nn.Module):
    """As a block of EDM: q, k and v are every third channel of each head."""

    def __init__(self, heads):
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Conv2d(8, 24, 1), nn.Conv2d(8, 8, 1), heads

    def forward(self, x):
        n, c, h, w = x.shape
        qkv = self.qkv(x).reshape(n * self.heads, c // self.heads, 3, -1)
        q, k, v = qkv.unbind(2)
        p = Softmax.apply(q, k, (c // self.heads) ** -0.5)
        a = torch.einsum("nqk,nck->ncq", p, v)
        return self.proj(a.reshape(x.shape)) + x


@pytest.mark.parametrize("heads", [1, 2])
def test_attention_of_such_a_function_is_one_op_of_one_product(heads):
    torch.manual_seed(0)
    module, x = Attended(heads).double(), torch.randn(2, 8, 4, 4, dtype=torch.float64)
    compared = compare(module, (x,))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    planned = plan(module, (x,), trains=True).graph
    assert planned.count()["attention"] == 1 and "layout_grad" not in planned.count()
    (attention,) = (n for n in planned.nodes if n.op == "attention")
    assert "qkv" in attention.inputs
    makers, copied = planned.producers(), [n for n in planned.nodes if n.op == "layout"]
    sizes = {x.numel(), *(p.numel() for p in module.parameters())}
    for node in copied:  # of filters and biases and their gradients, the argument and the result
        value = makers.behind(node.inputs["x"], "reshape", "layout")
        assert value in planned.parameters.values() or node.out.numel in sizes
