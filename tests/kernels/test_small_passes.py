"""The plan's smaller kernels against plain PyTorch: the gradient through an activation, padding of
channels, the convolution of stride 2, sums that end in one launch."""

import pytest
import torch

from triton_kernels import fused_ops as fused, reference
from triton_kernels.conv.plain import pad_channels
from triton_kernels.embedding import linear_grads, sinusoids
from triton_kernels.norm import passes as norm_passes, sums as norm_sums
from triton_kernels.norm.tables import After
from triton_kernels.reductions import row_sums
from triton_kernels.reference import fused as fused_reference

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def _randn(*shape, seed, device, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _close(got, exact, dtype):
    """Rounded once from float32 sums; float32 operands of a product lose 13 bits to TF32."""
    bound = {torch.float32: 2**-9, torch.float16: 2**-10, torch.bfloat16: 2**-8}[dtype]
    assert got.shape == exact.shape
    assert (got.double() - exact).norm() <= bound * exact.norm().clamp(min=1e-30)


@pytest.mark.parametrize("second", [0, 4])  # channels of another tensor
@pytest.mark.parametrize("exact_x", [False, True])  # x is float32
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(
    "shape",
    [(2, 4, 6, 16), (3, 5, 7, 20), (1, 24, 24, 8), (2, 1, 1, 136), (0, 4, 4, 16)],
    ids=str,
)
def test_activation_grad(shape, activation, dtype, exact_x, second, device):
    n, _, _, c = shape
    da = _randn(*shape, seed=0, device=device, dtype=dtype)
    x = _randn(*shape, seed=1, device=device, dtype=torch.float32 if exact_x else dtype)
    table = _randn(n, 4, c, seed=2, device=device)
    table[:, 1] = table[:, 1].abs() + 0.5
    x1, x2 = (half.contiguous() for half in x.split([c - second, second], dim=3))
    x2 = x2 if second else None
    dz, partials, _ = norm_sums.activation_grad(da, x1, x2, table, activation)
    exact, sums, _ = fused_reference.activation_grad(
        da.double(), x.double(), None, table.double(), activation
    )
    assert dz.dtype == dtype
    torch.testing.assert_close(
        dz.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5 if dtype.itemsize == 4 else 1e-3
    )
    assert shape[1] * shape[2] % partials.shape[1] == 0
    torch.testing.assert_close(
        partials.double().sum(1), sums.sum(1), rtol=1e-5, atol=1e-5 * (shape[1] * shape[2]) ** 0.5
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["mish", "identity"])
@pytest.mark.parametrize("shape", [(2, 4, 8, 32), (3, 5, 7, 20), (1, 1, 40, 136)], ids=str)
def test_scale_and_shift_behind_the_activation(shape, activation, dtype, device):
    """Their gradients, too, and that of what is in front; rows are columns of a wider tensor."""
    n, _, _, c = shape
    x, dy = (_randn(*shape, seed=i, device=device, dtype=dtype) for i in range(2))
    table = _randn(n, 4, c, seed=2, device=device)
    table[:, 1] = table[:, 1].abs() + 0.5
    wide = _randn(n, 2 * c + 5, seed=3, device=device, dtype=dtype)
    after = After(wide[:, 5 : c + 5], wide[:, c + 5 :], _randn(*shape, seed=4, device=device))
    y = norm_passes.apply(x, None, table, activation, after=after)
    exact = [rows.double() for rows in after]
    eps, atol = torch.finfo(dtype).eps, 1e-5 if dtype.itemsize == 4 else 1e-3
    wanted = fused_reference.apply(x.double(), None, table.double(), activation, after=exact)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), wanted, rtol=eps, atol=atol)

    results = norm_sums.activation_grad(dy, x, None, table, activation, after.scale)
    of_exact = dy.double(), x.double(), None, table.double(), activation, exact[0]
    dz, *sums = fused_reference.activation_grad(*of_exact)
    torch.testing.assert_close(results[0].double(), dz, rtol=eps, atol=atol)
    limit = 1e-5 * (shape[1] * shape[2]) ** 0.5
    for got, total in zip(results[1:], sums, strict=True):
        torch.testing.assert_close(got.double().sum(1), total.sum(1), rtol=1e-5, atol=limit)

    given = [t.double().requires_grad_() for t in (x, *after)]
    fused_reference.apply(given[0], None, table.double(), activation, after=given[1:]).backward(
        dy.double()
    )
    scale, shift = sums[1].sum(1).unbind(1)
    torch.testing.assert_close(scale, given[1].grad)
    torch.testing.assert_close(shift, given[2].grad)
    slope = (table[:, 1] * table[:, 2]).double()[:, None, None]
    torch.testing.assert_close(dz * slope, given[0].grad)


@pytest.mark.parametrize("need_dx", [True, False])
@pytest.mark.parametrize(
    "shape", [(5, 64, 256), (1, 20, 36), (70, 32, 200), (130, 68, 64), (0, 16, 16)], ids=str
)
def test_linear_grads(shape, need_dx, device):
    """N, CI, CO; every sum adds to what is there, and is the same at every run."""
    n, ci, co = shape
    x, dy = _randn(n, ci, seed=0, device=device), _randn(n, co, seed=1, device=device)
    weight = _randn(co, ci, seed=2, device=device)
    before = _randn(co, ci, seed=3, device=device), _randn(co, seed=4, device=device)
    got, again, exact = ([g.clone() for g in before] for _ in range(3))
    exact = [g.double() for g in exact]
    dx = linear_grads.linear_grads(x, dy, weight, *got, need_dx)
    same = linear_grads.linear_grads(x, dy, weight, *again, need_dx)
    doubles = [v.double() for v in (x, dy, weight)]
    expected = fused_reference.linear_grads(*doubles, *exact, need_dx)
    for a, b, c in zip(got, again, exact, strict=True):
        _close(a, c, torch.float32)
        assert torch.equal(a, b)
    if need_dx:
        _close(dx, expected, torch.float32)
        assert torch.equal(dx, same)
    else:
        assert dx is None and expected is None


@pytest.mark.parametrize("shape", [(5, 3), (2, 7, 9, 3), (3, 16), (0, 3), (1, 1, 1, 17)], ids=str)
def test_pad_channels(shape, device):
    x = _randn(*shape, seed=0, device=device)
    width = -(-shape[-1] // 16) * 16
    got = pad_channels.pad_channels(x, width, torch.float16)
    assert torch.equal(got, fused_reference.pad_channels(x, width, torch.float16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(
    "shape",
    [(2, 6, 8, 16, 24), (1, 2, 2, 8, 8), (0, 4, 4, 8, 8), (3, 6, 10, 64, 24), (2, 4, 6, 32, 40)],
    ids=str,
)
def test_conv_down(shape, padding, dtype, device):
    n, h, w, ci, co = shape
    x = _randn(n, h, w, ci, seed=0, device=device, dtype=dtype)
    weight = _randn(co, 3, 3, ci, seed=1, device=device, dtype=dtype).permute(0, 3, 1, 2) / 9
    bias = _randn(co, seed=2, device=device)
    dy = _randn(n, h // 2, w // 2, co, seed=3, device=device, dtype=dtype)
    add = _randn(n, h, w, ci, seed=4, device=device, dtype=dtype)
    out = _randn(co, 3, 3, ci, seed=5, device=device).permute(0, 3, 1, 2)
    expected = out.double()
    exact = [t.double() for t in (x, weight, bias, dy, add)]
    got = fused.conv_down(x, weight, bias, padding)
    _close(got, fused_reference.conv_down(*exact[:3], padding), dtype)
    got = fused.conv_down_input_grad(dy, weight, padding)
    _close(got, fused_reference.conv_down_input_grad(exact[3], exact[1], padding), dtype)
    got = fused.conv_down_input_grad(dy, weight, padding, add)
    _close(got, fused_reference.conv_down_input_grad(exact[3], exact[1], padding, exact[4]), dtype)
    options = {"accumulate": True, "stride": 2, "padding": padding}
    fused.conv_weight_grad(x, dy, out, **options)
    fused_reference.conv_weight_grad(exact[0], exact[3], expected, **options)
    _close(out, expected, dtype)


@pytest.mark.parametrize("co", [3, 6, 16])
def test_few_filters_into_wider_pixels(co, device):
    """The head: channels behind those of the filters are zero, and do not count in backward."""
    x = _randn(2, 8, 8, 16, seed=0, device=device, dtype=torch.float16)
    weight = _randn(co, 3, 3, 16, seed=1, device=device, dtype=torch.float16).permute(0, 3, 1, 2)
    bias = torch.full((16,), torch.nan, device=device)  # what is behind it is not read
    bias[:co] = _randn(co, seed=2, device=device)
    y, _ = fused.conv_forward(x, weight, bias[:co], width=16)
    exact = reference.conv2d(x.double(), weight.double(), bias[:co].double())
    _close(y[..., :co], exact, torch.float16)
    assert (y[..., co:] == 0).all()
    dy = _randn(2, 8, 8, 16, seed=3, device=device, dtype=torch.float16)
    table = _randn(2, 4, 16, seed=4, device=device)
    backward = {"inputs": (x,), "table": table, "activation": "silu"}
    dz, _ = fused.conv_input_grad(dy, weight, **backward)
    exact = {"inputs": (x.double(),), "table": table.double(), "activation": "silu"}
    exact, _ = fused_reference.conv_input_grad(dy.double(), weight.double(), **exact)
    _close(dz, exact, torch.float16)
    for rows in (co, 16):  # of filters for the head, of input channels for the stem
        out = torch.zeros(rows, 3, 3, 16 if rows == co else 3, device=device).permute(0, 3, 1, 2)
        expected = out.double()
        fused.conv_weight_grad(x, dy, out, accumulate=True)
        fused_reference.conv_weight_grad(x.double(), dy.double(), expected, accumulate=True)
        _close(out, expected, torch.float16)


def test_column_sums_at_the_end_of_backward(device):
    grad = _randn(64, seed=0, device=device)
    before = grad.double()
    sums = row_sums.RowSums(grad)
    x = _randn(3, 5, 70, 16, seed=1, device=device, dtype=torch.float16)
    for _ in range(2):  # the second time in one launch
        fused.bias_grad(fused.tensor_rows(x, sums), grad[32:35], accumulate=True, sums=sums)
        sums.flush()
    before[32:35] += 2 * x.double().sum((0, 1, 2))[:3]
    torch.testing.assert_close(grad.double(), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize(("n", "width", "half"), [(5, 64, 32), (37, 9, 4), (0, 8, 4), (2, 3, 1)])
def test_sinusoids(n, width, half, dtype, device):
    """As accurate as the reference's: angles are up to a thousand turns of a circle."""
    t = torch.arange(n, device=device).to(dtype) * 173 % 1000
    frequencies = torch.exp(-torch.arange(half, device=device) / half * 9.2)
    got = sinusoids.sinusoids(t, frequencies, width)
    expected = fused_reference.sinusoids(t, frequencies, width)
    assert got.shape == (n, width)
    torch.testing.assert_close(got, expected, rtol=0, atol=2**-22)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu", "identity"])
@pytest.mark.parametrize(
    ("shape", "gate"),
    [((3, 5, 2 * 40), 1), ((2, 4, 9, 2 * 300), 0), ((70, 2 * 7), 1), ((1, 2), 0), ((0, 4, 16), 1)],
    ids=str,
)
def test_gated_products(shape, gate, activation, dtype, device):
    x = _randn(*shape, seed=0, device=device, dtype=dtype)
    dy = _randn(*shape[:-1], shape[-1] // 2, seed=1, device=device, dtype=dtype)
    y = fused.gated_forward(x, activation, gate)
    dx = fused.gated_backward(dy, x, activation, gate)
    assert y.dtype == dx.dtype == dtype
    exact = x.double(), activation, gate
    for got, expected in (
        (y, fused_reference.gated_forward(*exact)),
        (dx, fused_reference.gated_backward(dy.double(), *exact)),
    ):
        rounding = torch.finfo(dtype).eps / 2 + 16 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(got.double(), expected, rtol=rounding, atol=1e-6)
