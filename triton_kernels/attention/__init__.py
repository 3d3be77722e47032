"""Multi-head attention, forward and backward: of a packed [N, T, 3C] tensor to itself, and of
queries [N, T, C] to keys and values [N, L, 2C] of other positions, some of which may be masked.

    s = q k^T / sqrt(d)    p = softmax(s)    o = p v             per sample and head

The forward pass is the online softmax of FlashAttention-2 (Dao 2023, algorithm 1): a program keeps
BLOCK_M queries, walks over the keys in blocks of BLOCK_N, and never writes s. What the backward
pass (algorithm 2) needs of the softmax is one float32 a row, the logarithm of its denominator:

    lse = log sum_j exp s_j    p = exp(s - lse)    delta = sum_c o_c do_c    dp = do v^T
    ds = p (dp - delta)    dq = ds k / sqrt(d)    dk = ds^T q / sqrt(d)    dv = p^T do

Exponentials are taken in base 2, the hardware's: log2(e) is folded into the scale, and `lse` is
kept in base 2 as well. Scores, statistics and accumulators are float32.

Layout: q, k and v are read by strides where the projection put them, and dq, dk and dv are written
into tensors like theirs; nothing is permuted or copied. T, L and D are compile-time constants (a
model has two or three of each): a row that fits one tile has no loop, and a T that is a multiple of
the tile has no masks. There are no atomics: the same input gives the same bits.

`op` is what PyTorch sees, `launch` has its passes and lists the kernels that they may take:
`tiles` and `few_keys` of plain Triton; on Hopper `hopper` keeps a head in shared memory, past the
queries of `streamed` come the keys of a longer one, and past the keys of `relayed` its queries.
"""

from .launch import attention_backward, attention_fwd, cross_attention_bwd, cross_attention_fwd
from .op import attention, cross_attention

__all__ = [
    "attention",
    "attention_backward",
    "attention_fwd",
    "cross_attention",
    "cross_attention_bwd",
    "cross_attention_fwd",
]
