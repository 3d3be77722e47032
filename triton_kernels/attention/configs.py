"""What one program of attention keeps and walks over, which of these tiles may be taken, and the
kernels that have them (`ATTENTION`, `CROSS_ATTENTION`, and their gradients)."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import triton

from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import AttentionSpec
from ..runtime.device import Device
from . import hopper as head
from . import relayed, streamed

_Config = TypeVar("_Config", bound=tuple)


@configures("tiles")
class Tile(NamedTuple):
    """The positions a program keeps, how many it takes at a time of the others, and its launch.

    Forward and dq keep queries and walk over keys; dk and dv keep keys and walk over queries.
    """

    keep: int
    step: int
    num_warps: int
    num_stages: int


@configures("head")
class HeadTile(NamedTuple):
    """Of `hopper`, which keeps the keys of a head in shared memory: it stages nothing."""

    keep: int
    step: int


@configures("kept")
class KeptTile(NamedTuple):
    """Of `streamed`, 256 queries a multiprocessor: those that a program keeps, keys at a time, and
    how many blocks of keys and values are in shared memory."""

    keep: int
    step: int
    slots: int


@configures("streamed")
class StreamedTile(NamedTuple):
    """Of `streamed`, one program a multiprocessor: its warpgroups, of 64 queries each, keys at a
    time, blocks of keys and of values in shared memory, and registers of a thread."""

    groups: int
    step: int
    slots: int
    registers: int


@configures("head")
class HeadGrad(NamedTuple):
    """Of its backward pass: keys that are kept, queries at a time."""

    keep: int
    step: int


@configures("relayed")
class RelayedTile(NamedTuple):
    """Of `relayed`: queries at a time, and how many blocks of them are in shared memory."""

    step: int
    slots: int


@configures("tiles")
class BwdConfig(NamedTuple):
    one_pass: bool  # one kernel that keeps all keys (T <= keep; 5 products), or two (7 products)
    keep: int  # as in `Tile`
    step: int
    num_warps: int
    num_stages: int


# What `fwd_config` and `bwd_config` choose, and what may have been measured to be faster; each is
# tested by itself.
# In 16 bits and for heads of 64 all of them fit a Hopper SM; the first of each list fits any chip.
FWD_CONFIGS = (
    Tile(64, 64, 4, 2),
    Tile(64, 128, 4, 2),
    Tile(64, 256, 4, 2),  # T = 256 and d = 32: all keys in one tile
    Tile(128, 64, 4, 3),
    Tile(128, 64, 8, 3),
    Tile(128, 128, 8, 2),
    Tile(128, 128, 8, 3),
    Tile(64, 64, 4, 3),
    Tile(64, 256, 8, 2),
    Tile(32, 32, 4, 2),
    Tile(32, 32, 8, 2),
)
BWD_CONFIGS = (
    BwdConfig(False, 64, 32, 4, 2),
    BwdConfig(False, 64, 64, 4, 2),
    BwdConfig(False, 128, 32, 4, 3),
    BwdConfig(False, 128, 64, 8, 2),
    BwdConfig(False, 32, 32, 4, 2),
    BwdConfig(False, 32, 32, 8, 2),
    BwdConfig(True, 64, 64, 4, 1),
    BwdConfig(True, 128, 64, 8, 2),
    BwdConfig(True, 256, 32, 8, 2),
    BwdConfig(True, 256, 64, 8, 1),
    BwdConfig(True, 256, 32, 8, 1),
    BwdConfig(True, 64, 64, 8, 1),
    BwdConfig(True, 64, 32, 4, 1),
    BwdConfig(True, 64, 32, 4, 2),
)


# For Hopper, in 16 bits, and only where they were measured to be faster.
FWD_HEAD_CONFIGS = (
    HeadTile(64, 128),
    HeadTile(128, 128),
    HeadTile(256, 128),
    HeadTile(256, 256),
)
BWD_HEAD_CONFIGS = (HeadGrad(256, 64),)

# The same, and of heads that shared memory cannot have, where `kept_cost` and `streamed_cost` say
# so.
KEPT_CONFIGS = (KeptTile(128, 64, 4), KeptTile(64, 64, 2))
STREAMED_CONFIGS = (StreamedTile(2, 128, 2, 240),)
RELAYED_CONFIGS = (RelayedTile(64, 4), RelayedTile(32, 4))


def fwd_config(spec: AttentionSpec) -> Tile:
    """Choices that fit every chip: compiled for sm_89 and sm_90, d = 16 to 256 and every precision,
    they spill at most 16 bytes of registers and need at most 81 KiB of shared memory."""
    row = block_d(spec.d) * spec.itemsize  # bytes of q, k or v
    if row > 512:
        return Tile(16, 16, 4, 2)
    if spec.dtype == "fp32":  # products are unrolled into FMAs
        return Tile(32, 32, 4 if row <= 256 else 8, 2)
    if row > 256:
        return Tile(32, 32, 4, 2)
    if row > 128 or spec.seen <= 64:
        return Tile(64, 64, 4, 2)
    return Tile(64, 128, 4, 2)


def bwd_config(spec: AttentionSpec) -> BwdConfig:
    row = block_d(spec.d) * spec.itemsize
    if row > 512:
        return BwdConfig(False, 16, 16, 4, 2)
    if spec.dtype == "fp32":
        return BwdConfig(False, 32, 32, 4 if row <= 256 else 8, 2)
    if row > 256:  # float32 of d = 128, or 16 bits of d = 256
        return BwdConfig(False, 32, 32, 8 if spec.itemsize == 2 else 4, 2)
    if row > 128:
        return BwdConfig(False, 64, 32, 4, 2)
    if spec.seen <= 64:
        return BwdConfig(True, 64, 64, 4, 1)
    return BwdConfig(False, 64, 64, 4, 2)


def block_d(d: int) -> int:
    """Channels of a tile that has those of a head."""
    return max(16, triton.next_power_of_2(d))


def fwd_tiles(spec: AttentionSpec, gpu: Device) -> list[Tile]:
    """The safe one first."""
    return [fwd_config(spec), *_fitting(FWD_CONFIGS, spec, gpu)]


def bwd_tiles(spec: AttentionSpec, gpu: Device) -> list[BwdConfig]:
    """The safe one first."""
    found = _fitting(BWD_CONFIGS, spec, gpu)
    return [bwd_config(spec), *(c for c in found if c.keep >= spec.seen or not c.one_pass)]


def head_tiles(spec: AttentionSpec, gpu: Device) -> list[HeadTile]:
    """Less those far beyond T."""
    longest = max(128, triton.next_power_of_2(spec.t))
    return [c for c in FWD_HEAD_CONFIGS if max(c.keep, c.step) <= longest]


_SHORT = 256  # positions, of fewer than which neither of `streamed`'s kernels was timed


def kept_cost(spec: AttentionSpec, gpu: Device, config: KeptTile) -> float:
    """Microseconds. The numbers are of one H200 in bf16: heads of 16 to 128, 300 to 4,096
    positions; of 79 choices among all kernels 76 are within 5 % of the fastest one. A head that
    fits shared memory is `hopper`'s unless this was measured to be faster."""
    step = 0.86 + 0.0055 * spec.d  # of 64 keys
    programs = spec.n * math.ceil(spec.t / config.keep)
    at_a_time = 256 // config.keep * gpu.num_sms
    us = _in_waves(programs, at_a_time, 2.2, math.ceil(spec.t / config.step) * step)
    return us if _is_long(spec, gpu) else math.inf


def streamed_cost(spec: AttentionSpec, gpu: Device, config: StreamedTile) -> float:
    """Likewise. Its programs have a multiprocessor each to themselves."""
    step = 0.63 + 0.0080 * spec.d  # of 128 keys
    programs = spec.n * math.ceil(spec.t / (64 * config.groups))
    us = _in_waves(programs, gpu.num_sms, 2.8, math.ceil(spec.t / config.step) * step)
    return us if _is_long(spec, gpu) else math.inf


def relayed_tiles(spec: AttentionSpec, gpu: Device) -> list[RelayedTile]:
    """Of 128 channels dk and dv take half of a thread's registers: there are fewer queries."""
    return [c for c in RELAYED_CONFIGS if c.step == (32 if spec.d > 64 else 64)]


def relayed_cost(spec: AttentionSpec, gpu: Device, config: RelayedTile) -> float:
    """Likewise, in bf16 on one H200, with the kernel in front, which reads o and do."""
    step = (0.58 + 0.015 * spec.d) * config.step / 64  # of 128 keys
    parts = math.ceil(spec.t / relayed.KEEP)
    front = 4 * spec.n * spec.t * spec.d / 2.7e6
    start, steps = 1.2 + 0.095 * spec.d, parts * relayed.KEEP // config.step
    us = front + _in_waves(spec.n * parts, gpu.num_sms, start, steps * step)
    return us if _is_long(spec, gpu) else math.inf


def tiles_grad_cost(spec: AttentionSpec, gpu: Device, config: BwdConfig) -> float:
    """Of the safe tile, where `relayed` could be taken: elsewhere nothing is compared with it. Its
    programs are small, and several fit a multiprocessor, so there are no waves."""
    if relayed.refuse(spec, gpu) is not None or config != bwd_config(spec):
        return math.inf
    blocks = math.ceil(spec.t / 64)
    program = 0.06 * spec.d - 0.3 + blocks * (0.32 + 0.0125 * spec.d)  # of both kernels
    us = max(1.0, spec.n * blocks / gpu.num_sms) * program
    return us if _is_long(spec, gpu) else math.inf


def _is_long(spec: AttentionSpec, gpu: Device) -> bool:
    return spec.t >= _SHORT and head.refuse(spec, gpu) is not None


def _in_waves(programs: int, at_a_time: int, start: float, steps: float) -> float:
    """Microseconds of programs that take `start` and `steps` each."""
    return math.ceil(programs / at_a_time) * (start + steps)


def _fitting(configs: Sequence[_Config], spec: AttentionSpec, gpu: Device) -> list[_Config]:
    """Those that fit, less tiles far beyond T and the keys: all of them only in 16 bits, for heads
    of at most 64, on a GPU with as much shared memory as Hopper's."""
    if spec.itemsize > 2 or block_d(spec.d) > 64 or gpu.shared_memory < 220_000:
        return []
    longest = max(64, triton.next_power_of_2(max(spec.t, spec.seen)))
    return [c for c in configs if max(c.keep, c.step) <= longest]


TILES = Kernel("tiles", Tile, lambda *_: None, fwd_tiles)
HEAD = Kernel("head", HeadTile, head.refuse, head_tiles)
KEPT = Kernel("kept", KeptTile, streamed.refuse_kept, lambda *_: KEPT_CONFIGS, kept_cost)
STREAMED = Kernel(
    "streamed", StreamedTile, streamed.refuse_streamed, lambda *_: STREAMED_CONFIGS, streamed_cost
)
RELAYED = Kernel("relayed", RelayedTile, relayed.refuse, relayed_tiles, relayed_cost)
TILES_GRAD = Kernel("tiles", BwdConfig, lambda *_: None, bwd_tiles, tiles_grad_cost)
HEAD_GRAD = Kernel("head", HeadGrad, head.refuse, lambda *_: BWD_HEAD_CONFIGS)


def _similar(spec: AttentionSpec, gpu: Device) -> bool:
    """Where a head can stay in shared memory, rows of other lengths say something too."""
    return head.refuse(spec, gpu) is None


_KEY = ("t", "d", "dtype")
ATTENTION = Op("attention", _KEY, (TILES, HEAD, KEPT, STREAMED), _similar)
ATTENTION_GRAD = Op("attention_bwd", _KEY, (TILES_GRAD, HEAD_GRAD, RELAYED), _similar)

_CROSS_KEY = ("t", "keys", "d", "dtype")
CROSS_ATTENTION = Op("cross_attention", _CROSS_KEY, (TILES, HEAD), similar=False)
CROSS_ATTENTION_GRAD = Op("cross_attention_bwd", _CROSS_KEY, (TILES_GRAD, HEAD_GRAD), similar=False)
