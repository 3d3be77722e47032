"""What fused kernels are launched with, and how the TMA unit is told of filters and of rows of
pixels."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from ...activations import rounded_grad
from ...hopper.descriptors import TensorDescriptor, in_boxes
from ...noise.dropout import Mask
from ...norm.tables import Statistics


class Norm(NamedTuple):
    """act(norm(x)) of 64 channels."""

    activation: str
    statistics: Statistics
    table: Tensor | None = None  # float32 [N, 4, 64], all of this
    producers: int = 0  # warpgroups that do nothing else; 0: those that multiply do it in between


class NormOfResult(NamedTuple):
    """act(norm(y)) of `Operands`, written by the same launch."""

    a: Tensor  # [N, H, W, C] to be written
    weight: Tensor  # float32 [C]
    bias: Tensor  # float32 [C]
    eps: float
    activation: str
    channels: int  # of a group
    keep: bool  # whether y is to be written
    x2: Tensor | None = None  # [N, H, W, C2] beside y, so that a has C + C2 channels

    @property
    def second(self) -> int:
        """Channels of x2."""
        return 0 if self.x2 is None else self.x2.shape[3]


class Operands(NamedTuple):
    """Those of `conv.fused.conv_forward`, or of `conv_input_grad`, which has an activation."""

    x: Tensor  # [N, H, W, K], what is convolved: x, or dy
    weight: Tensor  # [CO, CI, 3, 3] in channels_last memory
    y: Tensor  # [N, H, W, C] to be written: y, or dz
    vectors: Tensor | None  # float32: bias [CO], or table [N, 4, CI]: mean, rstd, g, b
    partials: Tensor | None  # float32 [N, tiles of an image, 2, C] to be written
    # [N, H, W, .], read in the epilogue where y is written: the residual; or x, or the two tensors
    # that it concatenates
    beside: Sequence[Tensor] = ()
    # up to two: [N, H, W, C], or, of `stationary_weights`, of half of H and W, and [CO, C]
    extra: Sequence[tuple[Tensor, Tensor]] = ()
    extra_bias: Tensor | None = None  # float32 [CO]
    emb: Tensor | None = None  # float32 [N, CO]
    factor: float | None = None  # of a forward pass: multiplies the sum
    activation: str | None = None
    norm: Norm | None = None  # of x
    mask: Mask | None = None  # of dropout, behind the activation
    precision: str = "tf32"  # of products of float32: "ieee" | "tf32"
    tf32: bool = False  # whether y of float32 is rounded to TF32

    @property
    def activation_name(self) -> str | None:
        """The activation for `activate_affine_grad`, or of a norm for `activate_affine`."""
        name = self.activation or (self.norm and self.norm.activation)
        return name and rounded_grad(name, self.y.dtype)

    @property
    def extra_channels(self) -> list[int]:
        """Channels of the two 1x1 convolutions, 0 of one that is absent."""
        channels = [other.shape[3] for other, _ in self.extra]
        return channels + [0] * (2 - len(channels))

    @property
    def emb_stride(self) -> int:
        """Of the embedding's rows."""
        return 0 if self.emb is None else self.emb.stride(0)

    @property
    def numbers(self) -> list[int]:
        """Channels of the first of two tensors beside, and the embedding's stride."""
        return [self.beside[0].shape[3] if self.beside else 0, self.emb_stride]

    def tensors(
        self,
        read: Callable[[Tensor], TensorDescriptor],  # of pixels that are multiplied
        written: Callable[[Tensor], TensorDescriptor | Tensor],  # of y and what is beside it
        # of a filter, [CO, CI], and of columns of `extra`; None: all channels, 64 at most
        box: tuple[int, int] | None = None,
    ) -> list:
        """Descriptors and pointers in the order of the kernels' arguments."""
        beside = [written(other) for other in self.beside]
        columns = 64 if box is None else box[1]
        if box is None:
            k = min(64, self.x.shape[3])
            box = (64, k) if self.activation is None else (k, 64)
        pairs: list = []
        for other, w1x1 in self.extra:
            co, c = w1x1.shape
            strides = [co * w1x1.stride(0), w1x1.stride(0), 1]
            filters = in_boxes(w1x1, [1, co, c], [1, 64, columns], strides)
            pairs += [read(other), filters]
        return [
            read(self.x),
            filters_in_boxes(self.weight, *box),
            *beside,
            *[None] * (2 - len(beside)),
            written(self.y),
            *pairs,
            *[None] * (4 - len(pairs)),
            self.vectors,
            self.extra_bias,
            self.emb,
            self.partials,
        ]


def norm_of(operands: Operands) -> tuple[list, dict[str, int | None]]:
    """What a kernel is told of the norm of x: arguments, and constants."""
    norm = operands.norm
    if norm is None or norm.table is not None:
        return [None] * 8, {"TILES_OF_X": None, "CG": None}
    (sums,), _, groups, weight, bias, eps, *film = norm.statistics
    strides = [None if t is None else t.stride(0) for t in film]
    given = [sums, weight, bias, *film, *strides, eps]
    return given, {"TILES_OF_X": sums.shape[1], "CG": 64 // groups}


def filters_in_boxes(weight: Tensor, rows: int = 64, columns: int = 64) -> TensorDescriptor:
    """[CO, CI, 3, 3] in channels_last memory as [9, CO, CI], a box of one tap."""
    co, ci, _, _ = weight.shape
    return in_boxes(weight, [9, co, ci], [1, rows, columns], [ci, 9 * ci, 1])


def in_rows(
    x: Tensor,
    rows: int = 1,
    images: int = 1,
    width: int | None = None,
    channels: int | None = None,
) -> TensorDescriptor:
    """[N, H, W, C], or [H, W, N, C] of several images, in boxes of whole rows, or of so many of
    their pixels; and of so many channels, or of 64 at most."""
    n, h, w, c = x.shape
    block = channels or min(c, 64)
    if images > 1:
        box = [rows, width or w, images, block]
        return in_boxes(x, [h, w, n, c], box, [w * c, c, h * w * c, 1])
    return in_boxes(x, [n, h, w, c], [1, rows, width or w, block])
