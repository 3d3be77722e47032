"""Cases, rows and models that are small enough for tests of the benchmarks."""

import torch

from benchmarks import parity, steps
from benchmarks.cases import (
    AdamWCase,
    AttentionCase,
    ConvCase,
    CrossAttentionCase,
    DenoiseCase,
    NormCase,
    model_settings,
)
from benchmarks.harness import Row

CPU = torch.device("cpu")

TINY = [
    ConvCase(2, 5, 4, 8, 16, 3, 3, 1, False, True),
    ConvCase(2, 4, 4, 16, 8, 1, 1, 1, False, True),
    ConvCase(2, 6, 6, 8, 8, 3, 3, 2, False, False),
    NormCase(2, 4, 3, 8, 4, "silu", False),
    NormCase(2, 2, 3, 8, 2, "identity", True),
    AttentionCase(2, 16, 32, 2, "qkv_heads"),
    AttentionCase(1, 16, 32, 2, "heads_qkv"),
    CrossAttentionCase(3, 16, 5, 32, 2),
    AdamWCase((70, 31, 1)),
    DenoiseCase(2, 4, 4, 3),
]


def row(**changes) -> Row:
    values = {
        "op": "conv2d",
        "shape": "32x64x64 64->64 3x3",
        "dtype": "bf16",
        "pass_": "fwd",
        "provider": "triton",
        "median_us": 28.5,
        "p20_us": 28.25,
        "p80_us": 29.0,
        "bytes": 2**35,
        "flops": 9663676416,
        "gpu": "nvidia-h200",
        "torch": "2.11.0+cu130",
        "triton": "3.6.0",
        "commit": "abc1234",
        "run": "20261101T120000Z",
    }
    return Row(**(values | changes))


def tiny_settings(monkeypatch):
    settings = model_settings("unet64") | {
        "model_channels": 8,
        "num_groups": 4,
        "num_head_channels": 4,
        "num_res_blocks": 1,
        "zero_init": False,
    }
    for module in (steps, parity):
        monkeypatch.setattr(module, "model_settings", lambda name: settings)
