"""The kernel of `narrow_output`: 3x3 filters, of 64 channels or 128 to 16.

Elsewhere the channels of the result are the rows of a product, of which the tensor cores do 64 at
least. Here the pixels are: a product is [64 pixels, 64] with the filters of a tap, [64, 16]. Both
stand in shared memory, the filters all the time. Reading the pixels nine times, once a tap, is what
takes longest: 576 clocks for a row of 64, half of that for its way from memory.

A program takes successive tiles of two rows, and two warpgroups a row each. Rows are fetched once:
they pass through a ring, in pairs, and a tile uses two pairs, of which the next tile uses the
second one again. There are two programs on a multiprocessor, which nothing keeps in step, so some
multiply while others write; or one with as much memory as both, where rows are larger.

Of rows of 32 pixels two images lie side by side, see `row_wgrad`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from ...hopper.compat import allocate_for_views, reinterpret, sync_threads, tma_load
from ...hopper.pairs import round_pairs
from ...hopper.pipeline import new_barriers, new_ring, wait_for
from ...hopper.roles import launch_roles
from ...runtime.dependent_launch import await_inputs_alone, begin_next
from .row_memory import clear_margins, pair_chunks, row_from, row_of_tap, rows_chunks


@gluon.jit
def _load(
    x_desc, w_desc, x, w_bufs, w_full, first, last, tiles_h,
    W: gl.constexpr, IMAGES: gl.constexpr, K_BLOCKS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    PAIR: gl.constexpr = pair_chunks(W)
    CHUNKS: gl.constexpr = rows_chunks(2 * x.SLOTS, W)
    bar = w_full.index(0)
    mbarrier.expect(bar, K_BLOCKS * 9 * 16 * 128)
    for k in gl.static_range(K_BLOCKS):
        for tap in range(9):
            buf = w_bufs.index(k * 9 + tap)
            tma_load(w_desc, [tap, 0, k * 64], bar, buf)
    if OVERLAP:
        await_inputs_alone()  # filters are there before the launch in front
    place = 0
    for tile in range(first, last):
        n = tile // tiles_h
        h0 = tile % tiles_h * 2
        known = gl.where((tile == first) | (h0 == 0), 0, 1)
        for i in range(known, 2):
            slot, bar = x.acquire(place, K_BLOCKS * 2 * W * 128)
            for k in gl.static_range(K_BLOCKS):
                for j in gl.static_range(2):
                    h = h0 - 1 + 2 * i + j
                    at = [n, h, 0, k * 64] if IMAGES == 1 else [h, 0, n * IMAGES, k * 64]
                    row = row_from(
                        x.bufs, slot, j, W, PAIR, IMAGES, BEFORE=k * CHUNKS, BLOCKS=x.SLOTS
                    )
                    tma_load(x_desc, at, bar, row)
            place += 1


@gluon.jit
def _multiply_row(
    acc, x, w_bufs, pair, j: gl.constexpr, r: gl.constexpr, piece: gl.constexpr, W: gl.constexpr,
    IMAGES: gl.constexpr, K_BLOCKS: gl.constexpr,
):  # fmt: skip
    """The products of 64 pixels of the j-th row of a pair with a row of the filter, begun but not
    waited for."""
    PAIR: gl.constexpr = pair_chunks(W)
    CHUNKS: gl.constexpr = rows_chunks(2 * x.SLOTS, W)
    for k in gl.static_range(K_BLOCKS):
        for s in gl.static_range(3):
            pixels = row_of_tap(
                x.bufs, pair, j, piece * 64 + s, W, PAIR, IMAGES, BEFORE=k * CHUNKS,
                BLOCKS=x.SLOTS, PIXELS=64,
            )  # fmt: skip
            w = w_bufs.index(k * 9 + r * 3 + s)
            w = reinterpret(w, w.dtype, [16, 64], gl.NVMMASharedLayout(128, 16)).permute((1, 0))
            acc = warpgroup_mma(pixels, w, acc, use_acc=k + r + s > 0, is_async=True)
    return acc


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, y_ptr, x, w_bufs, w_full, bias_ptr, first, last, tiles_h, N, H, CO,
    W: gl.constexpr, IMAGES: gl.constexpr, K_BLOCKS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Row GROUP of every tile."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    # 16 bytes a thread, and every warp the pixels whose sums it has
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    channels = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    bias = gl.load(bias_ptr + channels, mask=channels < CO, other=0.0)[None, :]
    offs = gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))[:, None] * 16
    offs += gl.arange(0, 16, layout=gl.SliceLayout(0, OUT))[None, :]
    inside = offs < 64 * 16
    first_n = first // tiles_h
    mbarrier.wait(w_full.index(0), 0)
    for tile in range(first, last):
        n = tile // tiles_h
        h = tile % tiles_h
        place = tile - first + n - first_n
        above = x.wait(place)
        below = x.wait(place + 1)
        accs = ()
        for i in gl.static_range(W // 64):
            acc = gl.zeros([64, 16], gl.float32, LAYOUT)
            for r in gl.static_range(3):
                pair = above if GROUP + r < 2 else below
                acc = _multiply_row(
                    acc, x, w_bufs, pair, (GROUP + r) % 2, r, i, W, IMAGES, K_BLOCKS
                )
            accs = accs + (acc,)
        accs = wait_for(0, accs, W // 64)
        sync_threads()
        # two tiles use a pair of rows, or one at the ends of an image and of what this program does
        x.release(place)
        x.release(place, (h == 0) | (tile == first))
        x.release(place + 1)
        x.release(place + 1, (h + 1 == tiles_h) | (tile + 1 == last))

        row = h * 2 + GROUP
        if IMAGES == 1:
            to = y_ptr + (n.to(gl.int64) * H + row) * (W * 16)
            for i in gl.static_range(W // 64):
                y = gl.convert_layout(round_pairs(accs[i] + bias, y_ptr.dtype.element_ty), OUT)
                gl.store(to + i * (64 * 16) + offs, y, mask=inside & (row < H))
        else:  # the same pixel of each image side by side
            pixel = offs // 16
            images = n * IMAGES + pixel % IMAGES
            to = y_ptr + (images.to(gl.int64) * H + row) * (W // IMAGES * 16)
            y = gl.convert_layout(round_pairs(accs[0] + bias, y_ptr.dtype.element_ty), OUT)
            there = inside & (row < H) & (images < N)
            gl.store(to + pixel // IMAGES * 16 + offs % 16, y, mask=there)
    if OVERLAP:
        begin_next()


@gluon.jit(do_not_specialize=["tiles", "tiles_h", "H"])
def conv_narrow_output_kernel(
    x_desc,  # [N, H, W, K] in boxes [1, 1, W, 64]; [H, W / IMAGES, N, K] in boxes of one row
    w_desc,  # [9, CO, K] in boxes [1, 16, 64]; beyond CO are zeros
    y_ptr,  # [N, H, W, 16]
    bias_ptr,  # float32 [CO]
    tiles,  # of all images
    tiles_h,  # of an image: H / 2, rounded up
    N,  # None: IMAGES is 1
    H,
    CO,
    W: gl.constexpr,  # pixels of a row, of all its images
    IMAGES: gl.constexpr,  # side by side in a row
    K_BLOCKS: gl.constexpr,  # of 64 channels of x
    PAIRS: gl.constexpr,  # of rows in shared memory
    OVERLAP: gl.constexpr,  # the launch in front may still be under way
    num_warps: gl.constexpr,
):
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    dtype: gl.constexpr = x_desc.dtype
    CHUNKS: gl.constexpr = rows_chunks(2 * PAIRS, W)
    x_bufs = allocate_for_views(dtype, [K_BLOCKS * CHUNKS, 8, 64], MATRIX)
    w_bufs = gl.allocate_shared_memory(dtype, [K_BLOCKS * 9, 1, 16, 64], w_desc.layout)
    x = new_ring(x_bufs, PAIRS, 4)  # two tiles of two warpgroups
    w_full = new_barriers(1)
    clear_margins(x_bufs, K_BLOCKS, 2 * PAIRS, W, num_warps)

    part = gl.program_id(0)
    parts = gl.num_programs(0)
    first = (tiles * part) // parts
    last = (tiles * (part + 1)) // parts
    launch_roles(
        _multiply,
        (
            y_ptr, x, w_bufs, w_full, bias_ptr, first, last, tiles_h, N, H, CO, W, IMAGES, K_BLOCKS,
            OVERLAP,
        ),
        _load,
        (x_desc, w_desc, x, w_bufs, w_full, first, last, tiles_h, W, IMAGES, K_BLOCKS, OVERLAP),
        2, (104 if K_BLOCKS * W == 64 else 224, 40),
    )  # fmt: skip
