"""`few_keys`: attention whose keys fit one tile, such as those of a text. A program keeps the keys
of a head and walks over queries. A head has as many programs as keep the GPU busy. Backward is one
launch; if a head has several programs, a second launch adds their dk and dv."""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import triton

from ..reductions.column_sum import partials, sum_partials
from ..registry.cost import AMPERE, Work, microseconds, parameters, resident
from ..registry.kernel import Kernel, configures
from ..registry.spec import AttentionSpec
from ..runtime.dependent_launch import overlapping
from ..runtime.device import Device
from ..runtime.hardware import WARP
from .few_keys_kernels import attention_few_keys_bwd_kernel, attention_few_keys_fwd_kernel
from .operands import BwdOperands, FwdOperands
from .tiles import block_d

KEYS = (64, 128)  # of a program: all of a head
BY_QUERY_CHANNELS = 64  # of a head: rows of a wgmma, of dk and dv transposed
_ROUNDS = 4
# Most accumulators of a thread, by the warps of a program; with more, registers spill by hundreds
# of bytes. mma.sync also has its operands in registers.
_MOST_SUMS, _MOST_OF_MMA_SYNC = {4: 144, 8: 192}, 100


@configures("few_keys")
class FewKeys(NamedTuple):
    """Of the forward pass."""

    keep: int  # keys, all of a head
    step: int  # queries at a time
    num_warps: int
    num_stages: int
    splits: int  # programs per head


@configures("few_keys")
class FewKeysGrad(NamedTuple):
    """Of the backward pass."""

    by_query: bool  # scores are [queries, keys], of heads of up to 64 channels; or [keys, queries]
    keep: int  # as in `FewKeys`
    step: int
    num_warps: int
    num_stages: int
    splits: int


def blocks_of(d: int) -> tuple[int, int]:
    """Channels of the two blocks that a head is cut into, both powers of two. The second is 0 if
    two blocks would have no less padding than one."""
    whole = block_d(d)
    first = whole // 2
    if d == whole or first < 16:
        return whole, 0
    rest = max(16, triton.next_power_of_2(d - first))
    return (first, rest) if rest < first else (whole, 0)


def refuse(spec: AttentionSpec, gpu: Device) -> str | None:
    if spec.itemsize != 2:
        return f"its tiles are of 16 bits, not of {spec.dtype}"
    if spec.seen > KEYS[-1]:
        return f"{spec.seen} keys do not fit a tile of {KEYS[-1]}"
    return None


def untimed(spec: AttentionSpec, gpu: Device) -> str | None:
    return "nobody has timed it with tcgen05" if gpu.arch // 10 == 10 else None


_Config = TypeVar("_Config", FewKeys, FewKeysGrad)


def tiles(spec: AttentionSpec, gpu: Device) -> list[FewKeys]:
    """A warpgroup has 64 queries."""
    keep = next(keys for keys in KEYS if keys >= spec.seen)
    return _in_parts([FewKeys(keep, 64, 4, stages, 1) for stages in (3, 2)], spec, gpu)


def grad_tiles(spec: AttentionSpec, gpu: Device) -> list[FewKeysGrad]:
    """A warpgroup has 64 keys, or 64 queries. With mma.sync tiles are smaller, since operands are
    in registers, and too few are left for scores by query."""
    steps = ((32, 2),) if gpu.mma_sync else ((64, 3), (64, 2))
    found = []
    for keep in KEYS:
        if keep < spec.seen:
            continue
        num_warps = keep // 16
        found += [FewKeysGrad(False, keep, step, num_warps, stages, 1) for step, stages in steps]
        if not gpu.mma_sync and spec.d <= BY_QUERY_CHANNELS:
            found.append(FewKeysGrad(True, keep, keep, num_warps, 2, 1))
    return _in_parts(found, spec, gpu)


def _in_parts(found: Iterable[_Config], spec: AttentionSpec, gpu: Device) -> list[_Config]:
    """The configurations whose accumulators and buffers fit, each with the numbers of programs per
    head that fill the multiprocessors once, twice, ..."""
    parts: dict[_Config, None] = {}
    for config in found:
        most = _MOST_OF_MMA_SYNC if gpu.mma_sync else _MOST_SUMS[config.num_warps]
        if _sums(config, spec) > most or _shared(config, spec) > gpu.shared_memory:
            continue
        room = gpu.num_sms * _resident(config, spec, gpu)
        blocks = triton.cdiv(spec.t, config.step)
        for rounds in range(1, _ROUNDS + 1):
            each = triton.cdiv(blocks, max(1, rounds * room // spec.n))
            parts[config._replace(splits=triton.cdiv(blocks, each))] = None
    return list(parts)


def _blocks(d: int, config: FewKeys | FewKeysGrad) -> tuple[int, int]:
    """Channels of each block of a head."""
    by_query = isinstance(config, FewKeysGrad) and config.by_query
    return (BY_QUERY_CHANNELS, 0) if by_query else blocks_of(d)


def _channels(spec: AttentionSpec, config: FewKeys | FewKeysGrad) -> int:
    return sum(_blocks(spec.d, config))


def _sums(config: FewKeys | FewKeysGrad, spec: AttentionSpec) -> int:
    """Accumulators of a thread: scores, or o and scores of 16 bits; backward dk and dv, scores and
    their gradient."""
    keep, step, d = config.keep, config.step, _channels(spec, config)
    if isinstance(config, FewKeys):
        numbers = step * max(keep, keep // 2 + d)
    else:
        numbers = 2 * keep * (step + d)
    return numbers // (WARP * config.num_warps)


def _shared(config: FewKeys | FewKeysGrad, spec: AttentionSpec) -> int:
    """Bytes of shared memory: keys and values, queries that are fetched ahead, and o to be stored;
    backward ds, and by query p."""
    row = _channels(spec, config) * spec.itemsize
    kept, fetched = 2 * config.keep * row, config.num_stages * config.step * row
    if isinstance(config, FewKeys):
        return kept + fetched + config.step * row
    lse = 4 * config.num_stages * config.step
    scores = (2 if config.by_query else 1) * config.step * config.keep * spec.itemsize
    return kept + 2 * fetched + scores + lse


def _resident(config: FewKeys | FewKeysGrad, spec: AttentionSpec, gpu: Device) -> int:
    return resident(_sums(config, spec), _shared(config, spec), config.num_warps, gpu)


def work(spec: AttentionSpec, gpu: Device, c: FewKeys | FewKeysGrad) -> Work:
    """The work of the programs of either pass."""
    grad = isinstance(c, FewKeysGrad)
    d, steps = _channels(spec, c), _walk(spec.t, c)
    queries, in_parts = steps * c.step, grad and c.splits > 1
    return Work(
        tiles=spec.n * c.splits,
        resident=_resident(c, spec, gpu),
        products=(5 if grad else 2) * c.keep * queries * d,
        fetched=(2 * c.keep + (2 if grad else 1) * queries) * d * spec.itemsize,
        steps=steps,
        written=c.keep * queries,
        memory=spec.bytes,
        parts=c.splits * spec.n * spec.seen * 2 * spec.d * 4 if in_parts else 0,
        splits=c.splits if grad else 1,
    )


def cost(spec: AttentionSpec, gpu: Device, c: FewKeys | FewKeysGrad) -> float:
    """Microseconds where there are no fitted parameters: by those of `tiles`, whose programs have
    the same instructions."""
    like = "tiles one_pass=False" if isinstance(c, FewKeysGrad) else "tiles"
    return microseconds(parameters(AMPERE)[like], work(spec, gpu, c), gpu)


def _walk(t: int, config: FewKeys | FewKeysGrad) -> int:
    """Blocks of queries per program."""
    return triton.cdiv(triton.cdiv(t, config.step), config.splits)


def _launched(config: FewKeys | FewKeysGrad, constants: dict[str, Any]) -> dict[str, Any]:
    """The arguments of either kernel, by name."""
    first, rest = _blocks(constants["D"], config)
    walk = _walk(constants["T"], config) * config.step
    return constants | dict(
        parts=triton.cdiv(constants["T"], walk), walk=walk, BLOCK_D=first, REST=rest,
        BLOCK_M=config.step, BLOCK_N=config.keep, num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def forward(config: FewKeys, operands: FwdOperands) -> None:
    """Compute o and lse."""
    *tensors, constants = operands
    n, heads, t = operands.lse.shape
    options = _launched(config, constants)
    attention_few_keys_fwd_kernel[(n * heads * options["parts"],)](
        *tensors, **options, **overlapping(operands.q.device, n * t)
    )


def backward(config: FewKeysGrad, operands: BwdOperands) -> None:
    """Compute the gradients."""
    do, q, kv, mask, _, lse, dq, dkv, _, constants = operands
    n, heads, _ = lse.shape
    options = _launched(config, constants)
    parts = partials(dkv, options["parts"])
    attention_few_keys_bwd_kernel[(n * heads * options["parts"],)](
        do, q, kv, mask, lse, dq, parts, **options, BY_QUERY=config.by_query,
        stride_don=do.stride(0), stride_dot=do.stride(1), stride_doc=do.stride(2),
        **overlapping(do.device),
    )  # fmt: skip
    sum_partials(parts, dkv, follows=True)


FEW_KEYS = Kernel(
    "few_keys",
    FewKeys,
    refuse,
    tiles,
    cost,
    launch=forward,
    work=work,
    fitted_by=("num_stages",),
    untimed=untimed,
)
FEW_KEYS_GRAD = Kernel(
    "few_keys",
    FewKeysGrad,
    refuse,
    grad_tiles,
    cost,
    launch=backward,
    work=work,
    fitted_by=("by_query", "num_stages"),
    untimed=untimed,
)
