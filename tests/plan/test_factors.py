"""Numbers go into filters that a norm makes, and what is around these becomes simpler."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diffusion import accelerate
from diffusion.plan.trace import trace
from tests.plan.compare import compare


def normalised(w, eps=1e-4):
    norm = torch.linalg.vector_norm(w, dim=tuple(range(1, w.ndim)), keepdim=True)
    return w / torch.add(eps, norm, alpha=w[0].numel() ** -0.5)


class Layer(nn.Module):
    """As EDM2's and KarrasUnet's."""

    def __init__(self, a, b, kernel=3, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(b, a, kernel, kernel))
        self.bias = nn.Parameter(torch.randn(b)) if bias else None
        self.forced = False

    def forward(self, x, gain=1):
        if self.training and self.forced:
            with torch.no_grad():
                self.weight.copy_(normalised(self.weight))
        w = normalised(self.weight) * (gain / self.weight[0].numel() ** 0.5)
        return F.conv2d(x, w, self.bias, padding=w.shape[-1] // 2)


def mp_sum(a, b, t=0.3):
    return a.lerp(b, t) / (t**2 + (1 - t) ** 2) ** 0.5


def karras_sum(a, b, t=0.3):
    return (a * (1 - t) + b * t) / (t**2 + (1 - t) ** 2) ** 0.5


FORMS = {  # and how many numbers, and how many weighted sums, are left
    "in front": (lambda m, x: m.a(F.silu(x) / 0.596), 0, 0),
    "behind": (lambda m, x: 3 * m.a(x), 0, 0),
    "in front of a bias": (lambda m, x: m.biased(x * 3), 0, 0),
    "behind a bias": (lambda m, x: m.biased(x) * 3, 1, 0),
    "negative": (lambda m, x: -m.a(-2 * x), 0, 0),
    "a weighted sum with an image": (lambda m, x: mp_sum(x, m.a(x)), 1, 0),
    "of two products": (lambda m, x: mp_sum(m.point(x), m.a(x)), 0, 0),
    "the other way round": (lambda m, x: mp_sum(m.a(x), x), 1, 0),
    "as KarrasUnet": (lambda m, x: karras_sum(x, m.a(x)), 1, 0),
    "of two images": (lambda m, x: mp_sum(x, x.sin()), 1, 1),
    "of an image with itself": (lambda m, x: mp_sum(x, x), 1, 1),
    "of a product that others read": (lambda m, x: mp_sum(x, y := m.a(x)) + y.sin(), 1, 1),
    "a weight of nothing": (lambda m, x: mp_sum(x, m.a(x), 1.0), 0, 1),
    "a sum": (lambda m, x: (x + m.a(x)) / 2**0.5, 1, 0),
    "a learned gain": (lambda m, x: m.a(F.silu(x) / 0.596, m.gain) * 2, 0, 0),
    "an image that others read": (lambda m, x: m.a(y := x / 3) + y, 1, 0),
    "an offset": (lambda m, x: m.a(2 * x + 1), 2, 0),
    "filters that are a result": (lambda m, x: (m.a(2 * x), normalised(m.a.weight)), None, 0),
    "filters that serve twice": (lambda m, x: m.a(2 * x) + m.a(x), 1, 0),
}


class Uses(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.gain = function, nn.Parameter(torch.tensor(0.7))
        self.a, self.point, self.biased = Layer(6, 6), Layer(6, 6, 1), Layer(6, 6, 3, True)
        self.inner, self.outer = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 3, 1)

    def forward(self, x):
        y = self.function(self, self.inner(x))
        return (self.outer(y[0]), *y[1:]) if isinstance(y, tuple) else self.outer(y)


def _left(graph):
    """Numbers that images are multiplied with, and weighted sums of them."""
    affine = [n for n in graph.nodes if n.op == "affine" and len(n.out.shape) == 4]
    lerp = [n for n in graph.nodes if n.attrs.get("target") == torch.ops.aten.lerp.Scalar]
    return len(affine), len(lerp)


@pytest.mark.parametrize("name", FORMS)
def test_forms_in_float64(name):
    torch.manual_seed(0)
    function, *left = FORMS[name]
    module, x = Uses(function).double(), torch.randn(2, 3, 4, 6).double()
    compared = compare(module, (x,))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    if left[0] is not None:
        assert _left(trace(module, (x,)).graph) == tuple(left)


def test_a_number_behind_a_product_of_low_rank_is_in_front():
    """As LoRA's, beside a layer whose product then adds what is made of it; not where that would
    make more to multiply."""
    torch.manual_seed(0)
    low, high, wide = (nn.Conv2d(*sizes, 1, bias=False) for sizes in ((6, 2), (2, 6), (6, 6)))
    layers = nn.ModuleList([low, high, wide])

    def function(m, x):
        return m.layers[2](x) * 2 + m.layers[1](m.layers[0](x)) * 3

    module, x = Uses(function).double(), torch.randn(2, 3, 4, 6).double()
    module.layers = layers.double()
    compared = compare(module, (x,))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    numbers = [n for n in trace(module, (x,)).graph.nodes if n.op == "affine"]
    assert {n.attrs["scale"]: n.out.shape[-1] for n in numbers} == {3: 2, 2: 6}


STEPS = (
    lambda m, layer, y, other, number: number * y,
    lambda m, layer, y, other, number: y / (2 + number**2),
    lambda m, layer, y, other, number: layer(y),
    lambda m, layer, y, other, number: layer(F.silu(y), m.gain),
    lambda m, layer, y, other, number: mp_sum(other, y, abs(number)),
    lambda m, layer, y, other, number: karras_sum(y, other, abs(number)),
    lambda m, layer, y, other, number: y + other,
    lambda m, layer, y, other, number: mp_sum(layer(y), other, abs(number)),
)


@pytest.mark.parametrize("seed", range(12))
def test_any_chain_of_numbers_products_and_sums(seed):
    """Of random steps, in any order, over images that later steps may read again."""
    draw = random.Random(seed)
    steps = [(draw.choice(STEPS), draw.random(), draw.uniform(-1, 1)) for _ in range(9)]

    def function(m, x):
        found = [x]
        for step, at, number in steps:
            other, layer = found[int(at * len(found))], (m.a, m.point, m.biased)[int(3 * at)]
            found.append(step(m, layer, found[-1], other, number))
        return found[-1]

    torch.manual_seed(seed)
    compared = compare(Uses(function).double(), (torch.randn(2, 3, 4, 6).double(),))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9


def test_filters_that_are_normalised_in_place_have_one_norm_more():
    """Under `no_grad`, where each step detaches what it makes."""
    torch.manual_seed(0)
    made = []
    for fast in (False, True):
        torch.manual_seed(1)
        module = Uses(lambda m, x: m.a(x)).double()
        module.a.forced = True
        net, x = accelerate(module) if fast else module, torch.randn(2, 3, 4, 6).double()
        y = net(x)
        grads = torch.autograd.grad(y.square().sum(), [module.a.weight, module.inner.weight])
        made.append((y, *grads, module.a.weight))
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11)
    nodes = trace(module, (x,)).graph.count()
    assert nodes["channel_norm"] == 2 and "arith" not in nodes and nodes["detach"] <= 2


def _resampled(number, size=2, **options):
    def function(m, x):
        f = torch.tensor([[[[number] * size] * size]], dtype=x.dtype, device=x.device)
        up = F.conv_transpose2d(x, f.tile([6, 1, 1, 1]), groups=6, stride=size, **options)
        return F.conv2d(m.a(up), f.tile([6, 1, 1, 1]), groups=6, stride=size, **options)

    return function


@pytest.mark.parametrize(
    ("number", "size", "options", "count"),
    [(1.0, 2, {}, 2), (0.25, 2, {}, 2), (0.5, 3, {}, 2), (0.5, 3, {"padding": 1}, 0)],
)
def test_filters_of_one_number_are_means_and_repeated_pixels(number, size, options, count):
    """EDM2's resampling, which then is in the order of the layers around it."""
    torch.manual_seed(0)
    module = Uses(_resampled(number, size, **options)).double()
    x = torch.randn(2, 3, 4, 6).double()
    compared = compare(module, (x,))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    nodes = trace(module, (x,)).graph.count()
    assert nodes.get("avg_pool", 0) + nodes.get("upsample", 0) == count
    assert count == 0 or nodes["layout"] == 2  # the argument and the result


def test_filters_of_several_numbers_stay():
    def function(m, x):
        f = torch.tensor([[[[0.1, 0.2], [0.3, 0.4]]]], dtype=x.dtype)
        return F.conv2d(x, f.tile([6, 1, 1, 1]), groups=6, stride=2)

    module, x = Uses(function).double(), torch.randn(2, 3, 4, 6).double()
    assert compare(module, (x,)).error() < 1e-9
    assert "avg_pool" not in trace(module, (x,)).graph.count()
