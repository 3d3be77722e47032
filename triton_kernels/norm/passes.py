"""The passes over memory of a GroupNorm whose statistics come from elsewhere (`norm.tables`):

    apply     x, table -> a = act((x - mean) rstd g + b)
    norm_dx   dz, x, coeff -> dx = p dz + q x + r  (+ gradients of other uses of x)

Launchers without autograd. x is one tensor or the concatenation of x1 and x2 over channels, which
never exists in memory: a program reads one half, and norm_dx writes the halves apart.
"""

import torch
import triton
from torch import Tensor

from ..activations import check_activation, rounded_grad
from ..noise.dropout import WORD, Mask, mask_arguments
from ..reductions.row_sums import RowSums, row_place
from ..runtime.dependent_launch import overlapping
from ..runtime.device import Device, describe
from ..runtime.layout import check_nhwc, check_second, check_shape, row_stride
from .apply_kernel import norm_apply_kernel
from .pass_grid import PassConfig, PassGrid, channel_block, cut_pass
from .pass_kernels import norm_dx_kernel
from .tables import After, Statistics, covering_groups

# Sixteen to 32 elements a thread: two or more 16-byte loads in flight, few registers
_APPLY = PassConfig(4096, 1, 4)
_DX = PassConfig(2048, 2, 4)
_DX_OF_ACT = PassConfig(2048, 1, 4)  # as measured of five shapes of 32x32 and 64x64
_SUMMED_DX = PassConfig(2048, 4, 4)  # fewer rows to be summed later
# A quarter of the pixels in the upsampled half, but four of each tensor at a time
_UPSAMPLED_DX = PassConfig(4096, 1, 4)

_MIN_PIXELS = 4  # what norm_dx makes one of with upsample1
_PROGRAMS = 2  # a multiprocessor, that make sums of their own: with fewer, each has fewer tiles
_OF_TABLE = (1024, 1, 4)  # `apply_upsampled`: four pixels are written for each that is read
MIN_TILE = 1024  # eight elements a thread


def cut(n: int, hw: int, c1: int, c2: int, config: PassConfig, gpu: Device) -> PassGrid:
    """How a pass over [N, HW, C1 + C2] is cut into programs: where there are few, into smaller
    tiles as well."""
    return cut_pass(n, hw, c1, c2, config, gpu, min_pixels=_MIN_PIXELS, min_tile=MIN_TILE)


def apply(
    x1: Tensor,  # [N, H, W, C1]
    x2: Tensor | None,  # [N, H, W, C2]
    table: Tensor,  # float32 [N, 4, C1 + C2], of `norm_table`
    activation: str,
    *,
    mask: Mask | None = None,
    early: bool = False,
    tf32: bool = False,
    dtype: torch.dtype | None = None,  # of the result; None: that of x1
    after: After | None = None,
) -> Tensor:  # [N, H, W, C1 + C2]
    """act(norm(x)) of x = x1 beside x2, scale act(norm(x)) + shift with those of `after`, dropout
    of it if there is a mask, and the sum with what is to be added. The words of the mask, if it has
    any, are written.

    `early` says that the previous kernel makes the table, and that x1 and x2 are older: then they
    are read while that launch is still under way, where kernels overlap (`dependent_launch`). With
    `tf32`, here and below, float32 results are rounded to TF32: products in that read them.
    """
    config = (channel_block(x1.shape[3], 0 if x2 is None else x2.shape[3]), *_APPLY)
    return launch_apply(
        x1, x2, activation, config, table=table, mask=mask, early=early, tf32=tf32, dtype=dtype,
        after=after, wanted=describe(x1.device).busy, least_tile=MIN_TILE,
    )[0]  # fmt: skip


def apply_upsampled(
    x1: Tensor,  # [N, H / 2, W / 2, C1]
    x2: Tensor | None,  # [N, H, W, C2]
    table: Tensor,  # float32 [N, 4, C1 + C2], of `norm_table`
    activation: str,
    *,
    corners: bool = False,
    keep: bool = True,
    early: bool = False,
    tf32: bool = False,
) -> tuple[Tensor, Tensor | None]:  # [N, H, W, C1 + C2]; [N, H, W, C1], both in the dtype of x1
    """act(norm(x)) of x = upsample(x1) beside x2, where every pixel of x1 becomes a 2x2 block; and
    upsample(x1), to `keep` it for its other readers. `early` as in `apply`. With `corners` only the
    first pixel of the 2x2 that are equal is written, in the first C1 channels: who reads them knows
    the others, whose memory stays what it was."""
    config = (channel_block(x1.shape[3], 0 if x2 is None else x2.shape[3]), *_OF_TABLE)
    options = {"up": True, "corners": corners, "keep": keep, "early": early, "tf32": tf32}
    return launch_apply(x1, x2, activation, config, table=table, **options)


def launch_apply(
    x1: Tensor,
    x2: Tensor | None,
    activation: str,
    config: tuple[int, int, int, int],  # BLOCK_C, elements of a tile, tiles, warps
    *,
    norm: Statistics | None = None,  # None: the table is given
    table: Tensor | None = None,  # float32 [N, 4, C1 + C2], as of `norm_table`; with a norm, out
    mask: Mask | None = None,
    up: bool = False,
    corners: bool = False,
    keep: bool = False,
    early: bool = False,
    tf32: bool = False,
    dtype: torch.dtype | None = None,
    after: After | None = None,
    pixels: int = 0,  # for `overlapping`; 0: it is to overlap at any size
    wanted: int | None = None,  # programs; where there are fewer, each has less to do
    least_tile: int | None = None,  # elements, then
) -> tuple[Tensor, Tensor | None]:
    """act(norm(x)) of x1, which may be upsampled, beside x2, as `apply`; and as
    `apply_upsampled`."""
    check_nhwc("x1", x1)
    n, small_h, small_w, c1 = x1.shape
    h, w = (2 * small_h, 2 * small_w) if up else (small_h, small_w)
    c2 = check_second(x2, n, h, w)
    c = c1 + c2
    if norm is None:
        check_activation(activation)
        check_shape("table", table, n, 4, c)
        norm = Statistics((None,), (0,), 1, None, None, 0.0)
    else:
        norm.check(n, c1, c2)
    assert mask is None or (c1 % 4 == c2 % 4 == 0), "four channels to a draw"
    a = x1.new_empty((n, h, w, c), dtype=dtype)
    large = x1.new_empty((n, h, w, c1)) if keep else None
    if a.numel() == 0:
        return a, large
    overlap = overlapping(x1.device, pixels)
    film, ks, cg = (norm.scale, norm.shift), norm.tiles, c // norm.num_groups
    halves = ((small_h * small_w, c1), (h * w if c2 else 0, c2))
    wanted = wanted or _PROGRAMS * describe(x1.device).num_sms
    programs, blocks, masked, tile = _cut(n, halves, config, wanted, least_tile)
    words = None if mask is None else mask.words
    assert words is None or (c1 % 8 == c % 8 == 0 and words.shape == (n, h, w, -(-c // WORD)))
    kept = None if words is None else words.view(torch.uint8)
    after = (After() if after is None else after).checked(n, h, w, c)
    assert not up or after.add is None, "nothing is added to what is upsampled"
    norm_apply_kernel[(programs,)](
        x1, x2, *norm.both, norm.weight, norm.bias, *film, a, large, table, *map(row_stride, film),
        norm.pixels[0], norm.pixels[-1], h * w, c1, c2, *blocks, norm.eps, *mask_arguments(mask),
        kept, *after, *map(row_stride, after[:2]), activation, small_w if up else None, corners,
        early and bool(overlap), *ks, cg, masked, *tile,
        *covering_groups(tile[-1], c1 if c2 else 0, cg),
        triton.next_power_of_2(max(ks)), tf32, h * w * c >= 2**31,
        num_warps=config[3], **overlap,
    )  # fmt: skip
    return a, large


def _cut(
    n: int,
    halves: tuple[tuple[int, int], ...],
    config: tuple[int, int, int, int],
    wanted: int,
    least_tile: int | None,
) -> tuple[int, tuple[int, int, int, int], bool, tuple[int, int, int]]:
    """How many programs; blocks of pixels and of channels, of both halves; whether some tiles reach
    over an edge; TILES, BLOCK_P and BLOCK_C. Halves are (pixels, channels), `wanted` programs."""
    most_c, tile, tiles, _ = config
    present = [half for half in halves if half[1]]
    block_c = min(most_c, triton.next_power_of_2(max(c for _, c in present)))
    least = min(p for p, _ in present)
    block_p = min(max(tile // block_c, 1), triton.next_power_of_2(least))

    def cut() -> list[tuple[int, int]]:
        return [(triton.cdiv(p, tiles * block_p), triton.cdiv(c, block_c)) for p, c in halves]

    def programs() -> int:
        return n * sum(pb * cb for pb, cb in cut())

    while tiles > 1 and programs() < wanted:
        tiles //= 2
    while least_tile and block_p * block_c > least_tile and programs() < wanted:
        block_p //= 2
    masked = any(p % block_p or c % block_c for p, c in present)
    (pb1, cb1), (pb2, cb2) = cut()
    return programs(), (pb1, pb2, cb1, cb2), masked, (tiles, block_p, block_c)


def _dx_config(upsampled: bool, summed: bool, of_act: bool) -> PassConfig:
    if upsampled:
        return _UPSAMPLED_DX
    return _SUMMED_DX if summed else _DX_OF_ACT if of_act else _DX


def norm_dx(
    dz: Tensor,  # [N, H, W, C1 + C2]
    x1: Tensor,  # [N, H, W, C1], or [N, H / 2, W / 2, C1] with upsample1
    x2: Tensor | None,  # [N, H, W, C2]
    coeff: Tensor,  # float32 [N, 3, C1 + C2], of `norm_grad_table`
    add1: Tensor | None = None,  # [N, H, W, C1]
    add2: Tensor | None = None,  # [N, H, W, C2]
    add1_second: Tensor | None = None,  # [N, H, W, C1]
    sums: bool | RowSums = False,
    *,
    table: Tensor | None = None,  # float32 [N, 4, C1 + C2], of `norm_table`
    activation: str = "identity",  # with a table
    upsample1: bool = False,
    factor: float | None = None,
    tf32: bool = False,
    out: Tensor | None = None,  # as x1, of any type; may be dz if there is no x2
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx1 = factor (p dz + q x1 + r + add1 + add1_second) and dx2 alike but for the factor, in the
    dtype of their x, each sum rounded once.

    With a table dz is the gradient of act(norm(x)), which is multiplied by act'(norm(x)) first, and
    coeff is `centred`: dx = p dz + q (x - mean) + r. With upsample1 x1 stands for a
    nearest-upsampled tensor, as in `apply`, and dx1 is the gradient of x1 itself: the sum over each
    2x2 block. With `sums` the third result is float32 [rows, C1],
    whose sum over rows (`bias_grad`) is the sum of dx1 over samples and pixels, in a place of
    RowSums if that is what it is; otherwise None.
    """
    check_nhwc("dz", dz)
    check_nhwc("x1", x1)
    n, h1, w1, c1 = x1.shape
    h, w = (2 * h1, 2 * w1) if upsample1 else (h1, w1)
    c2 = 0 if x2 is None else x2.shape[3]
    check_shape("dz", dz, n, h, w, c1 + c2)
    check_shape("coeff", coeff, n, 3, c1 + c2)
    if table is not None:
        check_activation(activation)
        check_shape("table", table, n, 4, c1 + c2)
        assert not upsample1
    for name, x, shape in (
        ("out", out, (h1, w1, c1)),
        ("add1", add1, (h, w, c1)),
        ("add1_second", add1_second, (h, w, c1)),
        ("x2", x2, (h, w, c2)),
        ("add2", add2, (h, w, c2)),
    ):
        if x is not None:
            check_nhwc(name, x)
            check_shape(name, x, n, *shape)
    adds = (add1, add1_second, add2)
    config = _dx_config(upsample1, sums is not False, table is not None)
    grid = cut(n, h * w, c1, c2, config, describe(dz.device))
    dx1 = x1.new_empty(x1.shape) if out is None else out
    dx2 = None if x2 is None else x2.new_empty(x2.shape)
    place = row_place(sums, x1)
    rows = None if place is None else place(n * grid.k, c1)
    shape = (h * w, w, c1, c2, grid.k, grid.cb1, grid.cb, factor)
    norm_dx_kernel[(grid.programs,)](
        dz, x1, x2, coeff, table, *adds, dx1, dx2, rows, *shape, upsample1,
        rounded_grad(activation, x1.dtype), *grid.tile, tf32,
        num_warps=config.num_warps, **overlapping(x1.device),
    )  # fmt: skip
    return dx1, dx2, rows
