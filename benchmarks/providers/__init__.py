"""Who computes each op: these kernels, and what PyTorch, its compiler, cuDNN and cuBLAS have.

A provider gets the inputs in the layout of `triton_kernels`, brings them into the layout it likes
best before the clock starts, and hands its result back in ours after the clock has stopped. So the
alternatives pay for no conversion that their own networks would not need.
"""

from benchmarks.cases import (
    AdamWCase,
    AttentionCase,
    Case,
    ConvCase,
    CrossAttentionCase,
    DenoiseCase,
    NormCase,
)
from benchmarks.experiment import Experiment
from benchmarks.providers import adamw, attention, conv, cross_attention, denoise, group_norm

_BY_CASE = {
    ConvCase: conv,
    NormCase: group_norm,
    AttentionCase: attention,
    CrossAttentionCase: cross_attention,
    AdamWCase: adamw,
    DenoiseCase: denoise,
}


def experiments(case: Case, count: int, dtype: str) -> list[Experiment]:
    """What there is to time of a case whose activations are `dtype`."""
    return _BY_CASE[type(case)].experiments(case, count, dtype)


def absent(op: str) -> list[str]:
    """What an op would be compared with as well, were it installed; a line each."""
    return group_norm.absent() if op == "group_norm" else []
