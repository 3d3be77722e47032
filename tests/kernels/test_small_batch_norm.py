"""Norms at a small batch, in one launch, against the reference."""

import dataclasses

import pytest
import torch

from triton_kernels import reference
from triton_kernels.conv.plain import split_k_sum
from triton_kernels.norm import (
    from_partials as norm_of_sums,
    passes as norm_passes,
    single_cta as norm_single_cta,
    sums as norm_sums,
)
from triton_kernels.norm.tables import Statistics
from triton_kernels.reductions.conv_parts import SplitConv
from triton_kernels.reference import fused as fused_reference
from triton_kernels.registry import search
from triton_kernels.registry.choose import select
from triton_kernels.registry.spec import NormSpec
from triton_kernels.tf32 import rounded_to_tf32

from .chips import HOPPER
from .small_batch import EPS, as_double, close, conv_inputs, filters, partials_of, pytestmark, randn  # noqa: F401  a mark for every test here
from .taken import take

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


@pytest.mark.parametrize("film", [False, True], ids=["plain", "film"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_norm_whole(case, dtype, film, device):
    x1, x2, groups, weight, bias, rows = norm_inputs(case, dtype, device)
    rows = rows if film else {}
    a, y = norm_single_cta.norm_single_cta(x1, x2, groups, weight, bias, EPS, "silu", **rows)
    assert y is x1 and a.dtype == dtype
    doubles = {k: v.double() for k, v in rows.items()}
    exact, _ = fused_reference.norm_single_cta(
        *as_double(x1, x2), groups, *as_double(weight, bias), EPS, "silu", **doubles
    )
    low, _ = fused_reference.norm_single_cta(x1, x2, groups, weight, bias, EPS, "silu", **rows)
    close(a, exact, low)


@pytest.mark.parametrize("c2", [0, 24])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_norm_whole_of_means(dtype, c2, device):
    x, x2, groups, weight, bias, _ = norm_inputs((2, 6, 10, 40, 0, 8), dtype, device)
    x2 = randn(2, 3, 5, c2, dtype=dtype, device=device) if c2 else None
    weight, bias = torch.randn(2, 40 + c2, device=device)
    arguments = (groups, weight, bias, EPS, "silu")
    a, means = norm_single_cta.norm_single_cta(x, x2, *arguments, pool=True)
    expected = reference.avg_pool2d(x.double())
    tolerance = 1e-3 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(means.double(), expected, rtol=tolerance, atol=tolerance)
    again, _ = norm_single_cta.norm_single_cta(means, x2, *arguments)
    exact, _ = fused_reference.norm_single_cta(
        *as_double(means, x2), groups, *as_double(weight, bias), EPS, "silu"
    )
    close(a, exact, again)


def test_norm_whole_far_from_zero(device):
    """A mean of 1e3 beside a deviation of 1."""
    x1, x2, groups, weight, bias, _ = norm_inputs(
        (2, 4, 4, 32, 0, 8), torch.float32, device, offset=1e3
    )
    a, _ = norm_single_cta.norm_single_cta(x1, x2, groups, weight, bias, EPS, "identity")
    exact, _ = fused_reference.norm_single_cta(
        *as_double(x1, x2), groups, *as_double(weight, bias), EPS, "identity"
    )
    assert (a.double() - exact).norm() <= 1e-6 * exact.norm()


def split_of(case, dtype, device, splits=3, factor=None):
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
        factor=factor,
    )
    return split, x2, groups, weight, bias


FACTORS = [None, -(0.5**0.5)]


@pytest.mark.parametrize("factor", FACTORS, ids=["", "times a number"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_norm_whole_of_a_convolution_in_parts(case, dtype, factor, device):
    check_norm_of_parts(case, dtype, factor, device)


def check_norm_of_parts(case, dtype, factor, device, splits=3):
    split, x2, groups, weight, bias = split_of(case, dtype, device, splits, factor)
    a, y = norm_single_cta.norm_single_cta(split, x2, groups, weight, bias, EPS, "silu")
    expected, _ = fused_reference.sum_parts(split)
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=1e-5)  # the last bit of a half
    exact, _ = fused_reference.norm_single_cta(
        *as_double(y, x2), groups, *as_double(weight, bias), EPS, "silu"
    )
    low, _ = fused_reference.norm_single_cta(y, x2, groups, weight, bias, EPS, "silu")
    close(a, exact, low)
    torch.testing.assert_close(split_k_sum.sum_parts(split)[0], y, rtol=0, atol=0)
    again, none = norm_single_cta.norm_single_cta(
        split, x2, groups, weight, bias, EPS, "silu", keep=False
    )
    assert none is None
    close(again, exact, low)  # without the store the compiler joins other products and sums


@pytest.mark.parametrize("factor", FACTORS, ids=["", "times a number"])
@pytest.mark.parametrize("up", [False, True], ids=["pooled", "upsampled"])
@pytest.mark.parametrize("shape", [(1, 4, 6, 24), (2, 16, 16, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_resampling_of_a_convolution_in_parts(shape, up, dtype, factor, device):
    split, *_ = split_of((*shape, 0, 8), dtype, device, factor=factor)
    y, resampled, partials = split_k_sum.resample_parts(split, up)
    expected, _ = fused_reference.sum_parts(split)
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=1e-5)  # the last bit of a half
    again, sums = split_k_sum.sum_parts(split)
    torch.testing.assert_close(y, again, rtol=0, atol=0)
    if shape[1:3] == (16, 16):
        assert partials.shape[1] == 4
        for got in (partials, sums):
            torch.testing.assert_close(got, partials_of(y, 4), rtol=1e-4, atol=1e-3)
    else:
        assert partials is None
    expected = fused_reference.upsample(y) if up else fused_reference.avg_pool(y.double())[0]
    tolerance = 0 if up else 1e-3 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(
        resampled.double(), expected.double(), rtol=tolerance, atol=tolerance
    )


def test_the_embedding_may_be_one_row_for_all(device):
    split, *rest = split_of(NORMS["one tensor"], torch.float32, device)
    row = split.emb[:1].expand(2, -1)
    for emb in (row, row.contiguous()):
        object.__setattr__(split, "emb", emb)
        a, _ = norm_single_cta.norm_single_cta(split, *rest, EPS, "silu")
        torch.testing.assert_close(
            a, fused_reference.norm_single_cta(split, *rest, EPS, "silu")[0], rtol=1e-5, atol=1e-5
        )


SUMS = {  # and the tiles of each half
    "one tensor": ((2, 4, 6, 64, 0, 32), (4, 1)),
    "two tensors": ((1, 6, 6, 48, 80, 8), (9, 3)),
    "groups across the border": ((2, 3, 3, 20, 12, 4), (1, 3)),
    "many tiles": ((1, 16, 16, 16, 16, 8), (64, 16)),
    "odd groups": ((1, 5, 7, 18, 0, 3), (5, 1)),
}


CONFIGS = norm_of_sums._LARGE, norm_of_sums._SMALL, norm_of_sums._WIDE


def _not_few(spec):
    """What would be taken of more images."""
    (few, one_launch, table) = norm_of_sums.NORM_OF_SUMS.kernels
    kernel = table if norm_of_sums.NORM_OF_SUMS.why_not(one_launch, spec, HOPPER) else one_launch
    return kernel.configs(spec, HOPPER)[0]


@pytest.mark.parametrize("few", [False, True], ids=["many images", "few images"])
@pytest.mark.parametrize(
    ("dtype", "film"), [(torch.float16, True), (torch.float32, False)], ids=["fp16, film", "fp32"]
)
@pytest.mark.parametrize(("case", "ks"), SUMS.values(), ids=SUMS)
def test_norm_of_sums(case, ks, dtype, film, few, device, monkeypatch):
    take(monkeypatch, norm_of_sums="small_batch" if few else _not_few)
    x1, x2, groups, weight, bias, rows = norm_inputs(case, dtype, device)
    rows = rows if film else {}
    halves = [x1] if x2 is None else [x1, x2]
    partials = tuple(partials_of(x, k) for x, k in zip(halves, ks, strict=False))
    pixels = (x1.shape[1] * x1.shape[2],) * len(halves)
    norm = Statistics(partials, pixels, groups, weight, bias, EPS, **rows)
    a, _ = norm_of_sums.norm_of_sums(x1, x2, norm, "silu")
    x = torch.cat(halves, dim=3)
    options = {"eps": EPS, "activation": "silu"}
    doubles = {k: v.double() for k, v in rows.items()}
    exact = reference.group_norm(x.double(), groups, *as_double(weight, bias), **options, **doubles)
    close(a, exact, reference.group_norm(x, groups, weight, bias, **options, **rows))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("case", "ks"), SUMS.values(), ids=SUMS)
def test_programs_of_several_tiles(case, ks, config, device, monkeypatch):
    """Smaller ones, of which an image has as many as a large image of large ones."""
    monkeypatch.setattr(norm_passes, "_PROGRAMS", 0)
    x1, x2, groups, weight, bias, _ = norm_inputs(case, torch.float32, device, offset=30.0)
    halves = [x1] if x2 is None else [x1, x2]
    partials = tuple(partials_of(x, k) for x, k in zip(halves, ks, strict=False))
    pixels = (x1.shape[1] * x1.shape[2],) * len(halves)
    norm = Statistics(partials, pixels, groups, weight, bias, EPS), "silu"
    config = config._replace(block_c=config.block_c // 2, tile=64)
    a, _ = norm_of_sums.norm_of_sums(x1, x2, *norm, config=config)
    expected, _ = fused_reference.norm_of_sums(*as_double(x1, x2), *norm)
    torch.testing.assert_close(a.double(), expected, rtol=1e-4, atol=2e-5)


def test_too_many_sums_for_one_launch(device, monkeypatch):
    spec = NormSpec(8, "fp32", 4, 4, 24, 8, 8, tiles=(4, 2))
    assert select(norm_of_sums.NORM_OF_SUMS, spec, HOPPER).kernel.name == "from_partials"
    many = dataclasses.replace(spec, tiles=(2**10, 2))
    assert select(norm_of_sums.NORM_OF_SUMS, many, HOPPER).kernel.name == "two_launches"
    take(monkeypatch, norm_of_sums="two_launches")
    x1, x2, groups, weight, bias, _ = norm_inputs((2, 4, 4, 24, 8, 8), torch.float32, device)
    partials = partials_of(x1, 4), partials_of(x2, 2)
    norm = Statistics(partials, (16, 16), groups, weight, bias, EPS), "silu"
    expected, _ = fused_reference.norm_of_sums(x1, x2, *norm)
    torch.testing.assert_close(norm_of_sums.norm_of_sums(x1, x2, *norm)[0], expected)


@pytest.mark.parametrize("few", [False, True], ids=["many images", "few images"])
@pytest.mark.parametrize("c2", [0, 20])
def test_norm_of_sums_of_an_upsampled_tensor(c2, few, device, monkeypatch):
    """The statistics of that half are of the image before, which has fewer pixels."""
    take(monkeypatch, norm_of_sums="small_batch" if few else _not_few)
    small = randn(2, 3, 5, 28, device=device, offset=1.0)
    x2 = randn(2, 6, 10, c2, device=device) if c2 else None
    halves = [small] if x2 is None else [small, x2]
    weight, bias = torch.randn(2, 28 + c2, device=device)
    partials = tuple(partials_of(x, 3) for x in halves)
    norm = Statistics(partials, (15, 60), 4, weight, bias, EPS), "silu"
    a, large = norm_of_sums.norm_of_sums(small, x2, *norm, up=True, keep=True)
    assert torch.equal(large, reference.upsample_nearest2d(small))
    x = torch.cat([large, *halves[1:]], dim=3)
    expected = reference.group_norm(x, 4, weight, bias, eps=EPS, activation="silu")
    torch.testing.assert_close(a, expected, rtol=1e-5, atol=1e-5)
    a, large = norm_of_sums.norm_of_sums(small, x2, *norm, up=True, corners=True)
    assert few or large is None
    first = expected.clone()
    if not few:
        for h, w in ((0, 1), (1, 0), (1, 1)):
            first[:, h::2, w::2, :28] = torch.nan
    torch.testing.assert_close(a, first, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_tiles_are_compared_where_they_write(device, monkeypatch):
    """Of the pixels that `corners` leaves as they were, memory that nobody cleared differs."""
    monkeypatch.setattr(search, "time_call", lambda run, best: 1.0)
    small, x2 = randn(1, 2, 2, 28, device=device), randn(1, 4, 4, 20, device=device)
    partials, affine = (partials_of(small, 1), partials_of(x2, 1)), randn(2, 48, device=device)
    norm = Statistics(partials, (4, 16), 4, *affine, EPS), "silu"
    with search.search() as found:
        norm_of_sums.norm_of_sums(small, x2, *norm, up=True, corners=True, keep=True)
    assert len(found.times) > 1 and not found.rejected


def check_rounded(got, expected):
    """To TF32, and then within a bit of it."""
    assert torch.equal(got, rounded_to_tf32(got))
    torch.testing.assert_close(got, expected, rtol=2**-10, atol=1e-6)


def test_whole_norms_and_means_are_rounded_to_tf32(device):
    x1, x2, *norm, _ = norm_inputs(NORMS["two tensors"], torch.float32, device)
    norm += [EPS, "silu"]
    for given, options in (
        (x1, {}),
        (reference.upsample_nearest2d(x1) + 1e-4, {"pool": True}),
    ):
        a, means = norm_single_cta.norm_single_cta(given, x2, *norm, **options, tf32=True)
        expected = fused_reference.norm_single_cta(given, x2, *norm, **options, tf32=True)
        check_rounded(a, expected[0])
        assert means is x1 or check_rounded(means, expected[1]) is None
    split, x2, *norm = split_of(NORMS["two tensors"], torch.float32, device)
    a, y = norm_single_cta.norm_single_cta(split, x2, *norm, EPS, "silu", tf32=True)
    check_rounded(a, fused_reference.norm_single_cta(split, x2, *norm, EPS, "silu", tf32=True)[0])
    assert torch.equal(y, split_k_sum.sum_parts(split)[0])  # the residual stream stays float32


@pytest.mark.parametrize("kernel", ["small_batch", "from_partials", "two_launches"])
def test_norms_of_sums_are_rounded_to_tf32(kernel, device, monkeypatch):
    take(monkeypatch, norm_of_sums=kernel)
    small, x2 = randn(2, 3, 5, 28, device=device), randn(2, 6, 10, 20, device=device)
    large, norm = reference.upsample_nearest2d(small), (4, *randn(2, 48, device=device), EPS)
    sums = partials_of(small, 3), partials_of(x2, 3)
    given = small, x2, Statistics(sums, (15, 60), *norm), "silu"
    a, again = norm_of_sums.norm_of_sums(*given, up=True, keep=True, tf32=True)
    expected, _ = fused_reference.norm_of_sums(*given, up=True, tf32=True)
    check_rounded(a, expected)
    assert torch.equal(again, large)
    sums = partials_of(large, 3), partials_of(x2, 3)
    given = large, x2, Statistics(sums, (60, 60), *norm), "silu"
    a, _ = norm_of_sums.norm_of_sums(*given, tf32=True)
    check_rounded(a, expected)


@pytest.mark.parametrize("up", [False, True], ids=["pooled", "upsampled"])
def test_what_is_resampled_is_rounded_to_tf32(up, device):
    split, *_ = split_of((2, 4, 6, 24, 0, 8), torch.float32, device)
    y, resampled, _ = split_k_sum.resample_parts(split, up, tf32=True)
    assert torch.equal(y, split_k_sum.sum_parts(split)[0])
    check_rounded(resampled, fused_reference.resample_parts(split, up, tf32=True)[1])


@pytest.mark.parametrize(("shape", "k"), [((1, 16, 16, 32), 8), ((2, 12, 12, 16), 4)], ids=str)
def test_partials_of_few_tensors_are_taken_by_many_programs(shape, k, device):
    x = randn(*shape, device=device)
    partials = norm_sums.tensor_partials(x, programs=8)
    assert partials.shape[1] == k
    torch.testing.assert_close(partials, partials_of(x, k), rtol=1e-5, atol=1e-4)


# --- on the GPU -----------------------------------------------------------------------------------


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
    exact, _ = fused_reference.norm_single_cta(
        *as_double(x1, x2), groups, *as_double(weight, bias), EPS, "silu"
    )
    low, _ = fused_reference.norm_single_cta(x1, x2, groups, weight, bias, EPS, "silu")
    arguments = (groups, weight, bias, EPS, "silu")
    halves = [x for x in (x1, x2) if x is not None]
    partials = tuple(partials_of(x, max(case[1] * case[2] // 128, 1)) for x in halves)
    pixels = (case[1] * case[2],) * len(halves)
    split, *_ = split_of(case, torch.bfloat16, device, splits=9)
    for _ in range(3):
        close(norm_single_cta.norm_single_cta(x1, x2, *arguments)[0], exact, low)
        norm = Statistics(partials, pixels, *arguments[:-1])
        close(norm_of_sums.norm_of_sums(x1, x2, norm, "silu")[0], exact, low)
        a, y = norm_single_cta.norm_single_cta(split, x2, *arguments)
        assert torch.equal(y, split_k_sum.sum_parts(split)[0])
        close(a, *[
            fused_reference.norm_single_cta(
                *as_double(y, x2), groups, *as_double(weight, bias), EPS, "silu"
            )[0],
            fused_reference.norm_single_cta(y, x2, *arguments)[0],
        ])  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [2, 9])
@pytest.mark.parametrize(
    "case", [(1, 8, 8, 256, 256, 32), (1, 16, 16, 256, 192, 32), (2, 16, 16, 128, 0, 32)], ids=str
)
def test_parts_that_a_number_multiplies(case, splits, device):
    for dtype in (torch.float16, torch.float32):
        check_norm_of_parts(case, dtype, 0.5**0.5, device, splits)
        split, *_ = split_of(case, dtype, device, splits, 0.5**0.5)
        for up in (False, True):
            y, _, partials = split_k_sum.resample_parts(split, up)
            assert torch.equal(y, split_k_sum.sum_parts(split)[0])
            sums = partials_of(y, partials.shape[1])
            torch.testing.assert_close(partials, sums, rtol=1e-4, atol=1e-3)


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
    exact, _ = fused_reference.norm_single_cta(
        *as_double(x1, x2), groups, *as_double(weight, bias), EPS, "silu"
    )
    low, _ = fused_reference.norm_single_cta(x1, x2, *arguments)
    for _ in range(3):
        close(norm_single_cta.norm_single_cta(x1, x2, *arguments)[0], exact, low)


DECODER = {  # N, H, W, C1, C2, tiles of each, whether the first is upsampled
    "448 at 16x16": (3, 16, 16, 256, 192, (1, 4), True),
    "384 at 16x16": (3, 16, 16, 192, 192, (4, 4), False),
    "320 at 32x32": (16, 32, 32, 192, 128, (4, 8), True),
    "320 at 32x32, not upsampled": (3, 32, 32, 192, 128, (16, 8), False),
    "256 at 32x32": (16, 32, 32, 128, 128, (16, 8), False),
    "128 at 32x32": (64, 32, 32, 128, 0, (8,), False),
    "192 at 64x64": (16, 64, 64, 128, 64, (8, 32), True),
    "odd": (3, 30, 34, 72, 40, (15, 20), True),
    "one of odd channels": (2, 31, 33, 104, 0, (31,), False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", DECODER.values(), ids=DECODER)
def test_norms_of_sums_in_all_configurations(case, device):
    n, h, w, c1, c2, ks, up = case
    groups = 32 if (c1 + c2) % 32 == 0 else 8
    shape = (n, h // 2, w // 2, c1) if up else (n, h, w, c1)
    x1 = randn(*shape, dtype=torch.bfloat16, device=device, offset=1.0)
    x2 = randn(n, h, w, c2, dtype=torch.bfloat16, device=device) if c2 else None
    weight, bias = torch.randn(2, c1 + c2, device=device)
    halves = [x1] if x2 is None else [x1, x2]
    partials = tuple(partials_of(x, k) for x, k in zip(halves, ks, strict=True))
    pixels = tuple(x.shape[1] * x.shape[2] for x in halves)
    norm = Statistics(partials, pixels, groups, weight, bias, EPS), "silu"
    large = reference.upsample_nearest2d(x1) if up else x1
    exact, _ = fused_reference.norm_of_sums(*as_double(large, x2), *norm)
    low = fused_reference.norm_of_sums(large, x2, *norm)[0].to(torch.bfloat16)
    for config in CONFIGS:
        for _ in range(3):
            if not up:
                close(norm_of_sums.norm_of_sums(x1, x2, *norm, config=config)[0], exact, low)
                continue
            how = {"up": True, "config": config}
            a, again = norm_of_sums.norm_of_sums(x1, x2, *norm, **how, keep=True)
            close(a, exact, low)
            assert torch.equal(again, large)
            corners, _ = norm_of_sums.norm_of_sums(x1, x2, *norm, **how, corners=True)
            assert torch.equal(corners[..., c1:], a[..., c1:])
            assert torch.equal(corners[:, ::2, ::2], a[:, ::2, ::2])
