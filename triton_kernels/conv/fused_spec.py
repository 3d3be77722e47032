"""What a fused convolution of given tensors computes, as a spec."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..registry.spec import ConvSpec, dtype_name


def forward_spec(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S]
    width: int | None = None,  # channels of y, None: CO
    *,
    emb: bool = False,
    residual: bool = False,
    extra: Sequence[Tensor] = (),  # of which 1x1 convolutions are added
    stats: bool = False,
    allow_tf32: bool = True,  # of float32
    **rest: Any,  # fields of the spec
) -> ConvSpec:
    """What `conv_forward` computes of such tensors."""
    n, h, w, k = x.shape
    co, ci, r, s = weight.shape
    dtype, c = dtype_name(x.dtype, allow_tf32), co if width is None else width
    rest |= {"emb": emb, "residual": residual, "stats": stats}
    rest["extra"] = tuple(other.shape[3] for other in extra)
    return ConvSpec(n, dtype, h, w, k, c, r, s, filters=(co, ci), **rest)
