"""The forward pass of attention over many positions for Hopper, in Gluon: keys stream by.

Where a head is too large for shared memory (`hopper`), a program keeps queries in registers and
shared memory and TMA brings blocks of keys and values past them, FlashAttention-2 as `kernels` has
it. Two kernels share that loop, and differ in who loads:

- `kept`: programs of equal warps, two or four a multiprocessor, so that one takes exponentials
  while another multiplies. A block is fetched when all have read the one before it in its slot.
- `streamed`: one program, whose warpgroups multiply, 64 queries each, and have most of the
  registers; a warp beside them loads (FlashAttention-3, Shah et al. 2024, without its turns).
  So two matrices of 64 x 128 of scores and results fit, what heads of 128 need, or 64 x 64 and
  64 x 256.
"""

import math
from typing import NamedTuple

import triton

from ..hopper.descriptors import LOADER_REGISTERS, SUPPORTED
from ..registry.kernel import Kernel, configures
from ..registry.spec import AttentionSpec
from ..runtime.dependent_launch import overlapping
from ..runtime.device import Device
from ..runtime.hardware import thread_registers
from .hopper import by_heads, in_waves, is_long, refuse_heads, shared
from .operands import FwdOperands
from .tiles import block_d, is_wide

if SUPPORTED:
    from .streamed_kernels import attention_fwd_kept_kernel, attention_fwd_streamed_kernel


@configures("kept")
class KeptTile(NamedTuple):
    """Of `kept`, with 256 queries per multiprocessor."""

    keep: int  # queries of a program
    step: int  # keys at a time
    slots: int  # blocks of keys and values in shared memory


@configures("streamed")
class StreamedTile(NamedTuple):
    """Of `streamed`, with one program per multiprocessor."""

    groups: int  # warpgroups, of 64 queries each
    step: int  # keys at a time
    slots: int  # blocks of keys, and blocks of values, in shared memory
    registers: int  # per thread


# These run where they were measured to be faster; for heads that do not fit shared memory, also
# where their costs say so
KEPT_CONFIGS = (KeptTile(128, 64, 4), KeptTile(64, 64, 2))
STREAMED_CONFIGS = (StreamedTile(2, 128, 2, 240), StreamedTile(2, 64, 2, 240))
# channels of tiles, which heads fill or are padded to
KEPT_DIMS = (16, 32, 64)  # of 128, results alone take half of a thread's 128 registers
STREAMED_DIMS = (16, 32, 64, 128, 256)
_KEPT_THREADS = 512  # of programs that fit a multiprocessor together


def refuse_kept(spec: AttentionSpec, gpu: Device) -> str | None:
    """Why `kept` cannot compute this: not on Hopper, not in 16 bits, or not heads like these."""
    return refuse_heads(spec, gpu, KEPT_DIMS, padded=True)


def refuse_streamed(spec: AttentionSpec, gpu: Device) -> str | None:
    """Why `streamed` cannot, likewise."""
    return refuse_heads(spec, gpu, STREAMED_DIMS, padded=True)


def streamed_tiles(spec: AttentionSpec, gpu: Device) -> list[StreamedTile]:
    """With 256 channels, results and shared memory leave room for 64 keys."""
    return [c for c in STREAMED_CONFIGS if c.step == (64 if is_wide(spec.d) else 128)]


def kept_cost(spec: AttentionSpec, gpu: Device, config: KeptTile) -> float:
    """Microseconds. The numbers were fitted on one H200 in bf16, with heads of 16 to 128 channels
    and 300 to 4,096 positions; of 79 choices among all kernels 76 are within 5 % of the fastest.
    `hopper` computes a head that fits shared memory, unless this kernel was measured to be
    faster."""
    step = 0.86 + 0.0055 * block_d(spec.d)  # of 64 keys
    programs = spec.n * math.ceil(spec.t / config.keep)
    at_a_time = 256 // config.keep * gpu.num_sms
    us = in_waves(programs, at_a_time, 2.2, math.ceil(spec.t / config.step) * step)
    return us if is_long(spec, gpu) else math.inf


def streamed_cost(spec: AttentionSpec, gpu: Device, config: StreamedTile) -> float:
    """Microseconds, fitted like `kept_cost`. A multiprocessor has one program."""
    d = block_d(spec.d)
    start, step = max(2.8, 0.022 * d), (0.63 + 0.0080 * d) * config.step / 128
    programs = spec.n * math.ceil(spec.t / (64 * config.groups))
    us = in_waves(programs, gpu.num_sms, start, math.ceil(spec.t / config.step) * step)
    return us if is_long(spec, gpu) else math.inf


def _forward_kept(config: KeptTile, operands: FwdOperands) -> None:
    """o and lse of qkv."""
    (keep, step, slots), (qkv, _, _, o, lse, constants) = config, operands
    n, t, _ = qkv.shape
    attention_fwd_kept_kernel[(n * constants["num_heads"] * triton.cdiv(t, keep),)](
        by_heads(qkv, keep, constants), by_heads(qkv, step, constants),
        by_heads(o, keep, constants), lse,
        **shared(constants, "BLOCK_D"), STEP=step, SLOTS=slots, num_warps=keep // 16,
        maxnreg=thread_registers(_KEPT_THREADS), **overlapping(qkv.device, n * t),
    )  # fmt: skip


def _forward_streamed(config: StreamedTile, operands: FwdOperands) -> None:
    """The same."""
    (groups, step, slots, registers), (qkv, _, _, o, lse, constants) = config, operands
    n, t, _ = qkv.shape
    # what a thread has at the launch; warpgroups then hand registers to each other
    equal = (groups * registers + LOADER_REGISTERS) // (groups + 1) // 8 * 8
    attention_fwd_streamed_kernel[(n * constants["num_heads"] * triton.cdiv(t, 64 * groups),)](
        by_heads(qkv, 64, constants), by_heads(qkv, step, constants), by_heads(o, 64, constants),
        lse, **shared(constants, "BLOCK_D"), GROUPS=groups, STEP=step, SLOTS=slots,
        REGISTERS=registers, num_warps=4, maxnreg=equal, **overlapping(qkv.device, n * t),
    )  # fmt: skip


KEPT = Kernel(
    "kept", KeptTile, refuse_kept, lambda *_: KEPT_CONFIGS, kept_cost, launch=_forward_kept
)
STREAMED = Kernel(
    "streamed", StreamedTile, refuse_streamed, streamed_tiles, streamed_cost,
    launch=_forward_streamed,
)  # fmt: skip
