"""Convolutions at a small batch: in parts, early, by rows; against `reference.fused`."""

import dataclasses

import pytest
import torch

from triton_kernels.conv import split as conv_split
from triton_kernels.conv.few import conv_few
from triton_kernels.conv.fused_spec import forward_spec
from triton_kernels.conv.hopper import one_row
from triton_kernels.conv.hopper.one_row import WHOLE
from triton_kernels.conv.plain.parts import SplitOperands, count_steps
from triton_kernels.conv.plain.pointers.pointer_split import PointerParts
from triton_kernels.conv.plain.small_batch import KERNEL as EARLY_PARTS, EarlyConfig, split_early
from triton_kernels.conv.plain.split_k import SplitConfig
from triton_kernels.conv.split import CONV_SPLIT
from triton_kernels.reference import fused as fused_reference
from triton_kernels.registry.chips import CHIPS
from triton_kernels.registry.choose import select
from triton_kernels.registry.spec import ConvSpec
from triton_kernels.runtime.device import describe
from triton_kernels.tf32 import rounded_to_tf32

from ..tensor_cores import tensor_cores_cut_off  # noqa: F401  a fixture
from .chips import HOPPER
from .small_batch import close, conv_inputs, filters, partials_of, pytestmark, randn  # noqa: F401  a mark for every test here

AMPERE, ADA = CHIPS["a100"].gpu, CHIPS["rtx4090"].gpu

CONVS = {  # N, H, W, CI, CO, R, S, channels of the extra 1x1 convolutions, parts
    "one image": (1, 8, 8, 64, 48, 3, 3, (), 4),
    "two extras": (2, 4, 4, 32, 64, 3, 3, (32, 16), 4),
    "odd sizes": (3, 5, 7, 48, 40, 3, 3, (24,), 3),
    "pointwise": (2, 3, 5, 64, 16, 1, 1, (64,), 2),
    "one part": (1, 4, 4, 16, 16, 3, 3, (), 1),
}


def double(extra):
    return [(x.double(), w.double()) for x, w in extra]


def split_case(case, precision, device):
    """Operands as a plan has them, and those that are multiplied: in TF32 filters and x have been
    rounded before, and what the 1x1 convolutions read is rounded on the way."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    x, weight, extra, splits = conv_inputs(case, dtype, device)
    seen = x, weight, extra
    if precision == "tf32":
        channels_last = {"memory_format": torch.channels_last}
        x, weight = rounded_to_tf32(x), rounded_to_tf32(weight).contiguous(**channels_last)
        extra = [(other, rounded_to_tf32(w)) for other, w in extra]
        seen = x, weight, [(rounded_to_tf32(other), w) for other, w in extra]
    return (x, weight, extra), seen, splits


def check_split(parts, seen, precision, **how):
    """Their sum is that of the products. Tensor cores round every addition towards zero, and of
    float32 each one of a step."""
    x, weight, extra = seen
    doubles = x.double(), weight.double()
    exact = fused_reference.conv_split(*doubles, extra=double(extra), **how).sum(0)
    low = fused_reference.conv_split(x, weight, extra=extra, **how).double().sum(0)
    rest = {"tf32": 1e-4, "fp32": 4e-6} if x.is_cuda else {}
    close(parts.sum(0), exact, low, rest=rest.get(precision, 1e-6))


@pytest.mark.parametrize("precision", ["fp16", "tf32", "fp32"])
@pytest.mark.parametrize("case", CONVS.values(), ids=CONVS)
def test_conv_split(case, precision, tensor_cores_cut_off, device):  # noqa: F811
    (x, weight, extra), seen, splits = split_case(case, precision, device)
    options = {"extra": extra, "allow_tf32": precision == "tf32"}
    config = SplitConfig(64, 64, 32, 4, 2, splits)
    parts = conv_split.conv_split(x, weight, **options, config=config)
    assert parts.dtype == torch.float32 and parts.shape[0] == splits
    check_split(parts, seen, precision)
    assert all(part.abs().sum() > 0 for part in parts)


POINTER_CONVS = CONVS | {  # any number of channels
    "20 channels": (2, 5, 7, 20, 36, 3, 3, (12,), 3),
    "odd channels": (1, 4, 4, 9, 7, 3, 3, (5, 3), 3),
    "blocks that divide": (1, 8, 8, 64, 64, 3, 3, (32,), 4),
}


@pytest.mark.parametrize("precision", ["fp16", "tf32"])
@pytest.mark.parametrize("case", POINTER_CONVS.values(), ids=POINTER_CONVS)
def test_conv_split_through_pointers(case, precision, tensor_cores_cut_off, device):  # noqa: F811
    (x, weight, extra), seen, splits = split_case(case, precision, device)
    config = PointerParts(64, 64, 32, 4, 3, splits)
    parts = conv_split.conv_split(x, weight, extra=extra, config=config)
    assert parts.dtype == torch.float32 and parts.shape[0] == splits
    check_split(parts, seen, precision)
    assert all(part.abs().sum() > 0 for part in parts)


def test_parts_through_pointers_are_for_what_tma_cannot_fetch():
    """Every configuration has work for each part, and fits into shared memory."""
    kernel = CONV_SPLIT.kernel("pointer_parts")
    spec = ConvSpec(1, "bf16", 8, 8, 256, 256)
    assert "TMA" in CONV_SPLIT.cannot(kernel, spec, HOPPER)
    odd = dataclasses.replace(spec, k=100)
    for gpu, its in ((AMPERE, spec), (ADA, spec), (AMPERE, odd), (HOPPER, odd)):
        assert CONV_SPLIT.why_apart(its, gpu) is None
        assert select(CONV_SPLIT, its, gpu).kernel is kernel
        for config in kernel.configs(its, gpu):
            steps = count_steps(config.block_k, its)
            each = -(-steps // config.parts)
            assert (config.parts - 1) * each < steps <= config.parts * each
            assert 0 < kernel.predict(its, gpu, config) < 100
    # wgmma, whose chains are quick, is for what TMA fetches
    several = (dataclasses.replace(its, n=16) for its in (spec, odd))
    apart, joined = (CONV_SPLIT.why_apart(its, HOPPER) for its in several)
    assert "64 whole tiles" in apart and joined is None
    wide = dataclasses.replace(spec, dtype="fp32")
    assert "TF32" in CONV_SPLIT.cannot(kernel, wide, AMPERE)
    halved = dataclasses.replace(spec, p=4, q=4, stride=2)
    assert "stride" in CONV_SPLIT.cannot(kernel, halved, AMPERE)


HALVED = {  # N, H, W, CI, CO, R, S, extras, parts; padding
    "one image": ((1, 8, 8, 64, 48, 3, 3, (), 4), 1),
    "zeros behind": ((2, 6, 10, 32, 64, 3, 3, (), 3), 0),
    "one pixel": ((3, 2, 2, 64, 16, 3, 3, (), 2), 1),
    "25 taps": ((1, 8, 4, 32, 40, 5, 5, (), 5), 2),
}


def check_halved(case, padding, precision, device, config=None):
    (x, weight, _), seen, splits = split_case(case, precision, device)
    how = {"stride": 2, "padding": padding}
    config = config or SplitConfig(64, 64, 32, 4, 2, splits)
    options = {"allow_tf32": precision == "tf32", "config": config}
    parts = conv_split.conv_split(x, weight, **how, **options)
    assert parts.shape == (config.parts, case[0], case[4], case[1] * case[2] // 4)
    check_split(parts, seen, precision, **how)


@pytest.mark.parametrize("precision", ["fp16", "tf32", "fp32"])
@pytest.mark.parametrize(("case", "padding"), HALVED.values(), ids=HALVED)
def test_convolutions_of_stride_2_in_parts(case, padding, precision, tensor_cores_cut_off, device):  # noqa: F811
    check_halved(case, padding, precision, device)


def test_blocks_of_channels_do_not_reach_into_the_other_parity():
    spec = ConvSpec(1, "tf32", 8, 8, 96, 64, p=4, q=4, stride=2)
    configs = CONV_SPLIT.kernel("split_k").configs(spec, HOPPER)
    assert {config.block_k for config in configs} == {32}
    odd = dataclasses.replace(spec, k=40)
    assert "parity" in CONV_SPLIT.cannot(CONV_SPLIT.kernel("split_k"), odd, HOPPER)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_float32_in_parts_keeps_infinities(tensor_cores_cut_off, device):  # noqa: F811
    """The second part of a filter may be zero, and infinity times zero is no number."""
    x = torch.ones(1, 4, 4, 16, device=device)
    x[0, 1, 1, 0] = torch.inf
    weight = torch.ones(16, 16, 1, 1, device=device)
    config = SplitConfig(64, 64, 16, 4, 2, 1)
    (y,) = conv_split.conv_split(x, weight, allow_tf32=False, config=config)
    assert torch.equal(y[0], (x.sum(3).flatten() * torch.ones(16, 1, device=device)))


def test_parts_of_an_empty_batch(device):
    x, weight = randn(0, 4, 4, 16, device=device), filters(16, 16, 3, 3, torch.float32, device)
    assert conv_split.conv_split(x, weight).shape[1:] == (0, 16, 16)


@pytest.mark.parametrize("precision", ["fp16", "tf32", "fp32"])
@pytest.mark.parametrize("case", CONVS.values(), ids=CONVS)
def test_every_candidate_has_work_for_each_part(case, precision, device):
    (x, weight, extra), *_ = split_case(case, precision, device)
    others = [other for other, _ in extra]
    spec = forward_spec(x, weight, extra=others, allow_tf32=precision == "tf32")
    for config in CONV_SPLIT.kernel("split_k").configs(spec, describe(device)):
        steps = count_steps(config.block_k, spec)
        each = -(-steps // config.parts)
        assert (config.parts - 1) * each < steps <= config.parts * each


EARLY = {  # a case of CONVS, and what a program does
    "one round": ("one image", (64, 32, 256, 1, 4)),
    "two rounds": ("two extras", (64, 32, 64, 2, 4)),
    "odd sizes": ("odd sizes", (16, 16, 64, 3, 4)),
    "pointwise": ("pointwise", (16, 16, 32, 1, 4)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("case", "config"), EARLY.values(), ids=EARLY)
def test_split_early(case, config, dtype, device):
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("float32 is multiplied in TF32 on a GPU")
    x, weight, extra, _ = conv_inputs(CONVS[case], dtype, device)
    operands = SplitOperands(x, weight, extra, conv_split.split_spec(x, weight, extra))
    parts = split_early(EarlyConfig(*config), operands)
    exact = fused_reference.conv_split(x.double(), weight.double(), extra=double(extra)).sum(0)
    low = fused_reference.conv_split(x, weight, extra=extra).double().sum(0)
    close(parts.sum(0), exact, low)
    assert all(part.abs().sum() > 0 for part in parts)


def whole_terms(x, weight, extra, factor):
    """All that a convolution adds, and what multiplies its sum."""
    (n, h, w, _), co = x.shape, weight.shape[0]
    bias, extra_bias = torch.randn(2, co, device=x.device)
    terms = {
        "emb": torch.randn(n, 3 * co, device=x.device)[:, co : 2 * co],
        "residual": randn(n, h, w, co, dtype=x.dtype, device=x.device),
    }
    terms |= {"extra": extra, "extra_bias": extra_bias} if extra else {}
    return bias, terms | {"factor": factor}


def in_double(terms):
    tensors = {k: v.double() for k, v in terms.items() if k not in ("extra", "factor")}
    return tensors | {"extra": double(terms.get("extra", ())), "factor": terms["factor"]}


def check_whole(x, weight, extra, config, factor=None):
    bias, terms = whole_terms(x, weight, extra, factor)
    y, partials = conv_few(x, weight, bias, **terms, stats=True, config=config)
    exact, _ = fused_reference.conv_forward(
        x.double(), weight.double(), bias.double(), **in_double(terms)
    )
    low, _ = fused_reference.conv_forward(x, weight, bias, **terms)
    close(y, exact, low)
    expected = partials_of(y, partials.shape[1])
    torch.testing.assert_close(partials, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("case", ["one image", "two extras"])
def test_sums_that_a_number_multiplies(case, device):
    x, weight, extra, _ = conv_inputs(CONVS[case], torch.float16, device)
    check_whole(x, weight, extra, None, factor=-(0.5**0.5))


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
@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_every_configuration(case, precision, device):
    (x, weight, extra), seen, _ = split_case((*case, 1), precision, device)
    options = {"extra": extra, "allow_tf32": precision == "tf32"}
    others = [other for other, _ in extra]
    spec = forward_spec(x, weight, extra=others, allow_tf32=precision == "tf32")
    for config in CONV_SPLIT.kernel("split_k").configs(spec, describe(device)):
        for _ in range(3):
            parts = conv_split.conv_split(x, weight, **options, config=config)
            assert parts.shape[0] == config.parts
            check_split(parts, seen, precision)


POINTER_SHAPES = SHAPES | {
    "7x7, twice a concat": (1, 7, 7, 896, 448, 3, 3, (448,)),
    "100 channels": (2, 8, 8, 100, 200, 3, 3, (60,)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("case", POINTER_SHAPES.values(), ids=POINTER_SHAPES)
def test_every_configuration_through_pointers(case, precision, device):
    (x, weight, extra), seen, _ = split_case((*case, 1), precision, device)
    spec = conv_split.split_spec(x, weight, extra)
    for config in CONV_SPLIT.kernel("pointer_parts").configs(spec, AMPERE):
        for _ in range(3):
            parts = conv_split.conv_split(x, weight, extra=extra, config=config)
            assert parts.shape[0] == config.parts
            check_split(parts, seen, precision)


HALVED_SHAPES = {  # of ddpm_cifar10 and latents
    "32x32": (1, 32, 32, 128, 128, 3, 3, ()),
    "16x16, four images": (4, 16, 16, 256, 256, 3, 3, ()),
    "8x8": (1, 8, 8, 640, 640, 3, 3, ()),
}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("case", HALVED_SHAPES.values(), ids=HALVED_SHAPES)
def test_every_configuration_of_stride_2(case, precision, device):
    (x, weight, _), *_ = split_case((*case, 1), precision, device)
    for padding in (0, 1):
        how = {"stride": 2, "padding": padding, "allow_tf32": precision == "tf32"}
        spec = conv_split.split_spec(x, weight, **how)
        for config in CONV_SPLIT.kernel("split_k").configs(spec, describe(device)):
            for _ in range(3):
                check_halved((*case, 1), padding, precision, device, config)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
def test_early_parts_of_the_model_s_shapes(case, device):
    x, weight, extra, _ = conv_inputs((*case, 1), torch.bfloat16, device)
    exact = fused_reference.conv_split(x.double(), weight.double(), extra=double(extra)).sum(0)
    low = fused_reference.conv_split(x, weight, extra=extra).double().sum(0)
    for _ in range(3):
        parts = conv_split.conv_split(x, weight, extra=extra, config=EARLY_PARTS.config())
        close(parts.sum(0), exact, low)


ROWS = {  # likewise, at 64x64 to 16x16, and of two images
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
    spec = forward_spec(x, weight, extra=[other for other, _ in extra])
    if reason := one_row.refuse(spec, describe(device)):
        pytest.skip(reason)
    for factor in (None, 0.5**0.5):
        for _ in range(3):
            check_whole(x, weight, extra, WHOLE.config(), factor)


@pytest.mark.gpu
def test_convolutions_by_rows_in_parts(device):
    x, weight, *_ = conv_inputs((1, 16, 16, 320, 192, 3, 3, (), 1), torch.bfloat16, device)
    spec = forward_spec(x, weight)
    if reason := one_row.refuse(spec, describe(device)):
        pytest.skip(reason)
    exact = fused_reference.conv_split(x.double(), weight.double()).sum(0)
    low = fused_reference.conv_split(x, weight).double().sum(0)
    for _ in range(3):
        parts = conv_split.conv_split(x, weight)
        assert parts.shape[0] == one_row.count_parts(spec, describe(device)) == 2
        close(parts.sum(0), exact, low)
