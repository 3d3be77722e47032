"""Tiles whose sums several programs share: every tile, whole and in parts, beside float64."""

import pytest
import torch

from triton_kernels.conv.conv2d import _conv2d_fwd, conv2d_input_grad
from triton_kernels.conv.fused import FORWARD
from triton_kernels.conv.plain.split_tiles import TILES, Config
from triton_kernels.reductions import last_program
from triton_kernels.registry.chips import chip
from triton_kernels.registry.choose import select
from triton_kernels.registry.spec import ConvSpec

from .conv_cases import (
    DTYPES as PRECISIONS,
    ROUNDING,
    Shape as Plain,
    make,
    padding_of,
    references,
    relative,
)
from .conv_fused_cases import (
    DTYPES,
    Shape,
    check_extra,
    check_forward,
    check_grad,
    needs_tma,  # noqa: F401  a fixture for every test here
    tensor_cores,  # noqa: F401  a fixture for every test here
)
from .poison import poison_outputs

PARTS = (1, 2, 5)
SHAPES = {
    "few pixels": Shape(3, 4, 4, 136, 72),
    "parts of images": Shape(2, 8, 8, 72, 40),
    "odd": Shape(3, 5, 7, 72, 40),
    "samples": Shape(37, 1, 1, 264, 72, 1),
}
LONG = {  # where programs of a tile run beside one another, and arrive in any order
    "policy": Shape(64, 4, 4, 512, 256),
    "samples": Shape(64, 1, 1, 4096, 272, 1),
    "odd": Shape(5, 7, 9, 520, 136),
}


def config_of(tile: tuple[int, ...], dtype: torch.dtype, splits: int) -> Config:
    block_c, block_m, row, *rest = tile
    return Config(block_c, block_m, row // dtype.itemsize, *rest, splits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", PARTS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_every_tile(tile, splits, dtype, device, monkeypatch):
    """Sums, terms, and the input gradient with its norm; nothing is left in the counters."""
    poison_outputs(monkeypatch)
    config = config_of(tile, dtype, splits)
    shape = SHAPES[list(SHAPES)[(TILES.index(tile) + splits) % len(SHAPES)]]
    check_forward(shape, dtype, device, config)
    check_extra(shape, 72, 24, dtype, device, config)
    check_grad(shape, None, dtype, device, config=config)
    assert not any(counters.any() for counters in last_program._of_streams.values())


@pytest.mark.parametrize("splits", PARTS)
@pytest.mark.parametrize("precision", ["fp16", pytest.param("bf16", marks=pytest.mark.gpu), "tf32"])
def test_without_an_epilogue(precision, splits, device, monkeypatch):
    """Forward and input gradient of `conv2d`."""
    poison_outputs(monkeypatch)
    dtype, tf32 = PRECISIONS[precision]
    shape = Plain(3, 5, 6, 72, 136)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    x, weight, bias, dy = make(shape, dtype, device)
    exact, low = references(shape, x, weight, bias, dy)
    options = shape.stride, padding_of(shape), tf32, config_of(TILES[2], dtype, splits)
    got = _conv2d_fwd(x, weight.to(dtype), bias, *options)
    dx = conv2d_input_grad(dy, weight.to(dtype), x.shape[1:3], *options)
    for result, wanted, rounded in zip((got, dx), exact, low, strict=False):
        budget = 2 * relative(rounded, wanted) + ROUNDING[precision] + 1e-6
        assert relative(result, wanted) <= budget


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("splits", [2, 7, 16])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
@pytest.mark.parametrize("name", LONG)
def test_bits_are_equal_at_every_run(name, tile, splits, dtype, device):
    """Whichever program is the last, it adds the parts in their order."""
    shape, config, results = LONG[name], config_of(tile, dtype, splits), []
    for _ in range(5):
        results.append(
            [
                *check_forward(shape, dtype, device, config),
                *check_grad(shape, None, dtype, device, config=config),
            ]
        )
        assert all(map(torch.equal, results[-1], results[0]))


def test_they_are_for_few_tiles_with_long_sums():
    """By the model of costs, on GPUs of both sizes; not where whole tiles keep a GPU busy, nor
    where a sum is short."""
    for name in ("h100", "h200"):
        gpu = chip(name).gpu

        def taken(n: int, k: int, taps: int, gpu=gpu) -> str:
            spec = ConvSpec(n, "bf16", 1, 4, k, 512, 1, taps, stats=True, filters=(512, k))
            return select(FORWARD, spec, gpu).kernel.name

        assert taken(64, 2048, 5) == taken(16, 512, 5) == "split_tiles"
        assert taken(64, 64, 1) != "split_tiles" != taken(4096, 512, 5)
        edge = ConvSpec(1, "bf16", 257, 66, 512, 64, 3, 3, stats=True, filters=(64, 512))
        assert select(FORWARD, edge, gpu).kernel.name != "split_tiles"  # no such tile covers it
