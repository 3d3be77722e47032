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
from .conv2d import conv2d_input_grad
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
    assert h % 2 == w % 2 == 0, f"an image of {h}x{w} pixels has no half"
    y = x.new_empty((n, h // 2, w // 2, weight.shape[0]))
    precision = precision_of(x.dtype, allow_tf32)
    launch(ConvOperands(x, weight, bias, y, 2, (padding, padding), precision, False))
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
    _, p, q, _ = dy.shape
    return conv2d_input_grad(dy, weight, (2 * p, 2 * q), 2, (padding,) * 2, allow_tf32, add=add)
