"""Which kernels are set up while the launch in front drains."""

import pytest
import torch

from triton_kernels import dependent_launch
from triton_kernels.dependent_launch import dependent_launches, overlapping
from triton_kernels.device import Device

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
