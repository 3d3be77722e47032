"""What one program of a convolution computes, and the choice of it for a weight gradient.

Each path has classes of its own made from these, since a configuration says which path it is of.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..reductions.column_sum import partials, sum_partials
from ..runtime.tuning import choose, same_tile


class FwdTile(NamedTuple):
    """What one program of the forward or of the input gradient computes."""

    block_c: int  # output channels
    block_m: int  # pixels
    block_k: int  # input channels a step
    num_warps: int
    num_stages: int


class WgradTile(NamedTuple):
    """What one program of the weight gradient computes."""

    block_co: int
    block_ci: int
    block_m: int  # pixels a step
    num_warps: int
    num_stages: int


C = TypeVar("C", bound=tuple)  # a configuration of a weight gradient


class _Plan(tuple):
    """The numbers of a configuration and, behind them, the number of parts: a row of a table."""

    __slots__ = ()

    def __new__(cls, *numbers: int) -> "_Plan":
        return super().__new__(cls, numbers)


def plans_around(
    configs: Iterable[C], splits: Callable[[C], int], fewest: int
) -> list[tuple[C, int]]:
    """Each configuration with as many parts as `splits` says, and with more and fewer, but not with
    fewer than `fewest` (`long_sums`)."""
    parts = [(c, splits(c)) for c in configs]
    around = [(c, k, max(1, int(k * f))) for c, k in parts for f in (1, 2, 0.5, 0.25)]
    return [(c, j if j >= fewest else k) for c, k, j in around]


def choose_plan(
    op: str,
    key: tuple,  # of the shape, the batch first
    config: type[C],
    candidates: Callable[[], list[tuple[C, int]]],
    default: Callable[[], tuple[C, int]],
    weight: Tensor,  # [CO, CI, R, S], of which shape, dtype and device matter
    launch: Callable[[Tensor, C, int], None],  # into [splits, CO * R * S * CI], or one part alone
) -> tuple[C, int]:
    """`tuning.choose` of a configuration and of the number of parts that a sum over pixels is split
    into, which are measured together and with the adding up of the parts."""

    def plans() -> list[_Plan]:
        return [_Plan(*c, k) for c, k in dict.fromkeys(candidates())]

    def default_plan() -> _Plan:
        c, k = default()
        return _Plan(*c, k)

    def run(plan: _Plan) -> Tensor:
        *tile, splits = plan
        out = torch.empty((weight.numel(),), dtype=weight.dtype, device=weight.device)
        parts = partials(out, splits)
        launch(parts, config(*tile), splits)
        sum_partials(parts, out, follows=True)
        return out

    *tile, splits = choose(op, key, plans, default_plan, run, same_tile)
    return config(*tile), splits
