"""The 3x3 convolution of stride 2 that halves an image, without autograd:

    y[n, p, q, co] = bias[co] + sum_{r, s, ci} x[n, 2p + r - padding, 2q + s - padding, ci]
                     weight[co, r, s, ci]

With padding 1 the window begins a pixel above and left of the 2x2 block that it stands for. With 0
it begins in the block and reaches a pixel below and right of the image, which counts as zero there.
Its kernels are those of `conv.forward`; the gradient of its filters is `conv.weight_grad`'s.
"""

from torch import Tensor

from ..registry.spec import precision_of
from .configs import ConvOperands
from .forward import launch


def conv_down(
    x: Tensor,  # [N, H, W, CI], H and W even
    weight: Tensor,  # [CO, CI, 3, 3] in channels_last memory, dtype of x
    bias: Tensor,  # [CO]
    padding: int,
    *,
    allow_tf32: bool = True,  # here and below: of float32
) -> Tensor:  # [N, H / 2, W / 2, CO]
    """y above."""
    n, h, w, _ = x.shape
    _check(weight, x, h, w)
    y = x.new_empty((n, h // 2, w // 2, weight.shape[0]))
    if y.numel():
        precision = precision_of(x.dtype, allow_tf32)
        launch(ConvOperands(x, weight, bias, y, 2, (padding,) * 2, precision, False))
    return y


def conv_down_input_grad(
    dy: Tensor,  # [N, H / 2, W / 2, CO]
    weight: Tensor,  # [CO, CI, 3, 3] in channels_last memory, dtype of dy
    padding: int,
    add: Tensor | None = None,  # [N, H, W, CI]
    *,
    allow_tf32: bool = True,
) -> Tensor:  # [N, H, W, CI]
    """The gradient of x, plus `add`, rounded once."""
    n, p, q, _ = dy.shape
    _check(weight, dy, 2 * p, 2 * q)
    dx = dy.new_empty((n, 2 * p, 2 * q, weight.shape[1]))
    assert add is None or (add.shape == dx.shape and add.is_contiguous())
    if dx.numel():
        precision = precision_of(dy.dtype, allow_tf32)
        launch(ConvOperands(dy, weight, None, dx, 2, (padding,) * 2, precision, True, add))
    return dx


def _check(weight: Tensor, x: Tensor, h: int, w: int) -> None:
    assert weight.permute(0, 2, 3, 1).is_contiguous() and weight.shape[2:] == (3, 3)
    assert x.is_contiguous() and x.dtype == weight.dtype
    assert h % 2 == w % 2 == 0, f"an image of {h}x{w} pixels has no half"
