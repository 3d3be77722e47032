"""What both kernels of `norm.cluster` consist of: layouts, sums and where things lie."""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# --- layouts --------------------------------------------------------------------------------------


@gluon.constexpr_function
def tiles_at_a_time(tiles):
    """How many tiles are waited for at a time."""
    return math.gcd(tiles, 4)


@gluon.constexpr_function
def _blocks_along_first(ctas, rank):
    """Thread blocks, one after the other along the first axis."""
    return [[1 << i] + [0] * (rank - 1) for i in range(ctas.bit_length() - 1)]


@gluon.constexpr_function
def tile_layout(ctas, num_warps, block_c):
    """Of [pixels, BLOCK_C]: eight channels a thread, a warp has whole rows."""
    lanes = block_c // 8
    return gl.BlockedLayout(
        [1, 8], [32 // lanes, lanes], [num_warps, 1], [1, 0], _blocks_along_first(ctas, 2)
    )


@gluon.constexpr_function
def memory_layout(ctas):
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0], _blocks_along_first(ctas, 2))


@gluon.constexpr_function
def warps_layout(ctas, num_warps):
    """Of [CTAS, warps, BLOCK_C]: a thread has what all warps have left of its channel."""
    return gl.BlockedLayout(
        [1, num_warps, 1],
        [1, 1, 32],
        [1, 1, num_warps],
        [2, 1, 0],
        _blocks_along_first(ctas, 3),
    )


@gluon.constexpr_function
def warps_memory_layout(ctas):
    return gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0], _blocks_along_first(ctas, 3))


@gluon.constexpr_function
def power_of_two(n):
    return 1 << (n - 1).bit_length()


@gluon.constexpr_function
def groups_layout(ctas, num_warps, groups, channels):
    """Of [CTAS, groups, channels of a group], all of it in every thread block; what is of a group
    is in one warp."""
    lanes_j = min(channels, 32)
    lanes_g = min(max(groups // num_warps, 1), 32 // lanes_j)
    lanes = [32 // (lanes_j * lanes_g), lanes_g, lanes_j]
    everywhere = [[0, 0, 0]] * (ctas.bit_length() - 1)
    return gl.BlockedLayout([1, 1, 1], lanes, [1, num_warps, 1], [2, 1, 0], everywhere)


# --- parts ----------------------------------------------------------------------------------------


@gluon.jit
def cluster_barrier(i):
    """Wait for all threads of the cluster. What they have stored can then be read,
    past the cache of a multiprocessor. The hardware starts all thread blocks of a cluster at the
    same time, so none is waited for that has no place."""
    return gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
        " mov.b32 $0, $1;",
        "=r,r",
        [i],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def merge_moments(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    """Mean, M2 and number of the pixels of both, which both have some (Chan, Golub and LeVeque
    1983)."""
    count = count_a + count_b
    share = count_b / count
    delta = mean_b - mean_a
    return mean_a + delta * share, m2_a + m2_b + delta * delta * (count_a * share), count


@gluon.jit
def of_warps(v, CTAS: gl.constexpr, num_warps: gl.constexpr):
    """[CTAS, warps, lanes, BLOCK_C] of a tile."""
    return v.reshape([CTAS, num_warps, v.shape[0] // (CTAS * num_warps), v.shape[1]])


@gluon.jit
def store_partial(partial_ptr, first, second, C, CTAS: gl.constexpr):
    """What each thread block has of its channels, [CTAS, BLOCK_C] both, to float32 [CTAS, 2, C]."""
    ROW: gl.constexpr = gl.SliceLayout(1, first.type.layout)
    COLUMN: gl.constexpr = gl.SliceLayout(0, first.type.layout)
    rows = gl.arange(0, CTAS, ROW)
    columns = gl.arange(0, first.shape[1], COLUMN)
    ptrs = partial_ptr + rows[:, None] * (2 * C) + columns[None, :]
    gl.store(ptrs, first)
    gl.store(ptrs + C, second)


@gluon.jit
def _load(ptr, offs, default: gl.constexpr):
    """Parameters of channels in float32, or what they are by default."""
    if ptr is None:
        return gl.full(offs.shape, default, gl.float32, offs.type.layout)
    else:
        return gl.load(ptr + offs).to(gl.float32)


@gluon.jit
def affine_of_sample(weight_ptr, bias_ptr, scale_ptr, shift_ptr, scale_row, shift_row, offs_c):
    """gain and offset of channels, float32 (see `group_norm`); the sample's rows of scale and shift
    begin so far behind their pointers."""
    one_scale = 1.0 + _load(scale_ptr, scale_row + offs_c, 0.0)
    gain = _load(weight_ptr, offs_c, 1.0) * one_scale
    shift = _load(shift_ptr, shift_row + offs_c, 0.0)
    return gain, _load(bias_ptr, offs_c, 0.0) * one_scale + shift


@gluon.jit
def place_of_task(task, HW: gl.constexpr, C: gl.constexpr, CHANNELS: gl.constexpr):
    """Of a task: its sample (int64), its first channel, and where that lies."""
    BLOCKS: gl.constexpr = C // CHANNELS
    n = (task // BLOCKS).to(gl.int64)
    c0 = task % BLOCKS * CHANNELS
    return n, c0, n * (HW * C) + c0


@gluon.jit
def new_tiles(
    dtype, COUNT: gl.constexpr, ROWS: gl.constexpr, BLOCK_C: gl.constexpr, CTAS: gl.constexpr
):
    """Shared memory. Each is on its own: writing to one waits for no reader of another."""
    tiles = ()
    for _i in gl.static_range(COUNT):
        tile = gl.allocate_shared_memory(dtype, [ROWS, BLOCK_C], memory_layout(CTAS))
        tiles = tiles + (tile,)
    return tiles


@gluon.jit
def place_of_tile(
    place, i: gl.constexpr, TILES: gl.constexpr, STEP: gl.constexpr, BLOCK_C: gl.constexpr
):
    """Where the i-th tile of a task begins: TILES of one block of channels, then of the next."""
    return place + i % TILES * STEP + i // TILES * BLOCK_C


@gluon.jit
def members(LAYOUT: gl.constexpr, GROUPS: gl.constexpr, CG: gl.constexpr):
    """The channels of groups, beginning with 0, and which of them there are: [GROUPS, power of
    two]."""
    BOTH: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    offs_g = gl.arange(0, GROUPS, gl.SliceLayout(1, BOTH))
    offs_j = gl.arange(0, power_of_two(CG), gl.SliceLayout(0, BOTH))
    member = offs_g[:, None] * CG + offs_j[None, :]
    return member, (offs_j < CG)[None, :] & (member >= 0)


@gluon.jit
def pointers_to_partials(row_ptr, member, there, zero, C, LAYOUT: gl.constexpr, CTAS: gl.constexpr):
    """To those of all thread blocks, of members of groups that are there, and their mask."""
    k = gl.expand_dims(gl.arange(0, CTAS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))), 1)
    live = gl.expand_dims(there, 0) & (gl.expand_dims(k, 2) >= 0)
    return row_ptr + gl.expand_dims(k + zero, 2) * (2 * C) + gl.expand_dims(member, 0), live
