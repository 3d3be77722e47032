"""Every op is one of torch.library's: opcheck passes, and a small network of them is one graph to
torch.compile, with the results of eager mode; under autocast, and inside a CUDA graph, as well."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import triton_kernels
from triton_kernels import (
    GroupNorm,
    adamw_step,
    attention,
    avg_pool2d,
    conv2d,
    denoise_loss,
    denoise_step,
    draw_timesteps,
    dropout,
    group_norm,
    q_sample,
    upsample_nearest2d,
)

OPS = torch.ops.triton_kernels

needs_compiler = pytest.mark.skipif(
    not torch.cuda.is_available() and shutil.which("g++") is None,
    reason="Inductor needs a C++ compiler on the CPU",
)


@pytest.fixture(autouse=True)
def fresh():
    """Each test compiles for itself."""
    torch._dynamo.reset()


# --- each op alone -------------------------------------------------------------------------------


def _randn(*shape, grad=True):
    return torch.randn(shape).requires_grad_(grad)


def _filters(*shape):
    return torch.randn(shape).contiguous(memory_format=torch.channels_last).requires_grad_()


def _process(n=2):
    """t, table, rng"""
    return torch.tensor([1, 3])[:n], torch.rand(4, 2), torch.tensor([5, 6])


def _images():
    """images [M, H, W, C], index, flip"""
    return torch.rand(3, 2, 3, 3), torch.tensor([2, 0]), torch.tensor([True, False])


def _adamw():
    vectors = [torch.rand(10) for _ in range(5)]
    hyper = torch.tensor([1e-3, 0.9, 0.99, 1e-8, 0.1, 0.1, 0.01, 0.9, 1.0], dtype=torch.float64)
    skipped = torch.zeros(1, dtype=torch.int32)
    return (*vectors, torch.ones(1), hyper, skipped, torch.zeros(10, dtype=torch.float16))


_PLAIN = (1, [1, 1], False)  # stride, padding, allow_tf32
_NORM = {
    "x": lambda: (_randn(2, 2, 3, 4), None, _randn(4), _randn(4)),
    "x2": lambda: (_randn(2, 2, 3, 4), _randn(2, 2, 3, 8), _randn(12), None),
}

# Arguments of each op, made afresh; where an op has a derivative, some ask for it
CASES = {
    "conv2d": lambda: (_randn(2, 3, 4, 5), _filters(6, 5, 3, 3), None, _randn(6), *_PLAIN),
    "conv2d without bias, stride 2": lambda: (
        *(_randn(2, 3, 4, 5), _filters(6, 5, 1, 3), None, None, 2, [0, 1], False),
    ),
    "conv2d_backward_input": lambda: (
        *(torch.randn(2, 3, 4, 6), _filters(6, 5, 3, 3).detach(), 3, 4, *_PLAIN),
    ),
    "conv2d_backward_weight": lambda: (
        *(torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 6), _filters(6, 5, 3, 3).detach()),
        *_PLAIN,
    ),
    "conv2d_backward_bias": lambda: (torch.randn(2, 3, 4, 6), torch.randn(6)),
    "group_norm": lambda: (*_NORM["x"](), _randn(2, 4), _randn(2, 4), 2, 1e-5, "silu"),
    "group_norm of two": lambda: (*_NORM["x2"](), None, None, 2, 1e-5, "gelu"),
    "group_norm_backward": lambda: (
        *(torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4), None, torch.rand(2, 2, 2)),
        *(torch.randn(4), None, torch.randn(2, 4), None),
        *("relu", [True, False, True, False, True, False]),
    ),
    "channel_norm": lambda: (
        *(_randn(2, 2, 3, 4), _randn(4), None, _randn(2, 4), _randn(2, 4)),
        *(1e-5, True, "root", "silu"),
    ),
    "channel_norm, without parameters": lambda: (
        *(_randn(2, 2, 3, 4), None, None, None, None, 1e-12, False, "max", "identity"),
    ),
    "channel_norm_backward": lambda: (
        *(torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4), torch.randn(4), None),
        *(torch.randn(2, 4), None, 1e-3, False, "sum", "gelu", [True, True, False, True, False]),
    ),
    "attention": lambda: (_randn(2, 5, 24), 2, "qkv_heads", False),
    "attention_backward": lambda: (
        *(torch.randn(2, 5, 8), torch.randn(2, 5, 24), torch.randn(2, 5, 8)),
        *(torch.rand(2, 2, 5), 2, "heads_qkv", False),
    ),
    "cross_attention": lambda: (_randn(2, 5, 8), _randn(2, 3, 16), None, 2, False),
    "cross_attention, masked": lambda: (
        *(_randn(2, 5, 8), _randn(2, 3, 16), torch.tensor([[True, False, True]] * 2), 2, False),
    ),
    "cross_attention_backward": lambda: (
        *(torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(2, 3, 16), None),
        *(torch.randn(2, 5, 8), torch.rand(2, 2, 5), 2, False),
    ),
    "avg_pool2d": lambda: (_randn(2, 5, 4, 3),),
    "avg_pool2d_backward": lambda: (torch.randn(2, 2, 2, 3), 5, 4),
    "upsample_nearest2d": lambda: (_randn(2, 3, 2, 3),),
    "upsample_nearest2d_backward": lambda: (torch.randn(2, 4, 6, 3),),
    "dropout": lambda: (_randn(2, 3, 3, 4), 0.3, torch.tensor([1, 2]), 3, 0),
    "normal": lambda: ([2, 3, 5], torch.tensor([1, 2]), 2, 0),
    "draw_timesteps": lambda: (torch.tensor([1, 2]), 7, 1000, 0),
    "draw_weighted_timesteps": lambda: (torch.tensor([1, 2]), 7, torch.tensor([3, 5, 9]), 0),
    "record_losses": lambda: (
        *(torch.rand(4), torch.tensor([1, 0, 1, 2]), torch.rand(2, 3)),
        *(torch.ones(3, dtype=torch.int32), 0.01),
    ),
    "draw_flips": lambda: (torch.tensor([1, 2]), 7, 0),
    "gather_images": lambda: _images(),
    "gather_images, all": lambda: (_images()[0], None, None),
    "q_sample": lambda: (*_images(), *_process(), 0, torch.float16),
    "denoise_loss": lambda: (_randn(2, 2, 3, 6), *_images(), *_process(), 4, "v_prediction", True),
    "denoise_loss, no gradient": lambda: (
        *(torch.randn(2, 2, 3, 3), *_images(), *_process(), 4, "sample", False),
    ),
    "denoise_loss_backward": lambda: (torch.rand(2), torch.randn(2, 2, 3, 3), 6, torch.float16),
    "denoise_step": lambda: (
        *(torch.randn(2, 2, 3, 3), torch.randn(2, 2, 3, 8)[..., :6], torch.rand(4, 8)),
        *(torch.tensor([1]), torch.tensor([5, 6]), 3, None, 1.0, None),
    ),
    "denoise_step with memory": lambda: (
        *(torch.randn(2, 2, 3, 3), torch.randn(2, 2, 3, 3), torch.rand(4, 8)),
        *(torch.tensor([1]), torch.tensor([5, 6]), 0, torch.tensor([3]), None),
        torch.randn(2, 2, 3, 3),
    ),
    "denoise_step of a guided output, partly known": lambda: (
        *(torch.randn(2, 2, 3, 3), torch.randn(2, 2, 3, 6), torch.rand(4, 8)),
        *(torch.tensor([1]), torch.tensor([5, 6]), 0, None, 1.0, None),
        *(torch.randn(2, 2, 3, 8)[..., :3], torch.rand(4) * 3, 0.7),
        *(torch.randn(2, 2, 3, 3), torch.rand(2, 2, 3), torch.rand(4, 2)),
    ),
    "grad_norm": lambda: (torch.randn(10),),
    "adamw_step": _adamw,
    "adamw_step without shadow": lambda: (*_adamw()[:-1], None),
}


def _op_of(case):
    return getattr(OPS, case.replace(",", "").split()[0]).default


def _arguments(case, device):
    torch.manual_seed(0)
    return tuple(
        a.detach().to(device).requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
        for a in CASES[case]()
    )


def test_every_public_function_is_an_op_and_every_op_has_a_case():
    functions = {name for name in triton_kernels.__all__ if name[0].islower()}
    names = torch._C._dispatch_get_all_op_names()
    ops = {name.split("::")[1] for name in names if name.startswith("triton_kernels::")}
    assert functions <= ops
    assert ops == {case.replace(",", "").split()[0] for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case, device):
    torch.library.opcheck(_op_of(case), _arguments(case, device))


@pytest.mark.parametrize(
    "case",
    [
        "conv2d",
        "group_norm",
        "channel_norm",
        "attention",
        "cross_attention",
        "avg_pool2d",
        "upsample_nearest2d",
    ]
    + ["dropout", "denoise_loss"],
)
def test_twice_differentiated_raises(case, device):
    """Also where the incoming gradient is a constant, which has no graph to come back to."""
    for loss in (torch.Tensor.square, torch.Tensor.clone):
        x, *rest = _arguments(case, device)
        y = _op_of(case)(x, *rest)
        y = y[0] if isinstance(y, tuple) else y
        (dx,) = torch.autograd.grad(loss(y).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            dx.sum().backward()


@pytest.mark.parametrize("case", ["conv2d", "group_norm", "channel_norm", "attention", "dropout"])
def test_twice_differentiated_by_one_tensor_raises(case, device):
    """That nothing says that the first gradient depends on: None would be taken for zeros."""
    x, *rest = _arguments(case, device)
    y = _op_of(case)(x, *rest)
    y = y[0] if isinstance(y, tuple) else y
    dy = torch.ones_like(y, requires_grad=True)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    for by in (dy, x)[: 1 if case == "dropout" else 2]:  # which is linear
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(dx.sum(), by, allow_unused=True, retain_graph=True)


def test_fake_tensors_are_not_launched_on(device):
    """Inside of their mode, and outside as well."""
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(2, 6, 4, 8, device=device, requires_grad=True)
        y = avg_pool2d(group_norm(x, 2))
    outside = avg_pool2d(y)
    for result, shape in ((y, (2, 3, 2, 8)), (outside, (2, 1, 1, 8))):
        assert isinstance(result, FakeTensor) and result.shape == shape and result.requires_grad


def test_in_place_changes_are_counted(device):
    """Autograd learns from the count that a tensor it kept is no longer what it was."""
    *arguments, shadow = _arguments("adamw_step", device)
    before = [t._version for t in (*arguments, shadow)]
    adamw_step(*arguments, shadow=shadow)
    counts = [t._version - v for t, v in zip((*arguments, shadow), before, strict=True)]
    assert counts == [1, 0, 1, 1, 1, 0, 0, 1, 1]


# --- a network -----------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """One of each layer; `channels` is a multiple of 4."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        shapes = {
            "stem": (channels, 3, 3, 3),
            "qkv": (3 * channels, channels, 1, 1),
            "mix": (channels, 2 * channels, 1, 1),
            "head": (3, channels, 3, 3),
        }
        for name, shape in shapes.items():
            weight = torch.randn(shape) / (shape[1] * shape[2] * shape[3]) ** 0.5
            setattr(self, name, torch.nn.Parameter(weight))
        self.bias = torch.nn.Parameter(torch.randn(channels))
        self.gain = torch.nn.Parameter(torch.randn(2 * channels))
        self.norm = GroupNorm(4, channels, activation="silu")
        self.to(memory_format=torch.channels_last)

    def forward(self, images, t, table, rng, dtype=torch.float32):
        x = q_sample(images, t, table, rng, dtype=dtype)
        h = conv2d(x, self.stem, self.bias)
        a = dropout(avg_pool2d(group_norm(h, 4, activation="gelu")), 0.1, rng, layer=0)
        n, height, width, c = a.shape
        a = attention(conv2d(a, self.qkv).view(n, height * width, 3 * c), 2).view(a.shape)
        a = F.silu(upsample_nearest2d(a)) + h  # for Inductor
        a = conv2d(group_norm(a, 4, self.gain, activation="silu", x2=h), self.mix)
        a = self.norm(a.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return denoise_loss(conv2d(a, self.head), images, t, table, rng).mean()


def _network(device, channels=8, size=6, n=2):
    """A network and its input."""
    torch.manual_seed(0)
    net = Net(channels).to(device)
    t = torch.arange(n, device=device) % 4
    inputs = (torch.rand(n, size, size, 3), torch.rand(4, 2), torch.tensor([5, 6]))
    images, table, rng = (tensor.to(device) for tensor in inputs)
    return net, (images, t, table, rng)


def _step(net, function, inputs):
    """The loss and every gradient."""
    loss = function(*inputs)
    return loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))


def _error(got, exact):
    return ((got.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30)).item()


def _check_fp32(got, want):
    """Inductor may add in another order."""
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert _error(a, b) < 1e-5


def test_network_is_one_graph(device):
    """With a backend that runs the same ops the results are the same to the bit."""
    net, inputs = _network(device)
    eager = _step(net, net, inputs)
    compiled = _step(net, torch.compile(net, fullgraph=True, backend="aot_eager"), inputs)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))


@pytest.mark.long
def test_network_of_any_batch(device):
    """One graph serves several sizes of the batch, be they larger than the channels."""
    net, _ = _network(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, fullgraph=True, backend=counter)
    for n in (2, 9):
        _, (images, t, table, rng) = _network(device, n=n)
        torch._dynamo.mark_dynamic(images, 0)
        torch._dynamo.mark_dynamic(t, 0)
        inputs = (images, t, table, rng)
        _check_fp32(_step(net, compiled, inputs), _step(net, net, inputs))
    assert counter.frame_count == 1


@pytest.mark.long
@needs_compiler
def test_two_ops_through_inductor(device):
    norm = GroupNorm(2, 8, activation="silu", device=device)
    weight, x = _filters(8, 8, 3, 3).detach().to(device), torch.randn(1, 4, 5, 8, device=device)

    def loss(x):
        y = norm(conv2d(x, weight).permute(0, 3, 1, 2))
        return torch.tanh(y).square().sum()

    leaf = x.requires_grad_()
    eager = torch.autograd.grad(loss(leaf), (leaf, *norm.parameters()))
    compiled = torch.compile(loss, fullgraph=True)
    _check_fp32(torch.autograd.grad(compiled(leaf), (leaf, *norm.parameters())), eager)


def test_draws_and_reverse_step_are_one_graph(device):
    case = _arguments("denoise_step with memory", device)
    x, output, table, row, rng, _, first, _, memory = case

    def sample(x, memory):
        t = draw_timesteps(rng, 2, 4)
        x_prev = denoise_step(x, output, table, row, rng, first=first, memory=memory)
        return t, x_prev, memory.square()  # sees the update

    compiled = torch.compile(sample, fullgraph=True, backend="aot_eager")
    want = sample(x, memory.clone())
    assert all(torch.equal(a, b) for a, b in zip(compiled(x, memory), want, strict=True))


def test_optimizer_is_one_graph(device):
    def update(*arguments):
        *arguments, shadow = arguments
        adamw_step(*arguments, shadow=shadow)
        return arguments[0] * 2  # sees the update

    eager, compiled = (_arguments("adamw_step", device) for _ in range(2))
    want = update(*eager)
    got = torch.compile(update, fullgraph=True, backend="aot_eager")(*compiled)
    for a, b in zip((got, *compiled), (want, *eager), strict=True):
        assert torch.equal(a, b)


# --- autocast ------------------------------------------------------------------------------------


def _low(device):
    """What torch.autocast casts to here; bfloat16 is wrong in Triton's interpreter."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_autocast(backend, device):
    """A convolution and attention take what they get in the low dtype; a norm keeps its input's.
    Gradients have the dtype of their tensor."""
    torch.manual_seed(0)
    low = _low(device)
    x = torch.randn(2, 3, 4, 8, device=device, requires_grad=True)
    weight = _filters(8, 8, 3, 3).detach().to(device).requires_grad_()

    def layers(x, weight):
        h = conv2d(x, weight)
        return h, attention(x.view(2, 12, 8)[..., :6].contiguous(), 1), group_norm(x, 2)

    function = layers if backend is None else torch.compile(layers, fullgraph=True, backend=backend)
    with torch.autocast(device.type, low):
        got = function(x, weight)
    want = layers(x.to(low), weight)
    assert [y.dtype for y in got] == [low, low, torch.float32]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert torch.equal(got[2], group_norm(x, 2))
    dx, dw = torch.autograd.grad(got[0].float().square().sum(), (x, weight))
    assert dx.dtype == dw.dtype == torch.float32
    (want_dw,) = torch.autograd.grad(want[0].float().square().sum(), weight)
    assert torch.equal(dw, want_dw)


# --- on the GPU: Inductor, bf16, CUDA graphs ------------------------------------------------------


@pytest.mark.gpu
def test_tensors_on_two_devices_raise(device):
    x = torch.randn(1, 2, 2, 8, device=device)
    with pytest.raises(ValueError, match="weight is on cpu; expected cuda:0, where x is"):
        group_norm(x, 2, torch.ones(8))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_network_on_a_gpu_that_is_not_the_current_one(device):
    net, inputs = _network(device)
    want = _step(net, net, inputs)
    net, inputs = _network("cuda:1")
    assert torch.cuda.current_device() == 0
    got = _step(net, net, inputs)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_network_through_inductor(dtype, device):
    """bf16: Inductor rounds less often than eager mode. Both are compared with float32."""
    net, inputs = _network(device, channels=32, size=16, n=4)
    compiled = torch.compile(net, fullgraph=True)
    got = _step(net, compiled, (*inputs, dtype))
    eager = _step(net, net, (*inputs, dtype))
    if dtype == torch.float32:
        return _check_fp32(got, eager)
    for a, b, c in zip(got, eager, _step(net, net, inputs), strict=True):
        assert _error(a, c) <= 2 * _error(b, c) + torch.finfo(dtype).eps


@pytest.mark.gpu
def test_network_through_inductor_under_autocast(device):
    net, inputs = _network(device, channels=32, size=16, n=4)
    compiled = torch.compile(net, fullgraph=True)
    results = []
    for function in (compiled, net):
        with torch.autocast("cuda", torch.bfloat16):
            loss = function(*inputs)
        results.append((loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))))
    for a, b, c in zip(*results, _step(net, net, inputs), strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert _error(a, c) <= 2 * _error(b, c) + torch.finfo(torch.bfloat16).eps


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["eager", "compiled", "reduce-overhead"])
def test_network_in_a_cuda_graph(way, device):
    """Captured once, replayed with other input in the same memory."""
    net, inputs = _network(device, channels=32, size=16, n=4)
    function = net
    if way != "eager":
        mode = "reduce-overhead" if way == "reduce-overhead" else None
        function = torch.compile(net, fullgraph=True, mode=mode)
    images, _, _, rng = inputs
    if way == "reduce-overhead":  # PyTorch captures it
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            [t.clone() for t in _step(net, function, inputs)]
        images.copy_(images.flip(0))
        rng += 1
        torch.compiler.cudagraph_mark_step_begin()
        got = [t.clone() for t in _step(net, function, inputs)]
    else:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _step(net, function, inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            got = _step(net, function, inputs)
        images.copy_(images.flip(0))
        rng += 1
        graph.replay()
    _check_fp32(got, _step(net, net, inputs))
