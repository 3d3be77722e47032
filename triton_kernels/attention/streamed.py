"""The forward pass of attention over many positions for Hopper, in Gluon: keys stream by.

Where a head is too large for shared memory (`hopper`), a program keeps queries in registers and
shared memory and TMA brings blocks of keys and values past them, FlashAttention-2 as `kernels` has
it. Two kernels share that loop, and differ in who loads:

- `kept`: programs of equal warps, two or four a multiprocessor, so that one takes exponentials
  while another multiplies. A block is fetched when all have read the one before it in its slot.
- `streamed`: one program, whose warpgroups multiply, 64 queries each, and have most of the
  registers; a warp beside them loads (FlashAttention-3, Shah et al. 2024, without its turns).
  So two matrices of 64 x 128 of scores and results fit: what heads of 128 need.
"""

import triton

from ..hopper.descriptors import LOADER_REGISTERS, SUPPORTED
from ..registry.spec import AttentionSpec
from ..runtime.dependent_launch import overlapping
from ..runtime.device import Device
from ..runtime.hardware import thread_registers
from .hopper import by_heads, refuse_heads, shared
from .operands import FwdOperands

if SUPPORTED:
    from .streamed_kernels import attention_fwd_kept_kernel, attention_fwd_streamed_kernel

# channels of tiles, which heads fill or are padded to
KEPT_DIMS = (16, 32, 64)  # of 128, results alone take half of a thread's 128 registers
STREAMED_DIMS = (16, 32, 64, 128)
_KEPT_THREADS = 512  # of programs that fit a multiprocessor together


def refuse_kept(spec: AttentionSpec, gpu: Device) -> str | None:
    """Why `kept` cannot compute this: not on Hopper, not in 16 bits, or not heads like these."""
    return refuse_heads(spec, gpu, KEPT_DIMS, padded=True)


def refuse_streamed(spec: AttentionSpec, gpu: Device) -> str | None:
    """Why `streamed` cannot, likewise."""
    return refuse_heads(spec, gpu, STREAMED_DIMS, padded=True)


def forward_kept(config: tuple[int, int, int], operands: FwdOperands) -> None:
    """o and lse of qkv: so many queries a program, so many keys at a time, of which so many blocks
    are in shared memory."""
    (keep, step, slots), (qkv, _, _, o, lse, constants) = config, operands
    n, t, _ = qkv.shape
    attention_fwd_kept_kernel[(n * constants["num_heads"] * triton.cdiv(t, keep),)](
        by_heads(qkv, keep, constants), by_heads(qkv, step, constants),
        by_heads(o, keep, constants), lse,
        **shared(constants, "BLOCK_D"), STEP=step, SLOTS=slots, num_warps=keep // 16,
        maxnreg=thread_registers(_KEPT_THREADS), **overlapping(qkv.device, n * t),
    )  # fmt: skip


def forward_streamed(config: tuple[int, int, int, int], operands: FwdOperands) -> None:
    """The same with groups of 64 queries a program, each a warpgroup with so many registers a
    thread, and so many blocks of keys and as many of values."""
    (groups, step, slots, registers), (qkv, _, _, o, lse, constants) = config, operands
    n, t, _ = qkv.shape
    # what a thread has at the launch; warpgroups then hand registers to each other
    equal = (groups * registers + LOADER_REGISTERS) // (groups + 1) // 8 * 8
    attention_fwd_streamed_kernel[(n * constants["num_heads"] * triton.cdiv(t, 64 * groups),)](
        by_heads(qkv, 64, constants), by_heads(qkv, step, constants), by_heads(o, 64, constants),
        lse, **shared(constants, "BLOCK_D"), GROUPS=groups, STEP=step, SLOTS=slots,
        REGISTERS=registers, num_warps=4, maxnreg=equal, **overlapping(qkv.device, n * t),
    )  # fmt: skip
