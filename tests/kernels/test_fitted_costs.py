"""Costs that are fitted: parameters of known kernels, and what they choose."""

import dataclasses

import pytest

from triton_kernels.attention.launch import (
    ATTENTION,
    ATTENTION_GRAD,
    CROSS_ATTENTION,
    CROSS_ATTENTION_GRAD,
)
from triton_kernels.conv.few import CONV_FEW
from triton_kernels.conv.fused import FORWARD, INPUT_GRAD
from triton_kernels.conv.skip_dx import SKIP_DX
from triton_kernels.conv.split import CONV_SPLIT
from triton_kernels.conv.upsampled import UPSAMPLED
from triton_kernels.conv.weight_grad import WEIGHT_GRAD
from triton_kernels.conv.wgrad_group import WEIGHT_GRADS
from triton_kernels.norm.channel_norm import CHANNEL_NORM_GRAD
from triton_kernels.registry import choose as registry, cost
from triton_kernels.registry.chips import CHIPS
from triton_kernels.registry.cost import Work
from triton_kernels.registry.spec import ChannelNormSpec, ConvSpec

from .chips import HOPPER

_WITHOUT_TMA = ("a100", "rtx3090", "rtx4090", "l40s")


class TestFittedCosts:
    @pytest.mark.parametrize("arch", [80, 90])
    def test_parameters_are_of_known_kernels(self, arch):
        """Each name is that of a kernel and of the fields that its parameters depend on."""
        ops = FORWARD, INPUT_GRAD, SKIP_DX, WEIGHT_GRAD, WEIGHT_GRADS, ATTENTION, ATTENTION_GRAD
        ops += CONV_SPLIT, CONV_FEW, UPSAMPLED, CROSS_ATTENTION, CROSS_ATTENTION_GRAD
        ops += (CHANNEL_NORM_GRAD,)
        known = {(k.name, *k.fitted_by) for op in ops for k in op.kernels if k.work is not None}
        fitted = cost.parameters(arch)
        assert len(fitted) >= 10 and not cost.parameters(70)
        for name, values in fitted.items():
            kernel, *fields = name.removesuffix(" tf32").removesuffix(" fp32").split()
            assert (kernel, *(field.split("=")[0] for field in fields)) in known
            assert len(values) == len(cost.terms(Work(1, 1, 1, 1, 1, 1, 1), HOPPER))
            assert all(value >= 0 for value in values) and any(values)

    def test_kernels_through_pointers_borrow_from_another_chip_of_their_instructions(self):
        """A chip that nobody has fitted takes tiles by the parameters of sm_80, in its own waves,
        and those of which a multiprocessor holds eight warps or more."""
        spec = ConvSpec(128, "bf16", 64, 64, 64, 64, r=3, s=3, stats=True, filters=(64, 64))
        chosen = {name: registry.select(FORWARD, spec, CHIPS[name].gpu) for name in _WITHOUT_TMA}
        kernel = FORWARD.kernel("pointer")
        for name, choice in chosen.items():
            gpu, config = CHIPS[name].gpu, choice.config
            assert choice.kernel is kernel and config.rows == 4
            assert kernel.model(spec, gpu, config) is None or name == "a100"
            as_80 = kernel.model(spec, gpu._replace(arch=80), config)
            assert kernel.predict(spec, gpu, config) == as_80
        assert [c.config.block_k for c in chosen.values()] == [32, 16, 16, 16]
        times = [kernel.predict(spec, CHIPS[n].gpu, chosen["a100"].config) for n in chosen]
        assert times[1] > times[0] > times[2]  # 82, 108 and 128 multiprocessors

    @pytest.mark.parametrize("op", [FORWARD, INPUT_GRAD, WEIGHT_GRAD], ids=lambda op: op.name)
    def test_more_work_takes_longer(self, op):
        """16 times the images take 4 to 16 times as long, by every kernel that has a model."""
        spec = ConvSpec(32, "bf16", 32, 32, 128, 128, padding=(1, 1))
        if op is INPUT_GRAD:
            spec = dataclasses.replace(spec, first=128, activation="silu")
        more = dataclasses.replace(spec, n=16 * 32)
        models = 0
        for kernel, config in registry.listed(op, spec, HOPPER):
            if (us := kernel.model(spec, HOPPER, config)) is not None:
                models += 1
                assert 5 < us < 1000
                assert 4 < kernel.model(more, HOPPER, config) / us < 17
        assert models >= 5

    def test_products_of_32_bits_have_parameters_of_their_own(self):
        """Three products of TF32 take longer than one, and neither is a product of 16 bits."""
        layer = {"n": 8, "h": 16, "w": 16, "k": 192, "c": 192, "padding": (1, 1)}
        kernel = WEIGHT_GRAD.kernel("mma_wgrad")
        config = kernel.configs(ConvSpec(dtype="tf32", **layer), HOPPER)[0]
        one, three = (
            kernel.model(ConvSpec(dtype=d, **layer), HOPPER, config) for d in ("tf32", "fp32")
        )
        assert 1.2 * one < three < 3 * one
        kernel = FORWARD.kernel("tma")
        spec, exact = (ConvSpec(dtype=d, **layer) for d in ("tf32", "fp32"))
        tile = kernel.configs(spec, HOPPER)[0]
        assert kernel.model(spec, HOPPER, tile) > 0
        assert kernel.model(exact, HOPPER, tile) is None  # nobody has timed it

    def test_tf32_takes_twice_as_long(self):
        """Or more, of a large layer: products have half the rate."""
        for name in ("tile_mma", "tma"):
            kernel = FORWARD.kernel(name)
            wide, low = (ConvSpec(64, d, 32, 32, 384, 384, stats=True) for d in ("tf32", "bf16"))
            wide, low = (
                min(kernel.model(spec, HOPPER, c) for c in kernel.configs(spec, HOPPER))
                for spec in (wide, low)
            )
            assert 1.6 * low < wide < 2.6 * low

    def test_rows_that_are_not_whole_take_longer(self):
        """Tiles of 40 channels are those of 64 with zeros in them, which are no less to fetch."""
        for op, grad in ((FORWARD, {}), (INPUT_GRAD, {"activation": "silu"})):
            whole, fewer = (ConvSpec(64, "bf16", 32, 32, c, c, stats=not grad) for c in (64, 40))
            if grad:
                whole, fewer = (dataclasses.replace(s, first=s.c, **grad) for s in (whole, fewer))
            for name in ("tma", "tile_mma"):
                kernel = op.kernel(name)
                for config in kernel.configs(fewer, HOPPER):
                    if config in kernel.configs(whole, HOPPER):
                        times = [kernel.model(s, HOPPER, config) for s in (whole, fewer)]
                        assert 1.1 < times[1] / times[0] < 4.5, (name, config)
        assert [cost.beside_rows(c, 64, 2) for c in (16, 24, 40, 64, 88)] == [0, 16, 16, 0, 32]
        assert cost.outside_rows(128, 64, 100, 10, beyond=0.0) == 0
        assert cost.outside_rows(128, 64, 100, 10, beyond=0.5) == 10
        assert cost.outside_rows(80, 64, 100, 10, beyond=0.5) == 5 + 110

    @pytest.mark.parametrize(
        ("layer", "kernel"),
        [
            ({"n": 1, "h": 64, "w": 64, "k": 64}, "narrow_output"),
            ({"n": 4, "h": 32, "w": 32, "k": 64}, "narrow_output"),
            ({"n": 16, "h": 32, "w": 32, "k": 128}, "narrow_output"),
            ({"n": 1, "h": 32, "w": 32, "c": 128}, "tile_mma"),
            ({"n": 4, "h": 64, "w": 64, "c": 64}, "tile_mma"),
            ({"n": 64, "h": 32, "w": 32, "c": 64}, "tile_mma"),
            ({"n": 32, "h": 32, "w": 32, "c": 256}, "tile_mma"),
        ],
        ids=str,
    )
    def test_few_channels_on_one_side(self, layer, kernel):
        """Of any batch, what an H200 does fastest; no row says so."""
        head = "k" in layer
        rest = {"c": 16, "filters": (3, layer.get("k"))} if head else {"k": 16, "stats": True}
        choice = registry.select(FORWARD, ConvSpec(dtype="bf16", **layer, **rest), HOPPER)
        assert (choice.kernel.name, choice.why) == (kernel, "predicted")

    @pytest.mark.parametrize(
        ("n", "side", "channels", "kernel"),
        [
            (1, 8, 256, "single_tile"),
            (64, 8, 256, "single_tile"),
            (16, 16, 256, "single_tile"),
            (64, 16, 128, "single_tile"),
            (64, 16, 256, "conv_forward"),
            (16, 16, 512, "conv_forward"),
        ],
    )
    def test_1x1_filters_of_few_images(self, n, side, channels, kernel):
        """What an H200 does fastest where a residual is added, of few tiles and of many."""
        given = {"h": side, "w": side, "k": channels, "c": channels, "r": 1, "s": 1, "stats": True}
        spec = ConvSpec(n, "bf16", residual=True, **given)
        assert registry.select(CONV_FEW, spec, HOPPER).kernel.name == kernel

    def test_fewer_multiprocessors_take_longer(self):
        """The parameters are of an architecture, in waves of the chip at hand."""
        spec = ConvSpec(32, "bf16", 32, 32, 128, 128)
        kernel = FORWARD.kernel("tile_mma")
        for config in kernel.configs(spec, HOPPER):
            half = HOPPER._replace(num_sms=66)
            assert kernel.model(spec, half, config) > 1.5 * kernel.model(spec, HOPPER, config)

    @pytest.mark.parametrize("channels", [64, 72, 320, 768, 1280, 8192])
    def test_every_tile_of_a_norm_over_channels_is_predicted(self, channels):
        """Backward, of 16 bits: the more pixels, and the fewer multiprocessors, the longer; on a
        chip that nobody has fitted by the same parameters, in its own waves. None of 32 bits."""
        given = {"c": channels, "grad": True}
        small, large = (ChannelNormSpec(1, "bf16", 1024 * k, **given) for k in (1, 16))
        kernel = CHANNEL_NORM_GRAD.kernel("whole_rows")
        for config in kernel.configs(small, HOPPER):
            us = kernel.model(small, HOPPER, config)
            assert 2 < us < 100 and us < kernel.model(large, HOPPER, config) < 17 * us
            half = HOPPER._replace(num_sms=66)
            assert kernel.model(large, half, config) > 1.1 * kernel.model(large, HOPPER, config)
            a100 = CHIPS["a100"].gpu
            assert kernel.model(small, a100, config) is None
            as_hopper = kernel.model(small, a100._replace(arch=90), config)
            assert kernel.predict(small, a100, config) == as_hopper
        wide = dataclasses.replace(small, dtype="fp32")
        assert kernel.model(wide, HOPPER, kernel.configs(wide, HOPPER)[0]) is None
