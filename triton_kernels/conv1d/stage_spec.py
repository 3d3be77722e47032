"""What a stage of a network over short rows computes, without tensors."""

from dataclasses import dataclass

from ..registry.spec import Spec


@dataclass(frozen=True)
class StageSpec(Spec):
    """A convolution of n rows of t positions, and the activation that it reads; of fp32, three
    products of TF32. A transposed one, of stride 2, is two that keep the length."""

    t: int
    rows: int  # channels out; transposed: twice
    channels: int  # in
    taps: int
    side: bool = False  # a 1x1 convolution of the same input beside it
    stride: int = 1
    transposed: bool = False
    batched: bool = False  # the activation is made once, in a launch of its own
    by_tap: bool = False  # there is a copy of the weights, tap by tap
    slice_channels: int = 32  # of a program that makes its own input
    block: int = 32  # of channels out, as weights are packed

    @property
    def split(self) -> bool:
        """Whether numbers are two of TF32 each."""
        return self.dtype == "fp32"

    @property
    def parts(self) -> int:
        """Into which an activation is split."""
        return 2 if self.split else 1

    @property
    def width(self) -> int:
        """Channels of a block, whose rows are 128 bytes."""
        return 128 // self.itemsize

    @property
    def tiles(self) -> int:
        """Products of a block."""
        return self.taps + self.side

    @property
    def positions(self) -> int:
        """Of a result; transposed: of either of the two."""
        return (self.t - 1) // self.stride + 1

    def fetched(self, times: int) -> int:
        """Times that so many of the result are made of."""
        return times + 2 if self.transposed else (times - 1) * self.stride + self.taps

    @property
    def flops(self) -> int:
        """Of its products."""
        return 2 * self.n * self.positions * self.rows * self.channels * self.tiles

    @property
    def bytes(self) -> int:
        """Weights, and what is read and written once."""
        weights = self.rows * self.channels * self.tiles * self.itemsize
        return weights + 4 * self.n * (self.t * self.channels + self.positions * self.rows)
