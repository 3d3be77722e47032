"""The norm's dx pass of a residual block whose skip is a 1x1 convolution, as that one's epilogue:

    y  = conv(act(norm(x))) + ... + skip(x),     skip(x) = W x
    dx = p dz + q x + r + W^T dy (+ gradients of other uses of x)

W^T dy alone would be written and read again, as wide as x. dx is [channels, pixels] of a product
over the few channels of y, and all else is read while it is made. x is one tensor or the
concatenation of x1 and x2; p, q and r are those of `norm.tables`, per (n, c).

All tensors are NHWC. The kernels are `conv.plain.tma_skip_dx`, and `conv.plain.pointer_skip_dx`
without a TMA unit.
"""

from typing import Any

import torch
from torch import Tensor

from ..norm.inline_statistics import NORM_BACKWARD
from ..norm.tables import NormGrads, norm_grad_table
from ..reductions.row_sums import RowSums, row_place, rows_of
from ..registry.choose import select
from ..registry.kernel import Op
from ..registry.spec import ConvSpec, NormSpec, dtype_name, precision_of
from ..runtime.device import describe
from .plain.by_tma import tma_skip_dx
from .plain.by_tma.tma import Config
from .plain.by_tma.tma_boxes import boxes_of_image
from .plain.pointers import pointer_skip_dx
from .plain.pointers.pointer_tiles import PointerTile
from .plain.skip_dx_tiles import NormSums, SkipOperands, box_of, straddles


def _key(spec: ConvSpec) -> dict[str, Any]:
    names = ("h", "w", "k", "c", "first", "dtype", "upsampled")
    return {name: getattr(spec, name) for name in names} | {"add": spec.residual}


SKIP_DX = Op("skip_dx", _key, kernels=(tma_skip_dx.KERNEL, pointer_skip_dx.KERNEL), similar=False)


def skip_dx(
    dy: Tensor,  # [N, H, W, CO]
    weight: Tensor,  # [CO, C1 + C2, 1, 1], dtype of dy
    dz: Tensor,  # [N, H, W, C1 + C2]
    x1: Tensor,  # [N, H, W, C1], or [N, H / 2, W / 2, C1] with upsample1
    x2: Tensor | None,  # [N, H, W, C2]
    coeff: Tensor | NormSums,  # float32 [N, 3, C1 + C2], of `norm_grad_table`, or for one image
    add1: Tensor | None = None,  # [N, H, W, C1]
    sums: bool | RowSums = False,
    *,
    dz2: Tensor | None = None,  # [N, H, W, C2]: then dz is that of x1, added up over 2x2 pixels
    upsample1: bool = False,
    factor: float | None = None,
    allow_tf32: bool = True,  # of float32: then results are rounded to it as well
    config: Config | PointerTile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx1 = factor (p dz + q x1 + r + W^T dy + add1), and dx2 alike but for factor and add1,
    rounded once.

    `upsample1`, `sums` and the third result are as those of `norm.passes.norm_dx`. NormSums are for
    tiles of one image and of one half, see `folds`. If no tile of channels divides the halves, each
    is a launch of its own.
    """
    (co, c), c1, halves = weight.shape[:2], x1.shape[3], dz2 is not None
    assert weight.shape == (dy.shape[3], c, 1, 1) and weight.stride(1) == 1
    assert c == c1 + (0 if x2 is None else x2.shape[3]) and weight.dtype == dy.dtype
    for x in (dy, dz, dz2, x1, x2, add1):
        assert x is None or (x.is_contiguous() and x.dtype == dy.dtype)
    if halves:
        assert upsample1 and dz.shape == x1.shape and dz2.shape == x2.shape
    else:
        assert dz.shape == (*dy.shape[:3], c)
    if config is None:
        config = choose_config(dy, weight, x1, x2, add1, upsample1, allow_tf32)
    if isinstance(coeff, Tensor):
        assert coeff.shape == (len(dy), 3, c) and coeff.is_contiguous()
    else:
        assert folds(config, dy, x1, x2, upsample1), "a tile of several images, or of both halves"
    matrix, precision = weight.view(co, c), precision_of(dy.dtype, allow_tf32)
    read = SkipOperands(dy, matrix, dz, dz2, x1, x2, add1, coeff, factor, upsample1, precision)
    if not straddles(config, x1, x2):
        return _launch(config, read, sums)
    assert not halves, "a tile of two tensors"
    first, second = (
        read._replace(weight=matrix[:, of], dz=dz[..., of], coeff=coeff[..., of], x2=None)
        for of in (slice(c1), slice(c1, c))
    )
    second = second._replace(x1=x2, add1=None, factor=None, upsample1=False)
    dx1, _, rows = _launch(config, first, sums)
    dx2, _, _ = _launch(config, second, False)
    return dx1, dx2, rows


def skip_backward(
    dy: Tensor,  # [N, H, W, CO]
    skip_weight: Tensor,  # [CO, C1 + C2, 1, 1], dtype of dy
    dz: Tensor,  # [N, H, W, C1 + C2]
    x1: Tensor,  # [N, H, W, C1], or [N, H / 2, W / 2, C1] with upsample1
    x2: Tensor | None,  # [N, H, W, C2]
    partials: Tensor,  # float32 [N, K, 2, C1 + C2]: of dz
    table: Tensor,  # float32 [N, 4, C1 + C2]
    num_groups: int,
    into: NormGrads,  # of weight and bias
    *,
    sums: RowSums | Tensor,  # as that of `norm_grad_table`
    rows: RowSums | bool = True,  # as `sums` of `skip_dx`
    add1: Tensor | None = None,  # [N, H, W, C1]
    dz2: Tensor | None = None,  # [N, H, W, C2]: then dz is that of x1, added up over 2x2 pixels
    upsample1: bool = False,
    allow_tf32: bool = True,  # as that of `skip_dx`
    ways: tuple | None = None,  # of a kernel of `NORM_BACKWARD`
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`skip_dx` with the coefficients of `norm_grad_table`: the gradients of x1 and x2, and rows
    whose sum is that of the first over samples and pixels."""
    (n, h, w, _), c = dy.shape, skip_weight.shape[1]
    given = dy, skip_weight, x1, x2, add1, upsample1, allow_tf32
    config = choose_config(*given) if n else None
    if ways is None:
        rest = {"grad": True, "tiles": (partials.shape[1],)}
        spec = NormSpec(n, dtype_name(dz.dtype), h, w, c, groups=num_groups, **rest)
        ways = select(NORM_BACKWARD, spec, describe(dz.device)).config
    if ways.kernel == "one_launch" and n > 0 and folds(config, dy, x1, x2, upsample1):
        coeff = NormSums(partials, table, num_groups, rows_of(sums, n, 2 * c))
        into.add(coeff.rows, sums, c)
    else:
        coeff = norm_grad_table(partials, table, h * w, num_groups, into, sums=sums)
    options = {"dz2": dz2, "upsample1": upsample1, "allow_tf32": allow_tf32, "config": config}
    return skip_dx(dy, skip_weight, dz, x1, x2, coeff, add1, rows, **options)


def _launch(
    config: Config | PointerTile, read: SkipOperands, sums: bool | RowSums
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of x1 and x2, and rows of the first where they have a place."""
    dy, x1, x2 = read.dy, read.x1, read.x2
    (n, h, w, co), c, c1 = dy.shape, read.weight.shape[1], x1.shape[3]
    fine = 2 if read.upsample1 else 1  # pixels of dz to one of x1, along an axis
    assert x1.shape == (n, h // fine, w // fine, c1)
    row = 1 if isinstance(config, PointerTile) else 16 // dy.itemsize
    assert c1 % row == c % row == co % row == 0, "channels in multiples of 16 bytes"
    dx1 = x1.new_empty(x1.shape)
    dx2 = None if x2 is None else x2.new_empty(x2.shape)
    box, place = box_of(config, n, h, w, read.upsample1), row_place(sums, dy)
    rows = None if place is None else place(n * boxes_of_image(box, h, w), c1)
    if n:
        operands = read._replace(box=box, dx1=dx1, dx2=dx2, rows=rows)
        SKIP_DX.kernel_of(config).launch(config, operands)
    return dx1, dx2, rows


def choose_config(
    dy: Tensor,
    weight: Tensor,
    x1: Tensor,
    x2: Tensor | None,
    add1: Tensor | None,
    upsample1: bool,
    allow_tf32: bool,
) -> Config | PointerTile:
    """The tile of `skip_dx` for these arguments."""
    n, h, w, co = dy.shape
    c = weight.shape[1]
    its = {"first": x1.shape[3], "residual": add1 is not None, "upsampled": upsample1}
    spec = ConvSpec(n, dtype_name(dy.dtype, allow_tf32), h, w, co, c, r=1, s=1, **its)

    def run(config: Config) -> Tensor:
        coeff = torch.ones((n, 3, c), device=dy.device)
        dz = torch.zeros((n, h, w, c), dtype=dy.dtype, device=dy.device)
        options = {"upsample1": upsample1, "allow_tf32": allow_tf32, "config": config}
        return skip_dx(dy, weight, dz, x1, x2, coeff, add1, **options)[0]

    return select(SKIP_DX, spec, describe(dy.device), run).config


def folds(config: Config, dy: Tensor, x1: Tensor, x2: Tensor | None, upsample1: bool) -> bool:
    """Whether the kernel can make the coefficients: no tile has pixels of several images, or
    channels of both halves."""
    within = not isinstance(config, PointerTile) and not straddles(config, x1, x2)
    return within and box_of(config, *dy.shape[:3], upsample1)[0] == 1
