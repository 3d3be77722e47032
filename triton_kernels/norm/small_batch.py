"""`norm_of_sums` of few images: a norm whose statistics are partial sums, and its activation.

    z = (x - mean) rstd g + b,   a = act(z)

At batch 1 a program with few channels and many pixels reads the fewest partial sums per pixel. It
has whole groups of any size, so sums and channels have the same lanes. It loads all of its pixels
and sums at once, in one round trip to memory. With many images most of what is read are pixels, and
blocks of channels by more pixels are faster (`norm_of_sums`).
"""

import triton
import triton.language as tl
from torch import Tensor

from ..activations import activate
from ..registry.kernel import Kernel
from ..registry.spec import FEW_IMAGES, NormSpec
from ..runtime.dependent_launch import await_inputs, begin_next, overlapping
from ..runtime.device import Device, describe
from ..runtime.layout import row_stride
from ..tf32 import as_operand
from .coefficients import modulate, parameters
from .pass_grid import MOST_HELD
from .single_cta_kernels import sum_of_lanes
from .statistics import add_pairs
from .tables import Statistics

_LANES, _LOADED = 32, 4096  # channels of a program, and their partial sums
_TILE, _MIN_TILE = 4096, 1024  # its elements; fewer if there are few programs


@triton.jit
def load_sums(
    partial_ptr,  # float32 [K, 2, C]
    C,
    offs_c,  # [L]
    mask_c,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The two sums of every tile, [BLOCK_K, L], and their mask."""
    offs_k = tl.arange(0, BLOCK_K)[:, None]
    mask = (offs_k < K) & mask_c[None, :]
    ptrs = partial_ptr + offs_k * (2 * C) + offs_c[None, :]
    within = tl.load(ptrs + C, mask=mask, other=0.0)
    return tl.load(ptrs, mask=mask, other=0.0), within, mask


@triton.jit
def about(
    sums,  # of `load_sums`
    within,
    mask,
    mean,  # [L]
    pixels,
    K: tl.constexpr,
):
    """The variance of each channel about the mean of its group, and the distance of the channel's
    mean from that mean; both [L]."""
    per_tile = (pixels // K) * 1.0
    delta = tl.where(mask, sums * (1.0 / per_tile) - mean[None, :], 0.0)
    m2 = within * (1.0 / pixels) + delta * delta * (1.0 / K)
    return tl.reduce((m2, delta * (1.0 / K)), 0, add_pairs)


@triton.jit
def _norm_small_batch_kernel(
    x1_ptr,  # [N, HW, C1]; with a large_ptr [N, HW / 4, C1]
    x2_ptr,  # [N, HW, C2] or None
    large_ptr,  # [N, HW, C1], x1 upsampled, out; or None
    partial1_ptr,  # float32 [N, K1, 2, C1]
    partial2_ptr,  # float32 [N, K2, 2, C2] or None
    weight_ptr,
    bias_ptr,
    scale_ptr,
    shift_ptr,
    a_ptr,  # [N, HW, C1 + C2], out
    stride_scale,
    stride_shift,
    pixels1,  # that the partials describe
    pixels2,
    HW,
    C1,
    C2,
    PB,  # blocks of pixels
    GB,  # blocks of groups
    eps,
    ACT: tl.constexpr,
    W: tl.constexpr,  # with a large_ptr
    K1: tl.constexpr,
    K2: tl.constexpr,
    CG: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_K1: tl.constexpr,
    BLOCK_K2: tl.constexpr,
    TF32: tl.constexpr,  # products in TF32 read what is written to a
):
    """A program has BLOCK_P pixels of BLOCK_G groups, and loads them and all partial sums of the
    groups at once."""
    begin_next()
    pid = tl.program_id(0)
    n = (pid // GB // PB).to(tl.int64)
    C = C1 + C2
    lanes = tl.arange(0, BLOCK_G * BLOCK_J)
    if CG == BLOCK_J:  # one run of memory
        offs_c = pid % GB * (BLOCK_G * CG) + lanes
        mask_c = offs_c < C
    else:
        offs_c = (pid % GB * BLOCK_G + lanes // BLOCK_J) * CG + lanes % BLOCK_J
        mask_c = (lanes % BLOCK_J < CG) & (offs_c < C)
    offs_p = pid // GB % PB * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_p = (offs_p < HW)[:, None]
    first, second = mask_c & (offs_c < C1), mask_c & (offs_c >= C1)
    g, b = parameters(weight_ptr, bias_ptr, offs_c, mask_c)
    await_inputs()
    # in this order: what is needed first is loaded last
    offs = (n * HW + offs_p)[:, None] * C1 + offs_c[None, :]
    if large_ptr is None:
        x = tl.load(x1_ptr + offs, mask=first[None, :] & mask_p, other=0.0)
    else:
        place = offs_p // W // 2 * (W // 2) + offs_p % W // 2
        small = (n * (HW // 4) + place)[:, None] * C1 + offs_c[None, :]
        x = tl.load(x1_ptr + small, mask=first[None, :] & mask_p, other=0.0)
    half = x
    if x2_ptr is not None:
        offs = (n * HW + offs_p)[:, None] * C2 + (offs_c - C1)[None, :]
        x2 = tl.load(x2_ptr + offs, mask=second[None, :] & mask_p, other=0.0)
        half_ptr = partial2_ptr + n * (K2 * 2) * C2
        sums2, within2, mask2 = load_sums(half_ptr, C2, offs_c - C1, second, K2, BLOCK_K2)
    half_ptr = partial1_ptr + n * (K1 * 2) * C1
    sums1, within1, mask1 = load_sums(half_ptr, C1, offs_c, first, K1, BLOCK_K1)
    if x2_ptr is not None:
        x = tl.where(second[None, :], x2, x)
    g, b = modulate(g, b, scale_ptr, shift_ptr, stride_scale, stride_shift, n, offs_c, mask_c)

    # all channels of a group have equally many pixels, so they have equal weights
    mean = tl.sum(sums1, 0) * (1.0 / pixels1)
    if x2_ptr is not None:
        mean += tl.sum(sums2, 0) * (1.0 / pixels2)
    mean = sum_of_lanes(mean, BLOCK_G, BLOCK_J) / CG
    # Chan: about the mean, and the rounding error of the mean
    var, rest = about(sums1, within1, mask1, mean, pixels1, K1)
    if x2_ptr is not None:
        var2, rest2 = about(sums2, within2, mask2, mean, pixels2, K2)
        var, rest = var + var2, rest + rest2
    rest = sum_of_lanes(rest, BLOCK_G, BLOCK_J) / CG
    var = sum_of_lanes(var, BLOCK_G, BLOCK_J) / CG - rest * rest
    slope = g / tl.sqrt(var + eps)
    x = x.to(tl.float32) - (mean + rest)[None, :]
    a = activate(x * slope[None, :] + b[None, :], ACT)
    ptrs = a_ptr + (n * HW + offs_p)[:, None] * C + offs_c[None, :]
    a = as_operand(a, a_ptr.dtype.element_ty, TF32)
    tl.store(ptrs, a, mask=mask_c[None, :] & mask_p)
    if large_ptr is not None:
        ptrs = large_ptr + (n * HW + offs_p)[:, None] * C1 + offs_c[None, :]
        tl.store(ptrs, half, mask=first[None, :] & mask_p)


def _untimed(spec: NormSpec, gpu: Device) -> str | None:
    most = gpu.busy * _MIN_TILE
    many = spec.n > FEW_IMAGES or spec.elements > most
    return f"more than {FEW_IMAGES} images, or {most} elements" if many else None


def _refuse(spec: NormSpec, gpu: Device) -> str | None:
    if triton.next_power_of_2(spec.c // spec.groups) * sum(spec.tiles) > MOST_HELD:
        return f"registers do not hold the sums of {sum(spec.tiles)} tiles of a group"
    return None


def norm_small_batch(
    x1: Tensor,  # [N, H, W, C1]; with `up` [N, H / 2, W / 2, C1]
    x2: Tensor | None,  # [N, H, W, C2]
    norm: Statistics,
    activation: str,
    up: bool,
    tf32: bool,
) -> tuple[Tensor, Tensor]:  # [N, H, W, C1 + C2]; x1, or with `up` it upsampled
    """As `norm_of_sums`."""
    n, h, w, c1 = x1.shape
    h, w = (2 * h, 2 * w) if up else (h, w)
    c2 = 0 if x2 is None else x2.shape[3]
    groups, ks = norm.num_groups, norm.tiles
    c, cg = c1 + c2, (c1 + c2) // groups
    a = x1.new_empty((n, h, w, c))
    large = x1.new_empty((n, h, w, c1)) if up else None
    result = a, x1 if large is None else large
    if n == 0:
        return result
    block_g, block_j, block_p = _tile(n, h * w, groups, cg, sum(ks), describe(x1.device))
    blocks = triton.cdiv(h * w, block_p), triton.cdiv(groups, block_g)
    film = (norm.scale, norm.shift)
    loaded = block_g * block_j * sum(map(triton.next_power_of_2, ks))
    _norm_small_batch_kernel[(n * blocks[0] * blocks[1],)](
        x1, x2, large, *norm.both, norm.weight, norm.bias, *film, a, *map(row_stride, film),
        norm.pixels[0], norm.pixels[-1], h * w, c1, c2, *blocks, norm.eps, activation,
        w if up else None, *ks, cg, block_p, block_g, block_j, *map(triton.next_power_of_2, ks),
        tf32, num_warps=8 if loaded > MOST_HELD // 2 else 4, **overlapping(x1.device),
    )  # fmt: skip
    return result


def _tile(n: int, hw: int, groups: int, cg: int, k: int, gpu: Device) -> tuple[int, int, int]:
    """BLOCK_G, BLOCK_J and BLOCK_P for k partial sums per channel: so few channels that the program
    loads few sums, and so few pixels that half of the multiprocessors have a program."""
    block_j = triton.next_power_of_2(cg)
    wanted = min(max(_LOADED // triton.next_power_of_2(k), 16), _LANES)
    block_g = max(min(wanted // block_j, triton.next_power_of_2(groups)), 1)
    lanes = block_g * block_j
    block_p = min(max(_TILE // lanes, 1), triton.next_power_of_2(hw))
    blocks = n * triton.cdiv(groups, block_g)
    while lanes * block_p > _MIN_TILE and blocks * triton.cdiv(hw, block_p) < gpu.busy // 16:
        block_p //= 2
    return block_g, block_j, block_p


SMALL_BATCH = Kernel("small_batch", refuse=_refuse, untimed=_untimed)
