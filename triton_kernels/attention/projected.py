"""Attention of what is projected to queries, keys and values, norm and all, in one launch.

    o = softmax(q k^T / sqrt(d)) v,   (q, k, v) = a w^T + b,   a = x, or norm(x)

For inference, where nobody else reads a, q, k or v.
"""

from torch import Tensor

from ..registry.choose import select
from ..registry.kernel import Op
from ..registry.spec import ProjectedSpec, dtype_name
from ..runtime.device import describe
from .norm_attention import PER_IMAGE, norm_attention

PROJECTED = Op(
    "projected_attention",
    ("t", "c", "heads", "groups", "tiles", "dtype"),
    (PER_IMAGE,),
    similar=False,
)


def projected_spec(
    x: Tensor,  # [N, T, C]
    num_heads: int,
    norm: tuple | None = None,  # of x, as below
) -> ProjectedSpec:
    """What `projected_attention` computes of such tensors."""
    n, t, c = x.shape
    sums = {} if norm is None else {"groups": norm[2], "tiles": norm[0].shape[1]}
    return ProjectedSpec(n, dtype_name(x.dtype), t, c, num_heads, **sums)


def projected_attention(
    x: Tensor,  # [N, T, C]
    norm: tuple | None,  # of x: partials float32 [N, K, 2, C], pixels, num_groups, [C], [C], eps
    weight: Tensor,  # [3C, C], dtype of x
    bias: Tensor,  # float32 [3C]
    num_heads: int,
    order: str,
) -> Tensor:  # [N, T, C]
    """Attention of norm(x) weight^T + bias, packed as `attention` says. No kernel may write weights
    and biases while earlier ones of the stream are under way: they are read ahead."""
    config = select(PROJECTED, projected_spec(x, num_heads, norm), describe(x.device)).config
    return norm_attention(x, norm, weight, bias, num_heads, order, config)
