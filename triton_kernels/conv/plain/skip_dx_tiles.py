"""What `conv.skip_dx` launches, by TMA or through pointers: what a launch is given, and how images
are cut into tiles."""

from typing import NamedTuple

from torch import Tensor

from ...registry.spec import ConvSpec
from .by_tma.tma import Config
from .by_tma.tma_boxes import covering_box, image_box, is_ragged
from .pointers.pointer_tiles import PointerTile


class NormSums(NamedTuple):
    """What the coefficients of `norm_grad_table` are made of, in the kernel itself."""

    partials: Tensor  # float32 [N, K, 2, C1 + C2]: of dz
    table: Tensor  # float32 [N, 4, C1 + C2]
    num_groups: int
    rows: Tensor  # float32 [N, 2 (C1 + C2)], out: what `norm_grad_table` has RowSums add up


class SkipOperands(NamedTuple):
    """What `conv.skip_dx` has checked, and what it has allocated."""

    dy: Tensor  # [N, H, W, CO]
    weight: Tensor  # [CO, C] of this launch's channels, with rows any distance apart,
    dz: Tensor  # as is [N, H, W, C of C or more]; with dz2: [N, H / 2, W / 2, C1]
    dz2: Tensor | None  # [N, H, W, C - C1]
    x1: Tensor  # [N, H, W, C1], or [N, H / 2, W / 2, C1] with upsample1
    x2: Tensor | None  # [N, H, W, C - C1]
    add1: Tensor | None  # [N, H, W, C1]
    coeff: Tensor | NormSums  # float32 [N, 3, C of C or more]; NormSums: for `tma_skip_dx`
    factor: float | None  # multiplies dx1
    upsample1: bool
    precision: str  # "ieee" | "tf32"
    # of each launch
    box: tuple[int, int, int] | None = None  # images, rows and columns of a tile
    dx1: Tensor | None = None  # as x1, to be written
    dx2: Tensor | None = None  # as x2, likewise
    rows: Tensor | None = None  # float32 [N K, C1], likewise


def box_of(
    config: Config | PointerTile, n: int, h: int, w: int, upsample1: bool
) -> tuple[int, int, int]:
    """A tile [images, rows, columns] that divides the images, if any can; of an upsampled one, by
    2x2."""
    factor = 2 if upsample1 else 1
    pixels = config.block_m // factor**2, n, h // factor, w // factor
    box = image_box(*pixels) or covering_box(*pixels, even=False)
    return box[0], factor * box[1], factor * box[2]


def straddles(config: Config | PointerTile, x1: Tensor, x2: Tensor | None) -> bool:
    """Whether some tile has channels of both halves."""
    return x2 is not None and x1.shape[3] % config.block_c > 0


def fitting(configs: list, spec: ConvSpec) -> list:
    """Of the tiles that can do it those that no other serves better anyway."""
    pixels = spec.n, spec.h, spec.w, spec.upsampled
    exact = [c for c in configs if not is_ragged(box_of(c, *pixels), spec.h, spec.w)]
    within = [c for c in exact or configs if spec.border % c.block_c == 0]
    return within or exact or configs
