"""The predicted time of a kernel: the work of its programs times parameters fitted to times.

A kernel describes the work of its programs (`Work`). This file converts it to microseconds:

    us = launch
       + waves of tiles over the multiprocessors x (products + bytes fetched + numbers written)
       + tiles of a multiprocessor on average x (products + numbers written + steps + rows that are
         not whole)
       + waves of resident tiles x (steps + a tile's start and end)
       + memory read and written + split-K parts, written and read again

Where a multiprocessor has several tiles under way, the last wave takes less than a whole one, so
waves are counted both rounded up and on average.

Every term is multiplied by a parameter that is not negative (`benchmarks.fit_costs`). Parameters
are of a kernel and of what changes its code or its rates most: fields of its configuration or of
the spec, and the type of products of 32 bits. They are stored in `measured/costs_sm_*.json`. They
belong to an architecture: chips with another number of multiprocessors use the same parameters with
another number of waves.
"""

import json
import logging
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..runtime.device import Device
from ..runtime.hardware import REGISTERS, SECTOR, THREAD_REGISTERS, WARP
from .spec import Spec

_MEASURED = Path(__file__).parents[1] / "measured"
# Architectures whose parameters kernels may borrow on one that nobody has fitted
HOPPER, AMPERE = 90, 80
_log = logging.getLogger(__name__)


class Work(NamedTuple):
    """Of one launch."""

    tiles: int  # programs, or what persistent ones take one after the other
    resident: int  # tiles that a multiprocessor has under way at a time
    products: float  # multiply-adds of a tile
    fetched: float  # bytes that a tile loads
    steps: float  # rounds of loading and multiplying, one after the other
    written: float  # numbers of a tile that are made one by one: of its result, or of its softmax
    memory: int  # bytes read and written at least once, of all
    parts: int = 0  # bytes of the parts of a split sum
    splits: int = 1
    grad: bool = False  # whether the epilogue is an input gradient's
    beside: float = 0.0  # bytes of a tile that are in the sectors it loads, beside those it needs
    outside: float = 0.0  # rows of a tile's boxes of which TMA writes some or all as zeros


@lru_cache
def beside_rows(channels: int, block: int, itemsize: int) -> float:
    """Bytes in the sectors of a pixel's channels, loaded in rows of `block`, beside those of the
    rows, on average over pixels: a row that is no multiple of a sector begins or ends in one."""
    pixels = SECTOR // math.gcd(channels * itemsize, SECTOR)
    sectors = 0
    for pixel in range(pixels):
        for begin in range(0, channels, block):
            first = (pixel * channels + begin) * itemsize
            last = (pixel * channels + min(begin + block, channels)) * itemsize - 1
            sectors += last // SECTOR - first // SECTOR + 1
    return sectors * SECTOR / pixels - channels * itemsize


def outside_rows(channels: int, block: int, pixels: int, filters: int, beyond: float) -> float:
    """Rows that are not whole, of the boxes of a sum over channels in blocks: of all pixels and
    filters in a last block that has fewer channels, and in the others of filters that there are
    not, which are such a share of them."""
    whole, rest = divmod(channels, block)
    return whole * filters * beyond + (pixels + filters) * (rest > 0)


def programs_at_a_time(shared: int, num_warps: int, gpu: Device, registers: int = 128) -> int:
    """Programs that a multiprocessor holds at a time, whose buffers have so many bytes of shared
    memory, and with so many registers a thread; 0: there is no room for one."""
    return min(gpu.holds(shared), REGISTERS // (WARP * num_warps * registers))


def resident(sums: int, shared: int, num_warps: int, gpu: Device) -> int:
    """The same of programs whose threads have so many sums, and at least 1: a thread has about 100
    registers beside its sums, if there are as many."""
    registers = min(THREAD_REGISTERS, sums + 100)
    return max(1, programs_at_a_time(shared, num_warps, gpu, registers))


def terms(work: Work, gpu: Device) -> tuple[float, ...]:
    """What the parameters are multiplied by, each about as large as microseconds."""
    mean = work.tiles / gpu.num_sms
    waves = math.ceil(mean)
    resident = math.ceil(work.tiles / (gpu.num_sms * work.resident))
    return (
        1.0,
        waves * work.products / 1e6,
        waves * work.fetched / 1e5,
        waves * work.written / 1e4,
        resident * work.steps,
        float(resident),
        work.memory / 1e7,
        work.parts / 1e7,
        float(work.splits > 1),
        float(work.grad),
        work.grad * waves * work.written / 1e4,
        waves * work.beside / 1e5,
        mean * work.products / 1e6,
        mean * work.written / 1e4,
        mean * work.steps,
        mean * work.outside / 1e3,
    )


@lru_cache
def parameters(arch: int) -> dict[str, tuple[float, ...]]:
    """Of `terms`, by kernel and fields; none for an architecture that nobody has fitted."""
    return {key: tuple(v) for key, v in _file(arch).items() if isinstance(v, list)}


N = TypeVar("N", bound=tuple)  # a NamedTuple of numbers


@lru_cache
def fitted_to(name: str, kind: type[N], arch: int = HOPPER) -> N:
    """The numbers of a kernel whose time is no sum of `terms`, but a formula of its own."""
    found = _file(arch).get(name)
    if not isinstance(found, dict):
        raise LookupError(f"costs_sm_{arch}.json has no numbers of the kernel {name}")
    return kind(**found)


@lru_cache
def _file(arch: int) -> dict[str, Any]:
    path = _MEASURED / f"costs_sm_{arch}.json"
    try:
        found = json.loads(path.read_text())
        if not all(isinstance(v, list | dict) for v in found.values()):
            raise TypeError("a kernel has a list of parameters, or numbers by their names")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.warning("%s has no cost parameters and is ignored: %r", path, error)
        return {}


def name(kernel: str, fields: tuple[str, ...], spec: Spec, config: tuple) -> str:
    """Under which the parameters of a configuration are kept, by fields of it or of the spec."""
    values = {field: getattr(config if hasattr(config, field) else spec, field) for field in fields}
    wide = [spec.dtype] if spec.itemsize == 4 else []  # whose products have other rates
    return " ".join([kernel, *(f"{field}={value}" for field, value in values.items()), *wide])


def microseconds(fitted: tuple[float, ...], work: Work, gpu: Device, step: float = 0.0) -> float:
    """With the parameters of a kernel, and what a step of its programs takes at least."""
    alone = fitted[0] + step * work.steps * math.ceil(work.tiles / (gpu.num_sms * work.resident))
    return max(alone, sum(p * term for p, term in zip(fitted, terms(work, gpu), strict=True)))


def step_of(kernel: str, arch: int) -> float:
    """Microseconds that a step takes at least, whatever it multiplies: it waits for what it loads,
    and the next for it. Few long sums are bound by that. 0: nobody has measured it."""
    return _file(arch).get("steps", {}).get(kernel, 0.0)


class _Passes(NamedTuple):
    """What passes over memory take, by a rule of thumb."""

    launch: float  # microseconds
    bytes: float  # that memory moves in one
    meeting: float  # microseconds in which the thread blocks of a cluster meet


class _Products(NamedTuple):
    """What products take, by a rule of thumb."""

    overhead: float  # microseconds
    rate: float  # multiply-adds of a multiprocessor in one, times two


def of_products(name: str, flops: float, gpu: Device) -> float:
    """Microseconds of so many products by the kernel of this name, a rule of thumb."""
    known = fitted_to(name, _Products)
    return known.overhead + flops / (known.rate * gpu.num_sms)


CACHE = 2**25  # bytes of a tensor that the L2 cache still has when it is read again


def of_passes(moved: int, launches: int, meetings: int = 0) -> float:
    """Microseconds of passes over memory."""
    rates = fitted_to("passes", _Passes)
    waits = launches * rates.launch + meetings * rates.meeting
    return waits + moved / rates.bytes
