"""What kernels of convolutions are written for, as data: `Only` says why another is refused."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..hopper.descriptors import missing
from ..registry.spec import ConvSpec
from ..runtime.device import Device
from ..runtime.hardware import VECTOR

BITS_16 = ("bf16", "fp16")
BITS_32 = ("tf32", "fp32")
ROUNDED = (*BITS_16, "tf32")  # products of what is read, and no three of its parts


@dataclass(frozen=True, kw_only=True)
class Only:
    """The convolutions, and the GPUs, that a kernel is for. A field that is not given asks for
    nothing."""

    hopper: bool = False  # a GPU with wgmma, and 227 KB of shared memory
    stride: int = 0
    filters: tuple[int, int] = (0, 0)  # R, S, of stride 1 and padding R // 2
    dtypes: tuple[str, ...] = ()
    tma: bool = False  # a TMA unit, and tensors that it fetches and stores
    multiple: int = 1  # which the channels of all tensors and filters are
    widths: tuple[int, ...] = ()  # pixels of a row

    def __call__(self, spec: ConvSpec, gpu: Device) -> str | None:
        """Why this is not for the kernel, or None."""
        if self.hopper and (reason := missing(gpu)):
            return reason
        if self.stride and spec.stride != self.stride:
            return f"it does stride {self.stride}, not {spec.stride}"
        r, s = self.filters
        if r and ((spec.r, spec.s, spec.stride) != (r, s, 1) or spec.pads != (r // 2, s // 2)):
            return f"it does {r}x{s} filters of stride 1 and padding {r // 2}, not {spec.moved}"
        if self.dtypes and spec.dtype not in self.dtypes:
            return f"numbers are {spec.dtype}; it multiplies {', '.join(self.dtypes)}"
        if self.tma and (reason := unaddressable(spec, gpu)):
            return reason
        if reason := odd_channels(self.multiple, (*channels_of(spec), *spec.of_filters)):
            return reason
        if self.widths and spec.w not in self.widths:
            return f"rows of {spec.w} pixels; it takes {', '.join(map(str, self.widths))}"
        return None


def channels_of(spec: ConvSpec) -> list[int]:
    """Of all tensors: of both halves of a concatenation, and of what is added, too."""
    halves = [] if spec.first is None else [spec.first, spec.c - spec.first]
    return [spec.k, spec.c, *spec.extra, *halves]


def odd_channels(multiple: int, channels: Iterable[int]) -> str | None:
    """Why these are no blocks of so many channels, or None."""
    odd = next((c for c in channels if c % multiple), None)
    return None if odd is None else f"{odd} channels are no multiple of {multiple}"


def odd_rows(spec: ConvSpec, rows: int) -> str | None:
    """Why tiles of so many whole rows do not divide an image, or None."""
    return f"{spec.h} rows are no multiple of {rows}" if spec.h % rows else None


def unfetchable(gpu: Device, itemsize: int, *channels: int) -> str | None:
    """Why the TMA unit cannot fetch tensors with these numbers of channels, or None."""
    if not gpu.tma:
        return "the GPU has no TMA unit, which fetches its tiles"
    if odd := [c for c in channels if c * itemsize % VECTOR]:
        return f"{odd[0]} channels are no multiple of {VECTOR} bytes, which the TMA unit wants"
    return None


def unaddressable(spec: ConvSpec, gpu: Device) -> str | None:
    """Why the TMA unit cannot fetch and store the tensors of a convolution, or None."""
    if reason := unfetchable(gpu, spec.itemsize, spec.k, spec.c):
        return reason
    return None if spec.aligned else f"tensors do not begin at multiples of {VECTOR} bytes"


def refuse_wide_float32(spec: ConvSpec, gpu: Device) -> str | None:
    """Why a convolution is not for the kernels of 32 bits and wide layers, or None."""
    if reason := _WIDE(spec, gpu):
        return reason
    few = min(spec.of_filters)
    return f"{few} channels would leave most of a tile to nothing" if few < 32 else None


_WIDE = Only(tma=True, dtypes=BITS_32, stride=1)
