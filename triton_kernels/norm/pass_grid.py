"""How a pass over memory is cut into programs, for launchers of any normalization.

A program has TILES tiles of BLOCK_P pixels by BLOCK_C channels of [N, HW, C1 + C2]: of one image,
and of one of the two halves, which need not be one tensor.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import triton

from ..runtime.device import Device
from ..runtime.hardware import REGISTERS

# Numbers that one program keeps in registers: a quarter of them, beside what it computes with
MOST_HELD = REGISTERS // 4


class PassConfig(NamedTuple):
    """What a program of a pass does."""

    tile: int  # elements of a tile
    tiles: int  # tiles of a program in a large image
    num_warps: int


class PassGrid(NamedTuple):
    """The programs of a pass, as `cut_pass` makes them."""

    programs: int
    k: int  # chunks of pixels an image
    cb1: int  # blocks of channels of the first half
    cb: int  # and of both
    masked: bool  # some tiles reach over an edge
    tiles: int
    block_p: int
    block_c: int

    @property
    def tile(self) -> tuple[bool, int, int, int]:
        """MASKED, TILES, BLOCK_P, BLOCK_C."""
        return self.masked, self.tiles, self.block_p, self.block_c


def channel_block(*channels: int) -> int:
    """A power of two that divides the channels, so that all lanes work; if that is less than 32, a
    masked block is better."""
    common = math.gcd(*channels)
    divisor = common & -common
    return min(divisor if divisor >= 32 else triton.next_power_of_2(max(channels)), 128)


def cut_pass(
    n: int,
    hw: int,
    c1: int,
    c2: int,  # 0: one tensor
    config: PassConfig,
    gpu: Device,
    *,
    min_pixels: int = 1,  # of a tile
    min_tile: int | None = None,  # elements
) -> PassGrid:
    """The grid of a pass. Where it has few programs for the GPU, each has fewer tiles, down to one,
    and then, with min_tile, smaller ones, down to so many elements."""
    block_c = channel_block(c1, c2)
    cb1 = triton.cdiv(c1, block_c)
    cb = cb1 + triton.cdiv(c2, block_c)
    block_p = min(config.tile // block_c, triton.next_power_of_2(max(hw, 1)))
    block_p = max(block_p, min_pixels)
    tiles = min(config.tiles, triton.next_power_of_2(max(triton.cdiv(hw, block_p), 1)))

    def few() -> bool:
        return n * cb * triton.cdiv(hw, tiles * block_p) < gpu.busy

    while tiles > 1 and few():
        tiles //= 2
    if min_tile is not None:
        smallest = max(min_tile // block_c, min_pixels)
        while block_p > smallest and few():
            block_p //= 2
    k = triton.cdiv(hw, tiles * block_p)
    masked = any(
        size % block > 0 for size, block in ((hw, tiles * block_p), (c1, block_c), (c2, block_c))
    )
    return PassGrid(n * k * cb, k, cb1, cb, masked, tiles, block_p, block_c)


def cut_evenly(
    n: int, hw: int, c1: int, c2: int, wanted: int, block_p: int, block_c: int
) -> PassGrid:
    """The grid of a pass that leaves sums of every chunk: about as many chunks an image as are
    wanted, all of one size, and tiles of at most so many pixels."""
    k = divisor_near(hw, max(wanted, 1))
    pixels = hw // k
    block_p = min(block_p, triton.next_power_of_2(max(pixels, 1)))
    tiles = max(triton.cdiv(pixels, block_p), 1)
    cb1 = triton.cdiv(c1, block_c)
    cb = cb1 + triton.cdiv(c2, block_c)
    # the kernels go through four tiles at a time
    masked = pixels % block_p + c1 % block_c + c2 % block_c + tiles % min(tiles, 4) > 0
    return PassGrid(n * k * cb, k, cb1, cb, masked, tiles, block_p, block_c)


@lru_cache
def divisor_near(number: int, wanted: int) -> int:
    """The largest divisor up to what is wanted; if that is less than half of it, the nearest."""
    low = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0] or [1]
    divisors = sorted({*low, *(number // k for k in low if number)})
    below = max(k for k in divisors if k <= wanted)
    if 2 * below >= wanted:
        return below
    return min(divisors, key=lambda k: max(k / wanted, wanted / k))
