"""The kernel of `stationary_weights` for 3x3 convolutions of 64 channels, or their input
gradients.

The filters stay in shared memory, which 64 channels in and 64 out leave room for. A program takes
successive tiles of two or four rows of an image, so every row is fetched once: they pass through a
ring, in pairs, and the last pair of a tile is the first one of the next.

Three warpgroups take every third tile, or two every second one of four rows. They have the tensor
cores in turn (`turns`), so that the epilogues of the others fall into the products of one. What
epilogues read beside their tiles (the residual, or x) passes through another ring, of pairs of rows
as well: a warp of its own fills it, as far ahead as there is room, and the result leaves from where
it was. With tiles of four rows filters are loaded to registers half as often.

Where 1x1 convolutions of other tensors are added there are two warpgroups and tiles of two rows,
since the memory is needed for those: blocks of 64 channels of a tile, which come and go between the
rows of the filter.

Forward x may be what a norm reads, of which a table is there, or sums. Then a warpgroup makes
act(norm(x)) of the rows that are new with its tile where they lie, before its turn; or one or two
others make it of all rows, see `norm_producers`, and two multiply. What is outside of the image
stays zeros, for it is the activation that is padded.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....hopper.compat import allocate_for_views
from ....hopper.pipeline import new_barriers, new_ring, new_turns
from ..norm_producers import make_rows
from ..norm_rows import Norm, new_affine
from ..row_memory import clear_margins, rows_chunks
from .stationary_loads import FilterDescs, Filters, Work, load_beside, load_rows
from .stationary_multiply import Vectors, multiply_rows


@gluon.jit(do_not_specialize=["tiles", "tiles_h"])
def conv_stationary_weights_kernel(
    x_desc,  # [N, H, W, 64] in boxes [1, 1, W, 64]: x, or dy
    w_desc,  # [9, CO, CI] in boxes [1, 64, 64]
    beside1_desc,  # [N, H, W, C] in boxes [1, 2, W, 64], or None: the residual; DGRAD: x
    beside2_desc,  # the second of two tensors that x concatenates, or None
    y_desc,  # [N, H, W, C] in boxes [1, 2, W, 64]: y, or dz
    # [N, H, W, 64 EXTRA1] in boxes [1, 1, W, 64], or [N, H / 2, W / 2, 2, 64 EXTRA1] in boxes
    # [1, 1, W / 2, 2, 64]: every pixel for 2x2; or None
    extra1_desc,
    extra1_w_desc,  # [1, C, 64 EXTRA1] in boxes [1, 64, 64]
    extra2_desc,  # a second such pair, or None
    extra2_w_desc,
    vectors_ptr,  # float32: bias [C]; DGRAD: table [N, 4, C]
    extra_bias_ptr,  # [C] or None
    emb_ptr,  # [N, C] or None
    partial_ptr,  # [N, H / ROWS, 2, C] or None
    sums_ptr,  # float32 [N, TILES_OF_X, 2, 64], of x, if act(norm(x)) is convolved; or None
    norm_weight_ptr,  # [64]
    norm_bias_ptr,  # [64]
    scale_ptr,  # [N, 64] or None
    shift_ptr,  # [N, 64] or None
    stride_scale,
    stride_shift,
    eps,
    x_ptr,  # x as well, with PRODUCERS; or None
    table_ptr,  # float32 [N, 4, 64]: the norm's table, in place of the sums; or None
    border,  # channels of the first of two tensors
    stride_emb,
    factor,  # of a forward pass, or None: multiplies the sum
    tiles,  # N * H / ROWS
    tiles_h,  # H / ROWS
    C,
    ROWS: gl.constexpr,  # of a tile; 2 with extra terms
    W: gl.constexpr,
    DGRAD: gl.constexpr,
    ACT: gl.constexpr,
    GROUPS: gl.constexpr,  # that multiply
    PAIRS: gl.constexpr,  # of rows of pixels in shared memory
    PRODUCERS: gl.constexpr,  # warpgroups that only make act(norm(x)): 0 to 2, a row of a pair each
    SLOTS: gl.constexpr,  # for two rows of the result: a ring, or of each group its own
    EXTRA1: gl.constexpr,
    EXTRA2: gl.constexpr,
    OVERLAP: gl.constexpr,  # the previous kernel may still be under way
    TILES_OF_X: gl.constexpr,
    CG: gl.constexpr,  # channels of a group
    num_warps: gl.constexpr,
):
    EXTRA: gl.constexpr = EXTRA1 + EXTRA2
    BESIDE: gl.constexpr = 0 if beside1_desc is None else 1
    PRODUCES: gl.constexpr = x_ptr is not None
    gl.static_assert(BESIDE == 1 or SLOTS <= GROUPS * (ROWS // 2))
    dtype: gl.constexpr = x_desc.dtype
    PIXELS: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    x_bufs = allocate_for_views(dtype, [rows_chunks(2 * PAIRS, W), 8, 64], PIXELS)
    w_bufs = gl.allocate_shared_memory(dtype, [9 + EXTRA, 1, 64, 64], w_desc.layout)
    stages = gl.allocate_shared_memory(dtype, [SLOTS, 1, 2, W, 64], y_desc.layout)
    x = new_ring(x_bufs, PAIRS, 2, 2 if PRODUCERS == 2 else 1)
    filters = Filters(w_bufs, new_barriers(3))
    turns = new_turns(GROUPS)
    beside, extra = None, None
    if BESIDE == 1:
        beside = new_ring(stages, SLOTS)
    if EXTRA > 0:
        extra_bufs = gl.allocate_shared_memory(dtype, [2 * 2, 1, 1, W, 64], y_desc.layout)
        extra = new_ring(extra_bufs, 2)
    clear_margins(x_bufs, 1, 2 * PAIRS, W, num_warps)

    # programs that are neighbours do the same tiles of other channels
    blocks_c = C // 64
    c0 = gl.program_id(0) % blocks_c * 64
    part = gl.program_id(0) // blocks_c
    parts = gl.num_programs(0) // blocks_c
    first = (tiles * part) // parts
    work = Work(first, (tiles * (part + 1)) // parts - first, tiles_h, c0)
    filter_descs = FilterDescs(w_desc, extra1_w_desc, extra2_w_desc)
    vectors = Vectors(vectors_ptr, extra_bias_ptr, emb_ptr, stride_emb, factor)
    kept = None
    if sums_ptr is not None or table_ptr is not None:
        kept = new_affine(PRODUCERS if PRODUCES else GROUPS)
    norm = Norm(
        sums_ptr, norm_weight_ptr, norm_bias_ptr, scale_ptr, shift_ptr,
        stride_scale, stride_shift, eps, kept, table_ptr,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                multiply_rows,
                (
                    role, y_desc, x, filters, extra, beside, stages, turns, vectors, norm,
                    partial_ptr, work, C,
                    ROWS, W, DGRAD, ACT, EXTRA, OVERLAP, TILES_OF_X, CG, PRODUCES,
                ),
            )
            if role < GROUPS
            else (
                make_rows,
                (
                    x_ptr, x, norm, work, tiles_h * ROWS,
                    role - GROUPS, 3 - PRODUCERS, ROWS, W, ACT, TILES_OF_X, CG, OVERLAP,
                ),
            )
            if role < GROUPS + PRODUCERS
            else (
                load_rows,
                (
                    x_desc, filter_descs, extra1_desc, extra2_desc, x, filters, extra, work,
                    ROWS, W, DGRAD, EXTRA1, EXTRA2, OVERLAP, PRODUCES,
                ),
            )
            if role == GROUPS + PRODUCERS
            else (
                load_beside,
                (beside1_desc, beside2_desc, beside, filters, work, border, ROWS, W, OVERLAP),
            )
            for role in ((0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5))[
                GROUPS - 2 + PRODUCERS + BESIDE
            ]
        ],
        (([4, 1], [4, 1, 1]), ([4, 4, 1], [4, 4, 1, 1]), ([4, 4, 4, 1], [4, 4, 4, 1, 1]))[
            GROUPS - 2 + PRODUCERS
        ][BESIDE],
        (
            ([240, 24], [240, 24, 24]),
            ([160, 160, 24], [160, 160, 24, 24]),
            ([168, 144, 24], [168, 144, 24, 24]),
            ([144, 80, 80, 24], [144, 80, 80, 24, 24]),
        )[GROUPS - 2 + (PRODUCERS + 1 if PRODUCES else 0)][BESIDE],
    )  # fmt: skip
