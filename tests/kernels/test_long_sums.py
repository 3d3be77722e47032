"""Sums over pixels are cut so that what tensor cores cut off does not grow with the batch."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from triton_kernels.conv.configs import WgradOperands
from triton_kernels.conv.hopper.weight_grads import (
    fp16_split_wgrad,
    group_wgrad,
    mma_wgrad,
    row_wgrad,
)
from triton_kernels.conv.plain import gather_wgrad, pointwise_wgrad
from triton_kernels.conv.plain.by_tma import tma_stride, tma_wgrad
from triton_kernels.conv.weight_grad import plan, weight_grad_spec
from triton_kernels.conv.wgrad_group import conv_weight_grads, grads_spec
from triton_kernels.conv.wgrad_parts import Gradient
from triton_kernels.reductions import long_sums
from triton_kernels.reductions.column_sum import num_splits
from triton_kernels.reductions.long_sums import MOST_PRODUCTS, fewest_parts
from triton_kernels.runtime.device import Device, standing_for

H100 = Device(tma=True, num_sms=132, shared_memory=232_448, hopper=True)
MEASURED = H100._replace(arch=90)  # with rows, whose numbers of parts are of other batches
A100 = Device(tma=False, num_sms=108, shared_memory=166_912)
BATCHES = (8, 32, 128, 512, 2048, 4096)
BF16 = torch.bfloat16


# --- the model ------------------------------------------------------------------------------------


def towards_zero(v):
    """float64 cut off to the 24 bits of a float32, which a tensor core does to a sum."""
    return (v.view(np.int64) & ~np.int64(2**29 - 1)).view(np.float64)


def in_bfloat16(v):
    return torch.from_numpy(v).to(torch.bfloat16).double().numpy()


def in_tf32(v):
    bits = (v.astype(np.float32).view(np.int32) + 0x1000) & -0x2000
    return bits.view(np.float32).astype(np.float64)


ROUNDED = {
    "bfloat16": (in_bfloat16, 16),
    "float16": (lambda v: v.astype(np.float16).astype(np.float64), 16),
    "tf32": (in_tf32, 8),
}


@pytest.mark.parametrize("grows", [False, True], ids=["random walk", "growing"])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_error_of_a_part(dtype, grows):
    """Bit for bit what a tensor core does to 64 sums of the longest part: as `long_sums` says."""
    rounded, pixels = ROUNDED[dtype]
    draw = np.random.default_rng(0)
    exact, acc = np.zeros(64), np.zeros(64)
    for _ in range(MOST_PRODUCTS):
        a, b = (rounded(draw.standard_normal((pixels, 64))) for _ in range(2))
        product = (abs(a * b) if grows else a * b).sum(0)
        exact += product
        acc = towards_zero(acc + product)
    error = np.linalg.norm(acc - exact) / np.linalg.norm(exact)
    model = 0.36 * 2**-23 * MOST_PRODUCTS / (2 if grows else math.sqrt(3))
    assert 0.7 * model < error < 1.3 * model
    assert abs(acc).sum() < abs(exact).sum()


def relative_error(batch, parts):
    """Of 16 sums over the pixels of a batch of 64 x 64, in so many parts, which are then added up
    in float32."""
    products = batch * 64 * 64 // 16
    draw = np.random.default_rng(0)
    exact, acc = np.zeros((parts, 16)), np.zeros((parts, 16))
    for step in range(-(-products // parts)):
        product = 4 * draw.standard_normal((parts, 16))
        product[products - step * parts :] = 0
        exact += product
        acc = towards_zero(acc + product)
    total = acc.astype(np.float32).sum(0)  # pairwise, as blocks of parts are
    return np.linalg.norm(total - exact.sum(0)) / np.linalg.norm(exact.sum(0))


def planned(batch, channels=64):
    """Into how many parts the fused step on an H100 cuts the sums of a layer of 64 x 64."""
    x, dy, weight = tensors(batch, 64, 64, channels, channels, 3, BF16)
    return row_wgrad.splits_of(weight_grad_spec(x, dy, weight, 1, (1, 1), "tf32"), H100)


def test_error_does_not_grow_with_the_batch(monkeypatch):
    """Up to where a part has as many products as it may it grows, and then no more; without the
    limit it does."""
    bound = 3e-8 * MOST_PRODUCTS
    errors = {batch: relative_error(batch, planned(batch, 128)) for batch in BATCHES}
    assert max(errors.values()) < bound
    assert errors[4096] < 1.5 * errors[512]
    monkeypatch.setattr(long_sums, "MOST_PRODUCTS", 10**9)
    unlimited = relative_error(4096, planned(4096, 128))
    assert unlimited > 4 * bound > 4 * errors[4096]


# --- the plans ------------------------------------------------------------------------------------


def test_fewest_parts():
    assert fewest_parts(0, BF16) == fewest_parts(1, BF16) == fewest_parts(16 * MOST_PRODUCTS, BF16)
    assert fewest_parts(16 * MOST_PRODUCTS + 1, BF16) == 2
    assert fewest_parts(16 * MOST_PRODUCTS, torch.float32) == 2  # a product is of 8 pixels
    assert fewest_parts(10**9, torch.float32, "ieee") == 1  # added up, rounded to the nearest


def test_splits_fill_the_places_beyond_the_fewest():
    """Nine sums on 132 places: 14 parts are one round. If 15 are the fewest, two rounds are."""
    assert num_splits(9, 1024, 132) == 14
    assert num_splits(9, 1024, 132, 15) == 29
    assert num_splits(1, 10, 132, 20) == 10


def tensors(n, h, w, ci, co, r, dtype, stride=1):
    x = torch.empty((n, h, w, ci), dtype=dtype, device="meta")
    dy = torch.empty((n, h // stride, w // stride, co), dtype=dtype, device="meta")
    return x, dy, torch.empty((co, ci, r, r), device="meta")


PATHS = {  # (precision, stride, dtype, GPU, layers [H, W, CI, CO, R], configurations)
    "tma": (
        "tf32", 1, BF16, H100,
        ((64, 64, 64, 64, 3), (64, 64, 192, 192, 3), (17, 19, 64, 64, 3), (64, 64, 128, 64, 1),
         (64, 64, 16, 64, 3)),
        tma_wgrad.WGRAD_CONFIGS,
    ),
    "stride 2": (
        "tf32", 2, BF16, H100, ((64, 64, 64, 64, 3), (32, 32, 256, 256, 3)),
        tma_stride.WGRAD_CONFIGS,
    ),
    "gather": (
        "tf32", 1, BF16, A100,
        ((64, 64, 3, 64, 3), (64, 64, 64, 3, 3), (17, 19, 33, 65, 3)),
        gather_wgrad.WGRAD_CONFIGS,
    ),
    "gather, tf32": (
        "tf32", 1, torch.float32, A100, ((64, 64, 64, 64, 3), (64, 64, 3, 64, 3)),
        gather_wgrad.WGRAD_CONFIGS,
    ),
    "tf32": (
        "tf32", 1, torch.float32, H100,
        ((64, 64, 64, 64, 3), (64, 64, 64, 128, 1), (17, 19, 64, 64, 3)),
        [
            *mma_wgrad.TILES, *pointwise_wgrad.TILES, gather_wgrad.WGRAD_CONFIGS[0],
        ],
    ),
    "tf32, in float16": (
        "tf32", 1, torch.float32, H100,
        ((64, 64, 64, 64, 3), (8, 8, 256, 256, 3)), [fp16_split_wgrad.TILE],
    ),
}  # fmt: skip


def takes(config, r):
    """Whether the taps of a program, if it has several, divide those of the filter."""
    if isinstance(config, pointwise_wgrad.PointwiseWgrad) and r > 1:
        return False
    return r % getattr(config, "taps", 1) == 0 and r % getattr(config, "rows", 1) == 0


def products_of_part(dy, parts, step):
    """At most: the boxes of pixels of a part may reach over the edges of images, where there are
    zeros."""
    pixels = dy.numel() // dy.shape[3] / parts + step
    return pixels / (8 if dy.dtype == torch.float32 else 16)


@pytest.mark.parametrize("path", PATHS)
def test_parts_of_every_plan(path):
    """By the rule of thumb and by each configuration."""
    precision, stride, dtype, gpu, layers, configs = PATHS[path]
    for batch in BATCHES:
        for h, w, ci, co, r in layers:
            x, dy, weight = tensors(batch, h, w, ci, co, r, dtype, stride)
            given = x, dy, weight, stride, (r // 2, r // 2), precision
            for config in (None, *(c for c in configs if takes(c, r))):
                with standing_for(gpu):
                    taken = plan(WgradOperands(*given), config)
                step = taken.tile.block_m
                assert products_of_part(dy, taken.splits, step) <= MOST_PRODUCTS + step / 8, taken


@pytest.mark.parametrize("path", ["tma", "stride 2", "tf32"])
def test_parts_of_measured_rows(path):
    precision, stride, dtype, _, layers, _ = PATHS[path]
    for batch in BATCHES:
        for h, w, ci, co, r in layers:
            x, dy, weight = tensors(batch, h, w, ci, co, r, dtype, stride)
            given = x, dy, weight, stride, (r // 2, r // 2), precision
            with standing_for(MEASURED):
                taken = plan(WgradOperands(*given))
            step = taken.tile.block_m
            assert products_of_part(dy, taken.splits, step) <= MOST_PRODUCTS + step / 8


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_parts_of_several(share, monkeypatch):
    """Pieces of one list are as long as parts may be, and each block has two of a program at
    most."""
    seen = []
    monkeypatch.setattr(group_wgrad, "launch_rows", lambda *given: seen.append(given[1]))
    for batch in BATCHES:
        group = [Gradient(*tensors(batch, 32, 32, ci, 128, 3, BF16)) for ci in (256, 128, 192)]
        with standing_for(H100):
            spec = grads_spec(group, True)
            assert group_wgrad.refuse(spec, H100) is None
            tiles = group_wgrad.tiles(spec, H100)
            for tile in tiles:
                conv_weight_grads(*group, share=share, config=tile)
                blocks = group_wgrad.count_blocks(spec)
                steps = group_wgrad.count_tiles(spec)
                piece = -(-blocks * steps // seen[-1]) * 256
                assert piece / 16 <= MOST_PRODUCTS + 256 / 16
                assert blocks <= seen[-1] <= blocks * steps
        assert tiles


def test_usual_batches_are_cut_as_before(monkeypatch):
    """What has no long sums is not cut any further."""
    plans = []
    spec = weight_grad_spec(*tensors(8, 64, 64, 64, 64, 3, BF16), 1, (1, 1), "tf32")
    for most in (MOST_PRODUCTS, 10**9):
        monkeypatch.setattr(long_sums, "MOST_PRODUCTS", most)
        for batch in (8, 32, 64):
            tile = tma_wgrad.WGRAD_CONFIGS[0]
            plans.append(tma_wgrad.num_parts(dataclasses.replace(spec, n=batch), H100, tile))
    assert plans[:3] == plans[3:]
