"""Convolutions of few images that load their filters before the previous kernel has ended.

    parts[s, n, co, p], whose sum over s is conv(x) + 1x1 convolutions of other tensors

At batch 1 a convolution is a chain of dependent steps. A loop that fetches one 64x64 tile of
filters and one of pixels per step takes 0.23 us per step, with any number of buffers. Here a
program loads the filters of up to 512 terms of the sum (channels of taps) before it waits for its
input. After the wait it loads all pixels at once: one round trip to memory and one long product.

    before the wait   load filters [BLOCK_C, BLOCK_K]; compute addresses and taps
    after the wait    load x [BLOCK_M, BLOCK_K], for each tap its pixels; product; store

A longer sum is cut into parts. If there were too many parts, each part takes several rounds, and
the filters of the first two rounds are loaded before the wait. With up to three rounds, the pixels
of a round are loaded before the product of the round before. The 1x1 convolutions are a part of
their own. A tile has BLOCK_M successive pixels of all images.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...registry.cost import HOPPER, Work
from ...registry.kernel import Kernel
from ...registry.spec import FEW_IMAGES, ConvSpec
from ...runtime.dependent_launch import overlapping
from ...runtime.device import Device, describe
from ..refusals import BITS_16, Only, odd_channels
from .parts import MOST_PARTS, SplitOperands, refuse_boxes
from .small_batch_kernels import conv_early_kernel

_DEEPEST = 512  # terms of a product: 64 registers of a thread for filters, 64 for pixels
_MAX_PIXELS = 1024  # of all images; with more a loop over tiles is faster


class EarlyConfig(NamedTuple):
    """A program computes a tile in `rounds` rounds of `block_k` terms of the sum."""

    block_c: int  # output channels
    block_m: int  # pixels
    block_k: int
    rounds: int
    num_warps: int


def split_early(config: EarlyConfig, operands: SplitOperands) -> Tensor:
    """The parts. Filters are read before earlier kernels of the stream have ended, so none of these
    may write them."""
    x, weight, extra, _ = operands
    n, h, w, ci = x.shape
    co, _, r, s = weight.shape
    splits = triton.cdiv(r * s * ci, config.rounds * config.block_k)
    out = operands.parts(splits + bool(extra))
    channels = [other.shape[3] for other, _ in extra]
    programs = triton.cdiv(n * h * w, config.block_m) * triton.cdiv(co, config.block_c)
    rows = weight.permute(0, 2, 3, 1).reshape(co, r * s * ci)
    box = [config.block_c, config.block_k]
    filters = TensorDescriptor(rows, list(rows.shape), [r * s * ci, 1], box)
    depths = _extra_depths(config, channels)
    others = []
    for (other, w1x1), depth in zip(extra, depths, strict=False):
        strides, block = list(w1x1.stride()), [config.block_c, depth]
        others += [other, TensorDescriptor(w1x1, list(w1x1.shape), strides, block)]
    rest = [c > depth for c, depth in zip((*channels, 0, 0), depths, strict=False)]
    conv_early_kernel[(programs, len(out))](
        x, filters, *(others + [None] * 4)[:4], out, n * h * w, ci, *(channels + [0, 0])[:2], co,
        splits, h, w, r, s, "tf32", config.block_c, config.block_m, config.block_k, *depths, *rest,
        config.rounds, _early(config, x), num_warps=config.num_warps, num_stages=1,
        **overlapping(x.device),
    )  # fmt: skip
    return out


def _extra_depths(config: EarlyConfig, channels: Sequence[int]) -> list[int]:
    """Channels of each of the two 1x1 convolutions that a program loads at once."""
    most = min(config.block_k, _DEEPEST // 2)
    return [min(max(triton.next_power_of_2(c), 16), most) for c in (*channels, 16, 16)[:2]]


def _early(config: EarlyConfig, x: Tensor) -> int:
    """Rounds whose filters fit shared memory together with the pixels of one round."""
    tile = config.block_k * x.itemsize
    room = describe(x.device).shared_memory - config.block_m * tile - 4096
    return min(config.rounds, max(room // (config.block_c * tile), 1), 2)


def split_config(spec: ConvSpec, gpu: Device) -> EarlyConfig:
    """The fewest parts that keep half of the multiprocessors busy. Parts take several rounds where
    there would be more programs than multiprocessors."""
    terms, sms = spec.taps * spec.k, gpu.num_sms
    for block_m, block_k in ((64, 512), (32, 512), (64, 256), (32, 256)):
        tiles = triton.cdiv(spec.n * spec.h * spec.w, block_m) * triton.cdiv(spec.c, 64)
        parts = triton.cdiv(terms, block_k)
        if 2 * tiles * parts >= 0.95 * sms and parts <= MOST_PARTS:
            break
    rounds = 1
    while rounds < parts and tiles * triton.cdiv(parts, rounds) > sms:
        rounds += 1
    return EarlyConfig(64, block_m, block_k, rounds, 8 if block_k == 512 else 4)


def _work(spec: ConvSpec, gpu: Device, _: tuple) -> Work:
    """The work of the programs of `split_early`. The 1x1 convolutions are a part of their own."""
    config, pixels = split_config(spec, gpu), spec.n * spec.h * spec.w
    terms = config.rounds * config.block_k
    parts = triton.cdiv(spec.taps * spec.k, terms) + bool(spec.extra)
    tiles = triton.cdiv(pixels, config.block_m) * triton.cdiv(spec.c, config.block_c)
    return Work(
        tiles=tiles * parts,
        resident=1,
        products=config.block_c * config.block_m * terms,
        fetched=(config.block_c + config.block_m) * terms * spec.itemsize,
        steps=config.rounds,
        written=config.block_c * config.block_m,
        memory=spec.bytes,
        parts=4 * parts * pixels * spec.c if parts > 1 else 0,
        splits=parts,
    )


def _launch(_: tuple, operands: SplitOperands) -> Tensor:
    return split_early(split_config(operands.spec, describe(operands.x.device)), operands)


def _refuse(spec: ConvSpec, gpu: Device) -> str | None:
    only = Only(dtypes=BITS_16, stride=1)
    return refuse_boxes(spec, gpu) or only(spec, gpu) or odd_channels(16, [spec.k])


def _untimed(spec: ConvSpec, gpu: Device) -> str | None:
    many = spec.n > FEW_IMAGES or spec.n * spec.h * spec.w > _MAX_PIXELS
    return f"it does {FEW_IMAGES} images and {_MAX_PIXELS} pixels at most" if many else None


KERNEL = Kernel(
    "early_parts",
    refuse=_refuse,
    launch=_launch,
    work=_work,
    borrows=HOPPER,
    untimed=_untimed,
    adds=("extra",),
)
