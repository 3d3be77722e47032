"""benchmarks.ablate: what is left out is not launched, and an impossible variant is said to be."""

import pytest

from benchmarks import ablate
from diffusion.errors import ConfigError
from tests.end_to_end.run import run


def said_of(*settings):
    """By a process with Triton's compiler, which the interpreter replaces in this one."""
    command = "-m", "benchmarks.ablate", "batch=2", "gpu=h100", "processes=2"
    code, out, err = run(*command, *settings)
    assert code == 0, err
    return out.splitlines()


@pytest.mark.long
def test_a_kernel_that_is_left_out_is_not_launched():
    names = "denoise_loss,conv_few/one_row,conv_few/conv_forward,one_row+early_parts"
    every, loss, rows, forward, both = said_of(
        "model=unet_tiny", "what=evaluate", f"kernels={names}"
    )
    assert every.startswith("evaluate 2x64x64x3 unet_tiny bf16 as a whole: ")
    assert loss.endswith("without denoise_loss: the same")
    with_rows, without = rows.split("->")
    assert "2 conv_one_row_kernel" in with_rows and "conv_one_row_kernel" not in without
    assert "impossible: ValueError: no kernel computes" in forward
    with_both, without = both.split("->")
    for name in ("conv_one_row_kernel", "conv_early_kernel"):
        assert name in with_both and name not in without


@pytest.mark.long
def test_a_row_of_the_fuse_table_that_is_left_out_changes_the_launches():
    names = "k and v are one,gradient of 1x1 skips in dx+sums in the epilogue"
    every, qkv, kv, two = said_of("model=unet_tiny", f"rows={names}")
    assert every.startswith("train 2x64x64x3 unet_tiny bf16 as a whole: ")
    assert every.endswith(" launches of two steps")
    assert qkv.endswith("q, k and v are one product: the same")  # its layers are made so
    assert kv.endswith("without k and v are one product: the same")
    assert "skip_dx_kernel" in two and "skip_dx_kernel" not in two.split("->")[1]


@pytest.mark.long
def test_a_row_of_the_plan_of_a_module_of_ones_own():
    (_, said) = said_of("model=examples/own_module.py:make", "rows=embedding are one")
    with_row, without = said.split("->")
    assert "1 conv_forward_kernel" in with_row and "6 conv_forward_kernel" in without


def test_a_row_that_changes_calls_of_pytorch_alone_is_timed():
    same = {"launches": ["a kernel"], "taken": {}}
    found = {
        "": same | {"rows": ["parts", "casts"]},
        "parts": same | {"rows": ["casts"]},
        "of another network": same | {"rows": ["parts", "casts"]},
        "impossible": {"error": "no kernel"},
    }
    assert ablate.changed(found) == ["parts"]


def test_an_unknown_kernel_is_named():
    with pytest.raises(ConfigError, match="has conv_tiles; there are hopper, tma, .*tile_mma"):
        ablate.main(["kernels=conv_tiles", "gpu=h100"])
    with pytest.raises(ConfigError, match="rows=conv_tiles is unknown; there are q, k and v"):
        ablate.main(["rows=conv_tiles", "gpu=h100"])
