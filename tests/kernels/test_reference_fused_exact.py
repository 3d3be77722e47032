"""The planned network's ops in PyTorch (`reference.fused`) against float64 at inputs that are hard
on float32.

What is exact depends on what passes between two of them. A table holds the mean of a group as a
float32, which is right to 2^-24 of itself: of a mean of m deviations no reader has more than
m 2^-24 of xhat.
"""

import pytest
import torch

from triton_kernels.norm.tables import NormGrads, Statistics
from triton_kernels.reference import fused
from triton_kernels.tf32 import rounded_to_tf32

from .test_reference_exact import DTYPES, ROUNDINGS, relative_error

EPS = 1e-5


def draws(seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(device)


def block(fused, x1, x2, weight, bias, scale, shift, filters, dy, groups, activation):
    """Every pass of a norm and the convolution behind it, by name; sums that may cancel come with
    the size of their terms. Partial sums are added up: a kernel has more of them."""
    xs = [x for x in (x1, x2) if x is not None]
    partials = [fused.tensor_partials(x) for x in xs]
    pixels = [x.shape[1] * x.shape[2] for x in xs]
    norm = Statistics(partials, pixels, groups, weight, bias, EPS, scale, shift)
    table = fused.norm_table(*norm)
    a, again = fused.norm_apply(x1, x2, norm, activation)
    one_launch, _ = fused.norm_of_sums(x1, x2, norm, activation)
    whole, _ = fused.norm_single_cta(x1, x2, *norm[2:6], activation, scale, shift)
    y, y_partials = fused.conv_forward(a, filters, bias[: len(filters)], stats=True)
    dz, sums = fused.conv_input_grad(dy, filters, inputs=xs, table=table, activation=activation)
    constants = weight.new_ones(len(filters)), weight.new_zeros(len(filters))
    y_table = fused.norm_table((y_partials,), (pixels[0],), 2, *constants, EPS)
    film = {name: torch.zeros_like(scale) for name in ("scale", "shift", "emb")}
    alone = {}
    if x2 is None:
        alone = {"input_partials": partials[0]}
    names = ("weight", "bias", "input_bias") if alone else ("weight", "bias")
    summands = weight.new_full((len(dy), len(names) * len(weight)), torch.nan)
    coeff = fused.norm_grad_table(
        sums, table, pixels[0], groups, NormGrads(**film | ({} if alone else {"emb": None})),
        film=(weight, bias, scale), sums=summands, **alone,
    )  # fmt: skip
    total = torch.empty_like(summands[0])
    fused.bias_grad(summands, total)
    grads = dict(zip(names, total.split(len(weight)), strict=True))
    dx1, dx2, rows = fused.norm_dx(dz, x1, x2, coeff, sums=True)
    terms = (dz * coeff[:, 0, None, None]).abs()  # of dx, and of its sums
    weights = filters.abs().sum((1, 2, 3)).norm()
    found = {
        "table": (table[:, :2], None),
        "table of apply": (again[:, :2], None),
        "apply": (a, None),
        "norm_of_sums": (one_launch, None),
        "norm_single_cta": (whole, None),
        "conv": (y, weights * a.norm() / filters.shape[1] ** 0.5),
        "table of the result": (y_table[:, :2], None),
        "dz": (dz, None),
        "backward sums": (sums.sum(1), dz.abs().sum((1, 2)).norm()),
        "weight": (grads["weight"], dz.abs().sum((0, 1, 2)).norm()),
        "bias": (grads["bias"], dz.abs().sum((0, 1, 2)).norm()),
        "scale": (film["scale"], dz.abs().sum((1, 2)).norm()),
        "shift": (film["shift"], dz.abs().sum((1, 2)).norm()),
        "dx1": (dx1, terms.norm()),
        "rows": (rows.sum(0), terms.sum((0, 1, 2)).norm()),
        "emb": (film["emb"], terms.sum((1, 2)).norm()),
    }
    if x2 is not None:
        return found | {"dx2": (dx2, terms.norm())}
    return found | {"input bias": (grads["input_bias"], terms.sum((0, 1, 2)).norm())}


def check_block(ops, shape, second, co, groups, mean, deviation, *, floor=ROUNDINGS, device="cpu"):
    """`block` of these ops, which may be kernels, against that of the reference in float64."""
    draw = draws(device=device)
    n, h, w, c = shape
    channels = c + second
    x1 = draw(*shape) * deviation + mean
    x2 = draw(n, h, w, second) * deviation + mean if second else None
    params = [draw(channels) for _ in range(2)] + [draw(n, channels) for _ in range(2)]
    # as a step leaves what its products read: in TF32 tensor cores would cut off the other bits
    filters = rounded_to_tf32(draw(co, 3, 3, channels).permute(0, 3, 1, 2))
    case = [x1, x2, *params, filters, rounded_to_tf32(draw(n, h, w, co))]
    got = block(ops, *case, groups, "silu")
    exact = block(fused, *(None if t is None else t.double() for t in case), groups, "silu")
    spread = (deviation**2 + EPS) ** 0.5  # what xhat is measured in
    bound = floor + 4 * 2**-24 * abs(mean) / spread
    errors = {k: relative_error(got[k][0], c, size) for k, (c, size) in exact.items()}
    wrong = {k: error for k, error in errors.items() if not error < bound}
    assert not wrong, f"{wrong}, above {bound}"


@pytest.mark.parametrize(
    ("mean", "deviation"), [(0, 1), (1e3, 1), (-30, 1), (1, 1e-4), (0, 1e-4)], ids=str
)
@pytest.mark.parametrize(
    ("shape", "second", "groups"),
    [
        pytest.param((2, 9, 7, 24), 0, 4, id="one-tensor"),
        pytest.param((2, 9, 7, 24), 12, 4, id="a-group-of-two-tensors"),
        pytest.param((2, 6, 6, 8), 8, 16, id="one-channel-a-group"),
        pytest.param((1, 1, 1, 24), 0, 4, id="one-pixel-of-one-sample"),
        pytest.param((2, 1, 1, 8), 8, 2, id="one-pixel-of-two-tensors"),
        pytest.param((2, 5, 3, 6), 0, 1, id="one-group"),
    ],
)
def test_a_norm_and_a_convolution(shape, second, groups, mean, deviation):
    check_block(fused, shape, second, 6, groups, mean, deviation)


def test_partials_of_several_tiles_of_a_large_mean():
    """As kernels leave them: the table that is made of them is that of the whole."""
    x = draws()(2, 16, 4, 8) + 1e3
    tiles = [fused.tensor_partials(x[:, i : i + 4].double()) for i in range(0, 16, 4)]
    norm = 64, 2, torch.ones(8), torch.zeros(8), EPS
    whole = fused.norm_table((fused.tensor_partials(x.double()),), (norm[0],), *norm[1:])
    got = fused.norm_table((torch.cat(tiles, 1).float(),), (norm[0],), *norm[1:])
    assert relative_error(got[:, 0], whole[:, 0]) < 1e-7
    assert relative_error(got[:, 1:], whole[:, 1:]) < 4e-5


@DTYPES
@pytest.mark.parametrize("mean", [0, 1e3])
def test_norms_of_a_low_precision(mean, dtype):
    """Sums over 16-bit numbers are float32, which float16 could not hold, and so is arithmetic."""
    draw = draws()
    x = (draw(2, 32, 32, 16) + mean).to(dtype)
    weight, bias = draw(16), draw(16)

    def norm(x, weight, bias):
        partials = fused.tensor_partials(x)
        table = fused.norm_table((partials,), (1024,), 4, weight, bias, EPS)
        return partials, table, fused.apply(x, None, table, "silu")

    exact = norm(x.double(), weight.double(), bias.double())
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    bound = ROUNDINGS + 4 * 2**-24 * mean
    got = norm(x, weight, bias)
    assert got[2].dtype == dtype and got[0].dtype == torch.float32
    for a, c, more in zip(got, exact, (0, 0, rounding), strict=True):
        assert relative_error(a, c) < bound + more


# --- the others: linear in every argument, or made of public ops ----------------------------------


def conv_terms(x, filters, bias, emb, residual, other, columns):
    return fused.conv_forward(
        x, filters, bias, emb=emb, residual=residual, extra=[(other, columns)], extra_bias=bias
    )[0]


def conv_weight_grad(x, dy):
    out = dy.new_zeros((6, 3, 3, 8)).permute(0, 3, 1, 2)
    fused.conv_weight_grad(x, dy, out)
    return out


def conv_down_weight_grad(x, dy):
    out = dy.new_zeros((6, 3, 3, 8)).permute(0, 3, 1, 2)
    fused.conv_weight_grad(x, dy[:, ::2, ::2].contiguous(), out, stride=2)
    return out


def linear_grads(x, dy, weight):
    grads = torch.zeros_like(weight), dy.new_zeros(dy.shape[1])
    dx = fused.linear_grads(x, dy, weight, *grads)
    return torch.cat([t.flatten() for t in (dx, *grads)])


def of_upsampled(x, filters, bias):
    summed = fused.upsampled_filters(filters, 8, filters.dtype)
    return fused.conv_of_upsampled(x, summed, bias)[0]


def of_upsampled_input_grad(dy, filters):
    summed = fused.upsampled_filters(filters, 8, filters.dtype)
    return fused.conv_of_upsampled_input_grad(dy, summed)


def attention_backward(qkv, do):
    return fused.attention_backward(do, qkv, None, None, 2, "qkv_heads", None)[0]


def cross_attention_backward(kv, q, do):
    dq, dkv = fused.cross_attention_backward(do, q, kv, None, None, None, 2)
    return torch.cat((dq.flatten(), dkv.flatten()))


IMAGE, GRADIENT, FILTERS = (2, 8, 6, 8), (2, 8, 6, 6), (6, 3, 3, 8)
LINEAR = {  # function, shapes of its arguments; four dimensions of odd sizes are filters
    "conv_forward": (conv_terms, (IMAGE, FILTERS, (6,), (2, 6), GRADIENT, (2, 8, 6, 5), (6, 5))),
    "conv_plain_input_grad": (fused.conv_plain_input_grad, (GRADIENT, FILTERS)),
    "conv_weight_grad": (conv_weight_grad, (IMAGE, GRADIENT)),
    "conv_weight_grad, stride 2": (conv_down_weight_grad, (IMAGE, GRADIENT)),
    "conv_down": (lambda x, f, b: fused.conv_down(x, f, b, 1), (IMAGE, FILTERS, (6,))),
    "conv_down_input_grad": (
        lambda dy, f: fused.conv_down_input_grad(dy, f, 1),
        ((2, 4, 3, 6), FILTERS),
    ),
    "linear_grads": (linear_grads, ((5, 7), (5, 9), (9, 7))),
    "bias_grad": (lambda rows: rows.new_zeros(9) + fused.tensor_rows(rows, None)[0], ((50, 9),)),
    "avg_pool_grad": (lambda dy: fused.avg_pool_grad(dy)[0], (IMAGE,)),
    "upsample_grad": (fused.upsample_grad, (IMAGE,)),
    "conv_of_upsampled": (of_upsampled, (IMAGE, FILTERS, (6,))),
    "conv_of_upsampled_input_grad": (of_upsampled_input_grad, (GRADIENT, FILTERS)),
    "attention_backward": (attention_backward, ((2, 20, 48), (2, 20, 16))),
    "cross_attention_backward": (
        cross_attention_backward,
        ((2, 7, 32), (2, 20, 16), (2, 20, 16)),
    ),
    "projected_attention": (
        lambda x, w, b: fused.projected_attention(x, None, w / 4, b, 2, "qkv_heads"),
        ((2, 20, 16), (48, 16), (48,)),
    ),
}


@pytest.mark.parametrize("mean", [0, 1e3])
@pytest.mark.parametrize("name", LINEAR)
def test_linear(name, mean):
    """The first argument has a mean; attention's, of which exp is taken, has none."""
    function, shapes = LINEAR[name]
    draw, case = draws(), []
    for i, shape in enumerate(shapes):
        t = draw(*shape) + (mean if i == 0 and "attention" not in name else 0)
        case.append(t.permute(0, 3, 1, 2) if shape == FILTERS else t)
    exact = function(*(t.double() for t in case))
    assert relative_error(function(*case), exact) < ROUNDINGS


def test_sinusoids():
    """Of timesteps up to 1,000: the angle is rounded, so they are right to 2^-24 of it."""
    t = torch.arange(0, 1000, 7)
    frequencies = torch.exp(-torch.linspace(0, 9, 16, dtype=torch.float64)).float()
    got = fused.sinusoids(t, frequencies, 34)
    angles = t[:, None].double() * frequencies.double()
    exact = torch.cat((angles.cos(), angles.sin(), angles[:, :2] * 0), dim=1)
    assert ((got - exact).abs() <= 2**-24 * (1 + angles.max())).all()
    assert relative_error(got[:, 1:16], exact[:, 1:16]) < 2e-5
