"""Norms over channels as modules write them are one node, with what stands behind them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion.plan.fuse.rows import fuse
from diffusion.plan.trace import trace
from tests.plan.compare import compare
from tests.plan.strangers import Normed

C = 6


class Norm(nn.Module):
    """A function of itself and of what a convolution makes of an image, as attributes g, b, t."""

    def __init__(self, function: Callable[["Norm", Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.conv = function, nn.Conv2d(3, C, 3, padding=1)
        self.g, self.b = (nn.Parameter(torch.randn(1, C, 1, 1)) for _ in range(2))
        self.film, self.head = nn.Linear(5, 2 * C), nn.Parameter(torch.randn(C // 2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.t = self.film(t)[:, :, None, None].chunk(2, dim=1)
        y = self.function(self, self.conv(x))
        del self.t
        return y


def _rms(x: Tensor, eps: float, dim: int = 1) -> Tensor:
    return torch.sqrt(x.pow(2).mean(dim, keepdim=True) + eps)


def _last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)


def _convnext(m: Norm, x: Tensor) -> Tensor:
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    x = (x - u) / torch.sqrt(s + 1e-6)
    return m.g * x + m.b


def _variance(m: Norm, x: Tensor) -> Tensor:
    """denoising-diffusion-pytorch 1, imagen-pytorch."""
    var = torch.var(x, dim=1, unbiased=False, keepdim=True)
    mean = torch.mean(x, dim=1, keepdim=True)
    return (x - mean) * (var + 1e-5).rsqrt() * m.g


def _of_heads(m: Norm, x: Tensor) -> Tensor:
    """With a number, or a vector of the channels of a head, as imagen-pytorch has it."""
    q = _last(x).reshape(x.shape[0], -1, 2, C // 2).permute(0, 2, 1, 3)
    return F.normalize(q, dim=-1) * 3 * m.head


def _gained_first(x: Tensor, gain: Tensor) -> Tensor:
    """k-diffusion."""
    gain = gain.double() * torch.rsqrt((x.double() ** 2).mean(-1, keepdim=True) + 1e-3)
    return x * gain.to(x.dtype)


def _heads_gained_first(m: Norm, x: Tensor, gain: Tensor) -> Tensor:
    """k-diffusion's attention, of a number for each head; or of a vector of their channels."""
    q = _last(x).unflatten(-1, (2, C // 2))
    return q * (gain * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-3))


def _edm2(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x / torch.add(1e-4, norm, alpha=(norm.numel() / x.numel()) ** 0.5)


FORMS: dict[str, Callable[[Norm, Tensor], Tensor]] = {
    "normalize": lambda m, x: F.normalize(x, dim=1),
    "normalize, a parameter, a number": lambda m, x: F.normalize(x, dim=1) * m.g * C**0.5,
    "normalize, a number, a parameter": lambda m, x: F.normalize(x, dim=1) * C**0.5 * (m.g + 1),
    "normalize, FiLM, SiLU": lambda m, x: F.silu(
        F.normalize(x, dim=1) * m.g * 2 * (m.t[0] + 1) + m.t[1]
    ),
    "normalize of rows": lambda m, x: F.normalize(_last(x), dim=-1, eps=0.1),
    "normalize of heads": _of_heads,
    "nn.RMSNorm": lambda m, x: F.rms_norm(_last(x), (C,), m.g.flatten(), 1e-3),
    "rsqrt of a mean": lambda m, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-3) * m.g,
    "in float32": lambda m, x: (
        x * torch.rsqrt((x.double() ** 2).mean(1, keepdim=True) + 1e-3).to(x.dtype) * m.g
    ),
    "a parameter first": lambda m, x: _gained_first(_last(x), m.g.flatten()),
    "FiLM first": lambda m, x: _gained_first(_last(x), _last(m.t[0]) + 1),
    "a parameter of heads first": lambda m, x: _heads_gained_first(m, x, m.head),
    "over a root": lambda m, x: m.g * (x / _rms(x, 0.1)) + m.b,
    "over a root of a sum": lambda m, x: x / ((x * x).sum(1, True) / C + 1e-2) ** 0.5,
    "over the length and eps": lambda m, x: x / (x.norm(dim=1, keepdim=True) * C**-0.5 + 0.1),
    "over the length, at least eps": lambda m, x: (
        x / (x.norm(2, 1, keepdim=True) * C**-0.5).clamp(min=0.5) * m.g
    ),
    "EDM2": lambda m, x: _edm2(x),
    "layer_norm, FiLM": lambda m, x: (
        F.layer_norm(_last(x), (C,)) * (1 + _last(m.t[0])) + _last(m.t[1])
    ),
    "layer_norm over two axes": lambda m, x: F.layer_norm(_last(x), (x.shape[3], C)),
    "by the variance": _variance,
    "as under autocast": lambda m, x: (  # on a GPU, where PyTorch's norm is in the wider type
        (x / x.double().norm(2, 1, keepdim=True).clamp_min(1e-12).expand_as(x)) * m.g * C**0.5
    ),
    "ConvNeXt": _convnext,
}
# which are no norm over channels, or not of what they divide
OTHERS: dict[str, Callable[[Norm, Tensor], Tensor]] = {
    "over pixels": lambda m, x: F.normalize(x.flatten(2), dim=2),
    "a parameter first, of another": lambda m, x: _last(x) * (m.head[0] / _rms(_last(x) + 1, 0.1)),
    "over axes that lie apart": lambda m, x: x / (x.norm(dim=(1, 2), keepdim=True) + 1e-4),
    "of the first power": lambda m, x: F.normalize(x, p=1, dim=1),
    "of another": lambda m, x: x / _rms(x * m.g, 0.1),
    "by the unbiased variance": lambda m, x: (
        (x - x.mean(1, True)) * (x.var(1, keepdim=True) + 1e-3).rsqrt()
    ),
    "variance of what keeps its mean": lambda m, x: (
        x * (x.var(1, unbiased=False, keepdim=True) + 1e-3).rsqrt()
    ),
    "less than eps": lambda m, x: x / x.norm(dim=1, keepdim=True).clamp(max=3.0),
    "between two": lambda m, x: x / x.norm(dim=1, keepdim=True).clamp(0.1, 3.0),
    "over the mean square": lambda m, x: x / (x.pow(2).mean(1, keepdim=True) + 0.1),
    "eps twice": lambda m, x: x / (_rms(x, 0.1) + 0.1),
    "a mean of another": lambda m, x: (x - (x * m.g).mean(1, True)) / _rms(x, 0.1),
}


def made(function) -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    module = Norm(function).double()
    return module, (torch.randn(2, 3, 4, 5).double(), torch.randn(2, 5).double())


@pytest.mark.parametrize("name", FORMS)
def test_is_one_node(name):
    """With all that stands behind it, and nothing of the image is left to PyTorch."""
    compared = compare(*made(FORMS[name]))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    forward = trace(*made(FORMS[name])).graph
    assert forward.count()["channel_norm"] == 1
    (norm,) = (node for node in forward.nodes if node.op == "channel_norm")
    moves = ("reshape", "layout")  # to the order of the result
    large = [n for n in forward.nodes if n.out.numel == norm.out.numel and n.op not in moves]
    assert [n.op for n in large] == ["conv", "channel_norm"]


@pytest.mark.parametrize("name", (*FORMS, *OTHERS))
def test_in_16_bits(name):
    """Where quotients are no products."""
    module, args = made({**FORMS, **OTHERS}[name])
    graph = trace(module.bfloat16(), tuple(x.bfloat16() for x in args)).graph
    assert graph.count().get("channel_norm", 0) == (name in FORMS)


@pytest.mark.parametrize("name", OTHERS)
def test_is_none(name):
    compared = compare(*made(OTHERS[name]))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    assert "channel_norm" not in compared.graph.count()


def _of_norm_one(w):
    """EDM2's filters."""
    norm = torch.linalg.vector_norm(w, dim=(1, 2, 3), keepdim=True)
    return w / torch.add(1e-4, norm, alpha=w[0].numel() ** -0.5)


def _standard(w):
    """Weight standardisation, of which filters have no mean."""
    mean, var = w.mean((1, 2, 3), True), w.var((1, 2, 3), unbiased=False, keepdim=True)
    return (w - mean) * (var + 1e-3).rsqrt()


OF_FILTERS = {
    "of norm 1": _of_norm_one,
    "standardised": _standard,
    "F.normalize": lambda w: F.normalize(w.flatten(1)).view(w.shape),
    "over taps alone": lambda w: w / w.norm(dim=(2, 3), keepdim=True),
    "of all": lambda w: w / (w.square().mean((0, 1, 2, 3), keepdim=True) + 1e-3).sqrt(),
}


@pytest.mark.parametrize("name", OF_FILTERS)
@pytest.mark.parametrize("size", [1, 3])
def test_of_filters(name, size):
    """Over several axes, which lie one behind the other."""

    class Filters(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 6, size, size))

        def forward(self, x):
            return F.conv2d(x, 0.3 * OF_FILTERS[name](self.w))

    torch.manual_seed(0)
    compared = compare(Filters().double(), (torch.randn(2, 6, 4, 5).double(),))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    assert compared.graph.count().get("channel_norm", 0) == 1
    assert "mul" not in compared.graph.count() or size == 1


GAINS_OF_HEADS = {
    "heads behind pixels": lambda m, x: _heads_gained_first(m, x, m.head[:2, None].exp()),
    "pixels behind heads": lambda m, x: _heads_gained_first(
        m, x.flatten(2)[:, :, None], m.head[:2, None].exp()
    ).transpose(1, 3),
    "of each sample": lambda m, x: _heads_gained_first(m, x, m.t[0][:, None, None, :2, 0].exp()),
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", GAINS_OF_HEADS)
def test_a_number_for_each_head_first(name, n):
    """Is multiplied behind the norm, as a vector is."""
    module, (x, t) = made(GAINS_OF_HEADS[name])
    compared = compare(module, (x[:n], t[:n]))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    nodes = trace(module, (x[:n], t[:n])).graph.nodes
    ops = [node.attrs.get("target", node.op) for node in nodes]
    aten = torch.ops.aten
    assert ops.count("channel_norm") == 1
    assert not {aten.pow.Tensor_Scalar, aten.sum.dim_IntList, aten.rsqrt.default} & set(ops)


@pytest.mark.parametrize("n", [1, 2])
def test_what_a_norm_takes(n):
    """A vector of channels is its weight, rows of samples are FiLM; of one sample both look alike,
    and what comes too late stays behind it."""
    module, (x, t) = made(lambda m, x: (F.normalize(x, dim=1) * m.g + m.b) * (m.t[0] + 1) + m.b)
    args = x[:n], t[:n]
    compared = compare(module, args)
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    (norm,) = (node for node in compared.graph.nodes if node.op == "channel_norm")
    expected = {"x", "weight", "bias", "scale"} | ({"shift"} if n == 1 else set())
    assert set(norm.inputs) == expected


@pytest.mark.parametrize("shared", [False, True])
def test_attention_of_normed_queries_has_the_usual_scale(shared):
    """Unless another reads the queries, too."""

    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, k = (F.normalize(y, dim=-1) for y in (x.unflatten(-1, (2, 4)), x))
            q = q.transpose(1, 2)
            k = k.unflatten(-1, (2, 4)).transpose(1, 2)
            o = F.scaled_dot_product_attention(q, k, k, scale=8.0)
            return o + q if shared else o

    compared = compare(Attends(), (torch.randn(2, 5, 8).double(),))
    assert compared.error() < 1e-9
    (node,) = (node for node in compared.graph.nodes if node.op == "attention")
    assert node.attrs["scale"] == (8.0 if shared else 0.5)


def test_gradients_of_what_is_beside_it():
    """Other gradients of x are added in the launch that makes it, and the sums that a bias before
    the norm wants are taken there."""
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return y + self.second(F.silu(F.normalize(y, dim=1)))

    graphs = []

    def rewrite(graph, backward):
        fuse(graph, backward)
        graphs.append(graph)
        return backward

    module, args = Residual().double(), (torch.randn(2, 4, 5, 6).double(),)
    compared = compare(module, args, rewrite=rewrite)
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    (grad,) = (node for node in graphs[0].nodes if node.op == "channel_norm_grad")
    assert "add" in grad.inputs and "rows" in grad.outputs


def test_a_network_of_them():
    """Each norm of denoising-diffusion-pytorch's blocks is one node, with FiLM and activation."""
    graph = trace(Normed(), (torch.randn(2, 3, 4, 6), torch.tensor([3.0, 400.0]))).graph
    norms = [node for node in graph.nodes if node.op == "channel_norm"]
    assert len(norms) == 9
    assert sum({"weight", "scale", "shift"} <= set(node.inputs) for node in norms) == 3
    assert sum(node.attrs["activation"] == "silu" for node in norms) == 6
