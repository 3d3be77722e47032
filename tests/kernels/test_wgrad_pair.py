"""Two weight gradients, in one launch or one after the other."""

import pytest
import torch

from triton_kernels.conv import wgrad_pair as two_weight_grads
from triton_kernels.conv.hopper import row_mma
from triton_kernels.conv.wgrad_pair import _Together, conv_two_weight_grads
from triton_kernels.registry.spec import ConvSpec
from triton_kernels.runtime.device import describe

from .poison import poison_outputs
from .test_conv_fused import (
    Shape,
    poison,  # noqa: F401  a fixture for every test here
    randn,
    relative,
    weight_grad_reference,
)
from .test_conv_hopper import gpu

SMALL = {
    "3x3": (Shape(2, 8, 8, 16, 24), Shape(2, 8, 8, 24, 8)),
    "of two sizes": (Shape(2, 8, 8, 16, 24), Shape(2, 8, 8, 24, 8, 1)),
    "empty batch": (Shape(0, 8, 8, 16, 24), Shape(0, 8, 8, 24, 8)),
}


def check(
    shapes: tuple[Shape, Shape], dtype, device, accumulate: bool, plan=None, share: float = 1.0
) -> list[torch.Tensor]:
    """The gradients, which have to be right."""
    arguments, before = [], []
    for seed, (n, h, w, ci, co, kernel) in enumerate(shapes):
        x = randn(n, h, w, ci, seed=seed, device=device, dtype=dtype)
        dy = randn(n, h, w, co, seed=seed + 2, device=device, dtype=dtype)
        out = randn(co, kernel, kernel, ci, seed=seed + 4, device=device).permute(0, 3, 1, 2)
        before.append(out.double())
        arguments += [x, dy, out]
    if plan is None:
        conv_two_weight_grads(*arguments, accumulate=accumulate, share=share)
    else:
        two_weight_grads._run(*arguments, accumulate, plan, True, share)
    for shape, old, x, dy, out in zip(
        shapes, before, arguments[::3], arguments[1::3], arguments[2::3], strict=True
    ):
        exact = weight_grad_reference(x, dy, shape.kernel) + accumulate * old
        floor = 2**-24 * (shape.n * shape.h * shape.w) ** 0.5 + 1e-6
        assert relative(out, exact) <= floor
    return arguments[2::3]


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("name", SMALL)
def test_two(name, accumulate, device):
    check(SMALL[name], torch.float16, device, accumulate)


@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
@pytest.mark.parametrize("splits", [3, 37])
def test_sums_of_parts(splits, accumulate, device):
    shapes = (16, 1, 1, 32), (32, 1, 1, 32)
    outs = [randn(*shape, seed=i, device=device) for i, shape in enumerate(shapes)]
    sizes = [out.numel() for out in outs]
    parts = randn(splits, sum(sizes), seed=2, device=device)
    exact = parts.double().sum(0).split(sizes)
    exact = [e.view_as(out) + accumulate * out for e, out in zip(exact, outs, strict=True)]
    two_weight_grads._sum_two(parts, *outs, accumulate)
    assert all(relative(out, e) <= 1e-6 for out, e in zip(outs, exact, strict=True))


LARGE = {
    "64x64": (Shape(3, 64, 64, 192, 64), Shape(3, 64, 64, 64, 64)),
    "16x16": (Shape(13, 16, 16, 64, 128), Shape(13, 16, 16, 128, 192)),
    "8x8": (Shape(64, 8, 8, 256, 192), Shape(64, 8, 8, 64, 128)),
    "8x8, an odd number": (Shape(37, 8, 8, 64, 64), Shape(37, 8, 8, 64, 64)),
    "8x8, one part": (Shape(5, 8, 8, 512, 384), Shape(5, 8, 8, 384, 512)),
}


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
    @pytest.mark.parametrize("name", LARGE)
    def test_one_launch(self, name, accumulate, device, monkeypatch):
        poison_outputs(monkeypatch, two_weight_grads)
        gpu = describe(device)
        convs = [ConvSpec(s.n, "bf16", s.h, s.w, s.ci, s.co) for s in LARGE[name]]
        plan = _Together(row_mma.wgrad_splits(convs[0], gpu, convs[1]))
        first = check(LARGE[name], torch.bfloat16, device, accumulate, plan)
        for _ in range(3):
            again = check(LARGE[name], torch.bfloat16, device, accumulate, plan)
            assert all(map(torch.equal, again, first))
        check(LARGE[name], torch.bfloat16, device, accumulate, plan, share=0.5)
