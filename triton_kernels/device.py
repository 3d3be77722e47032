"""What a launcher has to know of the GPU to choose a path and a tile."""

from functools import lru_cache
from typing import NamedTuple

import torch


class Device(NamedTuple):
    """Capability and size of a GPU."""

    tma: bool  # boxes of a tensor are fetched by the TMA unit (compute capability 9 and later)
    num_sms: int
    shared_memory: int  # bytes that one program may use
    hopper: bool = False  # compute capability 9, whose wgmma no other has


@lru_cache
def describe(device: torch.device) -> Device:
    """The GPU behind `device`; the interpreter stands in for a very small Hopper."""
    if device.type != "cuda":
        return Device(tma=True, num_sms=4, shared_memory=232_448)
    properties = torch.cuda.get_device_properties(device)
    return Device(
        tma=properties.major >= 9,
        num_sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        hopper=properties.major == 9,
    )
