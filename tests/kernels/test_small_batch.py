"""The kernels of inference at a small batch, against their meaning in `fused.reference`."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.fused import begin_step, conv_split, norm_tables, norm_whole
from triton_kernels.fused import reference as fused_reference
from triton_kernels.fused.conv_split import SplitConfig, SplitConv

# exp of the interpreter's NumPy warns where infinity is the right value
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")

EPS = 1e-5


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Outputs start as NaN, so an element that no program writes cannot pass."""
    for module in (begin_step, conv_split, norm_tables, norm_whole):
        monkeypatch.setattr(
            module, "_empty", lambda shape, **kw: torch.full(shape, torch.nan, **kw)
        )


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
    expected = fused_reference.sum_parts(split)
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=1e-5)  # the last bit of a half
    exact, _ = fused_reference.norm_whole(
        *as_double(y, x2), groups, *as_double(weight, bias), EPS, "silu"
    )
    low, _ = fused_reference.norm_whole(y, x2, groups, weight, bias, EPS, "silu")
    close(a, exact, low)
    torch.testing.assert_close(norm_whole.sum_parts(split), y, rtol=0, atol=0)


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


@pytest.mark.parametrize("film", [False, True], ids=["plain", "film"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("case", "ks"), SUMS.values(), ids=SUMS)
def test_norm_of_sums(case, ks, dtype, film, device):
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


def test_norm_of_sums_of_an_upsampled_tensor(device):
    """The statistics are of the image before, which has fewer pixels."""
    small = randn(1, 3, 4, 32, device=device)
    x, weight = reference.upsample_nearest2d(small), torch.ones(32, device=device)
    a = norm_whole.norm_of_sums(
        x, None, (partials_of(small, 2),), (12,), 8, weight, 0 * weight, EPS, "identity"
    )
    expected = reference.group_norm(x, 8, eps=EPS)
    torch.testing.assert_close(a, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "k"), [((1, 16, 16, 32), 8), ((2, 12, 12, 16), 4)], ids=str)
def test_partials_of_few_tensors_are_taken_by_many_programs(shape, k, device):
    x = randn(*shape, device=device)
    partials = norm_tables.tensor_partials(x, programs=8)
    assert partials.shape[1] == k
    torch.testing.assert_close(partials, partials_of(x, k), rtol=1e-5, atol=1e-4)


# --- what a step begins with ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 3, 5, 3), (1, 20, 20, 1), (3, 2, 2, 16)], ids=str)
@pytest.mark.parametrize("indexed", [False, True])
def test_begin_step(shape, indexed, device):
    x = randn(*shape, device=device)
    table, row = randn(4, 5, 300, device=device), torch.tensor([2], device=device)
    index = torch.arange(shape[0], device=device).flip(0) if indexed else None
    arguments = (x, 16, torch.float16, table, row, index)
    for got, expected in zip(
        begin_step.begin_step(*arguments), fused_reference.begin_step(*arguments), strict=True
    ):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    image, emb = begin_step.begin_step(x, 16, torch.float16)
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
    [(1, 8, 8, 256, 256, 32), (16, 8, 8, 256, 0, 32), (1, 16, 16, 256, 192, 32),
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
        assert torch.equal(y, norm_whole.sum_parts(split))
        close(a, *[
            fused_reference.norm_whole(*as_double(y, x2), groups, *as_double(weight, bias), EPS,
                                       "silu")[0],
            fused_reference.norm_whole(y, x2, *arguments)[0],
        ])  # fmt: skip
