"""GroupNorm, the module, against nn.GroupNorm: results, layouts, state dicts, graphs."""

import inspect

import pytest
import torch

from triton_kernels.norm import group_norm as group_norm_op
from triton_kernels.norm.group_norm import GroupNorm
from triton_kernels.runtime import layout

from .group_norm_cases import pytestmark, relative_error  # noqa: F401  a mark for every test here


@pytest.mark.parametrize("shape", [(2, 8, 3, 5), (2, 8, 5), (2, 8), (2, 8, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels-last"])
def test_module_is_a_drop_in(shape, channels_last, device):
    if channels_last and len(shape) != 4:
        pytest.skip("channels_last is a layout of four dimensions")
    torch.manual_seed(0)
    theirs, ours = torch.nn.GroupNorm(2, 8), GroupNorm(2, 8, device=device)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x, dy = torch.randn(shape), torch.randn(shape)
    leaf = x.to(device).clone()
    if channels_last:
        leaf = leaf.to(memory_format=torch.channels_last)
    leaf, exact = leaf.detach().requires_grad_(), x.double().requires_grad_()
    y, want = ours(leaf), theirs.double()(exact)
    assert y.shape == want.shape
    if channels_last:
        assert y.is_contiguous(memory_format=torch.channels_last)
    y.backward(dy.to(device))
    want.backward(dy.double())
    pairs = [(y.detach(), want.detach()), (leaf.grad, exact.grad)]
    pairs += [(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)]
    for a, c in pairs:
        assert relative_error(a.cpu(), c) < 2e-6


def test_module_takes_the_arguments_of_theirs():
    """In their order, so that a name is all that has to be replaced."""
    ours, theirs = (inspect.signature(c).parameters for c in (GroupNorm, torch.nn.GroupNorm))
    positional = [p.name for p in theirs.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours.values() if p.kind == p.POSITIONAL_OR_KEYWORD] == positional
    assert all(ours[name].default == p.default for name, p in theirs.items())
    norm = GroupNorm(2, 8, 1e-3, True, "meta", torch.float16)
    assert norm.weight.is_meta and norm.weight.dtype == torch.float16


def test_module_without_affine_and_with_activation(device):
    norm = GroupNorm(2, 8, affine=False, activation="silu", device=device)
    x = torch.randn(1, 8, 3, 3, device=device)
    want = torch.nn.functional.silu(torch.nn.functional.group_norm(x.double(), 2))
    assert relative_error(norm(x), want) < 2e-6
    assert not list(norm.parameters())
    assert "activation='silu'" in repr(norm)
    with pytest.raises(ValueError, match="expected one of identity"):
        GroupNorm(2, 8, activation="swish")


def test_module_without_bias(device):
    norm = GroupNorm(2, 8, bias=False, device=device)
    torch.nn.init.normal_(norm.weight)
    assert list(norm.state_dict()) == ["weight"]
    x = torch.randn(1, 8, 3, 3, device=device)
    want = torch.nn.functional.group_norm(x.double(), 2, norm.weight.double())
    assert relative_error(norm(x), want) < 2e-6


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_module_where_there_are_no_kernels(backend, monkeypatch):
    monkeypatch.setattr(layout, "_INTERPRETED", False)
    ours, theirs = GroupNorm(2, 8, activation="silu"), torch.nn.GroupNorm(2, 8)
    run = ours if backend is None else torch.compile(ours, fullgraph=True, backend=backend)
    x = torch.randn(2, 8, 3, 5).to(memory_format=torch.channels_last).requires_grad_()
    results = [
        (y, *torch.autograd.grad(y.square().sum(), (x, *module.parameters())))
        for y, module in ((run(x), ours), (torch.nn.functional.silu(theirs(x)), theirs))
    ]
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 2e-6
    assert results[0][0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        pytest.param((0, 6, 3, 3), 3, id="empty-batch"),
        pytest.param((2, 6, 1, 1), 3, id="one-pixel"),
        pytest.param((2, 7, 3, 2), 1, id="one-group"),
        pytest.param((2, 7, 3, 2), 7, id="a-group-each"),
        pytest.param((1, 40, 20, 33), 8, id="several-chunks"),
    ],
)
def test_module_shapes(shape, groups, layout, device):
    """At most twice as far from float64 as nn.GroupNorm, and a few float32 roundings."""
    got, low, exact = _module_results(shape, groups, layout, 0.0, device)
    for a, b, c in zip(got, low, exact, strict=True):
        assert a.shape == c.shape
        assert relative_error(a, c) <= 2 * relative_error(b, c) + 2e-6


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_module_of_a_mean_of_1e3(layout, device):
    """float32 holds the mean to 3e-5 of a deviation; no more is lost."""
    got, _, exact = _module_results((2, 12, 20, 19), 3, layout, 1e3, device)
    for a, c in zip(got, exact, strict=True):
        assert relative_error(a, c) < 1e-4


def _module_results(shape, groups, layout, mean, device):
    """Output and gradients of GroupNorm, of nn.GroupNorm, and of nn.GroupNorm in float64."""
    torch.manual_seed(0)
    norm = GroupNorm(groups, shape[1], activation="silu", device=device)
    torch.nn.init.normal_(norm.weight)
    x = (torch.randn(shape, device=device) + mean).to(memory_format=layout)
    dy = torch.randn(shape, device=device)

    def theirs(dtype):
        module = torch.nn.GroupNorm(groups, shape[1], device=device, dtype=dtype)
        module.load_state_dict(norm.state_dict())
        return module, torch.nn.functional.silu, dtype

    results = []
    identity = torch.nn.Identity()
    for module, act, dtype in (
        (norm, identity, torch.float32),
        theirs(torch.float32),
        theirs(torch.float64),
    ):
        leaf = x.detach().to(dtype).requires_grad_()
        y = act(module(leaf))
        grads = torch.autograd.grad(y, (leaf, *module.parameters()), dy.to(dtype))
        results.append([y.detach(), *grads])
        if module is norm:
            assert y.is_contiguous(memory_format=torch.channels_last)
    return results


def test_module_reads_channels_last_where_it_is(device, monkeypatch):
    seen = []

    def spy(x, *args, **kwargs):
        seen.append(x.data_ptr())
        return x

    monkeypatch.setattr(group_norm_op, "group_norm", spy)
    x = torch.randn(2, 8, 3, 5, device=device)
    near = x.to(memory_format=torch.channels_last)
    norm = GroupNorm(2, 8, device=device)
    norm(near), norm(x)
    assert seen[0] == near.data_ptr() and seen[1] != x.data_ptr()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_module_is_one_graph(layout, device):
    torch.manual_seed(0)
    norm = GroupNorm(2, 6, activation="gelu", device=device)
    x = torch.randn(2, 6, 3, 5, device=device).to(memory_format=layout).requires_grad_()
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, norm):
        y = function(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *norm.parameters()))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


def test_module_under_autocast(device):
    """y keeps the dtype of x; the statistics are float32 as ever."""
    low = torch.bfloat16 if device.type == "cuda" else torch.float16
    norm = GroupNorm(2, 8, device=device)
    x = torch.randn(2, 8, 3, 3, device=device).to(memory_format=torch.channels_last)
    for dtype in (low, torch.float32):
        with torch.autocast(device.type, low):
            y = norm(x.to(dtype))
        assert y.dtype == dtype and torch.equal(y, norm(x.to(dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_module_in_a_cuda_graph(dtype, layout, compiled, device):
    """Captured with its backward under autocast, replayed over another input."""
    torch._dynamo.reset()
    norm = GroupNorm(32, 192, activation="silu", device=device)
    function = torch.compile(norm, fullgraph=True) if compiled else norm
    x = torch.randn(4, 192, 16, 16, device=device, dtype=dtype).to(memory_format=layout)
    x.requires_grad_()
    dy = torch.randn_like(x)

    def step(function):
        with torch.autocast("cuda", torch.bfloat16):
            y = function(x)
        return y.detach(), *torch.autograd.grad(y, (x, *norm.parameters()), dy)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(function)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        got = step(function)
    with torch.no_grad():
        x.mul_(-2)
    graph.replay()
    assert got[0].dtype == dtype
    for a, b in zip(got, step(norm), strict=True):
        assert torch.equal(a, b)
