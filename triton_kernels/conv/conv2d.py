"""Convolution over NHWC as an implicit GEMM: forward, input gradient, weight and bias gradient.

    y[n, p, q, co]   = bias[co] + sum_{r, s, ci} x[n, h, w, ci] weight[co, r, s, ci]
    dx[n, h, w, ci]  = sum_{r, s, co} dy[n, p, q, co] weight[co, r, s, ci]
    dweight[co, r, s, ci] = sum_{n, p, q} dy[n, p, q, co] x[n, h, w, ci]
    dbias[co]        = sum_{n, p, q} dy[n, p, q, co]

with h = p stride + r - pad and w = q stride + s - pad throughout; whatever lies outside an image is
zero. With a 1x1 filter over [N, 1, 1, C] this is the linear layer.

The GEMM is swapped: the filters are the left operand of tl.dot and the pixels, transposed, the
right one, so an accumulator is [channels, pixels]. On Hopper both operands then stay in shared
memory. (With pixels on the left Triton moves them through registers first; one such tile raced.)

The kernels of the forward pass and of the input gradient are in `conv.forward`, those of the weight
gradient in `conv.weight_grad`.
"""

import torch
from torch import Tensor

from ..reductions.column_sum import column_sum
from ..registry.spec import precision_of
from ..runtime.layout import DTYPES, autocast, check_nhwc, check_shape
from ..runtime.library import derivative, once_differentiable, op
from . import forward, weight_grad
from .configs import ConvOperands, WgradOperands

# --- launchers ------------------------------------------------------------------------------------


def _out_size(size: int, taps: int, stride: int, padding: int) -> int:
    return (size + 2 * padding - taps) // stride + 1


def _conv2d_fwd(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of x
    bias: Tensor | None,  # [CO], any dtype
    stride: int,
    padding: tuple[int, int],
    allow_tf32: bool,
    config: tuple | None = None,  # of a kernel of `forward`
) -> Tensor:  # [N, P, Q, CO]
    n, h, w, _ = x.shape
    co, _, r, s = weight.shape
    p, q = _out_size(h, r, stride, padding[0]), _out_size(w, s, stride, padding[1])
    y = x.new_empty((n, p, q, co))
    precision = precision_of(x.dtype, allow_tf32)
    forward.launch(ConvOperands(x, weight, bias, y, stride, padding, precision, False), config)
    return y


def conv2d_input_grad(
    dy: Tensor,  # [N, P, Q, CO]
    weight: Tensor,  # [CO, CI, R, S] in channels_last memory, dtype of dy
    size: tuple[int, int],  # H, W
    stride: int,
    padding: tuple[int, int],
    allow_tf32: bool = True,  # of float32
    config: tuple | None = None,  # of a kernel of `forward`
    add: Tensor | None = None,  # as dx: added to it, and rounded once
) -> Tensor:  # [N, H, W, CI]
    dx = dy.new_empty((dy.shape[0], *size, weight.shape[1]))
    precision = precision_of(dy.dtype, allow_tf32)
    operands = ConvOperands(dy, weight, None, dx, stride, padding, precision, True, add)
    forward.launch(operands, config)
    return dx


def conv_down(
    x: Tensor,  # [N, H, W, CI], H and W even
    weight: Tensor,  # [CO, CI, 3, 3] in channels_last memory, dtype of x
    bias: Tensor,  # [CO]
    padding: int,
    *,
    allow_tf32: bool = True,  # here and below: of float32
) -> Tensor:  # [N, H / 2, W / 2, CO]
    """The 3x3 convolution of stride 2 that halves an image. With padding 1 the window begins a
    pixel above and left of the 2x2 block that it stands for. With 0 it begins in the block and
    reaches a pixel below and right of the image, which counts as zero there."""
    n, h, w, _ = x.shape
    assert h % 2 == w % 2 == 0, f"an image of {h}x{w} pixels has no half"
    y = x.new_empty((n, h // 2, w // 2, weight.shape[0]))
    precision = precision_of(x.dtype, allow_tf32)
    forward.launch(ConvOperands(x, weight, bias, y, 2, (padding, padding), precision, False))
    return y


def conv_down_input_grad(
    dy: Tensor,  # [N, H / 2, W / 2, CO]
    weight: Tensor,  # [CO, CI, 3, 3] in channels_last memory, dtype of dy
    padding: int,
    add: Tensor | None = None,  # [N, H, W, CI]
    *,
    allow_tf32: bool = True,
) -> Tensor:  # [N, H, W, CI]
    """The gradient of its x, plus `add`, rounded once."""
    _, p, q, _ = dy.shape
    return conv2d_input_grad(dy, weight, (2 * p, 2 * q), 2, (padding,) * 2, allow_tf32, add=add)


def _conv2d_wgrad(
    x: Tensor,  # [N, H, W, CI]
    dy: Tensor,  # [N, P, Q, CO]
    weight: Tensor,  # [CO, CI, R, S]: the shape, strides and dtype that are wanted
    stride: int,
    padding: tuple[int, int],
    allow_tf32: bool,
    config: tuple | None = None,  # a tile of a kernel of `weight_grad.WEIGHT_GRAD`
) -> Tensor:  # like weight
    dweight = x.new_empty((weight.numel(),), dtype=weight.dtype)
    if dy.numel() == 0 or weight.numel() == 0:
        return dweight.zero_().as_strided(weight.shape, weight.stride())
    precision = precision_of(x.dtype, allow_tf32)
    operands = WgradOperands(x, dy, weight, stride, padding, precision)
    weight_grad.launch_into(dweight, weight_grad.plan(operands, config), operands)
    return dweight.as_strided(weight.shape, weight.stride())


# --- the op --------------------------------------------------------------------------------------


def _fake_conv2d(x, weight, low, bias, stride, padding, allow_tf32):
    sizes = zip(x.shape[1:3], weight.shape[2:], padding, strict=True)
    p, q = (_out_size(size, taps, stride, pad) for size, taps, pad in sizes)
    return x.new_empty((x.shape[0], p, q, weight.shape[0]))


@op("conv2d", _fake_conv2d, differentiable=True)
def _conv2d(
    x: Tensor,
    weight: Tensor,
    low: Tensor | None,  # weight in the dtype of x, where that is another
    bias: Tensor | None,
    stride: int,
    padding: list[int],
    allow_tf32: bool,
) -> Tensor:
    low = weight if low is None else low
    return _conv2d_fwd(x, low, bias, stride, tuple(padding), allow_tf32)


@op(
    "conv2d_backward_input",
    lambda dy, weight, h, w, *_: dy.new_empty((dy.shape[0], h, w, weight.shape[1])),
)
def _backward_input(
    dy: Tensor,
    weight: Tensor,
    h: int,
    w: int,
    stride: int,
    padding: list[int],
    allow_tf32: bool,
) -> Tensor:
    return conv2d_input_grad(dy, weight, (h, w), stride, tuple(padding), allow_tf32)


@op(
    "conv2d_backward_weight",
    lambda x, dy, weight, *_: weight.new_empty_strided(weight.shape, weight.stride()),
)
def _backward_weight(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    stride: int,
    padding: list[int],
    allow_tf32: bool,
) -> Tensor:
    return _conv2d_wgrad(x, dy, weight, stride, tuple(padding), allow_tf32)


@op("conv2d_backward_bias", lambda dy, bias: bias.new_empty(bias.shape))
def _backward_bias(dy: Tensor, bias: Tensor) -> Tensor:  # [N, P, Q, CO] -> like bias
    dbias = dy.new_empty(tuple(bias.shape), dtype=bias.dtype)
    if dy.numel() == 0:
        return dbias.zero_()
    column_sum(dy, dbias)
    return dbias


@derivative(of=_conv2d)
class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, low, bias, stride, padding, allow_tf32):
        ctx.save_for_backward(x, weight if low is None else low, weight, bias)
        ctx.options = (stride, padding, allow_tf32)
        return _conv2d.below_autograd(x, weight, low, bias, *ctx.options)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, low, weight, bias = ctx.saved_tensors
        dy = dy.contiguous()  # autograd hands over expanded tensors, e.g. from y.sum()
        need_dx, need_dw, _, need_db = ctx.needs_input_grad[:4]
        dx = _backward_input(dy, low, *x.shape[1:3], *ctx.options) if need_dx else None
        dw = _backward_weight(x, dy, weight, *ctx.options) if need_dw else None
        db = _backward_bias(dy, bias) if need_db else None
        return dx, dw, None, db, None, None, None


def conv2d(
    x: Tensor,  # [N, H, W, CI]
    weight: Tensor,  # [CO, CI, R, S], channels_last in memory
    bias: Tensor | None = None,  # [CO]
    *,
    stride: int = 1,
    padding: int | tuple[int, int] | None = None,  # None: (R // 2, S // 2)
    allow_tf32: bool = False,  # float32 only: multiply in TF32
) -> Tensor:  # [N, P, Q, CO], dtype of x
    """Cross-correlation in x.dtype with float32 accumulation; bias is added to the accumulator.
    Under torch.autocast x is first cast to autocast's dtype.

    `weight` and `bias` may be float32 while x is bfloat16 or float16: weight is rounded to x.dtype
    for the products, and gradients go from the accumulators to the parameter's dtype directly.

    Raises ValueError if x is not contiguous NHWC, weight not channels_last, or shapes do not match.
    """
    check_nhwc("x", x)
    _check_weight(weight, bias, x)
    padding = _pair(stride, padding, weight)
    _check_sizes(x, weight, stride, padding)
    x = autocast(x)
    # without a gradient: that of weight comes in weight's dtype, straight from accumulators
    low = None if weight.dtype == x.dtype else weight.detach().to(x.dtype)
    return _conv2d(x, weight, low, bias, stride, padding, allow_tf32)


def _check_weight(weight: Tensor, bias: Tensor | None, x: Tensor) -> None:
    """ValueError: their shapes do not fit x, or kernels do not read such tensors."""
    if weight.ndim != 4 or weight.shape[1] != x.shape[3]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; expected [CO, {x.shape[3]}, R, S] "
            f"for x of shape {tuple(x.shape)}"
        )
    # is_contiguous(memory_format=channels_last) of a 1x1 weight says yes to more strides than this
    if not weight.permute(0, 2, 3, 1).is_contiguous():
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} has strides {weight.stride()}; expected "
            "channels_last: weight.to(memory_format=torch.channels_last); nn.Module.to does it too"
        )
    check_shape("bias", bias, weight.shape[0])
    for name, p in (("weight", weight), ("bias", bias)):
        if p is not None and p.dtype not in DTYPES:
            raise ValueError(f"{name} is {p.dtype}; expected float32, float16 or bfloat16")
        if p is not None and p.device != x.device:
            raise ValueError(f"{name} is on {p.device}; expected {x.device}, where x is")
    if bias is not None and not bias.is_contiguous():
        raise ValueError(f"bias has stride {bias.stride()}; expected contiguous")


def _pair(stride: int, padding: int | tuple[int, int] | None, weight: Tensor) -> tuple[int, int]:
    """The padding of rows and of columns. ValueError: it is wrong, or the stride is."""
    if padding is None:
        padding = (weight.shape[2] // 2, weight.shape[3] // 2)
    elif isinstance(padding, int):
        padding = (padding, padding)
    elif not isinstance(padding, tuple | list) or [type(p) for p in padding] != [int, int]:
        raise ValueError(f"padding={padding!r}; expected a whole number or (rows, columns)")
    if not isinstance(stride, int) or stride < 1 or min(padding) < 0:
        raise ValueError(
            f"stride={stride}, padding={padding}; expected a whole stride >= 1, padding >= 0"
        )
    return padding


def _check_sizes(x: Tensor, weight: Tensor, stride: int, padding: tuple[int, int]) -> None:
    """ValueError: there is no result, or it has more pixels than kernels count."""
    _, _, r, s = weight.shape
    if min(r, s) < 1:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; expected at least a tap")
    size = [_out_size(x.shape[1 + i], (r, s)[i], stride, padding[i]) for i in range(2)]
    if min(size) < 1:
        raise ValueError(
            f"x of shape {tuple(x.shape)} is smaller than the {r}x{s} filter with padding {padding}"
        )
    # not the product of the largest: which of symbols is that would become a guard
    pixels = x.shape[1] * x.shape[2], size[0] * size[1]
    factors = x.shape[0], x.shape[3], weight.shape[0]
    if any(factor * image >= 2**31 for factor in factors for image in pixels):
        raise ValueError(
            f"x of shape {tuple(x.shape)}: the pixels of the batch, and the elements of one image, "
            "have to be fewer than 2^31"
        )
