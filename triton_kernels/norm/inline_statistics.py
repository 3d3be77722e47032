"""A GroupNorm of the plan and its statistics in one launch, where there are few partial sums.

    norm_apply      x, partials -> a, table              `norm_table` and `apply`
    norm_backward   dz, x, partials, table -> dx         `norm_grad_table` and `norm_dx`

A launch of a few microseconds and the gap after it cost more than what it computes. Here every
program of the pass computes the statistics of its own channels from the partial sums, and the first
program of an image writes what backward, or the gradients of the parameters, need. Two launches are
faster where an image has many partial sums, or where many programs would read them: `NORM_APPLY`
and `NORM_BACKWARD` decide. The formulas are those of `norm.tables` and `norm.passes`.
`conv.skip_dx.skip_backward` does the same for `norm_grad_table` and `skip_dx`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import check_activation
from ..noise.dropout import Mask
from ..reductions.row_sums import RowSums, row_place, rows_of
from ..registry.choose import select
from ..registry.kernel import Kernel, Op, configures
from ..registry.spec import NormSpec, dtype_name
from ..runtime.dependent_launch import overlapping
from ..runtime.device import Device, describe
from ..runtime.layout import check_nhwc, check_shape, row_stride
from .from_partials import loaded_sums, sums_config
from .inline_statistics_kernels import norm_dx_inline_kernel
from .pass_grid import channel_block
from .passes import apply, apply_upsampled, cut, launch_apply, norm_dx
from .tables import (
    After,
    NormGrads,
    Statistics,
    check_partials_of,
    covering_groups,
    norm_grad_table,
    norm_table,
    tiles_at_a_time,
)

# Partial sums of either kind that a program loads, with padding, where one launch takes less time:
# see docs/kernels/norm.md
_MOST_SUMS, _MOST_SUMS_OF_DX = 1024, 512


@configures("one_launch")
class OneLaunch(NamedTuple):
    """A program of the gradient, as in `PassConfig`; forward see `from_partials.sums_config`."""

    tile: int = 4096
    tiles: int = 2
    num_warps: int = 4


def _refuse(spec: NormSpec, gpu: Device) -> str | None:
    if spec.n == 0 or spec.mask or spec.upsampled:
        return "it does no dropout, no upsampling, and no batch of 0 images"
    return None


def _untimed(spec: NormSpec, gpu: Device) -> str | None:
    sums = loaded_sums(channel_block(spec.c1, spec.c2), spec, *spec.tiles)
    most = _MOST_SUMS_OF_DX if spec.grad else _MOST_SUMS
    if sums > most:
        return f"a program loads {sums} sums of either kind; at most {most}"
    numbers = gpu.busy * OneLaunch().tile * OneLaunch().tiles
    if spec.elements > numbers:
        return f"{spec.elements} numbers; at most {numbers}, which keep the GPU busy once"
    return None


_KEY = ("h", "w", "c1", "c2", "tiles", "dtype")
_KERNELS = (  # the first that can is taken
    Kernel("one_launch", OneLaunch, _refuse, untimed=_untimed),
    Kernel("two_launches"),  # a table, or coefficients, and a pass
)
NORM_APPLY = Op("norm_apply", _KEY, _KERNELS, similar=False)
NORM_BACKWARD = Op("norm_backward", _KEY, _KERNELS, similar=False)


def _overlaps(x: Tensor) -> bool:
    """Whether a pass over x starts while the previous kernel, which computes its table, runs."""
    return bool(overlapping(x.device, 0))


def norm_apply(
    x1: Tensor,  # [N, H, W, C1]
    x2: Tensor | None,  # [N, H, W, C2]
    norm: Statistics,
    activation: str,
    *,
    mask: Mask | None = None,
    tf32: bool = False,  # here and below: float32 results are rounded to TF32, as products are
    dtype: torch.dtype | None = None,
    after: After | None = None,
    config: tuple | None = None,  # of a kernel of `NORM_APPLY`
) -> tuple[Tensor, Tensor]:  # [N, H, W, C1 + C2], float32 [N, 4, C1 + C2]
    """`apply` with the table of `norm_table`, and that table."""
    second = 0 if x2 is None else x2.shape[3]
    rest = {"tiles": tuple(part.shape[1] for part in norm.partials), "mask": mask is not None}
    spec = NormSpec(len(x1), dtype_name(x1.dtype), *x1.shape[1:], second, norm.num_groups, **rest)
    if config is None:
        config = select(NORM_APPLY, spec, describe(x1.device)).config
    if config.kernel == "two_launches":
        table = norm_table(*norm)
        early = mask is None and _overlaps(x1)
        how = {"mask": mask, "early": early, "tf32": tf32, "dtype": dtype, "after": after}
        return apply(x1, x2, table, activation, **how), table

    assert mask is None, "dropout is for two launches"
    check_activation(activation)
    table = x1.new_empty((len(x1), 4, spec.c), dtype=torch.float32)
    a, _ = launch_apply(
        x1, x2, activation, sums_config(spec), norm=norm, table=table, tf32=tf32, dtype=dtype,
        after=after, pixels=spec.n * spec.pixels,
    )  # fmt: skip
    return a, table


def norm_apply_upsampled(
    x1: Tensor,  # [N, H / 2, W / 2, C1]
    x2: Tensor,  # [N, H, W, C2]
    norm: Statistics,
    activation: str,
    *,
    tf32: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:  # [N, H, W, C1 + C2], tables, [N, H, W, C1]
    """`norm_apply` of the concatenation of upsample(x1) and x2. Returns the result; the tables,
    float32 [N, 4, C1 + C2] of all channels and [N, 4, C2] of x2; and upsample(x1)."""
    shape = len(x2), 4, x2.shape[3]
    second = x2.new_empty(shape, dtype=torch.float32)
    table = norm_table(*norm, second_out=second)
    a, large = apply_upsampled(x1, x2, table, activation, early=_overlaps(x1), tf32=tf32)
    return a, (table, second), large


def norm_backward(
    dz: Tensor,  # [N, H, W, C]
    x: Tensor,  # [N, H, W, C], or [N, H / 2, W / 2, C] with upsample1
    partials: Tensor,  # float32 [N, K, 2, C]: of dz
    table: Tensor,  # float32 [N, 4, C]
    num_groups: int,
    into: NormGrads,
    *,
    sums: RowSums | Tensor,  # as that of `norm_grad_table`
    add1: Tensor | None = None,  # [N, H, W, C]
    add1_second: Tensor | None = None,  # [N, H, W, C]
    rows: RowSums | bool = True,  # whether the second result is wanted, and where it is kept
    upsample1: bool = False,
    out: Tensor | None = None,  # as x; may be dz
    input_partials: Tensor | None = None,  # this and `film` as `norm_grad_table` has them
    film: tuple[Tensor | None, ...] = (None,) * 3,
    tf32: bool = False,
    config: tuple | None = None,  # of a kernel of `NORM_BACKWARD`
) -> tuple[Tensor, Tensor | None]:  # as x; float32 [rows, C]
    """`norm_dx` of one tensor, with the coefficients of `norm_grad_table`."""
    n, h, w, c = dz.shape
    if config is None:
        rest = {"grad": True, "tiles": (partials.shape[1],), "upsampled": upsample1}
        spec = NormSpec(n, dtype_name(dz.dtype), h, w, c, groups=num_groups, **rest)
        config = select(NORM_BACKWARD, spec, describe(dz.device)).config
    if config.kernel == "two_launches":
        options = {"input_partials": input_partials, "film": film, "sums": sums}
        coeff = norm_grad_table(partials, table, h * w, num_groups, into, **options)
        dx, _, added = norm_dx(
            dz, x, None, coeff, add1, None, add1_second, rows,
            upsample1=upsample1, tf32=tf32, out=out,
        )  # fmt: skip
        return dx, added

    assert not upsample1
    check_shape("table", table, n, 4, c)
    for name, t in (("dz", dz), ("x", x), ("add1", add1), ("second", add1_second), ("out", out)):
        if t is not None:
            check_nhwc(name, t)
            check_shape(name, t, n, h, w, c)
    sums_dx = input_partials is not None
    assert sums_dx or into.emb is into.input_bias is None, "sums of dx are of input_partials"
    for part in (partials, input_partials):
        if part is not None:
            check_partials_of(part, h * w, n, c)
    ks = partials.shape[1], 1 if input_partials is None else input_partials.shape[1]
    grid = cut(n, h * w, c, 0, config, describe(dz.device))
    cg, count = c // num_groups, 3 if sums_dx else 2
    groups = covering_groups(grid.block_c, 0, cg)
    dx = x.new_empty(x.shape) if out is None else out
    work = rows_of(sums, n, count * c)
    place = row_place(rows, x)
    added = None if place is None else place(n * grid.k, c)
    *affine, scale = film
    strided = (scale, into.scale, into.shift, into.emb)
    norm_dx_inline_kernel[(grid.programs,)](
        dz, x, add1, add1_second, dx, added, partials, input_partials, table, *affine, scale,
        work, *strided[1:], *map(row_stride, strided), h * w, c, grid.k, grid.cb,
        count, *ks, cg, *grid.tile, *groups, *tiles_at_a_time(groups, *ks),
        tf32, num_warps=config.num_warps, **overlapping(x.device),
    )  # fmt: skip
    into.add(work, sums, c)
    return dx, added
