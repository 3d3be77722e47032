"""What a launcher has to know of the GPU to choose a path and a tile, and which families of kernels
are switched off."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch


class Device(NamedTuple):
    """Capability and size of a GPU."""

    tma: bool  # boxes of a tensor are fetched by the TMA unit (compute capability 9 and later)
    num_sms: int
    shared_memory: int  # bytes that one program may use
    hopper: bool = False  # compute capability 9, whose wgmma no other has
    arch: int = 0  # compute capability, ten times: 90; 0 of the interpreter


_INTERPRETER = Device(tma=True, num_sms=4, shared_memory=232_448)  # stands in for a small Hopper

FAMILIES = ("hopper", "tma")  # of kernels, after what of a `Device` they need
_VARIABLE = "TRITON_KERNELS_OFF"  # families, with commas between, that are off from the start
_off: dict[str, str] | None = None  # family -> why; None: not looked at yet

_stood_for: Device | None = None  # by tensors in the host's memory, in a rehearsal


def describe(device: torch.device) -> Device:
    """The GPU behind `device`, without what is switched off, or that which it stands for."""
    if _stood_for is not None:
        return _stood_for
    found = _describe(device) if device.type == "cuda" else _INTERPRETER
    off = switched_off()
    return found._replace(**dict.fromkeys(off, False)) if off else found


def switched_off() -> dict[str, str]:
    """The families of kernels that are not used, and why.

    Raises ValueError if TRITON_KERNELS_OFF names one that there is not."""
    global _off
    if _off is None:
        named = [name for name in os.environ.get(_VARIABLE, "").split(",") if name]
        if unknown := [name for name in named if name not in FAMILIES]:
            raise ValueError(f"{_VARIABLE} has {unknown[0]}; there are {', '.join(FAMILIES)}")
        _off = dict.fromkeys(named, f"{_VARIABLE} names them")
    return _off


def switch_off(family: str, why: str) -> None:
    """Use no kernel of this family from now on, in this process and in those that it starts. What
    has been planned or captured goes on as it is."""
    off = switched_off()
    off.setdefault(family, why)
    os.environ[_VARIABLE] = ",".join(off)


def on_gpu(device: torch.device) -> bool:
    """Whether kernels over tensors there run on a GPU; in a rehearsal, whether they would."""
    return device.type == "cuda" or _stood_for is not None


def is_rehearsal() -> bool:
    """Whether tensors in the host's memory stand for a GPU's, and no kernel writes to them."""
    return _stood_for is not None


@contextmanager
def standing_for(gpu: Device) -> Iterator[None]:
    """Within the block launchers take any device for this GPU. See `rehearsal`."""
    global _stood_for
    before, _stood_for = _stood_for, gpu
    try:
        yield
    finally:
        _stood_for = before


@lru_cache
def _describe(device: torch.device) -> Device:
    properties = torch.cuda.get_device_properties(device)
    return Device(
        tma=properties.major >= 9,
        num_sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        hopper=properties.major == 9,
        arch=10 * properties.major + properties.minor,
    )
