"""The kernels of attention (`ATTENTION`, `CROSS_ATTENTION`, and their gradients), and what one
program of those in Gluon keeps and walks over; that of plain Triton is in `attention.tiles`."""

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
    """Of its backward pass, which keeps all of a head."""


@configures("relayed")
class RelayedTile(NamedTuple):
    """Of `relayed`: queries at a time, and how many blocks of them are in shared memory."""

    step: int
    slots: int


# For Hopper, in 16 bits, and only where they were measured to be faster.
FWD_HEAD_CONFIGS = (
    HeadTile(64, 128),
    HeadTile(128, 128),
    HeadTile(256, 128),
    HeadTile(256, 256),
)

# The same, and of heads that shared memory cannot have, where `kept_cost` and `streamed_cost` say
# so.
KEPT_CONFIGS = (KeptTile(128, 64, 4), KeptTile(64, 64, 2))
STREAMED_CONFIGS = (StreamedTile(2, 128, 2, 240),)
RELAYED_CONFIGS = (RelayedTile(64, 4), RelayedTile(32, 4))


def head_tiles(spec: AttentionSpec, gpu: Device) -> list[HeadTile]:
    """Less those far beyond T."""
    longest = max(128, triton.next_power_of_2(spec.t))
    return [c for c in FWD_HEAD_CONFIGS if max(c.keep, c.step) <= longest]


_SHORT = 256  # positions, of fewer than which neither of `streamed`'s kernels was timed


def kept_cost(spec: AttentionSpec, gpu: Device, config: KeptTile) -> float:
    """Microseconds. The numbers are of one H200 in bf16: heads of 16 to 128, 300 to 4,096
    positions; of 79 choices among all kernels 76 are within 5 % of the fastest one. A head that
    fits shared memory is `hopper`'s unless this was measured to be faster."""
    step = 0.86 + 0.0055 * block_d(spec.d)  # of 64 keys
    programs = spec.n * math.ceil(spec.t / config.keep)
    at_a_time = 256 // config.keep * gpu.num_sms
    us = _in_waves(programs, at_a_time, 2.2, math.ceil(spec.t / config.step) * step)
    return us if _is_long(spec, gpu) else math.inf


def streamed_cost(spec: AttentionSpec, gpu: Device, config: StreamedTile) -> float:
    """Likewise. Its programs have a multiprocessor each to themselves."""
    step = 0.63 + 0.0080 * block_d(spec.d)  # of 128 keys
    programs = spec.n * math.ceil(spec.t / (64 * config.groups))
    us = _in_waves(programs, gpu.num_sms, 2.8, math.ceil(spec.t / config.step) * step)
    return us if _is_long(spec, gpu) else math.inf


def relayed_tiles(spec: AttentionSpec, gpu: Device) -> list[RelayedTile]:
    """Of 128 channels dk and dv take half of a thread's registers: there are fewer queries."""
    return [c for c in RELAYED_CONFIGS if c.step == (32 if block_d(spec.d) > 64 else 64)]


def relayed_cost(spec: AttentionSpec, gpu: Device, config: RelayedTile) -> float:
    """Likewise, in bf16 on one H200, with the kernel in front, which reads o and do."""
    d = block_d(spec.d)
    step = (0.58 + 0.015 * d) * config.step / 64  # of 128 keys
    parts = math.ceil(spec.t / relayed.KEEP)
    front = 4 * spec.n * spec.t * spec.d / 2.7e6
    start, steps = 1.2 + 0.095 * d, parts * relayed.KEEP // config.step
    us = front + _in_waves(spec.n * parts, gpu.num_sms, start, steps * step)
    return us if _is_long(spec, gpu) else math.inf


def tiles_grad_cost(spec: AttentionSpec, gpu: Device, config: BwdConfig) -> float:
    """Of the safe tile, where `relayed` could be taken: elsewhere nothing is compared with it. Its
    programs are small, and several fit a multiprocessor, so there are no waves."""
    if relayed.refuse(spec, gpu) is not None or config != bwd_config(spec):
        return math.inf
    blocks, d = math.ceil(spec.t / 64), block_d(spec.d)
    program = 0.06 * d - 0.3 + blocks * (0.32 + 0.0125 * d)  # of both kernels
    us = max(1.0, spec.n * blocks / gpu.num_sms) * program
    return us if _is_long(spec, gpu) else math.inf


def _is_long(spec: AttentionSpec, gpu: Device) -> bool:
    return spec.t >= _SHORT and head.refuse(spec, gpu) is not None


def _in_waves(programs: int, at_a_time: int, start: float, steps: float) -> float:
    """Microseconds of programs that take `start` and `steps` each."""
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
    """Where a head can stay in shared memory, rows of other lengths say something too."""
    return head.refuse(spec, gpu) is None


_KEY = ("t", "d", "dtype")
ATTENTION = Op("attention", _KEY, (TILES, HEAD, KEPT, STREAMED), _similar)
ATTENTION_GRAD = Op("attention_bwd", _KEY, (TILES_GRAD, HEAD_GRAD, RELAYED), _similar)

_CROSS_KEY = ("t", "keys", "d", "dtype")
CROSS_ATTENTION = Op("cross_attention", _CROSS_KEY, (TILES, FEW_KEYS), similar=False)
CROSS_ATTENTION_GRAD = Op(
    "cross_attention_bwd", _CROSS_KEY, (TILES_GRAD, FEW_KEYS_GRAD), similar=False
)
