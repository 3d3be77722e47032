"""GroupNorm of a tile that is a part of an image, in the launch that makes it: tiles of an image
exchange their sums (grid sync).

Every tile leaves the sums of its channels in memory, a word each, which is not zero, and reads
those of all channels and tiles of its groups until none of them is zero. A word of 64 bits comes as
a whole, so that it is its own sign that it is there: no counter, no fence, and a way to memory and
back less. The memory is zero before the launch.

    word = bits of sum | (bits of squares + 1) << 32

Who waits for whom. A program takes tiles in the order of their numbers, a warpgroup every other
one. Wave w is the tiles that programs take w-th. Products of wave w in a program begin when those
of wave w - 1 there are done, and all of wave w - 2 is, its exchange too. An image has no more tiles
than there are programs, so they are of one wave or of two that follow one another, and a tile of
wave w waits for products of wave w + 1 at most. These wait for products of wave w and for exchanges
of wave w - 1, which wait for products of wave w at most, and so on down: there is no circle.

All of that is if every program runs, and there are no more of them than multiprocessors. Launches
in front of this one end by themselves, and what is behind it begins when all of its programs have
begun. Under time slicing a process has the whole GPU in its turn. Whoever keeps multiprocessors for
ever, or from this process (MPS with a share of them), could keep a program from beginning, and the
others would wait for it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _word_layout(lanes, tiles):
    """[64, lanes, tiles] of words in four warps, rows where accumulators of 64 rows have them."""
    rest = [[0, 1 << i, 0] for i in range(lanes.bit_length() - 1)]
    rest += [[0, 0, 1 << i] for i in range(tiles.bit_length() - 1)]
    inner = (rest + [[0, 0, 0]] * 2)[:2]
    return gl.DistributedLinearLayout(
        reg_bases=[*rest[2:], [8, 0, 0]],
        lane_bases=[*inner, [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, lanes, tiles],
    )


@gluon.constexpr_function
def _power_of_two(x):
    return 1 << (x - 1).bit_length()


@gluon.constexpr_function
def _polling(count):
    """PTX that reads `count` words until none of them is zero."""
    loads = [f"ld.relaxed.gpu.global.b64 ${i}, [${count + i}];" for i in range(count)]
    tests = ["setp.ne.b64 all, $0, 0;"]
    tests += [f"setp.ne.and.b64 all, ${i}, 0, all;" for i in range(1, count)]
    lines = ["{", ".reg .pred all;", "again:", *loads, *tests]
    return "\n".join([*lines, "@all bra there;", "nanosleep.u32 32;", "bra again;", "there:", "}"])


@gluon.constexpr_function
def _constraints(count):
    return ",".join(["=&l"] * count + ["l"] * count)  # loads are repeated: no address is lost


@gluon.jit
def leave_sums(slots_ptr, n, tile, offs, C, total, second, TILES: gl.constexpr):
    """Both sums [64, 1] of a tile of image n, for all tiles that wait for them."""
    squares = gl.where(second >= 0, second, float("nan"))  # one NaN, whose bits are not all set
    high = squares.to(gl.uint32, bitcast=True) + 1
    word = (high.to(gl.uint64) << 32) | total.to(gl.uint32, bitcast=True).to(gl.uint64)
    to = slots_ptr + (n.to(gl.int64) * C + offs) * TILES + tile
    gl.inline_asm_elementwise(
        "st.relaxed.gpu.global.b64 [$1], $2; mov.b32 $0, 0;",
        "=r,l,l",
        [to.to(gl.uint64), word],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def norm_of_image(
    slots_ptr,  # uint64 [N, C, TILES]
    n,
    c0,
    C,
    g,  # [64, 1]
    b,
    eps,
    TILES: gl.constexpr,
    CG: gl.constexpr,  # channels of a group
    PIXELS: gl.constexpr,  # of a tile
):
    """mean, scale and shift, [64, 1] each, when all tiles have come:
    z = (y - mean) scale + shift."""
    LANES: gl.constexpr = _power_of_two(CG)
    WORDS: gl.constexpr = _word_layout(LANES, TILES)
    COUNT: gl.constexpr = 64 * max(4, LANES * TILES) // 128
    OF_LANES: gl.constexpr = gl.SliceLayout(2, WORDS)
    OF_TILES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, WORDS))
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, OF_LANES))[:, None]
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, OF_LANES))[None, :]
    tile = gl.arange(0, TILES, layout=OF_TILES)[None, None, :]
    there = lane < CG
    channel = (c0 + rows) // CG * CG + gl.where(there, lane, 0)
    from_ptr = slots_ptr + (n.to(gl.int64) * C + channel)[:, :, None] * TILES + tile
    words = gl.inline_asm_elementwise(
        _polling(COUNT), _constraints(COUNT), [from_ptr.to(gl.uint64)], gl.uint64, False, COUNT
    )
    total = words.to(gl.uint32).to(gl.float32, bitcast=True)
    second = ((words >> 32).to(gl.uint32) - 1).to(gl.float32, bitcast=True)

    # every channel of a tile has as many pixels as the others, so that all weigh the same
    part: gl.constexpr = 1.0 / (CG * TILES)
    weight = gl.where(there, part, 0.0)[:, :, None]
    each = total * (1.0 / PIXELS)
    mean = gl.sum(gl.sum(each * weight, axis=2), axis=1)
    d = each - mean[:, None][:, :, None]
    rest = gl.sum(gl.sum(d * weight, axis=2), axis=1)  # what the first sum has rounded off
    var = gl.sum(gl.sum((second * (1.0 / PIXELS) + d * d) * weight, axis=2), axis=1) - rest * rest
    ROWS: gl.constexpr = gl.SliceLayout(1, g.type.layout)
    mean = gl.convert_layout(mean, ROWS, assert_trivial=True)[:, None]
    rest = gl.convert_layout(rest, ROWS, assert_trivial=True)[:, None]
    var = gl.convert_layout(var, ROWS, assert_trivial=True)[:, None]
    scale = g / gl.sqrt(var + eps)
    return mean, scale, b - rest * scale
