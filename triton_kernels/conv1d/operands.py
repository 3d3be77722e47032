"""What a stage of a 1-D network reads: an activation that no launch has made yet, as its parts."""

from typing import NamedTuple

from torch import Tensor


class Sums(NamedTuple):
    """What a convolution left: its result is the sum over the first dimension, plus the bias."""

    partial: Tensor  # float32 [S, N, C, T]
    bias: Tensor  # float32 [C]


class Stem(NamedTuple):
    """The network's first convolution, of so few terms that it is made where it is needed."""

    x: Tensor  # float32 [N, T, CX]
    weight: Tensor  # float32 [CX, taps, C]
    bias: Tensor  # float32 [C]


class Norm(NamedTuple):
    """GroupNorm and Mish behind it."""

    groups: int
    weight: Tensor  # float32 [C]
    bias: Tensor  # float32 [C]
    eps: float


class Film(NamedTuple):
    """Scale and shift of the channels: table[row], or table[n] without a row, + cond[n].

    None of it may be written by a kernel that lets its successor begin before it ends.
    """

    table: Tensor  # float32 [rows, F]
    cond: Tensor | None  # float32 [N, F]
    offset: int  # of this block's columns: scale [C] and shift [C], or shift [C]
    scale: bool
    row: Tensor | None  # int64 [1], on the device


class Activation(NamedTuple):
    """film(mish(norm(source))) + residual, [N, C, T], which no launch has made yet."""

    source: Sums | Stem
    norm: Norm | None = None  # None: no Mish either
    film: Film | None = None
    residual: Sums | Stem | Tensor | None = None  # a tensor is float32 [N, C, T]

    @property
    def shape(self) -> tuple[int, int, int]:  # N, C, T
        if isinstance(self.source, Stem):
            n, t, _ = self.source.x.shape
            return n, self.source.weight.shape[2], t
        return tuple(self.source.partial.shape[1:])
