"""Convolutions of few images that ask for their filters before the launch in front has ended.

    y = conv(x) + bias[co] + emb[n, co] + residual + 1x1 convolutions of others       `conv_early`
    parts[s, n, co, p], whose sum over s is conv(x) + those 1x1 convolutions           `split_early`

At batch 1 a convolution is a chain of dependent steps, and a loop that fetches one 64x64 tile of
filters and of pixels a step, through however many buffers, spends 0.23 us on each. Here a program
has the filters of up to 512 terms of the sum (channels of taps) on their way to registers before it
waits for its input, and then asks for all of that at once: one round trip and one long product.

    before the wait   filters [BLOCK_C, BLOCK_K], where they lie and what taps they belong to
    behind it         x [BLOCK_M, BLOCK_K], a tap's pixels from where they are; product; store

A sum longer than that is cut into parts, or done in several rounds, of which the first two have
their filters early; of up to three each one's pixels are asked for before the product in front. The
filters of 1x1 convolutions are early too; where there are parts, one program has them all. Pixels
are a run of successive ones, of all images.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..dependent_launch import await_inputs, overlapping
from ..device import describe
from ..layout import row_stride

_empty = torch.empty  # tests put a function here that returns NaNs

_DEEPEST = 512  # terms of a product: 64 registers of a thread for filters, 64 for pixels
_MAX_PARTS = 16
EARLY_IMAGES, _MAX_PIXELS = 4, 1024  # of 16 images a loop over tiles is faster
_LARGE = 4096  # pixels of images whose programs take 64 of them, for fewer partial sums,
_LONG = 1024  # unless their sums are of more terms than this


class EarlyConfig(NamedTuple):
    """What a program does: so many rounds of `block_k` terms of the sum, and one of `tail`."""

    block_c: int  # output channels
    block_m: int  # pixels
    block_k: int
    rounds: int
    tail: int  # 0: none
    num_warps: int


@triton.jit
def _pixels(
    x_ptr,  # [M, C]: pixels of images [H, W]
    offs_m,
    M,
    C,
    k0,
    H: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Where what terms k0 and up of the sum multiply lies, channel k % C of tap k // C, and what of
    it there is: [BLOCK_M, BLOCK_K]"""
    offs_k = k0 + tl.arange(0, BLOCK_K)
    mask = (offs_m < M)[:, None] & (offs_k < R * S * C)[None, :]
    ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * C
    if R * S == 1:
        return ptrs + offs_k[None, :], mask
    else:
        tap = offs_k // C
        dh, dw = tap // S - R // 2, tap % S - S // 2
        h, w = (offs_m // W % H)[:, None] + dh[None, :], (offs_m % W)[:, None] + dw[None, :]
        mask &= (h >= 0) & (h < H) & (w >= 0) & (w < W)
        return ptrs + ((dh * W + dw) * C + offs_k % C)[None, :], mask


@triton.jit
def _later(x, mask):
    """x as it is. The compiler puts what was loaded for a product into shared memory, and waits for
    it, where it was loaded; this is no load."""
    return tl.where(mask, x, 0.0)


@triton.jit
def _add_product(acc, w, x, PRECISION: tl.constexpr):
    """acc + w x^T, not as one product that begins with acc: of a chain of these the compiler has
    all but the last done by rows of warps, of which 64 rows have work for four (Triton 3.6)."""
    product = tl.dot(w, tl.trans(x), input_precision=PRECISION)
    return tl.fma(product, tl.full(acc.shape, 1.0, tl.float32), acc)


@triton.jit
def _add_rest(
    acc,
    x_ptr,  # [M, C]
    weight_desc,  # [CO, C] in boxes [BLOCK_C, BLOCK_E]
    c0,
    offs_m,
    M,
    C,
    PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr,
    REST: tl.constexpr,  # whether there are any; a loop that never runs turns acc's layout twice
):
    """acc plus a 1x1 convolution of all channels but the first BLOCK_E."""
    if not REST:
        return acc
    for k0 in range(BLOCK_E, C, BLOCK_E):
        w = weight_desc.load([c0, k0])
        ptrs, mask = _pixels(x_ptr, offs_m, M, C, k0, 1, 1, 1, 1, BLOCK_E)
        x = tl.load(ptrs, mask=mask, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["splits"])
def _conv_early_kernel(
    x_ptr,  # [M, CI]: pixels of images [H, W]
    weight_desc,  # [CO, R * S * CI] in boxes [BLOCK_C, BLOCK_K]
    tail_desc,  # the same in boxes [BLOCK_C, TAIL], or None
    extra1_ptr,  # [M, C1], or None
    extra1_desc,  # [CO, C1] in boxes [BLOCK_C, BLOCK_E1]
    extra2_ptr,  # a second such pair, or None
    extra2_desc,
    bias_ptr,  # [CO]; PARTS: None, and so are the next four
    extra_bias_ptr,  # [CO] or None
    emb_ptr,  # [N, CO] or None
    residual_ptr,  # [M, CO] or None
    partial_ptr,  # float32 [M / BLOCK_M, 2, CO], out, or None
    out_ptr,  # [M, WIDTH], out; PARTS: float32 [parts, N, CO, H * W]
    stride_emb,
    M,
    CI,
    C1,
    C2,
    CO,
    WIDTH,  # channels of y; those behind CO are zero
    splits,  # PARTS: parts of the convolution; one more has the others
    H: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E1: tl.constexpr,
    BLOCK_E2: tl.constexpr,
    REST1: tl.constexpr,  # whether C1 > BLOCK_E1
    REST2: tl.constexpr,
    ROUNDS: tl.constexpr,
    EARLY: tl.constexpr,  # of which the filters are asked for first
    TAIL: tl.constexpr,
):
    HW: tl.constexpr = H * W
    pid, part = tl.program_id(0), tl.program_id(1)
    blocks = tl.cdiv(WIDTH, BLOCK_C)
    c0 = pid % blocks * BLOCK_C
    offs_co = c0 + tl.arange(0, BLOCK_C)
    mask_co = offs_co < CO
    offs_m = pid // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    n, pixel = offs_m // HW, offs_m % HW
    acc = tl.zeros([BLOCK_C, BLOCK_M], tl.float32)
    if not PARTS or part < splits:
        k0 = part * (ROUNDS * BLOCK_K)
        k1 = k0 + ROUNDS * BLOCK_K
        ptrs, mask = _pixels(x_ptr, offs_m, M, CI, k0, H, W, R, S, BLOCK_K)
        if TAIL > 0:
            tail_ptrs, tail_mask = _pixels(x_ptr, offs_m, M, CI, k1, H, W, R, S, TAIL)
        if bias_ptr is not None:
            terms = tl.load(bias_ptr + offs_co, mask=mask_co, other=0.0)
        if extra_bias_ptr is not None:
            terms += tl.load(extra_bias_ptr + offs_co, mask=mask_co, other=0.0)
        filters = ()
        for i in tl.static_range(EARLY):
            filters = filters + (weight_desc.load([c0, k0 + i * BLOCK_K]),)
        if TAIL > 0:
            tail = tail_desc.load([c0, k1])
        if not PARTS and extra1_ptr is not None:
            w1 = extra1_desc.load([c0, 0])
            if extra2_ptr is not None:
                w2 = extra2_desc.load([c0, 0])
        await_inputs()
        # what is needed last is asked for first, and what a product needs last of all, since the
        # compiler waits for that where it is loaded
        if residual_ptr is not None:
            place = offs_m.to(tl.int64)[None, :] * WIDTH + offs_co[:, None]
            there = mask_co[:, None] & (offs_m < M)[None, :]
            residual = tl.load(residual_ptr + place, mask=there, other=0.0)
        if emb_ptr is not None:
            if HW % BLOCK_M == 0:  # of one image
                image = (pid // blocks // (HW // BLOCK_M)).to(tl.int64)
                place = image * stride_emb + offs_co
                emb = tl.load(emb_ptr + place, mask=mask_co, other=0.0)[:, None]
            else:
                place = n.to(tl.int64)[None, :] * stride_emb + offs_co[:, None]
                there = mask_co[:, None] & (offs_m < M)[None, :]
                emb = tl.load(emb_ptr + place, mask=there, other=0.0)
        if not PARTS and extra1_ptr is not None:
            ptrs1, mask1 = _pixels(extra1_ptr, offs_m, M, C1, 0, 1, 1, 1, 1, BLOCK_E1)
            e1 = tl.load(ptrs1, mask=mask1, other=0.0)
            if extra2_ptr is not None:
                ptrs2, mask2 = _pixels(extra2_ptr, offs_m, M, C2, 0, 1, 1, 1, 1, BLOCK_E2)
                e2 = tl.load(ptrs2, mask=mask2, other=0.0)
        if TAIL > 0:
            x1 = tl.load(tail_ptrs, mask=tail_mask, other=0.0)
        x = tl.load(ptrs, mask=mask, other=0.0)
        for i in tl.static_range(ROUNDS):
            now, there = x, mask
            if i + 1 < ROUNDS and ROUNDS <= 3:  # of more the compiler would keep too many
                k = k0 + (i + 1) * BLOCK_K
                ptrs, mask = _pixels(x_ptr, offs_m, M, CI, k, H, W, R, S, BLOCK_K)
                x = tl.load(ptrs, mask=mask, other=0.0)
            if i > 0 and ROUNDS <= 3:
                now = _later(now, there)
            w = filters[i] if i < EARLY else weight_desc.load([c0, k0 + i * BLOCK_K])
            acc = _add_product(acc, w, now, PRECISION)
            if i == 0 and TAIL > 0:
                acc = _add_product(acc, tail, _later(x1, tail_mask), PRECISION)
            if i + 1 < ROUNDS and ROUNDS > 3:
                k = k0 + (i + 1) * BLOCK_K
                ptrs, mask = _pixels(x_ptr, offs_m, M, CI, k, H, W, R, S, BLOCK_K)
                x = tl.load(ptrs, mask=mask, other=0.0)
        if not PARTS and extra1_ptr is not None:
            acc = _add_product(acc, w1, _later(e1, mask1), PRECISION)
            acc = _add_rest(
                acc, extra1_ptr, extra1_desc, c0, offs_m, M, C1, PRECISION, BLOCK_E1, REST1
            )
            if extra2_ptr is not None:
                acc = _add_product(acc, w2, _later(e2, mask2), PRECISION)
                acc = _add_rest(
                    acc, extra2_ptr, extra2_desc, c0, offs_m, M, C2, PRECISION, BLOCK_E2, REST2
                )
    elif extra1_ptr is not None:
        w1 = extra1_desc.load([c0, 0])
        ptrs1, mask1 = _pixels(extra1_ptr, offs_m, M, C1, 0, 1, 1, 1, 1, BLOCK_E1)
        if extra2_ptr is not None:
            w2 = extra2_desc.load([c0, 0])
            ptrs2, mask2 = _pixels(extra2_ptr, offs_m, M, C2, 0, 1, 1, 1, 1, BLOCK_E2)
        await_inputs()
        if extra2_ptr is not None:
            e2 = tl.load(ptrs2, mask=mask2, other=0.0)
        e1 = tl.load(ptrs1, mask=mask1, other=0.0)
        acc = _add_product(acc, w1, _later(e1, mask1), PRECISION)
        acc = _add_rest(acc, extra1_ptr, extra1_desc, c0, offs_m, M, C1, PRECISION, BLOCK_E1, REST1)
        if extra2_ptr is not None:
            acc = _add_product(acc, w2, _later(e2, mask2), PRECISION)
            acc = _add_rest(
                acc, extra2_ptr, extra2_desc, c0, offs_m, M, C2, PRECISION, BLOCK_E2, REST2
            )
    mask_m = offs_m < M
    if PARTS:
        images = M // HW
        place = ((part * images + n).to(tl.int64) * (CO * HW) + pixel)[None, :]
        place += offs_co[:, None] * HW
        tl.store(out_ptr + place, acc, mask=mask_co[:, None] & mask_m[None, :])
    else:
        acc += terms[:, None]
        if emb_ptr is not None:
            acc += emb
        if residual_ptr is not None:
            acc += residual.to(tl.float32)
        y = acc.to(out_ptr.dtype.element_ty)
        ptrs = out_ptr + offs_m.to(tl.int64)[None, :] * WIDTH + offs_co[:, None]
        tl.store(ptrs, y, mask=(offs_co < WIDTH)[:, None] & mask_m[None, :])
        if partial_ptr is not None:
            # about the mean of the tile, since a difference of large sums would cancel
            v = y.to(tl.float32)
            total = tl.sum(v, 1)
            v -= (total / BLOCK_M)[:, None]
            sums_ptr = partial_ptr + (pid // blocks).to(tl.int64) * 2 * CO + offs_co
            tl.store(sums_ptr, total, mask=mask_co)
            tl.store(sums_ptr + CO, tl.sum(v * v, 1), mask=mask_co)


def split_early(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of x
    *,
    extra: Sequence[tuple[Tensor, Tensor]] = (),  # up to two: [N, H, W, C], [CO, C]
    config: EarlyConfig | None = None,
) -> Tensor:  # float32 [parts, N, CO, H * W]
    """`conv_split` in other parts. No kernel may write the filters while earlier ones of the stream
    are under way: they are read ahead."""
    n, h, w, ci = x.shape
    co, _, r, s = weight.shape
    config = config or split_config(x.shape, weight, x.device)
    splits = triton.cdiv(r * s * ci, config.rounds * config.block_k)
    parts = _empty((splits + bool(extra), n, co, h * w), dtype=torch.float32, device=x.device)
    if n > 0:
        _launch(x, weight, extra, config, parts, parts.shape[0], splits=splits)
    return parts


def conv_early(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of x
    bias: Tensor,  # float32 [CO]
    *,
    emb: Tensor | None = None,  # float32 [N, CO], rows any distance apart
    residual: Tensor | None = None,  # [N, H, W, CO], dtype of x
    extra: Sequence[tuple[Tensor, Tensor]] = (),  # up to two: [N, H, W, C], [CO, C]
    extra_bias: Tensor | None = None,  # float32 [CO]
    stats: bool = False,  # whether to return partials
    width: int | None = None,  # channels of y; None: CO
    config: EarlyConfig | None = None,
) -> tuple[Tensor, Tensor | None]:  # [N, H, W, CO]; float32 [N, K, 2, CO]
    """`conv_forward`, of tiles that divide the images. Filters and biases are read ahead, as in
    `split_early`."""
    n, h, w, _ = x.shape
    co = weight.shape[0]
    config = config or whole_config(x.shape, weight)
    y = _empty((n, h, w, width or co), dtype=x.dtype, device=x.device)
    partials = None
    if stats:
        tiles = h * w // config.block_m
        assert tiles * config.block_m == h * w and y.shape[3] == co
        partials = _empty((n, tiles, 2, co), dtype=torch.float32, device=x.device)
    if residual is not None:
        assert residual.is_contiguous() and residual.shape == y.shape
    assert emb is None or (emb.shape == (n, co) and emb.stride(1) == 1)
    if n > 0:
        terms = (bias, extra_bias, emb, residual, partials)
        _launch(x, weight, extra, config, y, 1, *terms)
    return y, partials


def _launch(
    x: Tensor,
    weight: Tensor,
    extra: Sequence[tuple[Tensor, Tensor]],
    config: EarlyConfig,
    out: Tensor,
    parts: int,
    bias: Tensor | None = None,
    extra_bias: Tensor | None = None,
    emb: Tensor | None = None,
    residual: Tensor | None = None,
    partials: Tensor | None = None,
    splits: int = 0,  # 0: whole sums
) -> None:
    n, h, w, ci = x.shape
    co, _, r, s = weight.shape
    assert x.is_contiguous() and x.dtype == weight.dtype and len(extra) <= 2
    assert weight.permute(0, 2, 3, 1).is_contiguous() and r % 2 == s % 2 == 1
    channels = [other.shape[3] for other, _ in extra]
    for other, w1x1 in extra:
        assert other.is_contiguous() and other.shape[:3] == x.shape[:3]
        assert w1x1.shape == (co, other.shape[3]) and w1x1.stride(1) == 1
    width = co if splits else out.shape[3]
    programs = triton.cdiv(n * h * w, config.block_m) * triton.cdiv(width, config.block_c)
    rows = weight.permute(0, 2, 3, 1).reshape(co, r * s * ci)
    filters = [
        TensorDescriptor(rows, list(rows.shape), [r * s * ci, 1], [config.block_c, depth])
        if depth > 0
        else None
        for depth in (config.block_k, config.tail)
    ]
    depths = _extra_depths(config, channels)
    others = []
    for (other, w1x1), depth in zip(extra, depths, strict=False):
        strides, block = list(w1x1.stride()), [config.block_c, depth]
        others += [other, TensorDescriptor(w1x1, list(w1x1.shape), strides, block)]
    rest = [c > depth for c, depth in zip((*channels, 0, 0), depths, strict=False)]
    early = _early(config, x, [] if splits else depths[: len(extra)])
    _conv_early_kernel[(programs, parts)](
        x, *filters, *(others + [None] * 4)[:4], bias, extra_bias, emb, residual, partials, out,
        row_stride(emb), n * h * w, ci, *(channels + [0, 0])[:2], co, width, splits,
        h, w, r, s, splits > 0, "tf32", config.block_c, config.block_m, config.block_k,
        *depths, *rest, config.rounds, early, config.tail, num_warps=config.num_warps, num_stages=1,
        **overlapping(x.device),
    )  # fmt: skip


def _extra_depths(config: EarlyConfig, channels: Sequence[int]) -> list[int]:
    """Channels of the two 1x1 convolutions that a program asks for at once."""
    most = min(config.block_k, _DEEPEST // 2)
    return [min(max(triton.next_power_of_2(c), 16), most) for c in (*channels, 16, 16)[:2]]


def _early(config: EarlyConfig, x: Tensor, extra: Sequence[int]) -> int:
    """Rounds whose filters find room in shared memory beside the pixels of one, the tail and 1x1
    convolutions of so many channels."""
    tile = config.block_k * x.itemsize
    rest = (config.block_c + config.block_m) * (config.tail + sum(extra)) * x.itemsize
    room = describe(x.device).shared_memory - config.block_m * tile - rest - 4096
    return min(config.rounds, max(room // (config.block_c * tile), 1), 2)


def split_config(
    x_shape: Sequence[int],  # N, H, W, CI
    weight: Tensor,
    device: torch.device,
) -> EarlyConfig:
    """The fewest parts that keep half of the multiprocessors busy, in as many rounds as they
    become too many otherwise."""
    n, h, w, ci = x_shape
    co, _, r, s = weight.shape
    terms, sms = r * s * ci, describe(device).num_sms
    for block_m, block_k in ((64, 512), (32, 512), (64, 256), (32, 256)):
        tiles = triton.cdiv(n * h * w, block_m) * triton.cdiv(co, 64)
        parts = triton.cdiv(terms, block_k)
        if 2 * tiles * parts >= 0.95 * sms and parts <= _MAX_PARTS:
            break
    rounds = 1
    while rounds < parts and tiles * triton.cdiv(parts, rounds) > sms:
        rounds += 1
    return EarlyConfig(64, block_m, block_k, rounds, 0, 8 if block_k == 512 else 4)


def whole_config(
    x_shape: Sequence[int],  # N, H, W, CI
    weight: Tensor,
) -> EarlyConfig:
    """Deep products, and what is left of the sum in a shallow one."""
    n, h, w, ci = x_shape
    co, _, r, s = weight.shape
    terms = r * s * ci
    block_k = min(1 << (terms.bit_length() - 1), _DEEPEST)
    if block_k < _DEEPEST and 4 * terms > 5 * block_k:
        block_k *= 2
    rounds, rest = divmod(terms, block_k)
    tail = max(triton.next_power_of_2(rest), 16) if rest else 0
    if tail > _DEEPEST // 2 or rounds == 0:
        rounds, tail = rounds + 1, 0
    block_c = min(max(triton.next_power_of_2(co), 16), 64)
    block_m = 64 if h * w >= _LARGE and terms <= _LONG else 32
    return EarlyConfig(block_c, block_m, block_k, rounds, tail, 8 if block_k == _DEEPEST else 4)


def serves_split(x_shape: Sequence[int], weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether `split_early` should do it: images are few, and registers hold a tile of numbers of
    this size."""
    n, h, w, ci = x_shape
    few = n <= EARLY_IMAGES and n * h * w <= _MAX_PIXELS
    return few and dtype.itemsize == 2 and ci % 16 == 0


def serves_whole(
    x_shape: Sequence[int],  # N, H, W, CI
    weight: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether `conv_early` should do it: all programs find a multiprocessor each at once, and
    their tiles divide the images."""
    n, h, w, ci = x_shape
    if n > EARLY_IMAGES or dtype.itemsize != 2 or ci % 16 or not describe(device).tma:
        return False
    config = whole_config(x_shape, weight)
    programs = n * h * w // config.block_m * triton.cdiv(weight.shape[0], config.block_c)
    return h * w % config.block_m == 0 and programs <= describe(device).num_sms
