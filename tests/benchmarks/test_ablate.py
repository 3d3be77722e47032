"""benchmarks.ablate: what is left out is not launched, and an impossible variant is said to be."""

import os
import subprocess
import sys

import pytest

from benchmarks import ablate
from benchmarks.harness import ROOT
from diffusion.errors import ConfigError


def test_a_kernel_that_is_left_out_is_not_launched():
    """By a process with Triton's compiler, which the interpreter replaces in this one."""
    names = "denoise_loss,conv_few/early,conv_few/conv_forward+early,early+early_parts"
    command = [sys.executable, "-m", "benchmarks.ablate", "model=unet_tiny", "batch=2"]
    command += ["what=evaluate", "gpu=h100", f"kernels={names}"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    every, loss, early, forward, both = said.stdout.splitlines()
    assert every.startswith("evaluate 2x64x64x3 unet_tiny bf16 without nothing: ")
    assert loss.endswith("without denoise_loss: the same")
    assert "7 conv_early_kernel" in early and "conv_early_kernel" not in early.split("->")[1]
    assert "impossible: ValueError: no kernel computes" in forward
    assert "21 conv_early_kernel" in both and "early" not in both.split("->")[1]


def test_an_unknown_kernel_is_named():
    with pytest.raises(ConfigError, match="has conv_tiles; there are hopper, tma, .*tile_mma"):
        ablate.main(["kernels=conv_tiles", "gpu=h100"])
