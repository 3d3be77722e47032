"""Tiles of attention in plain Triton: what a program keeps and walks over, which of them a GPU can
take, and what their programs do, from which their time is predicted."""

from typing import NamedTuple

import triton

from ..registry.cost import Work, resident
from ..registry.kernel import configures
from ..registry.spec import AttentionSpec
from ..runtime.device import Device


@configures("tiles")
class Tile(NamedTuple):
    """The positions a program keeps, how many it takes at a time of the others, and its launch.

    Forward and dq keep queries and walk over keys; dk and dv keep keys and walk over queries.
    """

    keep: int
    step: int
    num_warps: int
    num_stages: int


@configures("tiles")
class BwdConfig(NamedTuple):
    one_pass: bool  # one kernel that keeps all keys (T <= keep; 5 products), or two (7 products)
    keep: int  # as in `Tile`
    step: int
    num_warps: int
    num_stages: int


# What `fwd_config` and `bwd_config` choose, and what may be faster; each is tested by itself.
FWD_CONFIGS = (
    Tile(64, 64, 4, 2),
    Tile(64, 128, 4, 2),
    Tile(64, 256, 4, 2),  # T = 256 and d = 32: all keys in one tile
    Tile(128, 64, 4, 3),
    Tile(128, 128, 8, 2),
    Tile(32, 32, 4, 2),
    Tile(32, 32, 8, 2),
)
BWD_CONFIGS = (
    BwdConfig(False, 64, 32, 4, 2),
    BwdConfig(False, 64, 64, 4, 2),
    BwdConfig(False, 128, 32, 4, 3),
    BwdConfig(False, 128, 64, 8, 2),
    BwdConfig(False, 32, 32, 4, 2),
    BwdConfig(False, 32, 32, 8, 2),
    BwdConfig(True, 64, 64, 4, 1),
    BwdConfig(True, 64, 32, 4, 1),
)
# What is taken of 129 to 256 channels in 16 bits on Hopper, whose products are of 64 rows: those of
# the 32 rows that fit every chip are not
FWD_WIDE = Tile(64, 64, 4, 2)
BWD_WIDE = BwdConfig(False, 64, 64, 8, 2)

MAX_HEAD_DIM = 512  # the products of 16 rows fit every chip; in 32 bits, not those of backward


def refuse(spec: AttentionSpec, gpu: Device) -> str | None:
    """Why these kernels have no place for a head."""
    if spec.d > MAX_HEAD_DIM:
        return f"a head has {spec.d} channels; at most {MAX_HEAD_DIM} are supported"
    needed = _shared(bwd_config(spec) if spec.grad else fwd_config(spec), spec)
    if needed > gpu.shared_memory:
        has = f"the GPU has {gpu.shared_memory // 1024}"
        return f"a head of {spec.d} channels takes {needed // 1024} KiB of shared memory, {has}"
    return None


def fwd_config(spec: AttentionSpec) -> Tile:
    """Choices that fit every chip: compiled for sm_89 and sm_90, d = 16 to 256 and every precision,
    they spill at most 16 bytes of registers and need at most 81 KiB of shared memory, of d = 512
    97. Backward passes of d = 512 fit in 16 bits; in 32 they take 160 KiB, and spill 680 bytes."""
    row = block_d(spec.d) * spec.itemsize  # bytes of q, k or v
    if row > 512:
        return Tile(16, 16, 4, 2)
    if spec.dtype == "fp32":  # products are unrolled into FMAs
        return Tile(32, 32, 4 if row <= 256 else 8, 2)
    if row > 256:
        return Tile(32, 32, 4, 2)
    if row > 128 or spec.seen <= 64:
        return Tile(64, 64, 4, 2)
    return Tile(64, 128, 4, 2)


def bwd_config(spec: AttentionSpec) -> BwdConfig:
    row = block_d(spec.d) * spec.itemsize
    if row > 512:
        return BwdConfig(False, 16, 16, 4, 2)
    if spec.dtype == "fp32":
        return BwdConfig(False, 32, 32, 4 if row <= 256 else 8, 2)
    if row > 256:  # float32 of d = 128, or 16 bits of d = 256
        return BwdConfig(False, 32, 32, 8 if spec.itemsize == 2 else 4, 2)
    if row > 128:
        return BwdConfig(False, 64, 32, 4, 2)
    if spec.seen <= 64:
        return BwdConfig(True, 64, 64, 4, 1)
    return BwdConfig(False, 64, 64, 4, 2)


def block_d(d: int) -> int:
    """Channels of a tile that has those of a head."""
    return max(16, triton.next_power_of_2(d))


def is_wide(d: int) -> bool:
    """Whether a head has 129 to 256 channels: results of 64 rows fill a warpgroup's registers."""
    return 128 < block_d(d) <= 256


def fwd_tiles(spec: AttentionSpec, gpu: Device) -> list[Tile]:
    """The one first that is taken where none was measured to be faster."""
    first = [FWD_WIDE] * _takes_wide(spec, gpu) + [fwd_config(spec)]
    return [*first, *(c for c in FWD_CONFIGS if _is_listed(c, spec, gpu))]


def bwd_tiles(spec: AttentionSpec, gpu: Device) -> list[BwdConfig]:
    """The one first that is taken where none was measured to be faster."""
    first = [BWD_WIDE] * _takes_wide(spec, gpu) + [bwd_config(spec)]
    return [*first, *(c for c in BWD_CONFIGS if _is_listed(c, spec, gpu))]


def _takes_wide(spec: AttentionSpec, gpu: Device) -> bool:
    return gpu.hopper and spec.itemsize == 2 and is_wide(spec.d)


def _is_listed(config: Tile | BwdConfig, spec: AttentionSpec, gpu: Device) -> bool:
    """Whether it was tested for such heads, and fits."""
    return spec.itemsize == 2 and block_d(spec.d) <= 64 and fits(config, spec, gpu)


def fits(config: Tile | BwdConfig, spec: AttentionSpec, gpu: Device) -> bool:
    """Whether there is shared memory for it, and it is not far beyond T and the keys; one pass is
    of all keys."""
    if isinstance(config, BwdConfig) and config.one_pass and config.keep < spec.seen:
        return False
    longest = max(64, triton.next_power_of_2(max(spec.t, spec.seen)))
    return max(config.keep, config.step) <= longest and _shared(config, spec) <= gpu.shared_memory


def _shared(config: Tile | BwdConfig, spec: AttentionSpec) -> int:
    """Bytes of a program: what it keeps, and of what it walks over all stages but one."""
    row = block_d(spec.d) * spec.itemsize
    kept = config.keep * row
    loaded = max(1, config.num_stages - 1) * 2 * config.step * row
    if isinstance(config, Tile):
        return kept + loaded
    passed_on = config.one_pass * config.keep * config.step * spec.itemsize  # ds, for dq
    return 2 * kept + loaded + passed_on


def sums(config: Tile | BwdConfig, spec: AttentionSpec) -> int:
    """Of a thread: results and scores, or both gradients, scores and theirs."""
    numbers = config.keep * (config.step + block_d(spec.d)) // (32 * config.num_warps)
    return numbers if isinstance(config, Tile) else 2 * numbers


def _resident(config: Tile | BwdConfig, spec: AttentionSpec, gpu: Device) -> int:
    return resident(sums(config, spec), _shared(config, spec), config.num_warps, gpu)


def _is_timed(spec: AttentionSpec, gpu: Device) -> bool:
    """With mma.sync, and cross-attention with wgmma too."""
    return gpu.mma_sync or gpu.hopper and spec.keys is not None


def work(spec: AttentionSpec, gpu: Device, c: Tile | BwdConfig) -> Work | None:
    """What its programs do, where costs are fitted to times. Of two launches, the mean of their
    programs, as of one launch of them all."""
    if not _is_timed(spec, gpu):
        return None
    d = block_d(spec.d)
    of_keys, of_queries = triton.cdiv(spec.seen, c.keep), triton.cdiv(spec.t, c.keep)
    over_queries, over_keys = triton.cdiv(spec.t, c.step), triton.cdiv(spec.seen, c.step)
    if isinstance(c, Tile):
        tiles, kept, steps, products = of_queries, 1, over_keys, 2 * over_keys
    elif c.one_pass:
        tiles, kept, steps = of_keys, 2, over_queries
        products = 5 * steps
    else:
        tiles, kept = of_keys + of_queries, 2
        steps = (of_keys * over_queries + of_queries * over_keys) / tiles
        products = (4 * of_keys * over_queries + 3 * of_queries * over_keys) / tiles
    return Work(
        tiles=spec.n * tiles,
        resident=_resident(c, spec, gpu),
        products=products * c.keep * c.step * d,
        fetched=(kept * c.keep + 2 * steps * c.step) * d * spec.itemsize,
        steps=steps,
        written=c.keep * steps * c.step,
        memory=spec.bytes,
    )
