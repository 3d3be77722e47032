"""The ops of the planned network in float32 that is not TF32 (`fused_float32`), against float64."""

import inspect
from functools import partial

import pytest
import torch
from torch import Tensor

from triton_kernels import fused_ops
from triton_kernels.conv.plain import fused_launch
from triton_kernels.fused_float32 import in_float32
from triton_kernels.reductions.row_sums import RowSums
from triton_kernels.reference import fused as fused_reference
from triton_kernels.tf32 import rounded_to_tf32

from ..tensor_cores import tensor_cores_cut_off  # noqa: F401  a fixture
from .conv_fused_cases import (
    RAGGED,
    SMALL,
    Shape,
    check_stats,
    extra_case,
    forward_case,
    forward_reference,
    grad_case,
    grad_reference,
    randn,
    relative,
    weight_grad_reference,
)
from .masks import dropped
from .test_conv_fused import RACES, RAGGED_RACES
from .test_skip_dx import SMALL as SKIPS, _inputs as skip_inputs

MOST = 1e-6  # of a norm, of short sums; a product in TF32 is 2e-4 off and more
SHAPES = SMALL | {name: RAGGED[name] for name in ("7x7", "1x1", "single pixels")}
SHAPES["19 and 33 channels"] = Shape(2, 5, 7, 19, 33)
SHAPES["few of the result"] = Shape(2, 8, 8, 24, 4)
KERNELS = in_float32(fused_ops)
PRODUCTS = """attention_backward attention_forward conv2d_input_grad conv_down conv_down_input_grad
    conv_few conv_forward conv_input_grad conv_plain_input_grad conv_split conv_weight_grad
    conv_weight_grads cross_attention_backward cross_attention_forward linear_attention_backward
    linear_attention_forward linear_grads skip_backward skip_dx""".split()


@pytest.fixture(autouse=True, params=["tma", "no tma"])
def chip(request, tensor_cores_cut_off):  # noqa: F811
    """With a TMA unit, if there is one here, and without."""
    if request.param == "no tma":
        request.getfixturevalue("no_tma")
    return request.param


def float32(*shape: int, seed: int, device) -> Tensor:
    return randn(*shape, seed=seed, device=device)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_in_float32_because_the_plan_says_so(name):
    option = inspect.signature(getattr(fused_ops, name)).parameters["allow_tf32"]
    assert option.default is True and KERNELS.__dict__[name].keywords == {"allow_tf32": False}


def most(terms: int) -> float:
    """Of a sum of so many products, each of which may be rounded when it is added."""
    return 2**-23 + 2**-24 * terms**0.5


def check_forward(shape: Shape, device, config=None) -> tuple[Tensor, Tensor]:
    x, weight, bias, emb, residual = forward_case(shape, torch.float32, device)
    terms = {"emb": emb, "residual": residual, "stats": True, "config": config}
    y, partials = KERNELS.conv_forward(x, weight, bias, **terms)
    exact = forward_reference(x, weight, bias, emb, residual, torch.float64)
    assert relative(y, exact) <= most(shape.kernel**2 * shape.ci)
    if shape.n:
        check_stats(y, partials)
    return y, partials


@pytest.mark.parametrize("name", SHAPES)
def test_forward(name, device):
    check_forward(SHAPES[name], device)


def check_extra(shape: Shape, count: int, c1: int, c2: int, device, config=None) -> Tensor:
    extra = extra_case(shape, c1, c2, torch.float32, device)[:count]
    x, weight, bias, emb, _ = forward_case(shape, torch.float32, device)
    extra_bias = float32(shape.co, seed=11, device=device)
    terms = {"emb": emb, "extra": extra, "extra_bias": extra_bias, "config": config}
    y, _ = KERNELS.conv_forward(x, weight, bias, **terms)
    nothing = torch.zeros_like(y)
    exact = forward_reference(x, weight, bias + extra_bias, emb, nothing, torch.float64)
    exact = exact + sum(x.double() @ w.double().T for x, w in extra)
    assert relative(y, exact) <= most(shape.kernel**2 * shape.ci + c1 + c2)
    return y


@pytest.mark.parametrize(
    ("count", "c1", "c2"), [(1, 72, 24), (2, 72, 24), (2, 12, 9)], ids=["one", "two", "odd"]
)
def test_extra_pointwise_convolutions(count, c1, c2, device):
    check_extra(SMALL["3x3"], count, c1, c2, device)


@pytest.mark.parametrize(
    "shape", [Shape(2, 5, 7, 24, 40, kernel=1), Shape(2, 4, 4, 19, 33)], ids=str
)
def test_a_result_that_products_in_tf32_read_is_rounded(shape, device):
    x, weight, bias, *_ = forward_case(shape, torch.float32, device)
    y, _ = KERNELS.conv_forward(x, weight, bias)
    assert torch.equal(KERNELS.conv_forward(x, weight, bias, tf32=True)[0], rounded_to_tf32(y))
    assert not torch.equal(y, rounded_to_tf32(y))


def test_a_result_that_is_padded(device):
    shape = Shape(2, 8, 8, 24, 3)
    x, weight, bias, *_ = forward_case(shape, torch.float32, device)
    y, _ = KERNELS.conv_forward(x, weight, bias, width=16)
    exact = fused_reference.conv_forward(x.double(), weight.double(), bias.double(), width=16)[0]
    assert relative(y, exact) <= MOST and not y[..., 3:].any()


def check_grad(shape: Shape, c1: int | None, device, mask=None, config=None) -> list[Tensor]:
    dy, weight, x, inputs, table = grad_case(shape, c1, torch.float32, device)
    rest = {"inputs": inputs, "table": table, "activation": "silu", "mask": mask, "config": config}
    dz, partials = KERNELS.conv_input_grad(dy, weight, **rest)
    exact, xhat = grad_reference(dy, weight, x, table, "silu", torch.float64, mask)
    assert relative(dz, exact) <= most(shape.kernel**2 * shape.co)
    if shape.n:
        for found, terms in zip(partials.sum(1).unbind(1), (exact, exact * xhat), strict=True):
            size = terms.abs().sum((1, 2)).norm()
            assert (found.double() - terms.sum((1, 2))).norm() <= MOST * size
    return [dz, partials]


@pytest.mark.parametrize("name", SHAPES)
def test_input_grad(name, device):
    check_grad(SHAPES[name], None, device)


@pytest.mark.parametrize("c1", [64, 48], ids=["tiles of one input", "a tile of both"])
def test_input_grad_of_two_inputs_behind_dropout(c1, device):
    check_grad(Shape(2, 6, 8, c1 + 64, 24), c1, device, dropped(device))


def test_input_grad_of_filters_that_cannot_be_turned(device):
    """Those of a head, of whose 16 channels 3 have filters."""
    shape = Shape(2, 8, 8, 24, 3)
    dy, weight, x, _, table = grad_case(shape, None, torch.float32, device)
    exact, _ = grad_reference(dy, weight, x, table, "silu", torch.float64)
    padded = torch.nn.functional.pad(dy, (0, 13), value=7.0)
    rest = {"inputs": x, "table": table, "activation": "silu"}
    assert relative(KERNELS.conv_input_grad(padded, weight, **rest)[0], exact) <= MOST


@pytest.mark.parametrize("name", ["3x3", "1x1"])
def test_plain_input_grad(name, device):
    dy, weight, x, _, table = grad_case(SMALL[name], None, torch.float32, device)
    table = torch.tensor([0.0, 1, 1, 0], device=device)[None, :, None].expand(table.shape)
    exact, _ = grad_reference(dy, weight, x, table, "identity", torch.float64)
    assert relative(KERNELS.conv_plain_input_grad(dy, weight), exact) <= MOST


@pytest.mark.parametrize("together", [False, True], ids=["", "two of a size"])
@pytest.mark.parametrize(
    ("ci", "co", "beside"),
    [(72, 40, 0), (19, 33, 0), (3, 40, 13), (40, 3, 13)],
    ids=["", "odd channels", "padded x", "padded dy"],
)
def test_weight_grad(ci, co, beside, together, device):
    """Of what pads x and dy nothing counts, which is large here."""
    x = float32(2, 6, 8, ci, seed=0, device=device)
    dy = float32(2, 6, 8, co, seed=1, device=device)
    exact = weight_grad_reference(x, dy, 3)
    if beside:
        padded = torch.nn.functional.pad(x if ci == 3 else dy, (0, beside), value=50.0)
        x, dy = (padded, dy) if ci == 3 else (x, padded)
    empty = torch.full((2, co, 3, 3, ci), torch.nan, device=device)
    outs = empty.permute(0, 1, 4, 2, 3)
    if together:
        KERNELS.conv_weight_grads(*((x, dy, out) for out in outs))
    else:
        KERNELS.conv_weight_grad(x, dy, outs[0])
    for out in outs if together else outs[:1]:
        assert relative(out, exact) <= MOST


@pytest.mark.parametrize("name", SKIPS)
def test_skip_dx(name, device):
    case = SKIPS[name]
    inputs = skip_inputs(case, torch.float32, device)
    exact = {k: v if v is None else v.double() for k, v in inputs.items()}
    got = KERNELS.skip_dx(**inputs, sums=True, upsample1=case.upsample1)
    want = fused_reference.skip_dx(**exact, sums=True, upsample1=case.upsample1)
    for found, expected in zip(got[:2], want[:2], strict=True):
        assert found is None or relative(found, expected) <= MOST


@pytest.mark.parametrize("padding", [0, 1])
def test_strided(padding, device):
    x = float32(2, 6, 8, 40, seed=0, device=device)
    weight = (float32(24, 3, 3, 40, seed=1, device=device) / 20).permute(0, 3, 1, 2)
    bias, dy = float32(24, seed=2, device=device), float32(2, 3, 4, 24, seed=3, device=device)
    for op, given in (("conv_down", (x, weight, bias)), ("conv_down_input_grad", (dy, weight))):
        got = getattr(KERNELS, op)(*given, padding)
        want = getattr(fused_reference, op)(*(t.double() for t in given), padding)
        assert relative(got, want) <= MOST


@pytest.mark.parametrize("n", [3, 40])
def test_linear_grads(n, device):
    x, dy = float32(n, 72, seed=0, device=device), float32(n, 40, seed=1, device=device)
    weight = float32(40, 72, seed=2, device=device)
    grads = torch.ones(40, 72, device=device), torch.ones(40, device=device)
    exact = tuple(g.double() for g in grads)
    dx = KERNELS.linear_grads(x, dy, weight, *grads)
    want = fused_reference.linear_grads(x.double(), dy.double(), weight.double(), *exact)
    for got, expected in ((dx, want), *zip(grads, exact, strict=True)):
        assert relative(got, expected) <= MOST


def test_attention(device):
    make = partial(float32, device=device)
    qkv, do = make(2, 20, 3 * 32, seed=0), make(2, 20, 32, seed=1)
    sums = RowSums(torch.zeros(96, device=device))
    o, lse = KERNELS.attention_forward(qkv, 2, "qkv_heads")
    dqkv, _ = KERNELS.attention_backward(do, qkv, o, lse, 2, "qkv_heads", sums)
    exact = qkv.double().requires_grad_()
    want, _ = fused_reference.attention_forward(exact, 2, "qkv_heads")
    assert relative(o, want.detach()) <= MOST
    assert relative(dqkv, *torch.autograd.grad(want, exact, do.double())) <= MOST


def test_cross_attention(device):
    make = partial(float32, device=device)
    q, kv, do = make(2, 20, 32, seed=0), make(2, 6, 64, seed=1), make(2, 20, 32, seed=2)
    mask = torch.arange(6, device=device)[None] < torch.tensor([[6], [4]], device=device)
    o, lse = KERNELS.cross_attention_forward(q, kv, mask, 2)
    got = KERNELS.cross_attention_backward(do, q, kv, mask, o, lse, 2)
    exact = q.double().requires_grad_(), kv.double().requires_grad_()
    want, _ = fused_reference.cross_attention_forward(*exact, mask, 2)
    assert relative(o, want.detach()) <= MOST
    for found, expected in zip(got, torch.autograd.grad(want, exact, do.double()), strict=True):
        assert relative(found, expected) <= MOST


LARGE = RACES | RAGGED_RACES | {"16x16, 1x1": Shape(32, 16, 16, 192, 576, 1)}


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(len(fused_launch.SPLIT_CONFIGS)))
@pytest.mark.parametrize("name", LARGE)
def test_every_config_repeatedly(name, index, chip, device):
    """A race shows as a wrong result, or one that changes."""
    if chip == "no tma" and index > 0:
        pytest.skip("the same again")
    shape = LARGE[name]
    configs = fused_launch.SPLITTING_CONFIGS if shape.kernel == 1 else fused_launch.SPLIT_CONFIGS
    config = configs[index % len(configs)] if chip == "tma" else None
    results = []
    for _ in range(4):
        both = shape.ci // 16 * 8
        found = [
            *check_forward(shape, device, config),
            check_extra(shape, 2, shape.co, 64, device, config),
            *check_grad(shape, None, device, dropped(device), config),
            *check_grad(shape, both, device, config=config),
        ]
        results.append(found)
        assert all(map(torch.equal, found, results[0]))
