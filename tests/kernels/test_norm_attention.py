"""The norm, the projection and attention in one launch, on a Hopper GPU."""

import pytest
import torch

from triton_kernels.attention import norm_attention as module
from triton_kernels.attention.norm_attention import (
    AttentionConfig,
    norm_attention,
    serves_norm_attention,
)
from triton_kernels.reference import fused as fused_reference
from triton_kernels.runtime.dependent_launch import dependent_launches

from .poison import poison_outputs
from .test_conv_hopper import gpu, repeatedly

# N, H, W, heads, groups, tiles of the partials or None: x is not normalized
SHAPES = {
    "16x16": (16, 16, 16, 6, 32, 2),
    "8x8, several heads a program": (64, 8, 8, 8, 32, 1),
    "8x8, normalized": (17, 8, 8, 8, None, None),
    "two groups": (5, 8, 16, 2, 2, 4),
    "16x16 of few channels": (33, 16, 16, 2, 16, 8),
}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    poison_outputs(monkeypatch, module)


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
        norm = torch.stack([parts.sum(2), within], 2), h * w, groups, randn(c), randn(c) + 1, 1e-5
    return x.flatten(1, 2), norm, weight, bias


def double(norm):
    return norm and tuple(t.double() if isinstance(t, torch.Tensor) else t for t in norm)


def check(case, dtype=torch.bfloat16, order="qkv_heads", config=None):
    x, norm, weight, bias = inputs(*case, dtype)
    heads = case[3]
    assert serves_norm_attention(x, heads, norm)
    with dependent_launches():
        o = norm_attention(x, norm, weight, bias, heads, order, config)
    exact = fused_reference.norm_attention(
        x.double(), double(norm), weight.double(), bias.double(), heads, order
    )
    a = x
    if norm is not None:
        partials, pixels, *rest = norm
        arguments = (partials,), (pixels,), *rest
        a = fused_reference.norm_of_sums(x[:, None], None, *arguments, "identity")[:, 0]
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

    def test_what_is_served(self):
        x = torch.empty((16, 256, 192), dtype=torch.bfloat16, device="cuda")
        norm = torch.empty((16, 2, 2, 192), device="cuda"), 256, 32, None, None, 1e-5
        assert serves_norm_attention(x, 6, norm) and serves_norm_attention(x, 6, None)
        assert not serves_norm_attention(x, 3, norm)  # heads of 64
        assert not serves_norm_attention(x[:, :200], 6, norm)
        assert not serves_norm_attention(x[:2], 6, norm)
        assert not serves_norm_attention(x.float(), 6, norm)
        assert not serves_norm_attention(x, 6, (torch.empty(16, 16, 2, 192), *norm[1:]))
        assert not serves_norm_attention(x, 6, (*norm[:2], 4, *norm[3:]))


def test_nothing_without_a_gpu():
    assert not serves_norm_attention(torch.empty((16, 256, 192), dtype=torch.float16), 6, None)
