"""Why the Hopper kernels of 3x3 convolutions cannot do one."""

from collections.abc import Sequence

from ...hopper.descriptors import missing
from ...registry.spec import ConvSpec
from ...runtime.device import Device


def refuse_3x3(
    spec: ConvSpec,
    gpu: Device,
    widths: Sequence[int] = (),
    ragged: bool = False,
    tf32: bool = False,
) -> str | None:
    """Of stride 1 and padding 1 in 16 bits, whose channels come in blocks of 64. Without `widths`
    rows have any number of pixels. `ragged`: the last block may have fewer channels. `tf32`: also
    in that."""
    multiplied = 2 if tf32 and spec.dtype == "tf32" else spec.itemsize
    if reason := missing(gpu, multiplied):
        return reason
    if reason := refuse_filters(spec):
        return reason
    # rows of what TMA fetches are multiples of 16 bytes
    least = 16 // spec.itemsize if ragged else 64
    if odd := [c for c in _channels(spec, ragged) if c % least]:
        return f"{odd[0]} channels are no multiple of {least}"
    if ragged and _lacking(spec):
        return f"tensors of {spec.k} and {spec.c} channels, filters of {spec.of_filters}"
    if widths and spec.w not in widths:
        return f"rows of {spec.w} pixels; it takes {', '.join(map(str, widths))}"
    return None


def refuse_filters(spec: ConvSpec) -> str | None:
    """Of another size than 3x3, or which are moved otherwise."""
    if (spec.r, spec.s) != (3, 3) or spec.stride != 1 or spec.pads != (1, 1):
        return f"it does 3x3 filters of stride 1 and padding 1, not {spec.moved}"
    return None


def _lacking(spec: ConvSpec) -> bool:
    """Whether filters lack channels that have to be zeros: where the result is written by its
    addresses, as in TF32, or summed."""
    (few, many), (narrow, wide) = sorted(spec.of_filters), sorted((spec.k, spec.c))
    summed = spec.c == narrow and (spec.stats or spec.activation is not None)
    return many != wide or (few < narrow and (spec.itemsize == 4 or summed))


def _channels(spec: ConvSpec, ragged: bool) -> list[int]:
    channels = [spec.c, *spec.extra]
    if spec.first is not None:
        channels += [spec.first, spec.c - spec.first]
    filters = spec.filters or (spec.k, spec.c)
    return [*channels, spec.k, *(filters[1:] if ragged else filters)]


def refuse_rows(spec: ConvSpec, pixels: int) -> str | None:
    """Tiles are so many pixels, whole rows of one image."""
    rows = pixels // spec.w
    return f"{spec.h} rows are no multiple of {rows}" if spec.h % rows else None
