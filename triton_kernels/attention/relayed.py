"""The backward pass of attention over many positions for Hopper, in Gluon: dq is relayed.

A program keeps keys, and blocks of queries come by: five products and one set of exponentials, as
in FlashAttention-3 (Shah et al. 2024). What the programs of a head contribute to dq is added up in
memory, in float32, and always in the same order, so that bits do not differ from run to run. Each
program begins at other queries and goes round all of them: no two are at the same ones. A flag of
each block of queries says how many have been there, and the next one waits for it. It is two steps
behind, so it hardly ever does. The last one at a block takes its sum and writes dq.

- Two warpgroups multiply. The products for dk and dq of a block run beside the exponentials of the
  next one. Each keeps keys of its own; of heads of more than 128 channels, whose dk and dv would
  not fit its registers, both keep the same, and p and ds go from one to the other by shared memory.
- Three warps beside them load, wait for flags, and set flags: none of this takes their time.
- An earlier kernel computes delta = sum_c o do, and sets all flags to zero.

Programs of a head wait for each other, so all of them have to be on the GPU at a time. They begin
in the order of their numbers: those of the first head that is not done are there if a head has no
more programs than fit beside others that wait (`_SHARE`).
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..hopper.descriptors import SUPPORTED
from ..registry.kernel import Kernel, configures
from ..registry.spec import AttentionSpec
from ..runtime.dependent_launch import following, overlapping
from ..runtime.device import Device
from ..runtime.hardware import WARP, thread_registers
from .hopper import by_heads, in_waves, is_long, refuse_heads, shared
from .kernels import attention_bwd_delta_kernel
from .operands import BwdOperands
from .tiles import block_d, is_wide

if SUPPORTED:
    from .relayed_kernels import attention_bwd_relayed_kernel


@configures("relayed")
class RelayedTile(NamedTuple):
    """What comes by."""

    step: int  # queries at a time
    slots: int  # blocks of queries in shared memory


# These run where they were measured to be faster; for heads that do not fit shared memory, also
# where their costs say so
RELAYED_CONFIGS = (RelayedTile(64, 4), RelayedTile(32, 4))
DIMS = (32, 64, 128, 256)  # channels of tiles, which heads fill or are padded to
_WARPS = 8  # that multiply
_SHARE = 4  # one multiprocessor in so many has a program of the same head, at most


def keys_of(d: int) -> int:
    """Keys of a program: 64 of each of the two warpgroups or, of heads so wide that dk and dv of 64
    keys take both of them, 64 that they share."""
    return 64 if is_wide(d) else 128


def refuse(spec: AttentionSpec, gpu: Device) -> str | None:
    """Why dq cannot be relayed: not on Hopper, not in 16 bits, not heads like these, or more
    programs a head than are sure to run at the same time."""
    if reason := refuse_heads(spec, gpu, DIMS, padded=True):
        return reason
    keys = keys_of(spec.d)
    if spec.t <= keys:
        return f"{spec.t} positions, the keys of one program"
    programs, most = triton.cdiv(spec.t, keys), gpu.num_sms // _SHARE
    if programs > most:
        return (
            f"{spec.t} positions are {programs} programs that wait for each other; at most {most}"
        )
    return None


def relayed_tiles(spec: AttentionSpec, gpu: Device) -> list[RelayedTile]:
    """With 128 channels dk and dv take half of a thread's registers, so a step has fewer
    queries."""
    return [c for c in RELAYED_CONFIGS if c.step == (32 if block_d(spec.d) > 64 else 64)]


def relayed_cost(spec: AttentionSpec, gpu: Device, config: RelayedTile) -> float:
    """Microseconds, fitted like `streamed.kept_cost`, with the kernel before it, which reads o and
    do."""
    d = block_d(spec.d)
    keys = keys_of(spec.d)
    # as long for 64 keys that two warpgroups share as for 128
    step = (0.58 + 0.015 * d) * config.step / 64
    parts = math.ceil(spec.t / keys)
    front = 4 * spec.n * spec.t * spec.d / 2.7e6
    start, steps = (1.2 + 0.095 * d) * keys / 128, parts * keys // config.step
    us = front + in_waves(spec.n * parts, gpu.num_sms, start, steps * step)
    return us if is_long(spec, gpu) else math.inf


def _backward(config: RelayedTile, operands: BwdOperands) -> Tensor | None:
    """dqkv, and rows of `BwdOperands`, of blocks of `keys_of` positions."""
    (step, slots), (do, qkv, _, _, o, lse, dqkv, _, _, constants) = config, operands
    n, t, _ = qkv.shape
    heads, width, keys = constants["num_heads"], constants["BLOCK_D"], keys_of(constants["D"])
    rows, parts = operands.rows(keys), triton.cdiv(t, keys)
    delta, dq, flags = (
        qkv.new_empty((n, heads, *shape), dtype=torch.float32)
        for shape in ((t,), (parts * keys, width), (parts * keys // step,))
    )
    flags = flags.view(torch.int32)
    grid = (n * heads * parts,)
    attention_bwd_delta_kernel[grid](
        do, o, delta, flags, heads,
        T=t, D=constants["D"], BLOCK_D=width, ROWS=keys, FLAGS=keys // step, num_warps=4,
        **overlapping(qkv.device),
    )  # fmt: skip
    attention_bwd_relayed_kernel[grid](
        by_heads(qkv, step, constants), by_heads(qkv, keys, constants),
        by_heads(do, step, constants), by_heads(dqkv, step, constants),
        by_heads(dqkv, keys, constants), lse, delta, dq, flags, rows,
        **shared(constants, "D", "BLOCK_D"), KEYS=keys, STEP=step, SLOTS=slots,
        # the three warps that do not multiply take the registers of four
        num_warps=_WARPS, maxnreg=thread_registers(12 * WARP), **following(qkv.device),
    )  # fmt: skip
    return rows


RELAYED = Kernel("relayed", RelayedTile, refuse, relayed_tiles, relayed_cost, launch=_backward)
