"""What `diffusion.plan.record.results` says of calls, beside PyTorch's own on the meta device."""

import itertools

import pytest
import torch
from torch import Tensor

from diffusion.factory import build_model
from diffusion.plan.record import notes
from diffusion.plan.record.results import known_result
from diffusion.plan.step.plan import body
from diffusion.plan.trace import trace
from diffusion.presets import preset
from diffusion.runtime.backend import TORCH_FP32

ATEN = torch.ops.aten
META = torch.device("meta")


def described(x: Tensor | tuple[Tensor, ...]) -> tuple:
    """Shape, strides that matter, dtype."""
    if not isinstance(x, Tensor):
        return tuple(map(described, x))
    strides = [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
    return tuple(x.shape), strides, x.dtype, x.device


def of_pytorch(target, args, kwargs):
    """None: it refuses the call."""
    try:
        return target(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None


def layouts(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Tensors of this shape that lie in memory in different ways."""
    x = torch.empty(shape, dtype=dtype, device=META)
    wider = torch.empty((*shape[:-1], shape[-1] + 1), dtype=dtype, device=META)
    return [
        x,
        x.contiguous(memory_format=torch.channels_last),
        torch.empty([shape[d] for d in (1, 3, 0, 2)], dtype=dtype, device=META).permute(2, 0, 3, 1),
        wider[..., :-1],
        torch.empty((shape[0], 1, 1, shape[3]), dtype=dtype, device=META).expand(shape),
    ]


SHAPES = [(2, 6, 4, 5), (1, 6, 4, 5), (2, 1, 4, 5), (2, 6, 1, 1), (0, 6, 4, 5)]
EACH = [x for shape in SHAPES for x in layouts(shape)]
WEIGHTS = [w for shape in [(8, 6, 3, 3), (8, 3, 1, 1), (8, 1, 3, 2)] for w in layouts(shape)[:2]]
BIAS = torch.empty(8, device=META)
GAIN = torch.empty(6, device=META)
RNG = torch.empty(2, dtype=torch.int64, device=META)


def elementwise():
    others = [
        *(x for shape in ((2, 6, 4, 5), (2, 6, 1, 1), (1, 6, 4, 5)) for x in layouts(shape)),
        torch.empty(5, device=META),
        torch.empty(2, 6, 4, 5, dtype=torch.bfloat16, device=META),
    ]
    for x, y in itertools.product(EACH, [*others, 2, 0.5]):
        yield ATEN.add.Tensor, (x, y), {}
        yield ATEN.mul.Tensor, (x, y), {}
    for x in [*EACH, *layouts((2, 6, 4, 5), torch.int64)]:
        yield ATEN.mul.Scalar, (x, 0.5), {}
        yield ATEN.silu.default, (x,), {}
        yield torch.ops.triton_kernels.dropout.default, (x, 0.1, RNG, 3, 0), {}
        yield ATEN.add.Tensor, (x, x), {"alpha": 2}


def layout():
    for x in EACH:
        for options in ({}, {"memory_format": torch.contiguous_format}):
            yield ATEN.clone.default, (x,), options
        yield ATEN._unsafe_view.default, (x, [x.shape[0], -1]), {}
        yield ATEN._unsafe_view.default, (x, [x.shape[0] * x.shape[1], *x.shape[2:]]), {}
    for x, y in itertools.product(EACH, EACH):
        for dim in (1, -2):
            yield ATEN.cat.default, ([x, y], dim), {}


def images():
    settings = itertools.product(((1, 1), (2, 1)), ((0, 0), (1, 2), (1,)), (1, 2), (False, True))
    for (stride, padding, groups, transposed), x, w in itertools.product(settings, EACH, WEIGHTS):
        args = (x, w, BIAS, stride, padding, (1, 1), transposed, (0, 0), groups)
        yield ATEN.convolution.default, args, {}
    for x in EACH:
        n, c, h, w = x.shape
        for groups, dtype in itertools.product((1, 2, 5), (torch.float32, torch.bfloat16)):
            args = (x.to(dtype), GAIN[:c], None, n, c, h * w, groups, 1e-5)
            yield ATEN.native_group_norm.default, args, {}
        yield ATEN.avg_pool2d.default, (x, [2, 2]), {}
        yield ATEN.avg_pool2d.default, (x, [2, 2], [1, 1]), {}
        yield ATEN.upsample_nearest2d.default, (x, [2 * h, 2 * w], 2.0, 2.0), {}


def matrices():
    for x, y in itertools.product(EACH, EACH):
        for a, b in ((x[0:1, 0], y[0:1, 0].mT), (x[:, 0], y[:, 0])):
            yield ATEN.bmm.default, (a, b), {}
    for x in EACH:
        yield ATEN._safe_softmax.default, (x, -1), {}


@pytest.mark.parametrize("calls", [elementwise, layout, images, matrices])
def test_results_are_those_of_pytorch_or_left_to_it(calls):
    known = 0
    for target, args, kwargs in calls():
        result, expected = known_result(target, args, kwargs), of_pytorch(target, args, kwargs)
        if result is not None:
            known += 1
            assert expected is not None, (target, args, kwargs)
            assert described(result) == described(expected), (target, args, kwargs)
    assert known > 20


@pytest.mark.parametrize("name", ["unet_tiny", "adm64", "edm_ddpmpp_cifar10"])
def test_all_calls_of_a_network(name, monkeypatch):
    """With FiLM, dropout and residual resampling; what is left to PyTorch are views and casts."""
    left = set()

    def held_against(target, args, kwargs):
        result, expected = known_result(target, args, kwargs), target(*args, **kwargs)
        if result is not None:
            assert described(result) == described(expected), target
        else:
            left.add(target)
        return result

    monkeypatch.setattr(notes, "known_result", held_against)
    settings = preset("model", name) | {"num_classes": None}
    network = build_model(settings, TORCH_FP32, (16, 16), 3, False, META).to(META)
    x = torch.empty(2, 16, 16, 3, device=META)
    emb = torch.empty(2, 4 * network.model_channels, device=META)
    trace(network.train(), (x, emb, RNG), forward=body(network))
    views = {"view", "permute", "transpose", "unsqueeze", "expand", "split", "unbind", "slice"}
    assert {target._opname for target in left} <= views | {"_to_copy", "select", "squeeze"}
