"""What the kernels of either pass of attention are launched with."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
from torch import Tensor

from ..registry.spec import AttentionSpec
from .tiles import block_d


class FwdOperands(NamedTuple):
    """Of the forward pass."""

    q: Tensor  # qkv [N, T, 3C], or q [N, T, C]
    kv: Tensor | None  # None, or [N, L, 2C]
    mask: Tensor | None  # uint8 [N, L]
    o: Tensor  # [N, T, C], to be written, as is float32 [N, heads, T]:
    lse: Tensor
    constants: dict[str, Any]  # of `constants_of`


class BwdOperands(NamedTuple):
    """Of the backward pass."""

    do: Tensor  # [N, T, C], of any strides
    q: Tensor  # these as those of the forward pass
    kv: Tensor | None
    mask: Tensor | None
    o: Tensor
    lse: Tensor
    dq: Tensor  # as q, to be written
    dkv: Tensor | None  # as kv, likewise
    place: Callable[[int, int], Tensor] | None  # (rows, columns) -> where they go, float32
    constants: dict[str, Any]

    def rows(self, keep: int) -> Tensor | None:
        """Room for the sums of dqkv over blocks of so many positions, [N blocks of T, 3C], if they
        are wanted."""
        n, t, c3 = self.q.shape
        return None if self.place is None else self.place(n * triton.cdiv(t, keep), c3)


def constants_of(
    spec: AttentionSpec, num_heads: int, order: str, allow_tf32: bool
) -> dict[str, Any]:
    """The arguments that every kernel has, by name."""
    return dict(
        num_heads=num_heads,
        scale=1 / math.sqrt(spec.d),
        T=spec.t,
        L=spec.seen,
        D=spec.d,
        HEADS_QKV=order == "heads_qkv",
        PRECISION="tf32" if allow_tf32 else "ieee",
        BLOCK_D=block_d(spec.d),
    )
