"""Which of the kernels that spare launches make a network faster, see `triton_kernels.tuning`."""

import math
from collections.abc import Callable, Iterator

from torch import Tensor

from triton_kernels import tuning

_FASTER = 0.995  # at most so much of the time without it
_AGREE = 0.05  # relative, in the norm: two ways through dozens of convolutions in 16 bits


def measure_joins(
    evaluate: Callable[[], Tensor],  # the network
    time: Callable[[Callable[[], Tensor]], float],  # microseconds of what it is given
) -> Iterator[dict[str, list[int]]]:
    """Rows of a table, as they are found: 1 where `tuning.decided` should say yes. Each kind of
    kernel for images of each size is tried beside those that have already been found to be faster,
    and is not taken if the result is another one."""
    kinds: dict[tuple, set[str]] = {}
    on: set[tuple] = set()

    def decide(op: str, key: tuple) -> bool:
        kind = op, *key[1:3]
        kinds.setdefault(kind, set()).add(tuning.row_name(op, key))
        return kind in on

    def rows(kind: tuple) -> dict[str, list[int]]:
        return {row: [int(kind in on)] for row in kinds[kind]}

    with tuning.trial(decide):
        expected = evaluate().clone()
        best = time(evaluate)
        print(f"{best:.1f} us without any", flush=True)
        for kind in sorted(kinds):
            on.add(kind)
            error = float((evaluate() - expected).norm() / expected.norm())
            took = time(evaluate) if error <= _AGREE else math.inf  # so it is if not a number
            print(f"{took:.1f} us with {' '.join(map(str, kind))}; {error:.1e}", flush=True)
            if took < _FASTER * best:
                best = took
            else:
                on.discard(kind)
            yield rows(kind)
        for kind in on:  # with others on, they may have been asked for more
            yield rows(kind)
