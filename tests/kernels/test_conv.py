"""conv2d and its gradients against the reference in float64."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.conv import conv2d as conv

from .conv_cases import DTYPES, MODEL, SMALL, Shape, check, make, references, relative, run

PRECISIONS = ["fp32", "tf32", "fp16", pytest.param("bf16", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", SMALL)
def test_matches_reference(name, precision, device, monkeypatch):
    dtype, tf32 = DTYPES[precision]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    x, weight, bias, dy = make(SMALL[name], dtype, device)
    got = run(conv.conv2d, SMALL[name], x, weight, bias, dy, allow_tf32=tf32)
    exact, low = references(SMALL[name], x, weight, bias, dy)
    check(got, exact, low, SMALL[name], precision)
    assert [t.dtype for t in got] == [dtype, dtype, torch.float32, torch.float32]
    assert got[2].stride() == weight.stride()


def test_without_bias_and_without_gradients(device):
    x, weight, _, _ = make(SMALL["3x3"], torch.float32, device)
    y = conv.conv2d(x, weight)
    assert relative(y, reference.conv2d(x.double(), weight.double())) < 1e-6
    (dw,) = torch.autograd.grad(conv.conv2d(x, weight.requires_grad_()).sum(), weight)
    assert dw.shape == weight.shape


def test_of_no_channels(device):
    """Sums of nothing: the bias alone, and gradients without numbers."""
    x = torch.randn(2, 3, 4, 0, device=device, requires_grad=True)
    weight = torch.empty(5, 3, 3, 0, device=device).permute(0, 3, 1, 2).requires_grad_()
    bias = torch.randn(5, device=device, requires_grad=True)
    y = conv.conv2d(x, weight, bias)
    assert torch.equal(y, bias.expand(2, 3, 4, 5))
    dx, dweight, dbias = torch.autograd.grad(y.sum(), (x, weight, bias))
    assert (dx.shape, dweight.shape) == (x.shape, weight.shape)
    assert torch.equal(dbias, torch.full_like(bias, 24.0))


@pytest.mark.parametrize("offset", [3, 8])
def test_weight_may_be_a_view_into_a_flat_buffer(offset, device):
    """With 8 elements before it, it has the 16-byte alignment that TMA needs; with 3 it has not."""
    shape = SMALL["3x3"]
    x, weight, bias, dy = make(shape, torch.float16, device)
    co, ci, r, s = weight.shape
    flat = torch.full((weight.numel() + 16,), float("nan"), device=device, dtype=x.dtype)
    view = flat[offset : offset + weight.numel()].view(co, r, s, ci).permute(0, 3, 1, 2)
    view.copy_(weight)
    exact, low = references(shape, x, weight, bias, dy)
    check(run(conv.conv2d, shape, x, view, bias, dy), exact, low, shape, "fp16")


def test_is_linear_and_shifts_with_its_input(device):
    x, weight, _, _ = make(Shape(1, 7, 8, 8, 8), torch.float32, device)
    y = conv.conv2d(x, weight, padding=0)
    torch.testing.assert_close(conv.conv2d(2 * x, weight, padding=0), 2 * y, rtol=0, atol=0)
    shifted = conv.conv2d(x.roll(1, dims=2).contiguous(), weight, padding=0)
    torch.testing.assert_close(shifted[:, :, 1:], y[:, :, :-1], rtol=1e-6, atol=1e-6)


# --- refusals -------------------------------------------------------------------------------------


def _channels_first(weight):
    return weight.contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, b: (x.permute(0, 3, 1, 2), w, b), "expected contiguous NHWC"),
        (lambda x, w, b: (x.double(), w, b), "expected float32, float16 or bfloat16"),
        (lambda x, w, b: (x, _channels_first(w), b), "memory_format=torch.channels_last"),
        (lambda x, w, b: (x, w[:, :8], b), r"expected \[CO, 24, R, S\]"),
        (lambda x, w, b: (x, w, b[:5]), r"bias has shape \(5,\); expected \(72,\)"),
        (lambda x, w, b: (x[:, :0].contiguous(), w, b), "smaller than the 3x3 filter"),
    ],
    ids=["x strided", "x float64", "weight NCHW", "channels", "bias", "no rows"],
)
def test_refuses(change, message, device):
    x, weight, bias, _ = make(SMALL["3x3"], torch.float32, device)
    with pytest.raises(ValueError, match=message):
        conv.conv2d(*change(x, weight, bias))


@pytest.mark.parametrize("padding", ["same", 1.5, (1,), (1, 1, 1), (1.0, 1.0), -1], ids=str)
def test_refuses_padding(padding, device):
    x, weight, _, _ = make(SMALL["3x3"], torch.float32, device)
    with pytest.raises(ValueError, match=r"padding=.*; expected a whole"):
        conv.conv2d(x, weight, padding=padding)


# --- on a GPU: the shapes of the models -----------------------------------------------------------

SOME = ["stem", "head", "3x3 16x16 320-192", "1x1 8x8 256-768", "linear 256-128", "28x28"]
MODEL_RUNS = [
    *((name, n, "bf16") for name in MODEL for n in (3, 32)),
    *((name, 3, precision) for name in SOME for precision in ("fp16", "tf32", "fp32")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "n", "precision"), MODEL_RUNS)
def test_model_shape(name, n, precision, monkeypatch, device):
    dtype, tf32 = DTYPES[precision]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    shape = Shape(n, *MODEL[name])
    data = make(shape, dtype, device)
    first = run(conv.conv2d, shape, *data, allow_tf32=tf32)
    check(first, *references(shape, *data), shape, precision)
    for _ in range(3):  # no atomics: the same bits each time
        again = run(conv.conv2d, shape, *data, allow_tf32=tf32)
        assert all(map(torch.equal, again, first))


@pytest.mark.gpu
def test_in_a_cuda_graph(device):
    shape = Shape(4, 16, 16, 64, 64)
    x, weight, bias, dy = make(shape, torch.bfloat16, device)
    inputs = [t.detach().requires_grad_() for t in (x, weight, bias)]

    def step():
        return torch.autograd.grad(conv.conv2d(*inputs), inputs, dy)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        for t in inputs:
            t.mul_(-0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, step()))
