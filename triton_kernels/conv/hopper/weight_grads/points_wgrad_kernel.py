"""The weight gradients of up to four 1x1 convolutions or linear layers, in one launch. All layers
have the same number of pixels.

    dweight[co, ci] = sum_p dy[p, co] x[p, ci]

The gradients are cut into blocks of CO_SIZE x CI_SIZE channels, and the blocks of all gradients
make one list. The first blocks of the list are `whole`: one program computes the whole sum and
writes the gradient. The tiles of pixels of all other blocks are cut into `pieces` of equal length,
so a piece may begin in one block and end in the next. A program writes one part for each block of a
piece, and `conv.wgrad_parts` adds the parts. A program takes its whole blocks first and then its
pieces, and the next tiles are loaded while it writes.

One warp loads tiles of pixels into a ring of buffers. Each warpgroup multiplies ROWS * 64 channels
of operand A by ACROSS * WIDTH channels of operand B. A is dy and B is x; SWAPPED: A is x, B is dy.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from ....hopper.compat import aggregate, sync_threads, tma_load
from ....hopper.pipeline import new_ring, wait_for
from ....hopper.roles import launch_roles
from ...wgrad_parts import gradient_of
from .wgrad_pieces import Gradient, begin_of


@aggregate
class _List:
    """The list of blocks. A program takes items of it: whole blocks and pieces."""

    whole: gl.tensor  # number of whole blocks
    pieces: gl.tensor  # number of pieces that the other blocks are cut into
    blocks: gl.tensor  # number of blocks
    tiles: gl.tensor  # tiles of pixels per block

    @gluon.jit
    def range_of(self, item):
        """The first tile of an item and the tile after its last, counted over all blocks."""
        first = item * self.tiles
        last = first + self.tiles
        if item >= self.whole:
            cut_tiles = (self.blocks - self.whole) * self.tiles
            start = self.whole * self.tiles
            place = item - self.whole
            first = start + begin_of(place, self.pieces, cut_tiles)
            last = start + begin_of(place + 1, self.pieces, cut_tiles)
        return first, last

    @gluon.jit
    def of_block(self, first, last, block):
        """The part of this range that lies in one block, counted from the block's first tile."""
        start = block * self.tiles
        return gl.maximum(first, start) - start, gl.minimum(last, start + self.tiles) - start


@aggregate
class _Points:
    """Loads, products and stores. A tile has STEPS * 64 pixels of a block's channels."""

    GROUPS: gl.constexpr
    ROWS: gl.constexpr
    WIDTH: gl.constexpr
    ACROSS: gl.constexpr
    STEPS: gl.constexpr
    SWAPPED: gl.constexpr
    CO_SIZE: gl.constexpr
    CI_SIZE: gl.constexpr

    @gluon.jit
    def load(self, gradient, ring, block, tile, place):
        BYTES: gl.constexpr = self.STEPS * (self.CO_SIZE + self.CI_SIZE) * 128
        BLOCKS: gl.constexpr = self.GROUPS * self.ROWS
        a_bufs, b_bufs = ring.bufs
        ci_blocks = gl.cdiv(gradient.CI, self.CI_SIZE)
        a_desc = gradient.dy_desc
        a0 = block // ci_blocks * self.CO_SIZE
        b_desc = gradient.x_desc
        b0 = block % ci_blocks * self.CI_SIZE
        if self.SWAPPED:
            a_desc, b_desc = gradient.x_desc, gradient.dy_desc
            a0, b0 = b0, a0
        stage, bar = ring.acquire(place, BYTES)
        for step in gl.static_range(self.STEPS):
            slot = stage * self.STEPS + step
            pixel = (tile * self.STEPS + step) * 64
            for i in gl.static_range(BLOCKS):
                tma_load(a_desc, [pixel, a0 + i * 64], bar, a_bufs.index(slot * BLOCKS + i))
            for i in gl.static_range(self.ACROSS):
                buf = b_bufs.index(slot * self.ACROSS + i)
                tma_load(b_desc, [pixel, b0 + i * self.WIDTH], bar, buf)

    @gluon.jit
    def multiply(self, GROUP: gl.constexpr, accs, ring, place, is_first):
        """Multiply one tile. WIDTH 64: A is loaded into registers, and the products are complete
        at the end. Wider: the products are still running at the end, so the function waits for
        those of the tile before and releases that tile's slot."""
        LAYOUT: gl.constexpr = accs[0].type.layout
        COUNT: gl.constexpr = self.ROWS * self.ACROSS
        a_bufs, b_bufs = ring.bufs
        stage = ring.wait(place)
        for step in gl.static_range(self.STEPS):
            slot = stage * self.STEPS + step
            begun = ()
            for i in gl.static_range(self.ROWS):
                a = a_bufs.index((slot * self.GROUPS + GROUP) * self.ROWS + i).permute((1, 0))
                if self.WIDTH == 64:
                    a = a.load(gl.DotOperandLayout(0, LAYOUT, 2))
                for j in gl.static_range(self.ACROSS):
                    b = b_bufs.index(slot * self.ACROSS + j)
                    acc = accs[i * self.ACROSS + j]
                    begun = begun + (warpgroup_mma(a, b, acc, is_async=True),)
            accs = begun
            if self.WIDTH == 64:
                if step > 0:
                    accs = wait_for(COUNT, accs, COUNT)
        if self.WIDTH == 64:
            accs = wait_for(0, accs, COUNT)
            sync_threads()
            ring.release(place)
        else:
            accs = wait_for(COUNT * self.STEPS, accs, COUNT)
            sync_threads()
            ring.release_before(place, is_first == 0)
        return accs

    @gluon.jit
    def finish(self, accs, ring, place):
        COUNT: gl.constexpr = self.ROWS * self.ACROSS
        if self.WIDTH != 64:
            accs = wait_for(0, accs, COUNT)
            sync_threads()
            ring.release(place)
        return accs

    @gluon.jit
    def store(self, GROUP: gl.constexpr, ptr, accs, stride, left_co, left_ci, adds):
        """Store a block of dweight. `adds`: add it to what memory holds; None: never."""
        LAYOUT: gl.constexpr = accs[0].type.layout
        WIDTH: gl.constexpr = self.WIDTH
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
        for i in gl.static_range(self.ROWS):
            offs_a = (GROUP * self.ROWS + i) * 64 + rows
            for j in gl.static_range(self.ACROSS):
                offs_b = j * WIDTH + columns
                if self.SWAPPED:
                    ptrs = ptr + offs_a[:, None] + (offs_b * stride)[None, :]
                    mask = (offs_a < left_ci)[:, None] & (offs_b < left_co)[None, :]
                else:
                    ptrs = ptr + (offs_a * stride)[:, None] + offs_b[None, :]
                    mask = (offs_a < left_co)[:, None] & (offs_b < left_ci)[None, :]
                acc = accs[i * self.ACROSS + j]
                if adds is not None:
                    if adds:
                        acc += gl.load(ptrs, mask=mask)
                gl.store(ptrs, acc, mask=mask)


@gluon.jit
def _load(gradients, products, ring, items, COUNT: gl.constexpr):
    place = 0
    for item in range(gl.program_id(0), items.whole + items.pieces, gl.num_programs(0)):
        first, last = items.range_of(item)
        for block in range(first // items.tiles, gl.cdiv(last, items.tiles)):
            begin, end = items.of_block(first, last, block)
            start = 0  # first block of gradient i
            for i in gl.static_range(COUNT):
                count = gradients[i].blocks(products.CI_SIZE, products.CO_SIZE)
                if (block >= start) & (block < start + count):
                    for tile in range(begin, end):
                        products.load(gradients[i], ring, block - start, tile, place + tile - begin)
                start += count
            place += end - begin


@gluon.jit
def _accumulate(
    GROUP: gl.constexpr, products, ring, items, outs, part_ptr, COUNT: gl.constexpr,
    PARTS: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """The loop of a warpgroup that multiplies."""
    WIDTH: gl.constexpr = products.WIDTH
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    CO_SIZE: gl.constexpr = products.CO_SIZE
    CI_SIZE: gl.constexpr = products.CI_SIZE
    place = 0
    for item in range(gl.program_id(0), items.whole + items.pieces, gl.num_programs(0)):
        first, last = items.range_of(item)
        part = 0
        for block in range(first // items.tiles, gl.cdiv(last, items.tiles)):
            accs = ()
            for _ in gl.static_range(products.ROWS * products.ACROSS):
                accs = accs + (gl.zeros([64, WIDTH], gl.float32, LAYOUT),)
            begin, end = items.of_block(first, last, block)
            for tile in range(begin, end):
                is_first = (tile == begin).to(gl.int32)
                accs = products.multiply(GROUP, accs, ring, place + tile - begin, is_first)
            place += end - begin
            accs = products.finish(accs, ring, place - 1)
            is_whole = item < items.whole
            number = (item - items.whole).to(gl.int64) * PARTS + part
            ptr = part_ptr + number * (CO_SIZE * CI_SIZE)
            stride = gl.maximum(CI_SIZE, 0)  # a tensor
            left_co = gl.maximum(CO_SIZE, 0)
            left_ci = gl.maximum(CI_SIZE, 0)
            if is_whole:
                CI, CO, stride, out_ptr, ci0, co0 = gradient_of(
                    block, outs, COUNT, CI_SIZE, CO_SIZE
                )
                ptr = out_ptr + co0.to(gl.int64) * stride + ci0
                left_co = CO - co0
                left_ci = CI - ci0
            adds = is_whole if ADD else None
            products.store(GROUP, ptr, accs, stride, left_co, left_ci, adds)
            part += 1


@gluon.jit(do_not_specialize=["tiles", "whole", "pieces"])
def conv_points_wgrad_kernel(
    x1_desc,  # [pixels, CI] in boxes [64, WIDTH], or 64 if SWAPPED
    dy1_desc,  # [pixels, CO] in boxes [64, 64], or WIDTH
    x2_desc,  # this and the following are None where there are fewer gradients
    dy2_desc,
    x3_desc,
    dy3_desc,
    x4_desc,
    dy4_desc,
    out1_ptr,  # float32 [CO1, CI1], with rows any distance apart
    out2_ptr,
    out3_ptr,
    out4_ptr,
    part_ptr,  # float32 [pieces, PARTS, CO_SIZE, CI_SIZE]
    stride1,
    stride2,
    stride3,
    stride4,
    CI1,
    CI2,
    CI3,
    CI4,
    CO1,
    CO2,
    CO3,
    CO4,
    tiles,  # tiles of STEPS * 64 pixels per block
    whole,  # number of whole blocks, the first of the list
    pieces,  # number of pieces that the other blocks are cut into
    COUNT: gl.constexpr,  # number of gradients, up to 4
    PARTS: gl.constexpr,  # parts per piece: 1, or 2 if a piece may have tiles of two blocks
    ADD: gl.constexpr,  # whole blocks are added to what memory holds
    GROUPS: gl.constexpr,  # warpgroups that multiply
    ROWS: gl.constexpr,  # a warpgroup has ROWS * 64 channels of A
    WIDTH: gl.constexpr,  # channels of B per product
    ACROSS: gl.constexpr,  # products across the channels of B
    STEPS: gl.constexpr,  # a tile has STEPS * 64 pixels
    STAGES: gl.constexpr,  # tiles in the ring
    SWAPPED: gl.constexpr,
    REGISTERS: gl.constexpr,  # per thread of the warpgroups that multiply
):
    dtype: gl.constexpr = x1_desc.dtype
    SLOTS: gl.constexpr = STAGES * STEPS
    A_SIZE: gl.constexpr = GROUPS * ROWS * 64
    B_SIZE: gl.constexpr = WIDTH * ACROSS
    CO_SIZE: gl.constexpr = B_SIZE if SWAPPED else A_SIZE
    CI_SIZE: gl.constexpr = A_SIZE if SWAPPED else B_SIZE
    a_desc = x1_desc if SWAPPED else dy1_desc
    b_desc = dy1_desc if SWAPPED else x1_desc
    a_bufs = gl.allocate_shared_memory(dtype, [SLOTS * GROUPS * ROWS, 64, 64], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(dtype, [SLOTS * ACROSS, 64, WIDTH], b_desc.layout)
    ring = new_ring((a_bufs, b_bufs), STAGES, GROUPS)
    fence_async_shared()
    sync_threads()

    gradients = (
        Gradient(x1_desc, dy1_desc, None, CI1, CO1),
        Gradient(x2_desc, dy2_desc, None, CI2, CO2),
        Gradient(x3_desc, dy3_desc, None, CI3, CO3),
        Gradient(x4_desc, dy4_desc, None, CI4, CO4),
    )
    outs = (
        (CI1, CO1, stride1, out1_ptr),
        (CI2, CO2, stride2, out2_ptr),
        (CI3, CO3, stride3, out3_ptr),
        (CI4, CO4, stride4, out4_ptr),
    )
    blocks = 0
    for i in gl.static_range(COUNT):
        blocks += gradients[i].blocks(CI_SIZE, CO_SIZE)
    items = _List(whole, pieces, blocks, tiles)
    products = _Points(GROUPS, ROWS, WIDTH, ACROSS, STEPS, SWAPPED, CO_SIZE, CI_SIZE)
    launch_roles(
        _accumulate, (products, ring, items, outs, part_ptr, COUNT, PARTS, ADD),
        _load, (gradients, products, ring, items, COUNT),
        GROUPS, (REGISTERS, 24),
    )  # fmt: skip
