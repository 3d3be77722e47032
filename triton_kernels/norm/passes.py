"""The passes over memory of a GroupNorm whose statistics come from elsewhere (`norm.tables`):

    apply     x, table -> a = act((x - mean) rstd g + b)
    norm_dx   dz, x, coeff -> dx = p dz + q x + r  (+ gradients of other uses of x)

Launchers without autograd. x is one tensor or the concatenation of x1 and x2 over channels, which
never exists in memory: a program reads one half, and norm_dx writes the halves apart.
"""

import torch
from torch import Tensor

from ..activations import check_activation
from ..noise.dropout import Mask, mask_arguments
from ..reductions.row_sums import RowSums
from ..registry.choose import select
from ..registry.kernel import Kernel, Op
from ..registry.spec import NormSpec, dtype_name
from ..runtime.dependent_launch import overlapping
from ..runtime.device import Device, describe
from ..runtime.layout import check_nhwc, check_second, check_shape
from .pass_grid import PassConfig, PassGrid, cut_pass
from .pass_kernels import norm_apply_kernel, norm_dx_kernel

_empty = torch.empty  # tests put a function here that returns NaNs

# Sixteen to 32 elements a thread: two or more 16-byte loads in flight, few registers. The first of
# each list is taken unless another was measured to be faster.
APPLY_CONFIGS = [
    PassConfig(4096, 2, 4),
    PassConfig(2048, 2, 4),
    PassConfig(4096, 1, 4),
    PassConfig(2048, 4, 4),
    PassConfig(2048, 1, 4),
    PassConfig(4096, 4, 4),
    PassConfig(8192, 1, 8),
    PassConfig(8192, 2, 8),
]
# Where the first tile is asked for before the table is there: all there is of them
_EARLY_CONFIG = PassConfig(4096, 1, 4)
_DX_CONFIGS = [
    PassConfig(2048, 2, 4),
    PassConfig(2048, 4, 4),
    PassConfig(4096, 2, 8),
    PassConfig(2048, 1, 4),
    PassConfig(4096, 1, 8),
    PassConfig(4096, 1, 4),
]

# Fewer rows to be summed later
_SUMS_DX_CONFIGS = [
    PassConfig(2048, 4, 4),
    PassConfig(2048, 8, 4),
    PassConfig(4096, 4, 8),
    PassConfig(2048, 2, 4),
    PassConfig(4096, 2, 8),
]
# A quarter of the pixels in the upsampled half, but four of each tensor at a time
_UPSAMPLED_DX_CONFIGS = [
    PassConfig(4096, 1, 4),
    PassConfig(4096, 2, 4),
    PassConfig(8192, 1, 8),
    PassConfig(2048, 2, 4),
]

_MIN_PIXELS = 4  # what norm_dx makes one of with upsample1
MIN_TILE = 1024  # eight elements a thread


def _dx_configs(spec: NormSpec, gpu: Device) -> list[PassConfig]:
    if spec.upsampled:
        return _UPSAMPLED_DX_CONFIGS
    return _SUMS_DX_CONFIGS if spec.sums else _DX_CONFIGS


_APPLY = Kernel("pass", PassConfig, lambda *_: None, lambda *_: APPLY_CONFIGS)
_DX = Kernel("pass", PassConfig, lambda *_: None, _dx_configs)
APPLY = Op("norm_apply", ("h", "w", "c1", "c2", "dtype", "activation"), (_APPLY,), similar=False)
DX = Op(
    "norm_dx", ("h", "w", "c1", "c2", "upsampled", "dtype", "sums", "adds"), (_DX,), similar=False
)


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
    config: PassConfig | None = None,
) -> Tensor:  # [N, H, W, C1 + C2], dtype of x1
    """act(norm(x)) of x = x1 beside x2, and dropout of it if there is a mask.

    `early` says that the launch in front makes the table, and that x1 and x2 are older: then they
    are read while that launch is still under way, where kernels overlap (`dependent_launch`). With
    `tf32`, here and below, float32 results are rounded to TF32: products in that read them.
    """
    check_activation(activation)
    check_nhwc("x1", x1)
    n, h, w, c1 = x1.shape
    c2 = check_second(x2, n, h, w)
    check_shape("table", table, n, 4, c1 + c2)
    if config is None and early:
        config = _EARLY_CONFIG
    if config is None:
        spec = NormSpec(n, dtype_name(x1.dtype), h, w, c1, c2, activation=activation)

        def run(c: PassConfig) -> Tensor:
            return apply(x1, x2, table, activation, tf32=tf32, config=c)

        config = select(APPLY, spec, describe(x1.device), run).config
    a = _empty((n, h, w, c1 + c2), dtype=x1.dtype, device=x1.device)
    _launch_apply(x1, x2, table, a, None, activation, mask, early, tf32, config)
    return a


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
    config: PassConfig | None = None,  # None: _EARLY_CONFIG
) -> tuple[Tensor, Tensor | None]:  # [N, H, W, C1 + C2]; [N, H, W, C1], both in the dtype of x1
    """act(norm(x)) of x = upsample(x1) beside x2, where every pixel of x1 becomes a 2x2 block; and
    upsample(x1), to `keep` it for its other readers. `early` as in `apply`. With `corners` only the
    first pixel of the 2x2 that are equal is written, in the first C1 channels: who reads them knows
    the others, whose memory stays what it was."""
    check_activation(activation)
    check_nhwc("x1", x1)
    n, h, w, c1 = x1.shape
    h, w = 2 * h, 2 * w
    c2 = check_second(x2, n, h, w)
    check_shape("table", table, n, 4, c1 + c2)
    a = _empty((n, h, w, c1 + c2), dtype=x1.dtype, device=x1.device)
    large = _empty((n, h, w, c1), dtype=x1.dtype, device=x1.device) if keep else None
    config = _EARLY_CONFIG if config is None else config
    _launch_apply(x1, x2, table, a, large, activation, None, early, tf32, config, corners)
    return a, large


def _launch_apply(
    x1: Tensor,
    x2: Tensor | None,
    table: Tensor,
    a: Tensor,
    large: Tensor | None,
    activation: str,
    mask: Mask | None,
    early: bool,
    tf32: bool,
    config: PassConfig,
    corners: bool = False,
) -> None:
    n, h, w, c = a.shape
    c1 = x1.shape[3]
    grid = cut(n, h * w, c1, c - c1, config, describe(x1.device))
    assert mask is None or (c1 % 4 == c % 4 == 0), "four channels to a draw"
    overlap = overlapping(x1.device, 0)  # of any size, see `early`
    masked, *tile = grid.tile
    shape = (h * w, w, c1, c - c1, grid.k, grid.cb1, grid.cb, *mask_arguments(mask))
    options = (
        activation,
        masked,
        early and bool(overlap) and mask is None,
        x1.shape[1] < h,
        corners,
        *tile,
    )
    norm_apply_kernel[(grid.programs,)](
        x1, x2, table, a, large, *shape, *options, tf32, num_warps=config.num_warps, **overlap
    )


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
    upsample1: bool = False,
    tf32: bool = False,
    out: Tensor | None = None,  # as x1; may be dz if there is no x2
    config: PassConfig | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx1 = p dz + q x1 + r + add1 + add1_second and dx2 alike, in the dtype of their x, each sum
    rounded once.

    With upsample1 x1 stands for a nearest-upsampled tensor, as in `apply`, and dx1 is the gradient
    of x1 itself: the sum over each 2x2 block. With `sums` the third result is float32 [rows, C1],
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
    if config is None:
        summed = sums is not False
        spec = NormSpec(
            n,
            dtype_name(dz.dtype),
            h,
            w,
            c1,
            c2,
            grad=True,
            upsampled=upsample1,
            sums=summed,
            adds=sum(x is not None for x in adds),
        )
        tensors, rest = (dz, x1, x2, coeff, add1, add2, add1_second), {"upsample1": upsample1}

        def run(c: PassConfig) -> Tensor:
            return norm_dx(*tensors, summed, **rest, config=c)[0]

        config = select(DX, spec, describe(dz.device), run).config
    grid = cut(n, h * w, c1, c2, config, describe(dz.device))
    dx1 = _empty(x1.shape, dtype=x1.dtype, device=x1.device) if out is None else out
    dx2 = None if x2 is None else _empty(x2.shape, dtype=x2.dtype, device=x2.device)
    rows = None
    if isinstance(sums, RowSums):
        rows = sums.rows(n * grid.k, c1)
    elif sums:
        rows = _empty((n * grid.k, c1), dtype=torch.float32, device=x1.device)
    shape = (h * w, w, c1, c2, grid.k, grid.cb1, grid.cb)
    norm_dx_kernel[(grid.programs,)](
        dz, x1, x2, coeff, *adds, dx1, dx2, rows, *shape, upsample1, *grid.tile,
        tf32, num_warps=config.num_warps, **overlapping(x1.device),
    )  # fmt: skip
    return dx1, dx2, rows
