"""What one program of a convolution computes, and the choice of it for a weight gradient.

Each path has classes of its own made from these, since a configuration says which path it is of.
"""

from collections import namedtuple
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..reductions.column_sum import partials, sum_partials
from ..registry.choose import choose, same_tile
from ..registry.kernel import configures
from ..runtime.device import describe


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


@lru_cache
def _plan_of(config: type[C]) -> type:
    """The fields of a kernel's configuration and, behind them, the number of parts."""
    plan = namedtuple(f"{config.__name__}Plan", [*config._fields, "splits"])
    plan.config = config
    return configures(config.kernel)(plan)


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
    n: int,
    shape: dict[str, Any],  # all else on which the choice depends
    candidates: Callable[[], list[tuple[C, int]]],
    default: Callable[[], tuple[C, int]],
    weight: Tensor,  # [CO, CI, R, S], of which shape, dtype and device matter
    launch: Callable[[Tensor, C, int], None],  # into [splits, CO * R * S * CI], or one part alone
) -> tuple[C, int]:
    """`registry.choose` of a configuration and of the number of parts that a sum over pixels is
    split into, which are measured together and with the adding up of the parts."""

    def plan(config: C, splits: int) -> tuple:
        return _plan_of(type(config))(*config, splits)

    def run(plan: tuple) -> Tensor:
        out = torch.empty((weight.numel(),), dtype=weight.dtype, device=weight.device)
        parts = partials(out, plan.splits)
        launch(parts, plan.config(*plan[:-1]), plan.splits)
        sum_partials(parts, out, follows=True)
        return out

    chosen = choose(
        op,
        n,
        shape,
        lambda: [plan(*c) for c in dict.fromkeys(candidates())],
        lambda: plan(*default()),
        run,
        describe(weight.device),
        similar=True,
        match=same_tile,
    )
    return chosen.config(*chosen[:-1]), chosen.splits
