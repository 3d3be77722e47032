"""The convolution that makes act(norm(x)) on its way, on a Hopper GPU."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.conv.fused_spec import forward_spec
from triton_kernels.conv.norm_conv import NORM_CONV, NormConv, norm_conv
from triton_kernels.norm import sums as norm_sums, tables as norm_tables
from triton_kernels.norm.tables import Statistics
from triton_kernels.reference import fused as fused_reference
from triton_kernels.registry.chips import chip
from triton_kernels.registry.choose import select
from triton_kernels.registry.spec import ConvSpec
from triton_kernels.runtime.dependent_launch import dependent_launches

from .chips import HOPPER
from .conv_fused_cases import Shape, check_stats, extra_case, forward_case, randn, relative
from .test_conv_hopper import gpu, repeatedly

EPS = 1e-5
FOUR = NormConv(256, 0, False)

# Images of one tile or two, whole and in part, several a program; images of several programs
SHAPES = {
    "a tile": Shape(300, 4, 64, 64, 64),
    "two tiles": Shape(151, 8, 64, 64, 64),
    "images of several programs": Shape(3, 64, 64, 64, 128),
    "many tiles": Shape(22, 64, 64, 64, 64),
}
TERMS = {  # with a residual, channels of 1x1 convolutions, whether the first is upsampled
    "alone": (False, (), False),
    "residual": (True, (), False),
    "1x1": (False, (128, 64), False),
    "few 1x1": (False, (64,), False),
    "upsampled 1x1": (False, (128, 64), True),
}


CASES = [
    ("a tile", "alone"),
    ("two tiles", "residual"),
    ("two tiles", "1x1"),
    ("images of several programs", "alone"),
    ("images of several programs", "upsampled 1x1"),
    *(("many tiles", terms) for terms in TERMS),
]


TWO = {  # tiles of two rows
    "between": NormConv(128, 0, False),
    "between, table": NormConv(128, 0, True),
    "one": NormConv(128, 1, False),
    "one, table": NormConv(128, 1, True),
    "two": NormConv(128, 2, False),
    "two, table": NormConv(128, 2, True),
}


def sums_of(x, groups, tiles=16):
    """Partials, groups, weight, bias and eps of a norm; act(b) is not 0."""
    n, _, _, c = x.shape
    weight, bias = (randn(c, seed=s, device=x.device) for s in (20, 21))
    partials = norm_sums.tensor_partials(x, n * tiles)
    return partials, groups, weight, bias + 1, EPS


def check(
    shape,
    terms,
    config,
    dtype=torch.bfloat16,
    activation="silu",
    groups=32,
    film=False,
    factor=None,
):
    device = torch.device("cuda")
    with_residual, channels, upsampled = TERMS[terms]
    x, weight, bias, emb, residual = forward_case(shape, dtype, device)
    x = x * 2 + 1
    given = {"emb": emb}
    if with_residual:
        given["residual"] = residual
    if channels:
        given["extra"] = extra_case(shape, *(*channels, 64)[:2], dtype, device)[: len(channels)]
        given["extra_bias"] = randn(shape.co, seed=11, device=device)
    exactly = dict(given)
    if upsampled:
        (first, w1x1), *rest = given["extra"]
        given["extra"] = [(first[:, ::2, ::2].contiguous(), w1x1), *rest]
        exactly["extra"] = [(reference.upsample_nearest2d(given["extra"][0][0]), w1x1), *rest]
    partials, *norm = sums_of(x, groups, 32 if shape.n < 10 else 16)
    affine = {}
    if film:
        rows = [randn(shape.n, 192, seed=22 + i, device=device)[:, 64:128] for i in range(2)]
        affine = dict(zip(("scale", "shift"), rows, strict=True))
    others = [other for other, _ in given.get("extra", ())]
    of_norm = {"groups": groups, "tiles": (partials.shape[1],)}
    assert NORM_CONV.refuse(forward_spec(x, weight, extra=others, **of_norm), HOPPER) is None
    statistics = Statistics((partials,), (shape.h * shape.w,), *norm, **affine)
    table = norm_tables.norm_table(*statistics)
    with dependent_launches():
        options = {"config": config, "factor": factor}
        y, sums = norm_conv(x, statistics, activation, weight, bias, **options, **given)

    def convolved(a):
        doubles = {k: v.double() for k, v in exactly.items() if k != "extra"}
        doubles["extra"] = [(t.double(), w.double()) for t, w in exactly.get("extra", ())]
        filters = weight.double(), bias.double()
        return fused_reference.conv_forward(a, *filters, **doubles, factor=factor)[0]

    a = fused_reference.apply(x.double(), None, table.double(), activation)
    exact = convolved(a)
    low = convolved(a.to(dtype).double()).to(dtype)
    assert relative(y, exact) <= 1.1 * relative(low, exact)
    check_stats(y, sums)
    return y, sums


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("form", TWO)
    @pytest.mark.parametrize("terms", TERMS)
    def test_whoever_makes_rows(self, terms, form):
        repeatedly(lambda: check(SHAPES["many tiles"], terms, TWO[form]))

    @pytest.mark.parametrize("config", [None, FOUR], ids=["chosen", "four rows"])
    @pytest.mark.parametrize(("name", "terms"), CASES)
    def test_it(self, name, terms, config):
        if config == FOUR and TERMS[terms][1]:
            pytest.skip("tiles of four rows leave no room for 1x1 convolutions")
        repeatedly(lambda: check(SHAPES[name], terms, config))

    @pytest.mark.parametrize("form", [*TWO, "four rows"])
    @pytest.mark.parametrize("terms", TERMS)
    def test_sums_that_a_number_multiplies(self, terms, form):
        if form == "four rows" and TERMS[terms][1]:
            pytest.skip("tiles of four rows leave no room for 1x1 convolutions")
        config = (TWO | {"four rows": FOUR})[form]
        repeatedly(lambda: check(SHAPES["two tiles"], terms, config, factor=-(0.5**0.5)))

    @pytest.mark.parametrize(("activation", "config"), [("gelu", None), ("identity", FOUR)])
    def test_scale_shift_and_other_activations(self, activation, config):
        shape = SHAPES["many tiles"]
        check(shape, "alone", config, torch.float16, activation, 8, film=True)


def applies(c=64, kernel=3, extra=(), groups=32, tiles=(16,), gpu=HOPPER, **rest) -> bool:
    size = {"n": 1, "dtype": "bf16", "h": 8, "w": 64, "k": c, "c": 64, "r": kernel, "s": kernel}
    spec = ConvSpec(**size | {"extra": extra, "groups": groups, "tiles": tiles} | rest)
    return NORM_CONV.why_apart(spec, gpu) is None


def chosen(**rest):
    """What is taken, of images of 64x64."""
    size = {"dtype": "bf16", "h": 64, "w": 64, "k": 64, "c": 64, "r": 3, "s": 3}
    spec = ConvSpec(**size | {"n": 16, "groups": 32, "tiles": (16,)} | rest)
    return select(NORM_CONV, spec, HOPPER).config


def test_how_rows_are_made():
    assert chosen() == chosen(residual=True) == chosen(extra=(64, 64)) == NormConv(128, 1, False)
    assert chosen(n=64) == chosen(n=64, extra=(64, 64)) == NormConv(128, 0, True)
    assert chosen(n=64, residual=True) == NormConv(128, 2, True)


def test_what_applies():
    assert applies() and applies(extra=(64, 64), groups=8)
    assert not applies(n=0)
    assert not applies(kernel=1)
    assert not applies(extra=(64, 192))
    assert not applies(groups=4)
    assert not applies(tiles=(12,)) and not applies(tiles=(2,)) and not applies(tiles=(128,))
    assert not applies(128) and not applies(128, first=64)
    assert not applies(dtype="tf32")
    assert not applies(gpu=chip("a100").gpu)
    # what is added may be upsampled on the way, to 64 channels, whoever the norm is of
    assert applies(extra=(128, 64), upsampled=True, groups=None, tiles=())
    assert not applies(extra=(128,), upsampled=True, w=32)
