"""`conv_forward` of few images by `conv.hopper.one_row`: whole sums, no tile larger than a row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .hopper import one_row
from .hopper.operands import Operands

_empty = torch.empty  # tests put a function here that returns NaNs


def conv_one_row(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, 3, 3] in channels_last memory, dtype of x
    bias: Tensor,  # float32 [CO]
    *,
    emb: Tensor | None = None,  # float32 [N, CO], rows any distance apart
    residual: Tensor | None = None,  # [N, H, W, CO], dtype of x
    extra: Sequence[tuple[Tensor, Tensor]] = (),  # up to two: [N, H, W, C], [CO, C]
    extra_bias: Tensor | None = None,  # float32 [CO]
    stats: bool = False,  # whether to return partials
) -> tuple[Tensor, Tensor | None]:  # [N, H, W, CO]; float32 [N, K, 2, CO]
    """As `conv_forward`. No kernel may write filters and biases while earlier ones of the stream
    are under way: they are read ahead."""
    n, h, w, _ = x.shape
    co = weight.shape[0]
    assert x.is_contiguous() and x.dtype == weight.dtype and len(extra) <= 2
    assert weight.permute(0, 2, 3, 1).is_contiguous()
    assert emb is None or (emb.shape == (n, co) and emb.stride(1) == 1)
    y = _empty((n, h, w, co), dtype=x.dtype, device=x.device)
    partials = None
    if stats:
        partials = _empty((n, h, 2, co), dtype=torch.float32, device=x.device)
    beside = () if residual is None else (residual,)
    assert all(t.is_contiguous() and t.shape == y.shape for t in beside)
    one_row.launch(Operands(x, weight, y, bias, partials, beside, extra, extra_bias, emb))
    return y, partials
