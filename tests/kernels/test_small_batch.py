"""The kernels of inference at a small batch, against their meaning in `fused.reference`."""

from functools import partial

import pytest
import torch

from triton_kernels import reference
from triton_kernels.conv.gluon import one_row
from triton_kernels.fused import (
    attention_few,
    begin_step,
    conv_early,
    conv_one_row,
    conv_split,
    linear_norm_few,
    norm_few,
    norm_linear_few,
    norm_tables,
    norm_whole,
)
from triton_kernels.fused import reference as fused_reference
from triton_kernels.fused.conv_early import EarlyConfig
from triton_kernels.fused.conv_split import SplitConfig, SplitConv

from .poison import poison_outputs

# exp of the interpreter's NumPy warns where infinity is the right value
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")

EPS = 1e-5
MODULES = (
    attention_few,
    begin_step,
    conv_early,
    conv_one_row,
    conv_split,
    linear_norm_few,
    norm_few,
    norm_linear_few,
    norm_tables,
    norm_whole,
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN, so an element that no program writes cannot pass."""
    poison_outputs(monkeypatch, *MODULES)


def randn(*shape, dtype=torch.float32, device="cpu", offset=0.0):
    return (torch.randn(shape, device=device) + offset).to(dtype)


def close(got, exact, low, scale=2.0):
    """Within twice the error of the reference in the same precision, against float64."""
    assert torch.isfinite(got).all()
    exact = exact.double()
    error = (got.double() - exact).norm()
    assert error <= scale * (low.double() - exact).norm() + 1e-6 * exact.norm(), error


def filters(co, ci, r, s, dtype, device):
    weight = randn(co, ci, r, s, dtype=dtype, device=device) / (ci * r * s) ** 0.5
    return weight.contiguous(memory_format=torch.channels_last)


# --- convolutions in parts ------------------------------------------------------------------------

CONVS = {  # N, H, W, CI, CO, R, S, channels of the extra 1x1 convolutions, parts
    "one image": (1, 8, 8, 64, 48, 3, 3, (), 4),
    "two extras": (2, 4, 4, 32, 64, 3, 3, (32, 16), 4),
    "odd sizes": (3, 5, 7, 48, 40, 3, 3, (24,), 3),
    "pointwise": (2, 3, 5, 64, 16, 1, 1, (64,), 2),
    "one part": (1, 4, 4, 16, 16, 3, 3, (), 1),
}


def conv_inputs(case, dtype, device):
    n, h, w, ci, co, r, s, extras, splits = case
    torch.manual_seed(0)
    x = randn(n, h, w, ci, dtype=dtype, device=device)
    weight = filters(co, ci, r, s, dtype, device)
    wide = filters(co, max(sum(extras), 1), 1, 1, dtype, device)[:, :, 0, 0]
    columns = wide.split(list(extras), dim=1) if extras else ()
    extra = [
        (randn(n, h, w, c, dtype=dtype, device=device), part)
        for c, part in zip(extras, columns, strict=True)
    ]
    return x, weight, extra, splits


def double(extra):
    return [(x.double(), w.double()) for x, w in extra]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CONVS.values(), ids=CONVS)
def test_conv_split(case, dtype, device):
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("float32 is multiplied in TF32 on a GPU")
    x, weight, extra, splits = conv_inputs(case, dtype, device)
    parts = conv_split.conv_split(
        x, weight, extra=extra, config=SplitConfig(64, 64, 32, 4, 2, splits)
    )
    assert parts.dtype == torch.float32 and parts.shape[0] == splits
    exact = fused_reference.conv_split(x.double(), weight.double(), extra=double(extra)).sum(0)
    low = fused_reference.conv_split(x, weight, extra=extra).double().sum(0)
    close(parts.sum(0), exact, low)
    assert all(part.abs().sum() > 0 for part in parts)


def test_parts_of_an_empty_batch(device):
    x, weight = randn(0, 4, 4, 16, device=device), filters(16, 16, 3, 3, torch.float32, device)
    assert conv_split.conv_split(x, weight).shape[1:] == (0, 16, 16)


@pytest.mark.parametrize("case", CONVS.values(), ids=CONVS)
def test_every_candidate_has_work_for_each_part(case, device):
    x, weight, extra, _ = conv_inputs(case, torch.float16, device)
    channels = [other.shape[3] for other, _ in extra]
    for config in conv_split._candidates(x, weight, channels):
        steps = conv_split._steps(config.block_k, weight, channels)
        each = -(-steps // config.splits)
        assert (config.splits - 1) * each < steps <= config.splits * each


# --- filters ahead of the launch in front ---------------------------------------------------------

EARLY = {  # a case of CONVS, and what a program does of parts and of whole sums
    "one round": ("one image", (64, 32, 256, 1, 0, 4), (64, 32, 512, 1, 64, 8)),
    "two rounds": ("two extras", (64, 32, 64, 2, 0, 4), (64, 16, 128, 2, 32, 4)),
    "odd sizes": ("odd sizes", (16, 16, 64, 3, 0, 4), (16, 32, 64, 7, 0, 4)),
    "pointwise": ("pointwise", (16, 16, 32, 1, 0, 4), (16, 16, 64, 1, 0, 4)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("case", "config", "_"), EARLY.values(), ids=EARLY)
def test_split_early(case, config, _, dtype, device):
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("float32 is multiplied in TF32 on a GPU")
    x, weight, extra, _ = conv_inputs(CONVS[case], dtype, device)
    parts = conv_early.split_early(x, weight, extra=extra, config=EarlyConfig(*config))
    exact = fused_reference.conv_split(x.double(), weight.double(), extra=double(extra)).sum(0)
    low = fused_reference.conv_split(x, weight, extra=extra).double().sum(0)
    close(parts.sum(0), exact, low)
    assert all(part.abs().sum() > 0 for part in parts)


def whole_terms(x, weight, extra):
    """All that `conv_early` adds, if images are of whole tiles, and their partial sums."""
    (n, h, w, _), co = x.shape, weight.shape[0]
    bias, extra_bias = torch.randn(2, co, device=x.device)
    terms = {
        "emb": torch.randn(n, 3 * co, device=x.device)[:, co : 2 * co],
        "residual": randn(n, h, w, co, dtype=x.dtype, device=x.device),
    }
    return bias, terms | ({"extra": extra, "extra_bias": extra_bias} if extra else {})


def in_double(terms):
    return {k: double(v) if k == "extra" else v.double() for k, v in terms.items()}


def check_whole(x, weight, extra, convolve=conv_early.conv_early, stats=False):
    bias, terms = whole_terms(x, weight, extra)
    y, partials = convolve(x, weight, bias, **terms, stats=stats)
    exact, _ = fused_reference.conv_forward(
        x.double(), weight.double(), bias.double(), **in_double(terms)
    )
    low, _ = fused_reference.conv_forward(x, weight, bias, **terms)
    close(y, exact, low)
    if stats:
        expected = partials_of(y, partials.shape[1])
        torch.testing.assert_close(partials, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("case", "_", "config"), EARLY.values(), ids=EARLY)
def test_conv_early(case, _, config, dtype, device):
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("float32 is multiplied in TF32 on a GPU")
    x, weight, extra, _ = conv_inputs(CONVS[case], dtype, device)
    config = EarlyConfig(*config)
    stats = x.shape[1] * x.shape[2] % config.block_m == 0
    check_whole(x, weight, extra, partial(conv_early.conv_early, config=config), stats)


def test_channels_behind_those_of_an_early_convolution_are_zero(device):
    x, weight, *_ = conv_inputs((1, 8, 8, 16, 3, 3, 3, (), 1), torch.float16, device)
    config = EarlyConfig(16, 64, 128, 1, 16, 4)
    y, _ = conv_early.conv_early(x, weight, torch.randn(3, device=device), width=16, config=config)
    assert y.shape[3] == 16 and torch.isfinite(y).all() and not y[..., 3:].any()


@pytest.mark.parametrize("co", [3, 64, 256])
@pytest.mark.parametrize("ci", [16, 48, 192, 448, 512])
def test_early_convolutions_add_up_every_term(ci, co):
    for r, size in ((1, 8), (3, 8), (3, 16), (3, 64)):
        weight, shape = torch.empty(co, ci, r, r), (1, size, size, ci)
        whole = conv_early.whole_config(shape, weight)
        assert whole.rounds * whole.block_k + whole.tail >= r * r * ci
        split = conv_early.split_config(shape, weight, torch.device("cpu"))
        assert split.tail == 0 and split.rounds >= 1


# --- norms in one launch --------------------------------------------------------------------------

NORMS = {  # N, H, W, C1, C2, groups
    "one tensor": (2, 4, 4, 32, 0, 8),
    "two tensors": (1, 3, 5, 24, 40, 8),
    "groups across the border": (2, 3, 3, 20, 12, 4),
    "odd groups": (1, 5, 7, 18, 0, 3),
    "one group": (2, 2, 2, 16, 0, 1),
    "groups of one": (1, 4, 4, 16, 16, 32),
}


def norm_inputs(case, dtype, device, offset=0.0):
    n, h, w, c1, c2, groups = case
    torch.manual_seed(1)
    x1 = randn(n, h, w, c1, dtype=dtype, device=device, offset=offset)
    x2 = randn(n, h, w, c2, dtype=dtype, device=device, offset=-offset) if c2 else None
    weight, bias = torch.randn(2, c1 + c2, device=device)
    film = torch.randn(2 * n, 2 * (c1 + c2), device=device)[::2].chunk(2, dim=1)
    return x1, x2, groups, weight, bias, dict(zip(("scale", "shift"), film, strict=True))


def as_double(*tensors):
    return [None if x is None else x.double() for x in tensors]


@pytest.mark.parametrize("film", [False, True], ids=["plain", "film"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_norm_whole(case, dtype, film, device):
    x1, x2, groups, weight, bias, rows = norm_inputs(case, dtype, device)
    rows = rows if film else {}
    a, y = norm_whole.norm_whole(x1, x2, groups, weight, bias, EPS, "silu", **rows)
    assert y is x1 and a.dtype == dtype
    doubles = {k: v.double() for k, v in rows.items()}
    exact, _ = fused_reference.norm_whole(
        *as_double(x1, x2), groups, *as_double(weight, bias), EPS, "silu", **doubles
    )
    low, _ = fused_reference.norm_whole(x1, x2, groups, weight, bias, EPS, "silu", **rows)
    close(a, exact, low)


@pytest.mark.parametrize("c2", [0, 24])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_norm_whole_of_means(dtype, c2, device):
    x, x2, groups, weight, bias, _ = norm_inputs((2, 6, 10, 40, 0, 8), dtype, device)
    x2 = randn(2, 3, 5, c2, dtype=dtype, device=device) if c2 else None
    weight, bias = torch.randn(2, 40 + c2, device=device)
    arguments = (groups, weight, bias, EPS, "silu")
    a, means = norm_whole.norm_whole(x, x2, *arguments, pool=True)
    expected = reference.avg_pool2d(x.double())
    tolerance = 1e-3 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(means.double(), expected, rtol=tolerance, atol=tolerance)
    again, _ = norm_whole.norm_whole(means, x2, *arguments)
    exact, _ = fused_reference.norm_whole(
        *as_double(means, x2), groups, *as_double(weight, bias), EPS, "silu"
    )
    close(a, exact, again)


def test_norm_whole_far_from_zero(device):
    """A mean of 1e3 beside a deviation of 1."""
    x1, x2, groups, weight, bias, _ = norm_inputs(
        (2, 4, 4, 32, 0, 8), torch.float32, device, offset=1e3
    )
    a, _ = norm_whole.norm_whole(x1, x2, groups, weight, bias, EPS, "identity")
    exact, _ = fused_reference.norm_whole(
        *as_double(x1, x2), groups, *as_double(weight, bias), EPS, "identity"
    )
    assert (a.double() - exact).norm() <= 1e-6 * exact.norm()


def split_of(case, dtype, device, splits=3):
    """A convolution in parts, all of its terms there, and a tensor beside it."""
    n, h, w, c1, c2, groups = case
    x1, x2, groups, weight, bias, _ = norm_inputs(case, dtype, device)
    split = SplitConv(
        parts=randn(splits, n, c1, h * w, device=device),
        shape=(n, h, w, c1),
        dtype=dtype,
        bias=randn(c1, device=device),
        extra_bias=randn(c1, device=device),
        emb=randn(n, 3 * c1, device=device)[:, c1 : 2 * c1],
        residual=x1,
    )
    return split, x2, groups, weight, bias


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_norm_whole_of_a_convolution_in_parts(case, dtype, device):
    split, x2, groups, weight, bias = split_of(case, dtype, device)
    a, y = norm_whole.norm_whole(split, x2, groups, weight, bias, EPS, "silu")
    expected, _ = fused_reference.sum_parts(split)
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=1e-5)  # the last bit of a half
    exact, _ = fused_reference.norm_whole(
        *as_double(y, x2), groups, *as_double(weight, bias), EPS, "silu"
    )
    low, _ = fused_reference.norm_whole(y, x2, groups, weight, bias, EPS, "silu")
    close(a, exact, low)
    torch.testing.assert_close(norm_whole.sum_parts(split)[0], y, rtol=0, atol=0)
    again, none = norm_whole.norm_whole(split, x2, groups, weight, bias, EPS, "silu", keep=False)
    assert none is None
    close(again, exact, low)  # without the store the compiler joins other products and sums


@pytest.mark.parametrize("up", [False, True], ids=["pooled", "upsampled"])
@pytest.mark.parametrize("shape", [(1, 4, 6, 24), (2, 16, 16, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_resampling_of_a_convolution_in_parts(shape, up, dtype, device):
    split, *_ = split_of((*shape, 0, 8), dtype, device)
    y, resampled, partials = norm_whole.resample_parts(split, up)
    again, sums = norm_whole.sum_parts(split)
    torch.testing.assert_close(y, again, rtol=0, atol=0)
    if shape[1:3] == (16, 16):
        assert partials.shape[1] == 4
        for got in (partials, sums):
            torch.testing.assert_close(got, partials_of(y, 4), rtol=1e-4, atol=1e-3)
    else:
        assert partials is None
    expected = fused_reference.upsample(y) if up else fused_reference.avg_pool(y.double())
    tolerance = 0 if up else 1e-3 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(
        resampled.double(), expected.double(), rtol=tolerance, atol=tolerance
    )


def test_the_embedding_may_be_one_row_for_all(device):
    split, *rest = split_of(NORMS["one tensor"], torch.float32, device)
    row = split.emb[:1].expand(2, -1)
    for emb in (row, row.contiguous()):
        object.__setattr__(split, "emb", emb)
        a, _ = norm_whole.norm_whole(split, *rest, EPS, "silu")
        torch.testing.assert_close(
            a, fused_reference.norm_whole(split, *rest, EPS, "silu")[0], rtol=1e-5, atol=1e-5
        )


def partials_of(x, k):
    n, h, w, c = x.shape
    tiles = x.double().reshape(n, k, h * w // k, c)
    m2 = (tiles - tiles.mean(2, keepdim=True)).square()
    return torch.stack((tiles.sum(2), m2.sum(2)), 2).float()


SUMS = {  # and the tiles of each half
    "one tensor": ((2, 4, 6, 64, 0, 32), (4, 1)),
    "two tensors": ((1, 6, 6, 48, 80, 8), (9, 3)),
    "groups across the border": ((2, 3, 3, 20, 12, 4), (1, 3)),
    "many tiles": ((1, 16, 16, 16, 16, 8), (64, 16)),
    "odd groups": ((1, 5, 7, 18, 0, 3), (5, 1)),
}


@pytest.mark.parametrize("few", [False, True], ids=["many images", "few images"])
@pytest.mark.parametrize(
    ("dtype", "film"), [(torch.float16, True), (torch.float32, False)], ids=["fp16, film", "fp32"]
)
@pytest.mark.parametrize(("case", "ks"), SUMS.values(), ids=SUMS)
def test_norm_of_sums(case, ks, dtype, film, few, device, monkeypatch):
    monkeypatch.setattr(norm_few, "_MAX_IMAGES", 4 if few else 0)
    x1, x2, groups, weight, bias, rows = norm_inputs(case, dtype, device)
    rows = rows if film else {}
    halves = [x1] if x2 is None else [x1, x2]
    partials = tuple(partials_of(x, k) for x, k in zip(halves, ks, strict=False))
    pixels = (x1.shape[1] * x1.shape[2],) * len(halves)
    a = norm_whole.norm_of_sums(x1, x2, partials, pixels, groups, weight, bias, EPS, "silu", **rows)
    x = torch.cat(halves, dim=3)
    options = {"eps": EPS, "activation": "silu"}
    doubles = {k: v.double() for k, v in rows.items()}
    exact = reference.group_norm(x.double(), groups, *as_double(weight, bias), **options, **doubles)
    close(a, exact, reference.group_norm(x, groups, weight, bias, **options, **rows))


@pytest.mark.parametrize("few", [False, True], ids=["many images", "few images"])
@pytest.mark.parametrize("c2", [0, 20])
def test_norm_of_sums_of_an_upsampled_tensor(c2, few, device, monkeypatch):
    """The statistics of that half are of the image before, which has fewer pixels."""
    monkeypatch.setattr(norm_few, "_MAX_IMAGES", 4 if few else 0)
    small = randn(2, 3, 5, 28, device=device, offset=1.0)
    x2 = randn(2, 6, 10, c2, device=device) if c2 else None
    halves = [small] if x2 is None else [small, x2]
    weight, bias = torch.randn(2, 28 + c2, device=device)
    partials = tuple(partials_of(x, 3) for x in halves)
    a, large = norm_whole.norm_of_sums_upsampled(
        small, x2, partials, (15, 60), 4, weight, bias, EPS, "silu"
    )
    assert torch.equal(large, reference.upsample_nearest2d(small))
    x = torch.cat([large, *halves[1:]], dim=3)
    expected = reference.group_norm(x, 4, weight, bias, eps=EPS, activation="silu")
    torch.testing.assert_close(a, expected, rtol=1e-5, atol=1e-5)


def check_norm_linear(n, h, w, c, co, groups, k, dtype, device):
    x = randn(n, h, w, c, dtype=dtype, device=device, offset=1.0)
    weight, bias = filters(co, c, 1, 1, dtype, device)[:, :, 0, 0], torch.randn(co, device=device)
    norm = torch.randn(2, c, device=device)
    rest = (partials_of(x, k), h * w, groups)
    y = norm_linear_few.norm_linear_few(x, *rest, *norm, EPS, weight, bias)
    exact = reference.group_norm(x.double(), groups, *as_double(*norm), eps=EPS)
    low = reference.group_norm(x, groups, *norm, eps=EPS).to(dtype)
    close(y, exact @ weight.double().T + bias.double(), (low @ weight.T + bias).to(dtype))


@pytest.mark.parametrize(
    "case", [(1, 8, 8, 24, 80, 4, 4), (2, 4, 8, 48, 64, 8, 2), (1, 8, 8, 32, 16, 4, 16)], ids=str
)
def test_norm_linear_few(case, device):
    check_norm_linear(*case, torch.float16, device)


NORMED = {  # N, H, W, CI, CO, channels beside, groups, whether there is a residual
    "one tensor": (1, 4, 4, 32, 32, 0, 4, False),
    "beside another": (2, 3, 5, 48, 32, 32, 4, True),
    "one group": (1, 8, 8, 16, 16, 0, 1, True),
}


def check_linear_norm(n, h, w, ci, co, c2, groups, residual, dtype, device):
    x, weight, *_ = conv_inputs((n, h, w, ci, co, 1, 1, (), 1), dtype, device)
    add, x2 = (randn(n, h, w, c, dtype=dtype, device=device) for c in (co, c2))
    add, x2 = add if residual else None, x2 if c2 else None
    bias, norm = torch.randn(co, device=device), torch.randn(2, co + c2, device=device)
    rest = (EPS, "silu")
    assert linear_norm_few.serves_linear_norm(co, co + c2, groups)
    a, y = linear_norm_few.linear_norm_few(x, weight, bias, add, x2, groups, *norm, *rest)
    given = x, weight, bias, add, x2, *norm
    exact, low = (
        fused_reference.linear_norm_few(*tensors[:5], groups, *tensors[5:], *rest)
        for tensors in (as_double(*given), given)
    )
    close(y, exact[1], low[1])
    close(a, exact[0], low[0].to(dtype))


@pytest.mark.parametrize("case", NORMED.values(), ids=NORMED)
def test_linear_norm_few(case, device):
    check_linear_norm(*case, torch.float16, device)


@pytest.mark.parametrize(("shape", "k"), [((1, 16, 16, 32), 8), ((2, 12, 12, 16), 4)], ids=str)
def test_partials_of_few_tensors_are_taken_by_many_programs(shape, k, device):
    x = randn(*shape, device=device)
    partials = norm_tables.tensor_partials(x, programs=8)
    assert partials.shape[1] == k
    torch.testing.assert_close(partials, partials_of(x, k), rtol=1e-5, atol=1e-4)


# --- attention over few positions -----------------------------------------------------------------


@pytest.mark.parametrize("order", ["qkv_heads", "heads_qkv"])
@pytest.mark.parametrize(("t", "heads", "d"), [(64, 2, 32), (100, 3, 16), (7, 1, 24), (1, 2, 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_attention_few(t, heads, d, order, dtype, device):
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("float32 is multiplied in TF32 on a GPU")
    torch.manual_seed(0)
    qkv = randn(2, t, 3 * heads * d, dtype=dtype, device=device)
    o = attention_few.attention_few(qkv, heads, order)
    exact = reference.attention(qkv.double(), heads, order=order)
    close(o, exact, reference.attention(qkv, heads, order=order))


# --- what a step begins with ----------------------------------------------------------------------


def qkv_inputs(n, t, c, dtype, device):
    torch.manual_seed(0)
    weight = randn(3 * c, c, dtype=dtype, device=device) / c**0.5
    return randn(n, t, c, dtype=dtype, device=device), weight, torch.randn(3 * c, device=device)


def check_qkv_attention(x, weight, bias, heads, order):
    o = attention_few.qkv_attention(x, weight, bias, heads, order)
    exact = fused_reference.qkv_attention(x.double(), *as_double(weight, bias), heads, order)
    qkv = (x @ weight.T + bias).to(x.dtype)
    close(o, exact, fused_reference.attention_few(qkv, heads, order))


@pytest.mark.parametrize("order", ["qkv_heads", "heads_qkv"])
@pytest.mark.parametrize(("n", "t", "heads", "d"), [(2, 16, 2, 32), (1, 7, 3, 16)])
def test_qkv_attention(n, t, heads, d, order, device):
    check_qkv_attention(*qkv_inputs(n, t, heads * d, torch.float16, device), heads, order)


@pytest.mark.parametrize("shape", [(2, 3, 5, 3), (1, 20, 20, 1), (3, 2, 2, 16)], ids=str)
@pytest.mark.parametrize("indexed", [False, True])
def test_begin_step(shape, indexed, device):
    x = randn(*shape, device=device)
    table, row = randn(4, 5, 300, device=device), torch.tensor([2], device=device)
    index = torch.arange(shape[0], device=device).flip(0) if indexed else None
    arguments = (x, 16, torch.float16, table, row, index)
    words = torch.full((3,), -1, device=device)
    for got, expected in zip(
        begin_step.begin_step(*arguments, cleared=words),
        fused_reference.begin_step(*arguments),
        strict=True,
    ):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    assert not words.any()
    words = torch.full((1500,), -1, device=device)
    image, emb = begin_step.begin_step(x, 16, torch.float16, cleared=words[:1300])
    assert not words[:1300].any() and (words[1300:] == -1).all()
    assert emb is None and torch.equal(image, fused_reference.begin_step(*arguments[:3])[0])


# --- on the GPU -----------------------------------------------------------------------------------

SHAPES = {  # of unet64 at batch 1 and 16
    "8x8": (1, 8, 8, 256, 256, 3, 3, ()),
    "8x8 with a skip": (1, 8, 8, 256, 256, 3, 3, (256, 256)),
    "8x8, batch 16": (16, 8, 8, 512, 256, 3, 3, ()),
    "16x16": (1, 16, 16, 192, 192, 3, 3, ()),
    "16x16 from a concat": (1, 16, 16, 448, 192, 3, 3, (256, 192)),
    "32x32": (1, 32, 32, 320, 128, 3, 3, ()),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_every_configuration(case, device):
    x, weight, extra, _ = conv_inputs((*case, 1), torch.bfloat16, device)
    exact = fused_reference.conv_split(x.double(), weight.double(), extra=double(extra)).sum(0)
    low = fused_reference.conv_split(x, weight, extra=extra).double().sum(0)
    for config in conv_split._candidates(x, weight, [other.shape[3] for other, _ in extra]):
        for _ in range(3):
            parts = conv_split.conv_split(x, weight, extra=extra, config=config)
            assert parts.shape[0] == config.splits
            close(parts.sum(0), exact, low)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [(1, 8, 8, 256, 256, 32), (16, 8, 8, 256, 0, 32), (16, 8, 8, 192, 0, 32),
     (16, 8, 8, 256, 192, 32), (1, 16, 16, 256, 192, 32), (64, 8, 8, 192, 0, 32),
     (1, 32, 32, 192, 128, 32), (1, 32, 32, 64, 0, 32), (2, 64, 64, 64, 0, 32)],
    ids=str,
)  # fmt: skip
def test_norms_of_the_model_s_shapes(case, device):
    x1, x2, groups, weight, bias, _ = norm_inputs(case, torch.bfloat16, device)
    exact, _ = fused_reference.norm_whole(
        *as_double(x1, x2), groups, *as_double(weight, bias), EPS, "silu"
    )
    low, _ = fused_reference.norm_whole(x1, x2, groups, weight, bias, EPS, "silu")
    arguments = (groups, weight, bias, EPS, "silu")
    halves = [x for x in (x1, x2) if x is not None]
    partials = tuple(partials_of(x, max(case[1] * case[2] // 128, 1)) for x in halves)
    pixels = (case[1] * case[2],) * len(halves)
    split, *_ = split_of(case, torch.bfloat16, device, splits=9)
    for _ in range(3):
        close(norm_whole.norm_whole(x1, x2, *arguments)[0], exact, low)
        close(norm_whole.norm_of_sums(x1, x2, partials, pixels, *arguments), exact, low)
        a, y = norm_whole.norm_whole(split, x2, *arguments)
        assert torch.equal(y, norm_whole.sum_parts(split)[0])
        close(a, *[
            fused_reference.norm_whole(*as_double(y, x2), groups, *as_double(weight, bias), EPS,
                                       "silu")[0],
            fused_reference.norm_whole(y, x2, *arguments)[0],
        ])  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [(8, 32, 32, 64, 0, 32), (8, 32, 32, 128, 0, 32), (9, 32, 32, 128, 64, 32),
     (16, 32, 32, 128, 128, 32), (64, 8, 8, 256, 256, 32), (16, 16, 16, 192, 192, 32)],
    ids=str,
)  # fmt: skip
def test_norms_of_many_images(case, device):
    x1, x2, groups, weight, bias, _ = norm_inputs(case, torch.bfloat16, device, offset=3.0)
    arguments = (groups, weight, bias, EPS, "silu")
    exact, _ = fused_reference.norm_whole(
        *as_double(x1, x2), groups, *as_double(weight, bias), EPS, "silu"
    )
    low, _ = fused_reference.norm_whole(x1, x2, *arguments)
    for _ in range(3):
        close(norm_whole.norm_whole(x1, x2, *arguments)[0], exact, low)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_early_parts_of_the_model_s_shapes(case, device):
    x, weight, extra, _ = conv_inputs((*case, 1), torch.bfloat16, device)
    exact = fused_reference.conv_split(x.double(), weight.double(), extra=double(extra)).sum(0)
    low = fused_reference.conv_split(x, weight, extra=extra).double().sum(0)
    for _ in range(3):
        close(conv_early.split_early(x, weight, extra=extra).sum(0), exact, low)


WHOLE = {  # of unet64 at batch 1
    "queries, keys and values": (1, 16, 16, 192, 576, 1, 1, ()),
    "projection": (1, 8, 8, 256, 256, 1, 1, ()),
    "stem": (1, 64, 64, 16, 64, 3, 3, ()),
    "64x64": (1, 64, 64, 64, 64, 3, 3, ()),
    "64x64 from a concat": (1, 64, 64, 192, 64, 3, 3, ()),
    "64x64 with a skip": (1, 64, 64, 64, 64, 3, 3, (128, 64)),
    "two images": (2, 32, 32, 64, 64, 3, 3, ()),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", WHOLE.values(), ids=WHOLE)
def test_early_convolutions_of_the_model_s_shapes(case, device):
    x, weight, extra, _ = conv_inputs((*case, 1), torch.bfloat16, device)
    for _ in range(3):
        check_whole(x, weight, extra, stats=True)


ROWS = {  # likewise, and of two images
    "64x64": (1, 64, 64, 64, 64, 3, 3, ()),
    "64x64 from a concat": (1, 64, 64, 192, 64, 3, 3, ()),
    "64x64 with a skip": (1, 64, 64, 64, 64, 3, 3, (128, 64)),
    "32x32": (1, 32, 32, 64, 128, 3, 3, ()),
    "32x32 from a concat": (1, 32, 32, 256, 128, 3, 3, ()),
    "32x32 with a skip": (1, 32, 32, 128, 128, 3, 3, (192, 128)),
    "32x32, two images": (2, 32, 32, 128, 128, 3, 3, ()),
    "16x16": (1, 16, 16, 192, 192, 3, 3, ()),
    "16x16 with a skip": (1, 16, 16, 192, 192, 3, 3, (256, 192)),
    "16x16, no square": (2, 6, 16, 64, 192, 3, 3, (64,)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", ROWS.values(), ids=ROWS)
def test_convolutions_by_rows(case, device):
    x, weight, extra, _ = conv_inputs((*case, 1), torch.bfloat16, device)
    if not conv_one_row.serves_one_row(x, weight, extra):
        pytest.skip("for Hopper, and versions of Triton that it was tried with")
    for _ in range(3):
        check_whole(x, weight, extra, conv_one_row.conv_one_row, stats=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [(1, 16, 16, 192, 576, 32, 16), (2, 8, 16, 256, 64, 32, 8)])
def test_norms_before_linear_layers_of_the_model_s_shapes(case, device):
    for _ in range(3):
        check_norm_linear(*case, torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("c2", [0, 256])
@pytest.mark.parametrize(("n", "h", "w"), [(1, 8, 8), (2, 7, 5)])
def test_norms_behind_linear_layers_of_the_model_s_shapes(n, h, w, c2, device):
    for _ in range(3):
        check_linear_norm(n, h, w, 256, 256, c2, 32, True, torch.bfloat16, device)


@pytest.mark.gpu
def test_convolutions_by_rows_in_parts(device):
    x, weight, *_ = conv_inputs((1, 16, 16, 320, 192, 3, 3, (), 1), torch.bfloat16, device)
    if not conv_one_row.serves_one_row(x, weight):
        pytest.skip("for Hopper, and versions of Triton that it was tried with")
    exact = fused_reference.conv_split(x.double(), weight.double()).sum(0)
    low = fused_reference.conv_split(x, weight).double().sum(0)
    for _ in range(3):
        parts = conv_split.conv_split(x, weight)
        assert parts.shape[0] == one_row.count_parts(x.shape, weight) == 2
        close(parts.sum(0), exact, low)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "t", "c", "heads"), [(1, 64, 256, 8), (4, 49, 192, 6)])
def test_qkv_attention_of_the_model_s_shapes(n, t, c, heads, device):
    for _ in range(3):
        inputs = qkv_inputs(n, t, c, torch.bfloat16, device)
        check_qkv_attention(*inputs, heads, "qkv_heads")


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "t", "c", "heads"), [(1, 256, 192, 6), (4, 64, 256, 8)])
def test_attention_of_the_model_s_shapes(n, t, c, heads, device):
    qkv = randn(n, t, 3 * c, dtype=torch.bfloat16, device=device)
    exact = reference.attention(qkv.double(), heads, order="qkv_heads")
    low = reference.attention(qkv, heads, order="qkv_heads")
    for _ in range(3):
        close(attention_few.attention_few(qkv, heads, "qkv_heads"), exact, low)
