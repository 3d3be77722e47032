"""The kernels of attention (`ATTENTION`, `CROSS_ATTENTION`, and their gradients), and the
configurations and costs of those in Gluon; those of plain Triton are in `attention.tiles`."""

import math
from typing import NamedTuple

import triton

from ..registry.cost import AMPERE
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import AttentionSpec
from ..runtime.device import Device
from . import hopper as head, relayed, streamed, tile_launch, tiles
from .few_keys import FEW_KEYS, FEW_KEYS_GRAD
from .tiles import BwdConfig, Tile, block_d, bwd_config, bwd_tiles, fwd_tiles, work


@configures("head")
class HeadTile(NamedTuple):
    """Of `hopper`, which has all keys of a head in shared memory."""

    keep: int  # queries of a program
    step: int  # keys at a time


@configures("kept")
class KeptTile(NamedTuple):
    """Of `streamed.forward_kept`, with 256 queries per multiprocessor."""

    keep: int  # queries of a program
    step: int  # keys at a time
    slots: int  # blocks of keys and values in shared memory


@configures("streamed")
class StreamedTile(NamedTuple):
    """Of `streamed.forward_streamed`, with one program per multiprocessor."""

    groups: int  # warpgroups, of 64 queries each
    step: int  # keys at a time
    slots: int  # blocks of keys, and blocks of values, in shared memory
    registers: int  # per thread


@configures("head")
class HeadGrad(NamedTuple):
    """Of the backward pass of `hopper`, which has a whole head in shared memory."""


@configures("relayed")
class RelayedTile(NamedTuple):
    """Of `relayed`."""

    step: int  # queries at a time
    slots: int  # blocks of queries in shared memory


# `head` runs only where it was measured to be faster
FWD_HEAD_CONFIGS = (
    HeadTile(64, 128),
    HeadTile(128, 128),
    HeadTile(256, 128),
    HeadTile(256, 256),
)

# These run where they were measured to be faster; for heads that do not fit shared memory, also
# where their costs say so
KEPT_CONFIGS = (KeptTile(128, 64, 4), KeptTile(64, 64, 2))
STREAMED_CONFIGS = (StreamedTile(2, 128, 2, 240),)
RELAYED_CONFIGS = (RelayedTile(64, 4), RelayedTile(32, 4))


def head_tiles(spec: AttentionSpec, gpu: Device) -> list[HeadTile]:
    """The configurations, without those far larger than T."""
    longest = max(128, triton.next_power_of_2(spec.t))
    return [c for c in FWD_HEAD_CONFIGS if max(c.keep, c.step) <= longest]


_SHORT = 256  # positions; the kernels of `streamed` were not timed with fewer


def kept_cost(spec: AttentionSpec, gpu: Device, config: KeptTile) -> float:
    """Microseconds. The numbers were fitted on one H200 in bf16, with heads of 16 to 128 channels
    and 300 to 4,096 positions; of 79 choices among all kernels 76 are within 5 % of the fastest.
    `hopper` computes a head that fits shared memory, unless this kernel was measured to be
    faster."""
    step = 0.86 + 0.0055 * block_d(spec.d)  # of 64 keys
    programs = spec.n * math.ceil(spec.t / config.keep)
    at_a_time = 256 // config.keep * gpu.num_sms
    us = _in_waves(programs, at_a_time, 2.2, math.ceil(spec.t / config.step) * step)
    return us if _is_long(spec, gpu) else math.inf


def streamed_cost(spec: AttentionSpec, gpu: Device, config: StreamedTile) -> float:
    """Microseconds, fitted like `kept_cost`. A multiprocessor has one program."""
    step = 0.63 + 0.0080 * block_d(spec.d)  # of 128 keys
    programs = spec.n * math.ceil(spec.t / (64 * config.groups))
    us = _in_waves(programs, gpu.num_sms, 2.8, math.ceil(spec.t / config.step) * step)
    return us if _is_long(spec, gpu) else math.inf


def relayed_tiles(spec: AttentionSpec, gpu: Device) -> list[RelayedTile]:
    """With 128 channels dk and dv take half of a thread's registers, so a step has fewer
    queries."""
    return [c for c in RELAYED_CONFIGS if c.step == (32 if block_d(spec.d) > 64 else 64)]


def relayed_cost(spec: AttentionSpec, gpu: Device, config: RelayedTile) -> float:
    """Microseconds, fitted like `kept_cost`, with the kernel before it, which reads o and do."""
    d = block_d(spec.d)
    step = (0.58 + 0.015 * d) * config.step / 64  # of 128 keys
    parts = math.ceil(spec.t / relayed.KEEP)
    front = 4 * spec.n * spec.t * spec.d / 2.7e6
    start, steps = 1.2 + 0.095 * d, parts * relayed.KEEP // config.step
    us = front + _in_waves(spec.n * parts, gpu.num_sms, start, steps * step)
    return us if _is_long(spec, gpu) else math.inf


def tiles_grad_cost(spec: AttentionSpec, gpu: Device, config: BwdConfig) -> float:
    """Microseconds of the default tile where `relayed` can run; elsewhere no other kernel is
    compared with it. Several of its small programs fit a multiprocessor, so waves are not
    counted."""
    if relayed.refuse(spec, gpu) is not None or config != bwd_config(spec):
        return math.inf
    blocks, d = math.ceil(spec.t / 64), block_d(spec.d)
    program = 0.06 * d - 0.3 + blocks * (0.32 + 0.0125 * d)  # us of both kernels
    us = max(1.0, spec.n * blocks / gpu.num_sms) * program
    return us if _is_long(spec, gpu) else math.inf


def _is_long(spec: AttentionSpec, gpu: Device) -> bool:
    return spec.t >= _SHORT and head.refuse(spec, gpu) is not None


def _in_waves(programs: int, at_a_time: int, start: float, steps: float) -> float:
    """Microseconds of programs that each take `start` plus `steps`."""
    return math.ceil(programs / at_a_time) * (start + steps)


TILES = Kernel(
    "tiles",
    Tile,
    tiles.refuse,
    fwd_tiles,
    launch=tile_launch.forward,
    work=work,
    borrows=AMPERE,
)
HEAD = Kernel("head", HeadTile, head.refuse, head_tiles, launch=head.forward)
KEPT = Kernel(
    "kept", KeptTile, streamed.refuse_kept, lambda *_: KEPT_CONFIGS, kept_cost,
    launch=streamed.forward_kept,
)  # fmt: skip
STREAMED = Kernel(
    "streamed", StreamedTile, streamed.refuse_streamed, lambda *_: STREAMED_CONFIGS, streamed_cost,
    launch=streamed.forward_streamed,
)  # fmt: skip
RELAYED = Kernel(
    "relayed", RelayedTile, relayed.refuse, relayed_tiles, relayed_cost, launch=relayed.backward
)
TILES_GRAD = Kernel(
    "tiles",
    BwdConfig,
    tiles.refuse,
    bwd_tiles,
    tiles_grad_cost,
    launch=tile_launch.backward,
    work=work,
    fitted_by=("one_pass",),
    borrows=AMPERE,
)
HEAD_GRAD = Kernel("head", HeadGrad, head.refuse, launch=head.backward)


def _similar(spec: AttentionSpec, gpu: Device) -> bool:
    """Whether rows of other lengths count: where a head fits shared memory."""
    return head.refuse(spec, gpu) is None


_KEY = ("t", "d", "dtype")
ATTENTION = Op("attention", _KEY, (TILES, HEAD, KEPT, STREAMED), _similar)
ATTENTION_GRAD = Op("attention_bwd", _KEY, (TILES_GRAD, HEAD_GRAD, RELAYED), _similar)

_CROSS_KEY = ("t", "keys", "d", "dtype")
CROSS_ATTENTION = Op("cross_attention", _CROSS_KEY, (TILES, FEW_KEYS), similar=False)
CROSS_ATTENTION_GRAD = Op(
    "cross_attention_bwd", _CROSS_KEY, (TILES_GRAD, FEW_KEYS_GRAD), similar=False
)
