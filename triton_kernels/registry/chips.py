"""Properties of GPUs by product name, for printing what would run on a GPU that is not here.

Kernels are never chosen by name; they depend on capabilities and sizes (`runtime.device.Device`),
which this table has for some products. The rates give lower bounds on time. Those of the H100 and
the H200 were measured (copies through memory, products of 8192 x 8192 matrices); the others are the
vendor's.
"""

import re
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
    "h200nvl": Chip(_gpu(90, 132, 227), 4.8e12, 835e12),
    "gh200": Chip(_gpu(90, 132, 227), 4.0e12, 790e12),
    "h100nvl": Chip(_gpu(90, 132, 227), 3.9e12, 835e12),
    "h100pcie": Chip(_gpu(90, 114, 227), 2.0e12, 756e12),
    "h20": Chip(_gpu(90, 78, 227), 4.0e12, 148e12),
    "b200": Chip(_gpu(100, 148, 227), 8.0e12, 2250e12),
    "gb200": Chip(_gpu(100, 148, 227), 8.0e12, 2500e12),
    "a100": Chip(_gpu(80, 108, 163), 2.0e12, 312e12),
    "a100pcie": Chip(_gpu(80, 108, 163), 1.9e12, 312e12),
    "a30": Chip(_gpu(80, 56, 163), 0.93e12, 165e12),
    "a10": Chip(_gpu(86, 72, 99), 0.6e12, 125e12),
    "a10g": Chip(_gpu(86, 80, 99), 0.6e12, 70e12),
    "a40": Chip(_gpu(86, 84, 99), 0.7e12, 150e12),
    "rtxa6000": Chip(_gpu(86, 84, 99), 0.77e12, 155e12),
    "rtxa5000": Chip(_gpu(86, 64, 99), 0.77e12, 111e12),
    "rtx3080": Chip(_gpu(86, 68, 99), 0.76e12, 60e12),
    "rtx3090": Chip(_gpu(86, 82, 99), 0.94e12, 71e12),
    "l4": Chip(_gpu(89, 58, 99), 0.3e12, 121e12),
    "l40": Chip(_gpu(89, 142, 99), 0.86e12, 181e12),
    "l40s": Chip(_gpu(89, 142, 99), 0.86e12, 362e12),
    "rtx6000ada": Chip(_gpu(89, 142, 99), 0.96e12, 364e12),
    "rtx4080": Chip(_gpu(89, 76, 99), 0.72e12, 97e12),
    "rtx4090": Chip(_gpu(89, 128, 99), 1.0e12, 165e12),
    "rtx5070": Chip(_gpu(120, 48, 99), 0.67e12, 62e12),
    "rtx5080": Chip(_gpu(120, 84, 99), 0.96e12, 113e12),
    "rtx5090": Chip(_gpu(120, 170, 99), 1.8e12, 209e12),
    "rtxpro6000": Chip(_gpu(120, 188, 99), 1.8e12, 504e12),
}
# words that drivers and people write around a product's name, such as NVIDIA A100-SXM4-80GB
_AROUND = re.compile(
    r"nvidia|geforce|gpu|generation|blackwell|server|workstation|edition|sxm\d?|hbm\d?e?|\d+gb"
)


def _plain(name: str) -> str:
    words = re.split(r"[^a-z\d]+", name.lower())
    return "".join(word for word in words if not _AROUND.fullmatch(word)).removeprefix("rtx")


def chip(name: str) -> Chip:
    """The product of this name, as its driver or its maker writes it: rtx4090, "NVIDIA GeForce RTX
    4090" and 4090 are one. ValueError: there is none."""
    found = {_plain(known): of for known, of in CHIPS.items()}
    if _plain(name) not in found:
        raise ValueError(
            f"gpu={name} is unknown; choose one of {', '.join(CHIPS)}; the kernels are for compute"
            " capability 8.0 and later"
        )
    return found[_plain(name)]


def floor(chip: Chip, flops: float, size: float, itemsize: int = 2) -> float:
    """Microseconds that no kernel can beat: the longer of products and copies of so many bytes.
    Products of numbers of 4 bytes, in TF32 at best, have half the rate of those of 2."""
    return 1e6 * max(flops * itemsize / 2 / chip.products, size / chip.copies)
