"""The configurations of a kernel that differ where the tests run."""

from collections.abc import Iterable
from typing import TypeVar

import torch

C = TypeVar("C", bound=tuple)  # a NamedTuple


def distinct(configs: Iterable[C]) -> list[C]:
    """On a GPU all. The interpreter knows nothing of warps and stages: there the first of those
    that differ in nothing else."""
    if torch.cuda.is_available():
        return list(configs)
    first = {}
    for config in configs:
        tile = {k: v for k, v in config._asdict().items() if k not in ("num_warps", "num_stages")}
        first.setdefault((type(config), *tile.items()), config)
    return list(first.values())
