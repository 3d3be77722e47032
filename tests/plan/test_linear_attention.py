"""Linear attention that a module writes itself is one op, and what only looks like it is not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from diffusion.plan.accelerate import Accelerated
from diffusion.plan.build import plan
from diffusion.plan.calls import planned
from diffusion.plan.calls.calls import Calls
from diffusion.plan.launch.table import launch_kernels
from diffusion.plan.trace import trace
from tests.plan.compare import compare

HEADS, D = 2, 4


def shared(q: Tensor, k: Tensor, v: Tensor, m: nn.Module) -> tuple[Tensor, Tensor]:
    """Keys and values behind a memory."""
    mk, mv = (x.expand(k.shape[0], -1, -1, -1) for x in m.memory)
    return torch.cat((mk, k), dim=-1), torch.cat((mv, v), dim=-1)


def _with_memory(q, k, v, m):
    k, v = shared(q, k, v, m)
    context = torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v)
    return torch.einsum("bhde,bhdn->bhen", context, q.softmax(-2) * 0.5)


def _other_way_round(q, k, v, m):
    context = torch.einsum("bhen,bhdn->bhed", v / 12, k.softmax(-1))
    return context @ q.softmax(-2)


def _of_rows(q, k, v, m):
    q, k, v = (x.transpose(-1, -2) for x in (q, k, v))  # [N, heads, T, d]
    context = k.softmax(-2).transpose(-1, -2) @ v
    return ((q.softmax(-1) * 0.5) @ context).transpose(-1, -2)


FORMS: dict[str, Callable] = {
    "without a memory": lambda q, k, v, m: torch.einsum(
        "bhde,bhdn->bhen", torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v), q.softmax(-2) * 0.3
    ),
    "with a memory": _with_memory,
    "the other way round": _other_way_round,
    "of rows": _of_rows,
}


def _half_a_memory(q, k, v, m):
    k, _ = shared(q, k, v, m)
    v = torch.cat((v[..., :3], v), dim=-1)
    context = torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v)
    return torch.einsum("bhde,bhdn->bhen", context, q.softmax(-2))


OTHERS: dict[str, Callable] = {
    "q over positions": lambda q, k, v, m: (k.softmax(-1) @ v.mT).mT @ q.softmax(-1),
    "k over channels": lambda q, k, v, m: (k.softmax(-2) @ v.mT).mT @ q.softmax(-2),
    "k as it is": lambda q, k, v, m: (k @ v.mT).mT @ q.softmax(-2),
    "q as it is": lambda q, k, v, m: (k.softmax(-1) @ v.mT).mT @ q,
    "the context turned": lambda q, k, v, m: (k.softmax(-1) @ v.mT) @ q.softmax(-2),
    "a context that is changed": lambda q, k, v, m: (k.softmax(-1) @ v.mT + 1).mT @ q.softmax(-2),
    "less than nothing": lambda q, k, v, m: (k.softmax(-1) @ v.mT).mT @ (q.softmax(-2) * -1),
    "a memory of keys alone": _half_a_memory,
}


class Linear(nn.Module):
    """A function of q, k and v [N, heads, d, T], and of this module."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function, self.qkv = function, nn.Conv2d(3, 3 * HEADS * D, 1)
        self.memory = nn.Parameter(torch.randn(2, HEADS, D, 3))
        self.out = nn.Conv2d(HEADS * D, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        parts = (t.reshape(n, HEADS, D, h * w) for t in self.qkv(x).chunk(3, dim=1))
        return self.out(self.function(*parts, self).reshape(n, HEADS * D, h, w))


def made(function: Callable, n: int = 2) -> tuple[nn.Module, tuple]:
    torch.manual_seed(0)
    return Linear(function).double(), (torch.randn(n, 3, 4, 5).double(),)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", FORMS)
def test_is_one_node(name, n):
    """Of the tensor that a convolution has made, without a copy of it."""
    compared = compare(*made(FORMS[name], n))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    graph = trace(*made(FORMS[name], n)).graph
    (node,) = (node for node in graph.nodes if node.op == "linear_attention")
    assert graph.producers()[node.inputs["qkv"]].op == "linear"
    assert ("memory_k" in node.inputs) == ("memory" in name and "without" not in name)
    large = [n for n in graph.nodes if n.out.numel >= node.out.numel and n.op in ("arith", "cat")]
    assert not large


@pytest.mark.parametrize("name", OTHERS)
def test_is_none(name):
    compared = compare(*made(OTHERS[name]))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    assert "linear_attention" not in compared.graph.count()


def test_of_tensors_apart():
    """q, k and v of layers of their own."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, HEADS * D) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).unflatten(-1, (HEADS, D)).transpose(1, 2) for f in self.layers)
            o = q.softmax(-1) @ (k.softmax(-2).mT @ v)
            return o.transpose(1, 2).flatten(2)

    compared = compare(Apart().double(), (torch.randn(2, 7, 3).double(),))
    assert compared.error() < 1e-9 and compared.gradient_error() < 1e-9
    assert compared.graph.count()["linear_attention"] == 1


@pytest.mark.parametrize("name", ["with a memory", "of rows"])
def test_on_the_kernels(name, device, monkeypatch):
    module, (x,) = made(FORMS[name])
    module, x = module.float().to(device), x.float().to(device)
    monkeypatch.setattr(Calls, "_tf32", lambda self: (False, False))
    monkeypatch.setattr(planned, "launcher", lambda device: launch_kernels)
    expected, y = module(x), Accelerated(module)(x)
    given, dy = [p for p in module.parameters() if p.ndim], torch.randn_like(expected)
    pairs = zip(
        (y, *torch.autograd.grad(y, given, dy, allow_unused=True)),
        (expected, *torch.autograd.grad(expected, given, dy, allow_unused=True)),
        strict=True,
    )
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is not None:
            assert (a - b).norm() <= 2e-5 * b.norm().clamp_min(1e-2)


def test_under_autocast():
    """No further from float64 than twice what the module is."""
    exact, (x,) = made(_with_memory)
    module, _ = made(_with_memory)
    module, results = module.float(), [exact(x)]
    with torch.autocast("cpu", torch.bfloat16):
        results += [net(x.float()) for net in (module, Accelerated(module))]
        graph = trace(module, (x.float(),)).graph
    assert graph.count()["linear_attention"] == 1
    exact, theirs, ours = results
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()


def test_its_products_are_no_convolutions():
    """Where PyTorch allows TF32 for these alone, as it does by default, they are in float32."""
    module, (x,) = made(_with_memory)
    planned = plan(module.float(), (x.float(),), trains=True, tf32=(True, False))
    nodes = [node for node in planned.schedule.nodes if "linear_attention" in node.op]
    assert len(nodes) == 2 and not any(node.tf32 for node in nodes)
