"""The norm, the projection and attention in one launch, on a Hopper GPU."""

import pytest
import torch

from triton_kernels.attention.norm_attention import (
    PROJECTED,
    AttentionConfig,
    projected_attention,
    projected_spec,
)
from triton_kernels.norm.tables import Statistics
from triton_kernels.reference import fused as fused_reference
from triton_kernels.registry.chips import chip
from triton_kernels.registry.choose import select
from triton_kernels.registry.spec import ProjectedSpec
from triton_kernels.runtime.dependent_launch import dependent_launches

from .chips import HOPPER
from .test_conv_hopper import gpu, repeatedly

# N, H, W, heads, groups, tiles of the partials or None: x is not normalized
SHAPES = {
    "16x16": (16, 16, 16, 6, 32, 2),
    "8x8, several heads a program": (64, 8, 8, 8, 32, 1),
    "8x8, normalized": (17, 8, 8, 8, None, None),
    "two groups": (5, 8, 16, 2, 2, 4),
    "16x16 of few channels": (33, 16, 16, 2, 16, 8),
}


def inputs(n, h, w, heads, groups, tiles, dtype, device="cuda"):
    generator = torch.Generator(device).manual_seed(1)

    def randn(*shape):
        return torch.randn(shape, device=device, generator=generator)

    c = 32 * heads
    x = (2 * randn(n, h, w, c) + 1).to(dtype)
    weight, bias = (randn(3 * c, c) / c**0.5).to(dtype), 0.3 * randn(3 * c)
    norm = None
    if groups is not None:
        parts = x.float().reshape(n, tiles, h * w // tiles, c)
        within = (parts - parts.mean(2, keepdim=True)).square().sum(2)
        partials = torch.stack([parts.sum(2), within], 2)
        norm = Statistics((partials,), (h * w,), groups, randn(c), randn(c) + 1, 1e-5)
    return x.flatten(1, 2), norm, weight, bias


def double(norm):
    if norm is None:
        return None
    affine = {"weight": norm.weight.double(), "bias": norm.bias.double()}
    return norm._replace(partials=tuple(t.double() for t in norm.partials), **affine)


def check(case, dtype=torch.bfloat16, order="qkv_heads", config=None):
    x, norm, weight, bias = inputs(*case, dtype)
    heads = case[3]
    assert PROJECTED.refuse(projected_spec(x, heads, norm), HOPPER) is None
    with dependent_launches():
        o = projected_attention(x, norm, weight, bias, heads, order, config)
    exact = fused_reference.projected_attention(
        x.double(), double(norm), weight.double(), bias.double(), heads, order
    )
    a = x
    if norm is not None:
        table = fused_reference.norm_table(*norm)
        a = fused_reference.apply(x[:, None], None, table, "identity")[:, 0]
    qkv = (a.to(dtype) @ weight.T + bias).to(dtype)
    low = fused_reference.attention_forward(qkv, heads, order)[0]
    assert (o.double() - exact).norm() <= 1.5 * (low.double() - exact).norm()
    return (o,)


class TestGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES)
    def test_it(self, case, dtype):
        repeatedly(lambda: check(case, dtype))

    @pytest.mark.parametrize(
        ("name", "config"),
        [
            ("16x16", AttentionConfig(3, 64, 8)),
            ("16x16", AttentionConfig(2, 128, 8)),
            ("8x8, several heads a program", AttentionConfig(4, 64, 4)),
        ],
        ids=str,
    )
    def test_other_programs(self, name, config):
        repeatedly(lambda: check(SHAPES[name], order="heads_qkv", config=config))


def taken(n=16, t=256, c=192, heads=6, gpu=HOPPER, dtype="bf16", **norm) -> str | None:
    """The kernel, if one launch is to do it."""
    spec = ProjectedSpec(n, dtype, t, c, heads, **norm)
    return None if PROJECTED.refuse(spec, gpu) else select(PROJECTED, spec, gpu).kernel.name


def test_what_is_taken():
    assert taken(groups=32, tiles=2) == taken() == "per_image"
    assert taken(heads=3) is None  # of 64
    assert taken(t=200) is None
    assert taken(dtype="tf32") is None
    assert taken(groups=32, tiles=16) is None
    assert taken(groups=4, tiles=2) is None
    assert taken(2) is None
    assert taken(gpu=chip("a100").gpu) is None
