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
    second: Tensor | None = None,  # beside x, of the same images
    allow_tf32: bool = True,  # of float32
    **rest: Any,  # fields of the spec
) -> ConvSpec:
    """What `conv_forward` computes of such tensors."""
    n, h, w, k = x.shape
    co, ci, r, s = weight.shape
    if second is not None:
        rest["first"], k = k, k + second.shape[3]
    return ConvSpec(
        n=n,
        dtype=dtype_name(x.dtype, allow_tf32),
        h=h,
        w=w,
        k=k,
        c=co if width is None else width,
        r=r,
        s=s,
        filters=(co, ci),
        emb=emb,
        residual=residual,
        extra=tuple(other.shape[3] for other in extra),
        stats=stats,
        **rest,
    )
