"""What a fused convolution of given tensors adds, and what it computes, as a spec."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..registry.spec import TERMS, ConvSpec, dtype_name


class Terms(NamedTuple):
    """What the epilogue of a forward pass adds to the sum, beside a bias."""

    emb: Tensor | None = None  # float32 [N, CO], rows any distance apart
    residual: Tensor | None = None  # [N, H, W, CO], dtype of x
    # 1x1 convolutions of up to two other tensors, in the same accumulator: [N, H, W, C], [CO, C].
    # Rows of their filters are any multiple of 16 bytes apart: columns of that of a concatenation.
    extra: Sequence[tuple[Tensor, Tensor]] = ()
    extra_bias: Tensor | None = None  # float32 [CO]
    factor: float | None = None  # multiplies the sum of all that

    @property
    def others(self) -> list[Tensor]:
        """Of which 1x1 convolutions are added."""
        return [other for other, _ in self.extra]

    @property
    def asked(self) -> dict[str, Any]:
        """For `forward_spec`."""
        there = {name: getattr(self, name) is not None for name in self._fields if name in TERMS}
        return there | {"extra": self.others}

    @property
    def operands(self) -> tuple:
        """In the order of `Operands`, from what is read beside the result on."""
        beside = () if self.residual is None else (self.residual,)
        return beside, self.extra, self.extra_bias, self.emb, self.factor

    def check(self, y: Tensor, co: int) -> None:
        """Raise unless they can be added to y [N, H, W, .] of so many channels."""
        emb, residual = self.emb, self.residual
        assert emb is None or (emb.shape == (len(y), co) and emb.stride(1) == 1)
        assert residual is None or residual.shape == y.shape
        for x in (*self.others, *([] if residual is None else [residual])):
            assert x.is_contiguous() and x.dtype == y.dtype
        assert len(self.extra) <= 2
        assert all(w1x1.shape == (co, other.shape[3]) for other, w1x1 in self.extra)


def forward_spec(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S]
    width: int | None = None,  # channels of y, None: CO
    *,
    emb: bool = False,
    residual: bool = False,
    extra: Sequence[Tensor] = (),  # of which 1x1 convolutions are added
    factor: bool = False,
    stats: bool = False,
    allow_tf32: bool = True,  # of float32
    **rest: Any,  # fields of the spec
) -> ConvSpec:
    """What `conv_forward` computes of such tensors."""
    n, h, w, k = x.shape
    co, ci, r, s = weight.shape
    dtype, c = dtype_name(x.dtype, allow_tf32), co if width is None else width
    rest |= {"emb": emb, "residual": residual, "factor": factor, "stats": stats}
    rest["extra"] = tuple(other.shape[3] for other in extra)
    return ConvSpec(n, dtype, h, w, k, c, r, s, filters=(co, ci), **rest)
