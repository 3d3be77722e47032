"""Properties of the GPU on which the choice of kernels depends, and the kernels that are switched
off, by family or by name in the registry."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch

from .hardware import BESIDE_BUFFERS

_OLDEST = 80  # compute capability, ten times: the first with products of bf16 and TF32


class Device(NamedTuple):
    """Capability and size of a GPU."""

    tma: bool  # boxes of a tensor are fetched by the TMA unit (compute capability 9 and later)
    num_sms: int
    shared_memory: int  # bytes that one program may use
    hopper: bool = False  # compute capability 9, whose wgmma no other has
    arch: int = 0  # compute capability, ten times: 90; 0 of the interpreter
    off: str = ""  # kernels of the registry that are switched off, with commas between

    @property
    def busy(self) -> int:
        """Programs of four warps that keep it busy: just below eight a multiprocessor, so that
        powers of two are enough for chips whose multiprocessors are a few more than one."""
        return int(7.75 * self.num_sms) + 1

    @property
    def loops(self) -> int:
        """Programs that keep it busy where each loops over a part of memory: four for each
        multiprocessor."""
        return 4 * self.num_sms

    def holds(self, shared: int) -> int:
        """Programs whose buffers have so many bytes of shared memory that a multiprocessor has room
        for at a time; 0: not for one."""
        return self.shared_memory // (shared + BESIDE_BUFFERS)

    @property
    def lacks(self) -> str | None:
        """What every kernel here needs and the GPU lacks; None: nothing."""
        if not 0 < self.arch < _OLDEST:
            return None
        capability, oldest = (f"{arch // 10}.{arch % 10}" for arch in (self.arch, _OLDEST))
        return f"the GPU has compute capability {capability}; the kernels need {oldest} or later"

    @property
    def mma_sync(self) -> bool:
        """Whether products in plain Triton are mma.sync, neither wgmma (9) nor tcgen05 (10)."""
        return self.arch // 10 in (8, 12)


_INTERPRETER = Device(tma=True, num_sms=4, shared_memory=232_448)  # stands in for a small Hopper

FAMILIES = ("hopper", "tma")  # of kernels, after what of a `Device` they need
_VARIABLE = "TRITON_KERNELS_OFF"  # what is off from the start, with commas between
# what else may be switched off: "tile_mma", or "conv_norm/tile_mma" of one op (`registry.kernel`)
kernels: set[str] = set()
_off: dict[str, str] | None = None  # family or kernel -> why; None: not looked at yet

_stood_for: Device | None = None  # by whatever tensors there are, see `standing_for`
_rehearses = False


def describe(device: torch.device) -> Device:
    """The GPU behind `device`, without what is switched off, or that which it stands for."""
    if _stood_for is not None:
        return _stood_for
    found = _describe(device) if device.type == "cuda" else _INTERPRETER
    off = switched_off()
    return _without(found, off) if off else found


def _without(gpu: Device, names: Iterable[str]) -> Device:
    """A GPU on which these families and kernels are off."""
    names = set(names)
    families = names.intersection(FAMILIES)
    off = {*gpu.off.split(","), *names} - {"", *families}
    return gpu._replace(**dict.fromkeys(families, False), off=",".join(sorted(off)))


def switched_off() -> dict[str, str]:
    """The families of kernels, and the kernels, that are not used, and why.

    Raises ValueError if TRITON_KERNELS_OFF names one that there is not."""
    global _off
    if _off is None:
        _off = dict.fromkeys(_known(os.environ.get(_VARIABLE, "")), f"{_VARIABLE} names them")
    return _off


def _known(text: str) -> list[str]:
    """The names in it. ValueError: one of them is nothing that could be switched off."""
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in {*FAMILIES, *kernels}]:
        valid = ", ".join((*FAMILIES, *sorted(name for name in kernels if "/" not in name)))
        raise ValueError(f"{_VARIABLE} has {unknown[0]}; there are {valid}; or OP/KERNEL")
    return names


def switch_off(name: str, why: str) -> None:
    """Use no kernel of this family or name from now on, in this process and in those that it
    starts. What has been planned or captured goes on as it is."""
    off = switched_off()
    off.setdefault(name, why)
    os.environ[_VARIABLE] = ",".join(off)


@contextmanager
def without(names: str) -> Iterator[None]:
    """Within the block kernels of these names, with commas between, are off as well, in this
    process alone. What has been planned or captured goes on as it is.

    Raises ValueError if one of them is unknown."""
    global _off, _stood_for
    before = switched_off(), _stood_for
    named = _known(names)
    _off = dict.fromkeys(named, "left out") | before[0]
    if _stood_for is not None:
        _stood_for = _without(_stood_for, named)
    try:
        yield
    finally:
        _off, _stood_for = before


def on_gpu(device: torch.device) -> bool:
    """Whether kernels over tensors there run on a GPU; in a rehearsal, whether they would."""
    return device.type == "cuda" or _stood_for is not None


def is_rehearsal() -> bool:
    """Whether tensors in the host's memory stand for a GPU's, and no kernel writes to them."""
    return _rehearses


@contextmanager
def standing_for(gpu: Device, rehearses: bool = True) -> Iterator[None]:
    """Within the block launchers take any device for this GPU. See `rehearsal`; if it is none,
    kernels are launched, and tensors have numbers."""
    global _stood_for, _rehearses
    before = _stood_for, _rehearses
    _stood_for, _rehearses = gpu, rehearses
    try:
        yield
    finally:
        _stood_for, _rehearses = before


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
