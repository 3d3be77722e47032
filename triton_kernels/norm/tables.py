"""Statistics of a GroupNorm, from per-tile sums to one row of coefficients a channel:

    forward    partials of x           -> table (mean, rstd, g, b):  z  = (x - mean) rstd g + b
    backward   partials of dz, table   -> coeff (p, q, r):           dx = p dz + q x + r

`norm.passes` applies them. A fused convolution writes the partials in its epilogue, so that no pass
over memory computes a statistic. With partials float32 [N, K, 2, C], tile k of an image has exactly
H W / K pixels, and for each of its channels

    forward    sum of x,    sum of (x - mean of the tile)^2
    backward   sum of dz,   sum of dz xhat                       xhat = (x - mean) rstd

x may be the concatenation of two tensors, each with partials of its own; a group may lie across the
border. Means and squares are merged by Chan's formula (Chan, Golub and LeVeque 1983), so that
nothing is ever a difference of large numbers:

    M2 = sum M2_i + sum count_i (mean_i - mean)^2

With D, E = sum over pixels of dz, dz xhat, both per (n, c), and

    m1, m2 = sum over the group of g D, g E / (H W C/G)

    p = rstd g,   q = -rstd^2 m2,   r = -rstd m1 + rstd^2 m2 mean
    d_weight = sum_n (1 + scale) E,             d_scale = weight E + bias D
    d_bias   = sum_n (1 + scale) D,             d_shift = D
    sum over pixels of dx = p D + q (sum of x) + r H W
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..reductions.row_sums import RowSums, rows_of
from ..runtime.dependent_launch import overlapping
from ..runtime.layout import check_nhwc, check_shape, row_stride
from .table_kernels import norm_grad_table_kernel, norm_table_kernel

# Lanes times tiles that a warp loads at once: 32 numbers a thread of each of two statistics. Half
# as many where there are as many lanes, of each of which a thread keeps gain and offset too, or
# where tiles take several rounds, between which it keeps their mean and M2. One warp a program, if
# that will do: warps would meet at a barrier for every sum.
_WARP_TILE = 1024
_LOADED = 2048  # partial sums that a program of a pass loads at a time


class Statistics(NamedTuple):
    """Where a norm has mean, rstd, gain and offset from, by the arguments of `norm_table`."""

    partials: tuple[Tensor, ...]  # of one or two tensors: float32 [N, K, 2, C1], [N, K2, 2, C2]
    pixels: tuple[int, ...]  # H W of the image that each describes
    num_groups: int
    weight: Tensor | None  # [C1 + C2]
    bias: Tensor | None  # [C1 + C2]
    eps: float
    scale: Tensor | None = None  # [N, C1 + C2], rows may be strided
    shift: Tensor | None = None  # [N, C1 + C2]

    @property
    def both(self) -> tuple[Tensor, Tensor | None]:
        """The partials of either half."""
        return (*self.partials, None)[:2]

    @property
    def tiles(self) -> list[int]:
        """Of an image of either half; 1 where there is none."""
        return [1 if part is None else part.shape[1] for part in self.both]

    def check(self, n: int, *channels: int) -> None:
        """Raise unless these are of n images of so many channels in either half."""
        for part, count, c in zip(self.partials, self.pixels, channels, strict=False):
            check_partials_of(part, count, n, c)


class After(NamedTuple):
    """What comes behind the activation: scale act(z) + shift, the FiLM of a policy's blocks (Perez
    et al. 2018), whose rows may be strided, and, behind dropout, another tensor."""

    scale: Tensor | None = None  # [N, C], with a shift or not at all
    shift: Tensor | None = None  # [N, C]
    add: Tensor | None = None  # [N, H, W, C], of any type

    def checked(self, n: int, h: int, w: int, c: int) -> "After":
        """Itself. ValueError: it is not of n images of c channels, or not in NHWC order."""
        for name, rows in (("scale", self.scale), ("shift", self.shift)):
            check_shape(name, rows, n, c)
        if self.add is not None:
            check_nhwc("add", self.add)
            check_shape("add", self.add, n, h, w, c)
        return self


class NormGrads(NamedTuple):
    """Where those gradients go that follow from the sums of a norm's backward pass. RowSums add to
    the first three; the others are written."""

    weight: Tensor | None = None  # float32 [C]
    bias: Tensor | None = None  # float32 [C]
    # of what was added to every pixel of x, which are sums of dx: the bias of the convolution in
    # front, and an embedding
    input_bias: Tensor | None = None  # float32 [C]
    emb: Tensor | None = None  # [N, C], with rows any distance apart, as are the next two
    scale: Tensor | None = None  # [N, C]
    shift: Tensor | None = None  # [N, C]

    @property
    def of_rows(self) -> tuple[Tensor | None, ...]:
        """The sums over samples of the rows that a kernel leaves, in their order."""
        return self.weight, self.bias, self.input_bias

    def add(self, rows: Tensor, sums: RowSums, c: int) -> None:
        """Have them added up later."""
        for i, out in enumerate(self.of_rows):
            if out is not None:
                sums.add(rows, i * c, out)


class _Lanes(NamedTuple):
    """How the groups of a sample are dealt to programs, and the tiles of an image to rounds."""

    programs: int  # GB
    cg: int
    blocks: tuple[int, int, int, int]  # BLOCK_K of two tensors, BLOCK_G, BLOCK_J
    num_warps: int


def _lanes_of(c: int, num_groups: int, *ks: int) -> _Lanes:
    cg = c // num_groups
    block_j = triton.next_power_of_2(cg)
    wanted = max(16, min(_WARP_TILE // 2 // triton.next_power_of_2(max(ks)), 128))
    block_g = min(max(wanted // block_j, 1), triton.next_power_of_2(num_groups))
    lanes = block_g * block_j
    blocks = [min(triton.next_power_of_2(k), max(4 * _WARP_TILE // lanes, 1)) for k in ks]
    rounds = any(block < k for block, k in zip(blocks, ks, strict=True))
    numbers = 2 * lanes * max(blocks) if rounds else lanes * max(*blocks, 2)
    num_warps = max(1, min(8, numbers // _WARP_TILE))
    return _Lanes(triton.cdiv(num_groups, block_g), cg, (*blocks, block_g, block_j), num_warps)


def covering_groups(block_c: int, border: int, cg: int) -> tuple[int, int]:
    """BLOCK_G, at least the groups that a block of channels belongs to, and BLOCK_J."""
    aligned = block_c % cg == 0 and border % cg == 0
    groups = block_c // cg if aligned else 1 + triton.cdiv(block_c - 1, cg)
    return triton.next_power_of_2(groups), triton.next_power_of_2(cg)


def tiles_at_a_time(groups: tuple[int, int], *ks: int) -> list[int]:
    """Tiles at a time, for each number of tiles."""
    most = max(_LOADED // (groups[0] * groups[1]), 1)
    return [min(triton.next_power_of_2(k), most) for k in ks]


def _check_partials(partials: Tensor, pixels: int) -> None:
    assert partials.dtype == torch.float32 and partials.is_contiguous() and partials.ndim == 4
    k = partials.shape[1]
    assert k > 0 and pixels % k == 0, f"{pixels} pixels are not {k} tiles of one size"


def check_partials_of(partials: Tensor, pixels: int, n: int, channels: int) -> None:
    """Raise unless they are those of n images of so many pixels and channels."""
    _check_partials(partials, pixels)
    check_shape("partials", partials, n, partials.shape[1], 2, channels)


def norm_table(
    partials: tuple[Tensor, ...],  # of one or two tensors: float32 [N, K, 2, C1], [N, K2, 2, C2]
    pixels: tuple[int, ...],  # H W of the image that each describes
    num_groups: int,
    weight: Tensor | None,  # [C1 + C2]
    bias: Tensor | None,  # [C1 + C2]
    eps: float,
    scale: Tensor | None = None,  # [N, C1 + C2], rows may be strided
    shift: Tensor | None = None,  # [N, C1 + C2]
    second_out: Tensor | None = None,  # float32 [N, 4, C2], the second half once more
    stats_out: Tensor | None = None,  # float32 [2, N, G]: mean and rstd of every group
) -> Tensor:  # float32 [N, 4, C1 + C2]
    """mean, rstd, g = weight (1 + scale) and b = bias (1 + scale) + shift of every channel.

    For a nearest-upsampled tensor pass the partials and the pixels of its source: mean and variance
    are the same.
    """
    for part, count in zip(partials, pixels, strict=True):
        _check_partials(part, count)
    first, second = partials[0], partials[1] if len(partials) == 2 else None
    n, k1, _, c1 = first.shape
    k2, c = (1, c1) if second is None else (second.shape[1], c1 + second.shape[3])
    assert c % num_groups == 0 and (second is None or second.shape[0] == n)
    if second_out is not None:
        check_shape("second_out", second_out, n, 4, c - c1)
    if stats_out is not None:
        check_shape("stats_out", stats_out, 2, n, num_groups)
    lanes = _lanes_of(c, num_groups, k1, k2)
    table = first.new_empty((n, 4, c), dtype=torch.float32)
    film = (scale, shift)
    shape = (pixels[0], pixels[-1], c1, c, lanes.programs, eps, k1, k2, lanes.cg)
    norm_table_kernel[(n * lanes.programs,)](
        first, second, weight, bias, *film, table, second_out,
        *((None, None) if stats_out is None else stats_out), *map(row_stride, film), *shape,
        *lanes.blocks, num_warps=lanes.num_warps,
        **overlapping(first.device, n * max(pixels)),
    )  # fmt: skip
    return table


def norm_grad_table(
    partials: Tensor,  # float32 [N, K, 2, C]: of dz, over the whole concatenation
    table: Tensor,  # float32 [N, 4, C], of `norm_table`
    pixels: int,  # H W of dz
    num_groups: int,
    into: NormGrads,  # those of sums of dx need `input_partials`
    *,
    input_partials: Tensor | None = None,  # float32 [N, KX, 2, C]: of x, which is one tensor
    # weight and bias [C] and scale [N, C], as `norm_table` had them, if it had a scale or a shift
    film: tuple[Tensor | None, ...] = (None,) * 3,
    # what adds to the gradients [C], later; or float32 [N, 2 C or 3 C], out: what they are sums of
    sums: RowSums | Tensor,
    centred: bool = False,  # dx = p dz + q (x - mean) + r
) -> Tensor:  # float32 [N, 3, C]
    """p, q and r of every channel, with dx = p dz + q x + r, and gradients of the parameters."""
    _check_partials(partials, pixels)
    n, k, _, c = partials.shape
    assert table.shape == (n, 4, c) and table.is_contiguous()
    assert isinstance(sums, RowSums) or into.of_rows == (None,) * 3, "gradients are sums of rows"
    assert input_partials is not None or into.emb is into.input_bias is None, "sums of dx"
    kx = 1
    if input_partials is not None:
        kx = input_partials.shape[1]
        check_partials_of(input_partials, pixels, n, c)
    lanes = _lanes_of(c, num_groups, k, kx)
    rows = 2 if input_partials is None else 3
    coeff = table.new_empty((n, 3, c), dtype=torch.float32)
    work = rows_of(sums, n, rows * c)
    *affine, scale = film
    strided = (scale, into.scale, into.shift, into.emb)
    shape = (pixels, c, lanes.programs, rows, centred, k, kx, lanes.cg)
    norm_grad_table_kernel[(n * lanes.programs,)](
        partials, input_partials, table, *affine, scale, coeff, work, *strided[1:],
        *map(row_stride, strided), *shape, *lanes.blocks, num_warps=lanes.num_warps,
        **overlapping(table.device),
    )  # fmt: skip
    into.add(work, sums, c)
    return coeff
