"""The kernel of `conv.hopper.mma_wgrad`.

A warp takes 32 channels of each 64 of dy, and 32 of each 64 of x. Neither which index of the sum a
pixel has in a product matters, if it is the same in both operands, nor which row of the product a
channel is, if the result is stored accordingly. So a thread reads four neighbouring channels of a
pixel at once, which are rows i, i + 8, i + 32 and i + 40, and the four threads of a row take pixels
0, 2, 4 and 6, whose 16 bytes the swizzle of TMA puts into different banks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ....hopper.compat import reinterpret, sync_threads, tma_load
from ....hopper.pipeline import new_ring
from ....hopper.roles import launch_roles
from ....runtime.dependent_launch import await_inputs

# A pixel is bits p3 p2 p1 p0 of its place in a step, a channel c5 ... c0. Registers of a thread:
# c0, c1, p0, p3. Its place in the warp: p1, p2, c2, c3, c4. Of the four warps two differ in c5.
_REGISTERS = [[0, 1], [0, 2], [1, 0], [8, 0]]
_LANES = [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
_DY = gl.constexpr(gl.DistributedLinearLayout(_REGISTERS, _LANES, [[0, 0], [0, 32]], [], [16, 64]))
_X = gl.constexpr(gl.DistributedLinearLayout(_REGISTERS, _LANES, [[0, 32], [0, 0]], [], [16, 64]))
# The sum as it is stored, [channel of dy, channel of x]: eight neighbours of x a thread.
_OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]],
        [[0, 8], [0, 16], [4, 0], [8, 0], [16, 0]],
        [[0, 32], [32, 0]],
        [],
        [64, 64],
    )
)
_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8]))


@gluon.jit
def _rounded(v):
    """To the nearest TF32, as far as a tensor core looks. The bits of a NaN may carry over into the
    sign: a product with zero keeps it, and makes a NaN of an infinity."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; add.u32 t, $1, 0x1000; fma.rn.f32 $0, $1, 0f00000000, t; }",
        "=r,r", [v], gl.float32, True, 1,
    )  # fmt: skip


@gluon.jit
def _split(v):
    """Two numbers whose sum is v, the first a TF32. Of an infinity or a NaN the second is NaN."""
    bits = (v.to(gl.int32, bitcast=True) + 0x1000) & -0x2000
    big = bits.to(gl.float32, bitcast=True)
    return big, v - big


@gluon.jit
def _as_left(v):
    """[16 pixels, 64 channels] as the left operand of a product."""
    v = v.reshape([2, 4, 2, 2, 8, 2, 2]).permute((5, 3, 6, 4, 0, 2, 1)).reshape([64, 16])
    return gl.convert_layout(v, gl.DotOperandLayout(0, _MMA, 1), assert_trivial=True)


@gluon.jit
def _as_right(v):
    v = v.reshape([2, 4, 2, 2, 8, 2, 2]).permute((0, 2, 1, 5, 6, 3, 4)).reshape([16, 64])
    return gl.convert_layout(v, gl.DotOperandLayout(1, _MMA, 1), assert_trivial=True)


@gluon.jit
def _as_stored(acc):
    """A sum with its channels in order."""
    acc = acc.reshape([2, 2, 2, 8, 2, 2, 2, 8]).permute((1, 3, 0, 2, 6, 7, 4, 5)).reshape([64, 64])
    return gl.convert_layout(acc, _OUT, assert_trivial=True)


@gluon.jit
def _read(ring, slot, K: gl.constexpr, X_BLOCKS: gl.constexpr):
    """The K-th 16 pixels of the tile in a slot: of dy, and of each block of x."""
    x_bufs, dy_bufs = ring.bufs
    BOX: gl.constexpr = dy_bufs.shape
    PIXELS: gl.constexpr = BOX[1] * BOX[2] * BOX[3]
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    buf = reinterpret(dy_bufs.index(slot), gl.float32, [PIXELS, 64], MATRIX)
    values = (buf.slice(K * 16, 16).load(_DY),)
    for j in gl.static_range(X_BLOCKS):
        buf = reinterpret(x_bufs.index(slot * X_BLOCKS + j), gl.float32, [PIXELS, 64], MATRIX)
        values = values + (buf.slice(K * 16, 16).load(_X),)
    return values


@gluon.jit
def _add_products(accs, values, PRODUCTS: gl.constexpr, X_BLOCKS: gl.constexpr):
    """Those of 16 pixels."""
    dy = values[0]
    if PRODUCTS == 1:
        left = _as_left(_rounded(dy))
    else:
        big, small = _split(dy)
        left = _as_left(big)
        left_small = _as_left(small)
    sums = ()
    for j in gl.static_range(X_BLOCKS):
        x = values[1 + j]
        acc = accs[j]
        if PRODUCTS == 1:
            acc = mma_v2(left, _as_right(_rounded(x)), acc, input_precision="tf32")
        else:
            big, small = _split(x)
            right = _as_right(big)
            # added up by themselves: tensor cores round every addition towards zero
            right_small = _as_right(small)
            part = gl.zeros([64, 64], gl.float32, _MMA)
            part = mma_v2(left_small, right, part, input_precision="tf32")
            part = mma_v2(left, right_small, part, input_precision="tf32")
            acc += mma_v2(left, right, part, input_precision="tf32")
        sums = sums + (acc,)
    return sums


@gluon.jit
def _store(dw_ptr, accs, CI, CO, co0, j0, x_blocks, TAPS: gl.constexpr, X_BLOCKS: gl.constexpr):
    row = TAPS * CI
    offs_co = gl.arange(0, 64, layout=gl.SliceLayout(1, _OUT))
    offs_ci = gl.arange(0, 64, layout=gl.SliceLayout(0, _OUT))
    dw_ptr += gl.program_id(1).to(gl.int64) * CO * row
    for j in gl.static_range(X_BLOCKS):
        tap = (j0 + j) // x_blocks
        ci = (j0 + j) % x_blocks * 64 + offs_ci
        co = co0 + offs_co
        ptrs = dw_ptr + (co * row)[:, None] + (tap * CI + ci)[None, :]
        mask = (co < CO)[:, None] & ((ci < CI) & (tap < TAPS))[None, :]
        gl.store(ptrs, _as_stored(accs[j]).to(dw_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _load_all(
    x_desc, dy_desc, ring, first, steps, P, Q, co0, j0, x_blocks,
    S: gl.constexpr, PAD_H: gl.constexpr, PAD_W: gl.constexpr, X_BLOCKS: gl.constexpr,
):  # fmt: skip
    """The tiles of pixels of a part, of all of the program's channels."""
    BOX: gl.constexpr = dy_desc.block_shape
    BYTES: gl.constexpr = (1 + X_BLOCKS) * BOX[0] * BOX[1] * BOX[2] * 64 * 4
    x_bufs, dy_bufs = ring.bufs
    tiles_h = (P + BOX[1] - 1) // BOX[1]
    tiles_w = (Q + BOX[2] - 1) // BOX[2]
    w = first % tiles_w * BOX[2]
    h = first // tiles_w % tiles_h * BOX[1]
    n = first // (tiles_w * tiles_h) * BOX[0]
    blocks = ()  # of x: row, column and channel
    for j in gl.static_range(X_BLOCKS):
        tap = (j0 + j) // x_blocks
        blocks = blocks + ((tap // S - PAD_H, tap % S - PAD_W, (j0 + j) % x_blocks * 64),)
    for step in range(steps):
        slot, bar = ring.acquire(step, BYTES)
        tma_load(dy_desc, [n, h, w, co0], bar, dy_bufs.index(slot))
        for j in gl.static_range(X_BLOCKS):
            where = [n, h + blocks[j][0], w + blocks[j][1], blocks[j][2]]
            buf = x_bufs.index(slot * X_BLOCKS + j)
            tma_load(x_desc, where, bar, buf)
        w += BOX[2]
        h = gl.where(w < Q, h, h + BOX[1])
        w = gl.where(w < Q, w, 0)
        n = gl.where(h < P, n, n + BOX[0])
        h = gl.where(h < P, h, 0)


@gluon.jit
def _multiply_all(
    GROUP: gl.constexpr, dw_ptr, ring, steps, CI, CO, co0, j0, x_blocks,
    PRODUCTS: gl.constexpr, TAPS: gl.constexpr, X_BLOCKS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    _, dy_bufs = ring.bufs
    SLICES: gl.constexpr = dy_bufs.shape[1] * dy_bufs.shape[2] * dy_bufs.shape[3] // 16
    accs = ()
    for _ in gl.static_range(X_BLOCKS):
        accs = accs + (gl.zeros([64, 64], gl.float32, _MMA),)
    if AHEAD:
        values = _read(ring, ring.wait(0, pred=steps > 0), 0, X_BLOCKS)
    for step in range(steps):
        slot = step % ring.SLOTS if AHEAD else ring.wait(step)
        # What was read from the slot of the step before has been multiplied, so it is there. Behind
        # the step itself it would not have to be: products are put off beyond a barrier.
        sync_threads()
        ring.release(step - 1, pred=step > 0)
        for k in gl.static_range(SLICES):
            if AHEAD:
                if k + 1 < SLICES:
                    following = _read(ring, slot, k + 1, X_BLOCKS)
                else:
                    next_slot = ring.wait(gl.minimum(step + 1, steps - 1))
                    following = _read(ring, next_slot, 0, X_BLOCKS)
                accs = _add_products(accs, values, PRODUCTS, X_BLOCKS)
                values = following
            else:
                values = _read(ring, slot, k, X_BLOCKS)
                accs = _add_products(accs, values, PRODUCTS, X_BLOCKS)
    _store(dw_ptr, accs, CI, CO, co0, j0, x_blocks, TAPS, X_BLOCKS)


@gluon.jit
def _first(split, num_tiles):
    """The first tile of a part."""
    return (split.to(gl.int64) * num_tiles // gl.num_programs(1)).to(gl.int32)


@gluon.jit(do_not_specialize=["P", "Q", "num_tiles"])
def conv_mma_wgrad_kernel(
    x_desc,  # float32 [N, H, W, CI] in boxes [TILE_N, TILE_H, TILE_W, 64]
    dy_desc,  # float32 [N, P, Q, CO] in such boxes
    dw_ptr,  # [splits, CO, R * S, CI]
    CI,
    P,
    Q,
    CO,
    num_tiles,  # of pixels
    PRODUCTS: gl.constexpr,  # of TF32: 1, or 3
    TAPS: gl.constexpr,
    S: gl.constexpr,
    PAD_H: gl.constexpr,
    PAD_W: gl.constexpr,
    X_BLOCKS: gl.constexpr,  # of 64 channels of a tap, of a program, which has 64 of dy
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,  # pixels are read into registers before those before them are multiplied
    num_warps: gl.constexpr,  # that multiply; one more loads
):
    BOX: gl.constexpr = dy_desc.block_shape
    SLOT: gl.constexpr = [BOX[0], BOX[1], BOX[2], 64]
    x_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * X_BLOCKS] + SLOT, x_desc.layout)
    dy_bufs = gl.allocate_shared_memory(gl.float32, [STAGES] + SLOT, dy_desc.layout)

    await_inputs()
    x_blocks = (CI + 63) // 64  # of a tap
    columns = (TAPS * x_blocks + X_BLOCKS - 1) // X_BLOCKS
    co0 = gl.program_id(0) // columns * 64
    j0 = gl.program_id(0) % columns * X_BLOCKS
    first = _first(gl.program_id(1), num_tiles)
    steps = _first(gl.program_id(1) + 1, num_tiles) - first
    ring = new_ring((x_bufs, dy_bufs), STAGES)
    fence_async_shared()
    sync_threads()
    launch_roles(
        _multiply_all, (
            dw_ptr, ring, steps, CI, CO, co0, j0, x_blocks, PRODUCTS, TAPS, X_BLOCKS, AHEAD,
        ),
        _load_all, (
            x_desc, dy_desc, ring, first, steps, P, Q, co0, j0, x_blocks, S, PAD_H, PAD_W, X_BLOCKS,
        ),
        1, (None, 24),
    )  # fmt: skip
