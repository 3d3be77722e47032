"""Which kernels are set up while the previous kernel drains."""

import pytest
import torch

from triton_kernels.conv import fused as conv
from triton_kernels.conv.fused_spec import forward_spec
from triton_kernels.norm.passes import apply
from triton_kernels.runtime import dependent_launch
from triton_kernels.runtime.dependent_launch import dependent_launches, overlapping
from triton_kernels.runtime.device import Device, describe

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    chip = Device(tma=True, num_sms=132, shared_memory=232_448, hopper=True)
    monkeypatch.setattr(dependent_launch, "describe", lambda _: chip)


@pytest.mark.parametrize(
    ("batch", "pixels", "overlaps"),
    [
        (2**12, None, True),
        (2**16, None, False),  # a kernel that does not know goes by its network
        (2**16, 2**14, True),
        (2**12, 2**16, False),
        (2**16, 0, True),
    ],
)
def test_small_kernels_overlap(batch, pixels, overlaps):
    with dependent_launches(batch):
        assert bool(overlapping(CUDA, pixels)) == overlaps


def test_only_within_the_block_and_on_a_gpu():
    assert overlapping(CUDA) == {}
    with dependent_launches(2**16):
        with dependent_launches():
            assert overlapping(CUDA) == {"launch_pdl": True}
            assert overlapping(torch.device("cpu")) == {}
        assert overlapping(CUDA) == {}
    assert overlapping(CUDA, 0) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("side", [3, 1])
@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_gpu_convolutions_wait_for_what_they_read(size, side, device):
    """Two norms and two convolutions, each of which reads what the previous kernel writes."""
    x = torch.randn(16, size, size, 64, device=device).bfloat16()
    weight = torch.randn(64, 64, side, side, device=device).bfloat16() / (8 * side)
    weight = weight.contiguous(memory_format=torch.channels_last)
    bias = torch.randn(64, device=device)
    table = torch.randn(16, 4, 64, device=device)
    spec, gpu = forward_spec(x, weight), describe(device)
    kernels = [k for k in conv.FORWARD.kernels if k.name != "tma"]  # those for Hopper GPUs
    kernels = [k for k in kernels if k.refuse(spec, gpu) is None]
    configs = [config for kernel in kernels for config in kernel.configs(spec, gpu)]
    if not gpu.hopper:
        pytest.skip("no Hopper GPU")
    assert configs

    def run(config):
        y, _ = conv.conv_forward(apply(x, None, table, "silu"), weight, bias, config=config)
        return conv.conv_forward(apply(y, None, table, "silu"), weight, bias, config=config)[0]

    for config in configs:
        want = run(config)
        with dependent_launches():
            for _ in range(5):
                assert torch.equal(run(config), want), config
