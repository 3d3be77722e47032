"""Properties of GPUs by product name, for printing what would run on a GPU that is not here.

Kernels are never chosen by name; they depend on capabilities and sizes (`runtime.device.Device`),
which this table has for some products. The rates give lower bounds on time. Those of the H100 and
the H200 were measured (copies through memory, products of 8192 x 8192 matrices); the others are the
vendor's.
"""

from typing import NamedTuple

from ..runtime.device import Device


class Chip(NamedTuple):
    """A product."""

    gpu: Device
    copies: float  # bytes a second, read and written
    products: float  # multiply-adds of 16 bits a second, times two
    measured: bool = False  # the two rates; else they are from its data sheet


def _gpu(arch: int, num_sms: int, kilobytes: int) -> Device:
    return Device(
        tma=arch >= 90, num_sms=num_sms, shared_memory=kilobytes << 10, hopper=arch == 90, arch=arch
    )


CHIPS = {
    "h100": Chip(_gpu(90, 132, 227), 3.0e12, 798e12, measured=True),
    "h200": Chip(_gpu(90, 132, 227), 4.23e12, 790e12, measured=True),
    "gh200": Chip(_gpu(90, 132, 227), 4.0e12, 790e12),
    "a100": Chip(_gpu(80, 108, 163), 2.0e12, 312e12),
    "a6000": Chip(_gpu(86, 84, 99), 0.77e12, 155e12),
    "rtx3090": Chip(_gpu(86, 82, 99), 0.94e12, 71e12),
    "rtx4090": Chip(_gpu(89, 128, 99), 1.0e12, 165e12),
    "l40s": Chip(_gpu(89, 142, 99), 0.86e12, 362e12),
    "rtx5090": Chip(_gpu(120, 170, 99), 1.8e12, 209e12),
    "b200": Chip(_gpu(100, 148, 227), 8.0e12, 2250e12),
}


def chip(name: str) -> Chip:
    """The product of this name. ValueError: there is none."""
    if name.lower() not in CHIPS:
        raise ValueError(
            f"gpu={name} is unknown; choose one of {', '.join(CHIPS)}; the kernels are for compute"
            " capability 8.0 and later"
        )
    return CHIPS[name.lower()]


def floor(chip: Chip, flops: float, size: float) -> float:
    """Microseconds that no kernel can beat: the longer of products and copies."""
    return 1e6 * max(flops / chip.products, size / chip.copies)
