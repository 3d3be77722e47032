"""The norm's dx pass of a residual block whose skip is a 1x1 convolution, as that one's epilogue:

    y  = conv(act(norm(x))) + ... + skip(x),     skip(x) = W x
    dx = p dz + q x + r + W^T dy (+ gradients of other uses of x)

W^T dy alone would be written and read again, as wide as x. dx is [channels, pixels] of a product
over the few channels of y, and all else is read while it is made. x is one tensor or the
concatenation of x1 and x2; p, q and r are those of `norm.tables`, per (n, c).

The GEMM and its boxes are those of `conv.fused`; all tensors are NHWC. Without a TMA unit it is
`conv.plain.pointer_skip_dx`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..norm.coefficients import load_coefficients
from ..norm.inline_statistics_kernels import folded_coefficients
from ..norm.tables import check_partials_of, covering_groups, tiles_at_a_time
from ..reductions.row_sums import RowSums
from ..registry.choose import select
from ..registry.cost import AMPERE, Work, programs_at_a_time
from ..registry.kernel import Kernel, Op
from ..registry.spec import ConvSpec, dtype_name, precision_of
from ..runtime.dependent_launch import await_inputs, overlapping
from ..runtime.device import Device, describe
from ..tf32 import as_operand
from .plain import fused_tiles, pointer_skip_dx, pointer_tiles
from .plain.fused_launch import columns_in_boxes
from .plain.pointer_skip_dx import SkipOperands
from .plain.pointer_tiles import PointerTile
from .plain.products import multiply, tile_origin, whole_sum
from .plain.tile_edges import count_tiles, tile_number, zero_outside
from .plain.tma import Config
from .plain.tma_boxes import (
    boxes_of_image,
    count_boxes,
    covering_box,
    image_box,
    in_boxes,
    is_ragged,
    tile_sizes,
)

_CONFIGS = [
    Config(64, 64, 64, 4, 2),
    Config(64, 128, 64, 4, 2),
    Config(64, 128, 64, 8, 2),
    Config(64, 256, 64, 8, 2),
    Config(128, 128, 64, 8, 2),
    Config(64, 64, 64, 8, 2),
    Config(64, 128, 64, 4, 1),
    Config(64, 64, 32, 4, 2),  # few channels of y, and TF32: a row of a box is at most 128 bytes
]

_empty = torch.empty  # tests put a function here that returns NaNs


@triton.jit
def _finish(
    acc,  # float32 [BLOCK_C, BLOCK_M]: W^T dy
    x_desc,  # this half of x, or what is upsampled to it
    add_desc,  # or None
    dz_desc,  # this half of dz, with SUMMED as x_desc; or else the whole
    p,  # float32 [BLOCK_C, TILE_N]
    q,
    r,
    dx_desc,  # as x_desc
    sums_ptr,  # float32 [N, K, CH] or None
    n0,
    h0,
    w0,
    c0,  # of the whole
    border,  # first channel of this half
    N,
    P,
    Q,
    C,
    CH,  # channels of this half
    UPSAMPLE: tl.constexpr,
    SUMMED: tl.constexpr,  # dz has been added up over 2x2 pixels
    HALVES: tl.constexpr,  # dz is two tensors
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    RAGGED: tl.constexpr,
    TF32: tl.constexpr,  # products in TF32 read what is written
):
    PIXELS: tl.constexpr = TILE_H * TILE_W
    BLOCK_M: tl.constexpr = TILE_N * PIXELS
    offs_c = c0 + tl.arange(0, BLOCK_C)
    offs_n = n0 + tl.arange(0, TILE_N)
    mask = (offs_c < C)[:, None] & (offs_n < N)[None, :]
    if add_desc is not None:
        add = add_desc.load([n0, h0, w0, c0 - border]).reshape(BLOCK_M, BLOCK_C)
        acc += tl.trans(add).to(tl.float32)
    if SUMMED:
        dx = acc
    else:
        at_dz = [n0, h0, w0, c0 - border] if HALVES else [n0, h0, w0, c0]
        dz = tl.trans(dz_desc.load(at_dz).reshape(BLOCK_M, BLOCK_C)).to(tl.float32)
        dz = dz.reshape(BLOCK_C, TILE_N, PIXELS)
        dx = acc.reshape(BLOCK_C, TILE_N, PIXELS) + p[:, :, None] * dz
    if UPSAMPLE:  # the gradient of a pixel is the sum of those of its 2x2 copies
        dx = dx.reshape(BLOCK_C, TILE_N, TILE_H // 2, 2, TILE_W // 2, 2)
        dx = tl.sum(tl.sum(dx, axis=5), axis=3).reshape(BLOCK_C, TILE_N, PIXELS // 4)
        q *= 4
        r *= 4
        FACTOR: tl.constexpr = 2
    else:
        FACTOR: tl.constexpr = 1
    at = [n0, h0 // FACTOR, w0 // FACTOR, c0 - border]
    x = x_desc.load(at).reshape(BLOCK_M // FACTOR // FACTOR, BLOCK_C)
    x = tl.trans(x).to(tl.float32).reshape(BLOCK_C, TILE_N, PIXELS // FACTOR // FACTOR)
    dx += q[:, :, None] * x + r[:, :, None]
    if SUMMED:
        dz = tl.trans(dz_desc.load(at).reshape(BLOCK_M // FACTOR // FACTOR, BLOCK_C))
        dz = dz.to(tl.float32).reshape(BLOCK_C, TILE_N, PIXELS // FACTOR // FACTOR)
        dx += p[:, :, None] * dz
    if sums_ptr is not None:
        k = tile_number(h0, w0, Q, TILE_H, TILE_W, RAGGED)
        tiles = count_tiles(P, TILE_H, RAGGED) * count_tiles(Q, TILE_W, RAGGED)
        row = offs_n.to(tl.int64) * tiles + k
        inside = dx
        if RAGGED:
            inside = zero_outside(
                dx, at[1], at[2], P // FACTOR, Q // FACTOR, TILE_H // FACTOR, TILE_W // FACTOR
            )
        tl.store(sums_ptr + row[None, :] * CH + offs_c[:, None], tl.sum(inside, axis=2), mask=mask)
    dx = as_operand(dx.reshape(BLOCK_C, BLOCK_M // FACTOR // FACTOR), dx_desc.dtype, TF32)
    dx = tl.trans(dx)
    dx_desc.store(at, dx.reshape(TILE_N, TILE_H // FACTOR, TILE_W // FACTOR, BLOCK_C))


@triton.jit(do_not_specialize=["N", "P", "Q"])
def _skip_dx_kernel(
    dy_desc,  # [N, P, Q, CO] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_K]
    w_desc,  # [CO, C] in boxes [BLOCK_K, BLOCK_C]; "ieee": [1, CO, C], likewise
    dz_desc,  # [N, P, Q, C] in boxes [TILE_N, TILE_H, TILE_W, BLOCK_C], or with the next as x1_desc
    dz2_desc,  # as x2_desc or None
    x1_desc,  # [N, P, Q, C1] likewise; UPSAMPLE: half as high and wide, and so are its boxes
    x2_desc,  # [N, P, Q, C - C1] or None
    add1_desc,  # [N, P, Q, C1] or None
    coeff_ptr,  # float32 [N, 3, C] of rows of CK; None: made of the next two, as is the third
    partial_ptr,  # float32 [N, KZ, 2, C] or None
    table_ptr,  # float32 [N, 4, C] or None
    rows_ptr,  # float32 [N, 2, C] or None
    dx1_desc,  # as x1_desc
    dx2_desc,  # as x2_desc
    sums_ptr,  # float32 [N, K, C1] or None
    N,
    CO,
    P,
    Q,
    C,
    C1,
    CK,
    PRECISION: tl.constexpr,
    UPSAMPLE: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KZ: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_KZ: tl.constexpr,
    RAGGED: tl.constexpr,  # tiles reach over the edges of images
):
    await_inputs()
    BLOCK_M: tl.constexpr = TILE_N * TILE_H * TILE_W
    at = tile_origin(P, Q, C, TILE_N, TILE_H, TILE_W, BLOCK_C)
    n0, h0, w0, c0 = at
    if coeff_ptr is None:  # a tile is of one image
        p, q, r = folded_coefficients(
            partial_ptr, None, table_ptr, None, None, None, rows_ptr, None, None, None, 0, 0, 0, 0,
            n0.to(tl.int64), c0, (h0 == 0) & (w0 == 0), P * Q, C,
            2, KZ, 1, CG, BLOCK_C, BLOCK_G, BLOCK_J, BLOCK_KZ, 1,
        )  # fmt: skip
        p = p[:, None]
        q = q[:, None]
        r = r[:, None]
    else:
        offs_c = c0 + tl.arange(0, BLOCK_C)
        offs_n = n0 + tl.arange(0, TILE_N)
        mask = (offs_c < C)[:, None] & (offs_n < N)[None, :]
        ptrs = coeff_ptr + offs_n.to(tl.int64)[None, :] * 3 * CK + offs_c[:, None]
        p, q, r = load_coefficients(ptrs, CK, mask)
    acc = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    if PRECISION == "ieee":
        acc, small = multiply(
            acc, acc, dy_desc, None, w_desc, None, at, CO, 0, None,
            1, 1, 0, 0, 1, True, PRECISION, BLOCK_K,
        )  # fmt: skip
        acc = whole_sum(acc, small)
    else:
        for k0 in range(0, CO, BLOCK_K):
            w = tl.trans(w_desc.load([k0, c0]))
            dy = dy_desc.load([n0, h0, w0, k0]).reshape(BLOCK_M, BLOCK_K)
            acc = tl.dot(w, tl.trans(dy), acc, input_precision=PRECISION)
    if c0 < C1:
        _finish(
            acc, x1_desc, add1_desc, dz_desc, p, q, r, dx1_desc, sums_ptr, n0, h0, w0, c0, 0,
            N, P, Q, C, C1, UPSAMPLE, dz2_desc is not None, False,
            TILE_N, TILE_H, TILE_W, BLOCK_C, RAGGED, PRECISION == "tf32",
        )  # fmt: skip
    elif x2_desc is not None:
        _finish(
            acc, x2_desc, None, dz2_desc if dz2_desc is not None else dz_desc, p, q, r, dx2_desc,
            None, n0, h0, w0, c0, C1,
            N, P, Q, C, C - C1, False, False, dz2_desc is not None,
            TILE_N, TILE_H, TILE_W, BLOCK_C, RAGGED, PRECISION == "tf32",
        )  # fmt: skip


class NormSums(NamedTuple):
    """What the coefficients of `norm_grad_table` are made of, in the kernel itself."""

    partials: Tensor  # float32 [N, K, 2, C1 + C2]: of dz
    table: Tensor  # float32 [N, 4, C1 + C2]
    num_groups: int
    rows: Tensor  # float32 [N, 2 (C1 + C2)], out: what `norm_grad_table` has RowSums add up


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
    allow_tf32: bool = True,  # of float32: then results are rounded to it as well
    config: Config | PointerTile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx1 = p dz + q x1 + r + W^T dy + add1, and dx2 alike but for add1, rounded once.

    `upsample1`, `sums` and the third result are as those of `norm.passes.norm_dx`. NormSums are for
    tiles of one image and of one half, see `folds`. If no tile of channels divides the halves, each
    is a launch of its own.
    """
    halves = dz2 is not None
    assert dz.shape[3] == x1.shape[3] + (0 if x2 is None or halves else x2.shape[3])
    assert not halves or (upsample1 and dz.shape == x1.shape and dz2.shape == x2.shape)
    if config is None:
        config = choose_config(dy, weight, x1, x2, add1, upsample1, allow_tf32)
    precision = precision_of(dy.dtype, allow_tf32)
    if isinstance(coeff, NormSums):
        assert folds(config, dy, x1, x2, upsample1), "a tile of several images, or of both halves"
    if halves or not _straddles(config, x1, x2):
        rest = coeff, add1, sums, upsample1, config, precision
        return _launch(dy, weight, dz, 0, x1, x2, *rest, dz2)
    c1 = x1.shape[3]
    first, second = (weight[:, :c1], dz, 0, x1, None), (weight[:, c1:], dz, c1, x2, None)
    dx1, _, rows = _launch(dy, *first, coeff, add1, sums, upsample1, config, precision)
    dx2, _, _ = _launch(dy, *second, coeff, None, False, False, config, precision)
    return dx1, dx2, rows


def _launch(
    dy: Tensor,
    weight: Tensor,  # these two as in `skip_dx`, of this launch's channels
    dz: Tensor,  # as are coefficients, of all channels,
    begin: int,  # of which this launch's are those from here on
    x1: Tensor,
    x2: Tensor | None,
    coeff: Tensor | NormSums,
    add1: Tensor | None,
    sums: bool | RowSums,
    upsample1: bool,
    config: Config,
    precision: str,
    dz2: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    n, h, w, co = dy.shape
    c1 = x1.shape[3]
    c = c1 if x2 is None else c1 + x2.shape[3]
    factor = 2 if upsample1 else 1
    assert weight.shape == (co, c, 1, 1) and weight.stride(1) == 1 and weight.dtype == dy.dtype
    channels = begin + c if dz2 is not None else dz.shape[3]  # that have coefficients
    assert dz2 is not None or (dz.shape[:3] == (n, h, w) and begin + c <= channels)
    assert dz2 is None or not _straddles(config, x1, x2), "a tile of two tensors"
    assert x1.shape == (n, h // factor, w // factor, c1)
    for x in (dy, dz, dz2, x1, x2, add1):
        assert x is None or (x.is_contiguous() and x.dtype == dy.dtype)
    dx1 = _empty(x1.shape, dtype=x1.dtype, device=x1.device)
    dx2 = None if x2 is None else _empty(x2.shape, dtype=x2.dtype, device=x2.device)
    by_pointers = isinstance(config, PointerTile)
    row = 1 if by_pointers else 16 // dy.itemsize
    assert c1 % row == c % row == co % row == 0, "channels in multiples of 16 bytes"
    box = _box(config, n, h, w, upsample1)
    rows = None
    count = n * boxes_of_image(box, h, w)
    if isinstance(sums, RowSums):
        rows = sums.rows(count, c1)
    elif sums:
        rows = _empty((count, c1), dtype=torch.float32, device=dy.device)
    if isinstance(coeff, Tensor):
        assert coeff.shape == (n, 3, channels) and coeff.is_contiguous()
        coeff = coeff[..., begin:]
    if n == 0:
        return dx1, dx2, rows
    columns = dz if dz2 is not None else dz[..., begin : begin + c]
    tensors = dy, weight.view(co, c), columns, dz2, x1, x2, add1, coeff, dx1, dx2, rows
    operands = SkipOperands(*tensors, box, upsample1, precision)
    SKIP_DX.kernel_of(config).launch(config, operands)
    return dx1, dx2, rows


def _launch_tma(config: Config, operands: SkipOperands) -> None:
    dy, weight, dz, dz2, x1, x2, add1, coeff, dx1, dx2, rows, box, upsample1, precision = operands
    n, h, w, co = dy.shape
    c, c1 = weight.shape[1], x1.shape[3]
    factor = 2 if upsample1 else 1
    tile = [*box, config.block_c]
    tile1 = [box[0], box[1] // factor, box[2] // factor, config.block_c]
    channels = coeff.stride(1) if isinstance(coeff, Tensor) else c  # of dz, too, if it is one
    if dz2 is None:
        pitches = [h * w * channels, w * channels, channels, 1]  # not dz.stride(), see `in_boxes`
        columns = TensorDescriptor(dz, [n, h, w, c], pitches, tile)
    else:
        columns = in_boxes(dz, tile1)
    norm, fold = _of_norm(coeff, n, h * w, c, config)
    programs = count_boxes(box, n, h, w) * triton.cdiv(c, config.block_c)
    _skip_dx_kernel[(programs,)](
        in_boxes(dy, [*box, config.block_k]),
        columns_in_boxes(weight, [config.block_k, config.block_c], precision == "ieee"), columns,
        None if dz2 is None else in_boxes(dz2, tile), in_boxes(x1, tile1),
        None if x2 is None else in_boxes(x2, tile), None if add1 is None else in_boxes(add1, tile),
        *norm, in_boxes(dx1, tile1), None if dx2 is None else in_boxes(dx2, tile), rows, n, co, h,
        w, c, c1, channels,
        PRECISION=precision, UPSAMPLE=upsample1, RAGGED=is_ragged(box, h, w),
        **tile_sizes(box, config), **fold, **overlapping(dy.device),
    )  # fmt: skip


def _of_norm(
    coeff: Tensor | NormSums, n: int, pixels: int, c: int, config: Config
) -> tuple[list[Tensor | None], dict[str, int]]:
    """coeff_ptr, partial_ptr, table_ptr and rows_ptr of the kernel, and the constants that belong
    to them."""
    names = ("KZ", "CG", "BLOCK_G", "BLOCK_J", "BLOCK_KZ")
    if isinstance(coeff, Tensor):
        return [coeff, None, None, None], dict.fromkeys(names, 1)
    partials, table, num_groups, place = coeff
    check_partials_of(partials, pixels, n, c)
    assert place.shape == (n, 2 * c)
    assert table.shape == (n, 4, c) and table.is_contiguous() and place.is_contiguous()
    tiles, cg = partials.shape[1], c // num_groups
    groups = covering_groups(config.block_c, 0, cg)
    fold = zip(names, (tiles, cg, *groups, *tiles_at_a_time(groups, tiles)), strict=True)
    return [None, partials, table, place], dict(fold)


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
    spec = ConvSpec(
        n=n,
        dtype=dtype_name(dy.dtype, allow_tf32),
        h=h,
        w=w,
        k=co,
        c=c,
        r=1,
        s=1,
        first=x1.shape[3],
        residual=add1 is not None,
        upsampled=upsample1,
    )

    def run(config: Config) -> Tensor:
        coeff = torch.ones((n, 3, c), device=dy.device)
        dz = torch.zeros((n, h, w, c), dtype=dy.dtype, device=dy.device)
        options = {"upsample1": upsample1, "allow_tf32": allow_tf32, "config": config}
        return skip_dx(dy, weight, dz, x1, x2, coeff, add1, **options)[0]

    return select(SKIP_DX, spec, describe(dy.device), run).config


def _refuse_tma(spec: ConvSpec, gpu: Device) -> str | None:
    if not gpu.tma:
        return "the GPU has no TMA unit, which fetches its tiles"
    row = 16 // spec.itemsize
    if odd := [c for c in (spec.k, spec.c, spec.first) if c % row]:
        return f"{odd[0]} channels are no multiple of {row}, which is 16 bytes"
    return None


def _refuse_pointer(spec: ConvSpec, gpu: Device) -> str | None:
    return None if _refuse_tma(spec, gpu) else "the TMA unit of this GPU fetches such tensors"


def _of_tma(spec: ConvSpec, gpu: Device) -> list[Config]:
    block_k = 64 if spec.itemsize == 2 and spec.k > 32 else 32
    return _fitting([c for c in _CONFIGS if c.block_k == block_k], spec)


def _of_pointer(spec: ConvSpec, gpu: Device) -> list[PointerTile]:
    return _fitting(pointer_skip_dx.candidates(spec.k, spec.precision), spec)


def _tma_work(spec: ConvSpec, gpu: Device, c: Config) -> Work:
    """What its programs do."""
    box = _box(c, spec.n, spec.h, spec.w, bool(spec.upsampled))
    steps, loaded = triton.cdiv(spec.k, c.block_k), sum(fused_tiles.fetched(c, spec.itemsize))
    tile = c.block_c * c.block_m
    # dz and x of a tile are there at once, too
    shared = loaded * c.num_stages + 2 * tile * spec.itemsize + 1024
    return Work(
        tiles=count_boxes(box, spec.n, spec.h, spec.w) * triton.cdiv(spec.c, c.block_c),
        resident=max(1, programs_at_a_time(shared, c.num_warps, gpu)),
        products=tile * c.block_k * steps,
        fetched=loaded * steps,
        steps=steps,
        written=tile,
        memory=spec.bytes,
    )


def _pointer_work(spec: ConvSpec, gpu: Device, c: PointerTile) -> Work:
    box = _box(c, spec.n, spec.h, spec.w, bool(spec.upsampled))
    return pointer_tiles.work(spec, gpu, c, box)


def _key(spec: ConvSpec) -> dict[str, Any]:
    names = ("h", "w", "k", "c", "first", "dtype", "upsampled")
    return {name: getattr(spec, name) for name in names} | {"add": spec.residual}


SKIP_DX = Op(
    "skip_dx",
    key=_key,
    kernels=(
        Kernel(
            "tma",
            Config,
            _refuse_tma,
            _of_tma,
            launch=_launch_tma,
            work=_tma_work,
            fitted_by=("num_warps",),
            adds=("residual",),
        ),
        Kernel(
            "pointer",
            PointerTile,
            _refuse_pointer,
            _of_pointer,
            launch=pointer_skip_dx.launch,
            work=_pointer_work,
            fitted_by=pointer_tiles.FITTED_BY,
            borrows=AMPERE,
            adds=("residual",),
        ),
    ),
    similar=False,
)


def folds(config: Config, dy: Tensor, x1: Tensor, x2: Tensor | None, upsample1: bool) -> bool:
    """Whether the kernel can make the coefficients: no tile has pixels of several images, or
    channels of both halves."""
    within = not isinstance(config, PointerTile) and not _straddles(config, x1, x2)
    return within and _box(config, *dy.shape[:3], upsample1)[0] == 1


def _straddles(config: Config, x1: Tensor, x2: Tensor | None) -> bool:
    """Whether some tile has channels of both halves."""
    return x2 is not None and x1.shape[3] % config.block_c > 0


def _fitting(configs: list, spec: ConvSpec) -> list:
    """Of the tiles that can do it those that no other serves better anyway."""
    border = None if spec.first == spec.c else spec.first
    pixels = spec.n, spec.h, spec.w, spec.upsampled
    exact = [c for c in configs if not is_ragged(_box(c, *pixels), spec.h, spec.w)]
    within = [c for c in exact or configs if border is None or border % c.block_c == 0]
    return within or exact or configs


def _box(config: Config, n: int, h: int, w: int, upsample1: bool) -> tuple[int, int, int]:
    """A tile [images, rows, columns] that divides the images, if any can; of an upsampled one, by
    2x2."""
    factor = 2 if upsample1 else 1
    pixels = config.block_m // factor**2, n, h // factor, w // factor
    box = image_box(*pixels) or covering_box(*pixels, even=False)
    return box[0], factor * box[1], factor * box[2]
