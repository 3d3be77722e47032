"""`conv.skip_dx` where a TMA unit fetches: a norm's dx pass as the epilogue of the product with the
filters of a 1x1 skip. The GEMM and its boxes are those of `conv.fused`."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ....norm.coefficients import load_coefficients
from ....norm.inline_statistics_kernels import folded_coefficients
from ....norm.tables import check_partials_of, covering_groups, tiles_at_a_time
from ....registry.cost import Work, programs_at_a_time
from ....registry.kernel import Kernel
from ....registry.spec import ConvSpec
from ....runtime.dependent_launch import await_inputs, overlapping
from ....runtime.device import Device
from ....tf32 import as_operand
from ...refusals import unfetchable
from ..fused_launch import columns_in_boxes
from ..fused_tiles import fetched
from ..output_tiles import OutputTiles, tile_number, tile_origin, zero_outside
from ..products import Taps, multiply, whole_sum
from ..skip_dx_tiles import NormSums, SkipOperands, box_of, fitting
from .tma import Config
from .tma_boxes import count_boxes, in_boxes, is_ragged, tile_sizes

CONFIGS = [
    Config(64, 64, 64, 4, 2),
    Config(64, 128, 64, 4, 2),
    Config(64, 64, 64, 8, 2),
    Config(64, 128, 64, 4, 1),
    Config(64, 64, 32, 4, 2),  # few channels of y, and TF32: a row of a box is at most 128 bytes
]


@triton.jit
def _finish(
    acc,  # float32 [BLOCK_C, BLOCK_M]: W^T dy
    x_desc,  # this half of x, or what is upsampled to it
    add_desc,  # or None
    dz_desc,  # this half of dz, with SUMMED as x_desc; or else the whole
    coeff,  # p, q and r, float32 [BLOCK_C, TILE_N] each
    factor,  # or None
    dx_desc,  # as x_desc
    sums_ptr,  # float32 [N, K, CH] or None
    at,  # first image, row, column and channel of the tile
    border,  # first channel of this half
    CH,  # channels of this half
    tiles,  # OutputTiles
    UPSAMPLE: tl.constexpr,
    SUMMED: tl.constexpr,  # dz has been added up over 2x2 pixels
    HALVES: tl.constexpr,  # dz is two tensors
    TF32: tl.constexpr,  # products in TF32 read what is written
):
    p, q, r = coeff
    n0, h0, w0, c0 = at
    TILE_N: tl.constexpr = tiles.TILE_N
    TILE_H: tl.constexpr = tiles.TILE_H
    TILE_W: tl.constexpr = tiles.TILE_W
    BLOCK_C: tl.constexpr = tiles.BLOCK_C
    PIXELS: tl.constexpr = TILE_H * TILE_W
    BLOCK_M: tl.constexpr = TILE_N * PIXELS
    offs_c = c0 + tl.arange(0, BLOCK_C)
    offs_n = n0 + tl.arange(0, TILE_N)
    mask = (offs_c < tiles.C)[:, None] & (offs_n < tiles.N)[None, :]
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
    place = [n0, h0 // FACTOR, w0 // FACTOR, c0 - border]
    x = x_desc.load(place).reshape(BLOCK_M // FACTOR // FACTOR, BLOCK_C)
    x = tl.trans(x).to(tl.float32).reshape(BLOCK_C, TILE_N, PIXELS // FACTOR // FACTOR)
    dx += q[:, :, None] * x + r[:, :, None]
    if SUMMED:
        dz = tl.trans(dz_desc.load(place).reshape(BLOCK_M // FACTOR // FACTOR, BLOCK_C))
        dz = dz.to(tl.float32).reshape(BLOCK_C, TILE_N, PIXELS // FACTOR // FACTOR)
        dx += p[:, :, None] * dz
    if factor is not None:
        dx *= factor
    if sums_ptr is not None:
        k, count = tile_number(h0, w0, tiles)
        row = offs_n.to(tl.int64) * count + k
        inside = dx
        if tiles.RAGGED:
            inside = zero_outside(
                dx, place[1], place[2], tiles.P // FACTOR, tiles.Q // FACTOR,
                TILE_H // FACTOR, TILE_W // FACTOR,
            )  # fmt: skip
        tl.store(sums_ptr + row[None, :] * CH + offs_c[:, None], tl.sum(inside, axis=2), mask=mask)
    dx = as_operand(dx.reshape(BLOCK_C, BLOCK_M // FACTOR // FACTOR), dx_desc.dtype, TF32)
    dx = tl.trans(dx)
    dx_desc.store(place, dx.reshape(TILE_N, TILE_H // FACTOR, TILE_W // FACTOR, BLOCK_C))


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
    factor,  # multiplies dx1; or None
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
        coeff = p[:, None], q[:, None], r[:, None]
    else:
        offs_c = c0 + tl.arange(0, BLOCK_C)
        offs_n = n0 + tl.arange(0, TILE_N)
        mask = (offs_c < C)[:, None] & (offs_n < N)[None, :]
        ptrs = coeff_ptr + offs_n.to(tl.int64)[None, :] * 3 * CK + offs_c[:, None]
        coeff = load_coefficients(ptrs, CK, mask)
    acc = tl.zeros([BLOCK_C, BLOCK_M], dtype=tl.float32)
    if PRECISION == "ieee":
        acc, small = multiply(
            acc, acc, dy_desc, None, w_desc, None, at, CO, 0, None,
            Taps(1, 1, 0, 0, 1, True), PRECISION, BLOCK_K,
        )  # fmt: skip
        acc = whole_sum(acc, small)
    else:
        for k0 in range(0, CO, BLOCK_K):
            w = tl.trans(w_desc.load([k0, c0]))
            dy = dy_desc.load([n0, h0, w0, k0]).reshape(BLOCK_M, BLOCK_K)
            acc = tl.dot(w, tl.trans(dy), acc, input_precision=PRECISION)
    if c0 < C1:
        _finish(
            acc, x1_desc, add1_desc, dz_desc, coeff, factor, dx1_desc, sums_ptr, at, 0, C1,
            OutputTiles(N, P, Q, C, TILE_N, TILE_H, TILE_W, BLOCK_C, RAGGED),
            UPSAMPLE, dz2_desc is not None, False, PRECISION == "tf32",
        )  # fmt: skip
    elif x2_desc is not None:
        _finish(
            acc, x2_desc, None, dz2_desc if dz2_desc is not None else dz_desc, coeff, None,
            dx2_desc, None, at, C1, C - C1,
            OutputTiles(N, P, Q, C, TILE_N, TILE_H, TILE_W, BLOCK_C, RAGGED),
            False, False, dz2_desc is not None, PRECISION == "tf32",
        )  # fmt: skip


def _launch(config: Config, operands: SkipOperands) -> None:
    dy, weight, dz, dz2, x1, x2, add1, coeff, factor, *rest = operands
    upsample1, precision, box, dx1, dx2, rows = rest
    n, h, w, co = dy.shape
    c, c1 = weight.shape[1], x1.shape[3]
    fine = 2 if upsample1 else 1
    tile = [*box, config.block_c]
    tile1 = [box[0], box[1] // fine, box[2] // fine, config.block_c]
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
        w, c, c1, channels, factor,
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


def refuse(spec: ConvSpec, gpu: Device) -> str | None:
    """Why the TMA unit cannot fetch what it reads, or None."""
    return unfetchable(gpu, spec.itemsize, spec.k, spec.c, spec.first)


def _configs(spec: ConvSpec, gpu: Device) -> list[Config]:
    block_k = 64 if spec.itemsize == 2 and spec.k > 32 else 32
    return fitting([c for c in CONFIGS if c.block_k == block_k], spec)


def _work(spec: ConvSpec, gpu: Device, c: Config) -> Work:
    """What its programs do."""
    box = box_of(c, spec.n, spec.h, spec.w, bool(spec.upsampled))
    steps, loaded = triton.cdiv(spec.k, c.block_k), sum(fetched(c, spec.itemsize))
    tile = c.block_c * c.block_m
    # dz and x of a tile are there at once, too
    shared = loaded * c.num_stages + 2 * tile * spec.itemsize
    return Work(
        tiles=count_boxes(box, spec.n, spec.h, spec.w) * triton.cdiv(spec.c, c.block_c),
        resident=max(1, programs_at_a_time(shared, c.num_warps, gpu)),
        products=tile * c.block_k * steps,
        fetched=loaded * steps,
        steps=steps,
        written=tile,
        memory=spec.bytes,
    )


KERNEL = Kernel(
    "tma",
    Config,
    refuse,
    _configs,
    launch=_launch,
    work=_work,
    fitted_by=("num_warps",),
    adds=("residual",),
)
