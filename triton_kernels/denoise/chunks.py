"""How a batch [N, H, W, C] is divided among programs, each of which has a chunk of one sample.

    elements  of a sample, H * W * C, counted in that order
    quad      four of them, for which one evaluation of Philox is good
    chunk     4 * BLOCK of them

The loss and its gradient have chunks of other sizes.
"""

import triton
import triton.language as tl

BLOCK = 256  # evaluations of Philox in a program, each good for four elements
NUM_WARPS = 4


@triton.jit
def locate(chunks, BLOCK: tl.constexpr):
    """The sample (int64) and the first quad of this program."""
    pid = tl.program_id(0)
    return (pid // chunks).to(tl.int64), (pid % chunks) * BLOCK


@triton.jit
def first_channels(offs, C: tl.constexpr, CO: tl.constexpr):
    """Where elements `offs` of [H, W, C] are in [H, W, CO]."""
    if CO == C:
        return offs
    else:
        return offs // C * CO + offs % C
