"""Which of the kernels that spare launches make a network faster, see `triton_kernels.tuning`."""

from collections.abc import Callable

from torch import Tensor

from triton_kernels import tuning

_AGREE = 0.05  # relative, in the norm: two ways through dozens of convolutions in 16 bits


def measure_joins(
    evaluate: Callable[[], Tensor],  # the network
    time: Callable[[Callable[[], Tensor]], float],  # microseconds of what it is given
) -> dict[str, list[int]]:
    """Rows of a table: 1 where `tuning.decided` should say yes. Each kind of kernel for images of
    each size is tried beside those that have already been found to be faster, and is not taken if
    the result is another one."""
    kinds: dict[tuple, set[str]] = {}
    on: set[tuple] = set()

    def decide(op: str, key: tuple) -> bool:
        kind = op, *key[1:3]
        kinds.setdefault(kind, set()).add(tuning.row_name(op, key))
        return kind in on

    with tuning.trial(lambda *asked: decide(*asked) or True):
        evaluate()
    with tuning.trial(decide):
        expected = evaluate().clone()
        best = time(evaluate)
        print(f"{best:.1f} us without any", flush=True)
        for kind in sorted(kinds):
            on.add(kind)
            error = float((evaluate() - expected).norm() / expected.norm())
            if not error <= _AGREE:  # also if it is not a number
                print(f"! {kind} is wrong by {error:.1e}", flush=True)
                on.discard(kind)
                continue
            took = time(evaluate)
            print(f"{took:.1f} us with {' '.join(map(str, kind))}; {error:.1e}", flush=True)
            if took < best:
                best = took
            else:
                on.discard(kind)
    return {row: [int(kind in on)] for kind, rows in kinds.items() for row in rows}
