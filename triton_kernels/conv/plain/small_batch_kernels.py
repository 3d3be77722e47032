"""The kernel of `conv.plain.small_batch`; that module describes it."""

import triton
import triton.language as tl

from ...runtime.dependent_launch import await_inputs


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
    """Pointers to the pixels that terms k0, k0 + 1, ... of the sum multiply, and their mask:
    [BLOCK_M, BLOCK_K]. Term k is channel k % C of tap k // C."""
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
    """Return x unchanged. The compiler copies an operand that was loaded into shared memory right
    behind the load, and waits for it there. The result of `where` is no load, so the copy comes
    later."""
    return tl.where(mask, x, 0.0)


@triton.jit
def _add_product(acc, w, x, PRECISION: tl.constexpr):
    """acc + w x^T, where the product does not start from acc. In a chain of products that do, the
    compiler gives each warp 16 rows in all but the last, so 64 rows have work for only four warps
    (Triton 3.6)."""
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
    REST: tl.constexpr,  # C > BLOCK_E; a loop that never runs would convert acc's layout twice
):
    """Add a 1x1 convolution of the channels from BLOCK_E on."""
    if not REST:
        return acc
    for k0 in range(BLOCK_E, C, BLOCK_E):
        w = weight_desc.load([c0, k0])
        ptrs, mask = _pixels(x_ptr, offs_m, M, C, k0, 1, 1, 1, 1, BLOCK_E)
        x = tl.load(ptrs, mask=mask, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["splits"])
def conv_early_kernel(
    x_ptr,  # [M, CI]: pixels of images [H, W]
    weight_desc,  # [CO, R * S * CI] in boxes [BLOCK_C, BLOCK_K]
    extra1_ptr,  # [M, C1], or None
    extra1_desc,  # [CO, C1] in boxes [BLOCK_C, BLOCK_E1]
    extra2_ptr,  # a second such pair, or None
    extra2_desc,
    out_ptr,  # float32 [parts, N, CO, H * W], out
    M,
    CI,
    C1,
    C2,
    CO,
    splits,  # parts of the convolution; the 1x1 convolutions are one more part
    H: tl.constexpr,
    W: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E1: tl.constexpr,
    BLOCK_E2: tl.constexpr,
    REST1: tl.constexpr,  # whether C1 > BLOCK_E1
    REST2: tl.constexpr,
    ROUNDS: tl.constexpr,
    EARLY: tl.constexpr,  # the first rounds, whose filters are loaded before the wait
):
    HW: tl.constexpr = H * W
    pid, part = tl.program_id(0), tl.program_id(1)
    blocks = tl.cdiv(CO, BLOCK_C)
    c0 = pid % blocks * BLOCK_C
    offs_co = c0 + tl.arange(0, BLOCK_C)
    mask_co = offs_co < CO
    offs_m = pid // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    n, pixel = offs_m // HW, offs_m % HW
    acc = tl.zeros([BLOCK_C, BLOCK_M], tl.float32)
    if part < splits:
        k0 = part * (ROUNDS * BLOCK_K)
        ptrs, mask = _pixels(x_ptr, offs_m, M, CI, k0, H, W, R, S, BLOCK_K)
        filters = ()
        for i in tl.static_range(EARLY):
            filters = filters + (weight_desc.load([c0, k0 + i * BLOCK_K]),)
        await_inputs()
        x = tl.load(ptrs, mask=mask, other=0.0)
        for i in tl.static_range(ROUNDS):
            now, there = x, mask
            if i + 1 < ROUNDS and ROUNDS <= 3:  # with more rounds, registers would not suffice
                k = k0 + (i + 1) * BLOCK_K
                ptrs, mask = _pixels(x_ptr, offs_m, M, CI, k, H, W, R, S, BLOCK_K)
                x = tl.load(ptrs, mask=mask, other=0.0)
            if i > 0 and ROUNDS <= 3:
                now = _later(now, there)
            w = filters[i] if i < EARLY else weight_desc.load([c0, k0 + i * BLOCK_K])
            acc = _add_product(acc, w, now, PRECISION)
            if i + 1 < ROUNDS and ROUNDS > 3:
                k = k0 + (i + 1) * BLOCK_K
                ptrs, mask = _pixels(x_ptr, offs_m, M, CI, k, H, W, R, S, BLOCK_K)
                x = tl.load(ptrs, mask=mask, other=0.0)
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
    images = M // HW
    place = ((part * images + n).to(tl.int64) * (CO * HW) + pixel)[None, :]
    place += offs_co[:, None] * HW
    tl.store(out_ptr + place, acc, mask=mask_co[:, None] & mask_m[None, :])
