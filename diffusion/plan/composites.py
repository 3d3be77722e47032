"""Functions of PyTorch expressed by ops that a plan has; they replace these while a module is
recorded. They compute the same; one that does not support a call returns NotImplemented."""

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call

INSTEAD: dict[Callable, Callable] = {}


def instead_of(*functions: Callable) -> Callable[[Callable], Callable]:
    def register(ours: Callable) -> Callable:
        ours.__name__ = functions[0].__name__  # what a refusal calls it
        INSTEAD.update(dict.fromkeys(functions, ours))
        return ours

    return register


@instead_of(custom_function_call)
def _custom_function_call(function: type, *args) -> SimpleNamespace:
    """PyTorch 2.11's `checkpoint` gives what it would keep to a Function that computes nothing.
    Functionalization takes no Function, and a plan keeps what it needs: as without gradients."""
    nothing = SimpleNamespace(grad_fn=None)
    return nothing if function.__name__ == "_NoopSaveInputs" else NotImplemented


@instead_of(F.batch_norm)
def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        return _batch_norm_of_the_batch(
            input, running_mean, running_var, weight, bias, momentum, eps
        )
    shape = (1, -1, *(1,) * (input.ndim - 2))
    gain = torch.rsqrt(running_var + eps)
    gain = gain if weight is None else gain * weight
    shift = -running_mean * gain
    shift = shift if bias is None else shift + bias
    return input * gain.view(shape).to(input.dtype) + shift.view(shape).to(input.dtype)


def _batch_norm_of_the_batch(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """By the statistics of x [N, C, ...], of which averages are kept."""
    F._verify_batch_size(x.shape)
    y = torch._native_batch_norm_legit(x, weight, bias, True, momentum, eps)[0]
    over = [i for i in range(x.ndim) if i != 1]
    with torch.no_grad():
        for running, new in (
            (running_mean, lambda z: z.mean(over)),
            (running_var, lambda z: z.var(over)),
        ):
            if running is not None:
                running.lerp_(new(x.to(running.dtype)), momentum)
    return y


# Names in place of which functionalization sees nothing: each is another name of an op
_SECOND_NAMES = (
    "absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh clip divide fix greater"
    " greater_equal less less_equal multiply negative not_equal square subtract true_divide"
).split()


def _written(name: str) -> Callable:
    def write(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.copy_(getattr(self, name)(*args, **kwargs))

    return write


for _name in _SECOND_NAMES:
    _both = (getattr(owner, f"{_name}_", None) for owner in (Tensor, torch))
    instead_of(*filter(None, _both))(_written(_name))


@instead_of(F.dropout)
def _dropout_in_place(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not (inplace and training and p):
        return NotImplemented
    return input.copy_(F.dropout(input, p))


@instead_of(F.rrelu)
def _rrelu(
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    """In evaluation."""
    return NotImplemented if training else F.leaky_relu(input, (lower + upper) / 2, inplace)


@instead_of(F.dropout1d, F.dropout2d, F.dropout3d)
def _dropout_of_channels(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Of whole channels [N, C, ...]: one draw for each."""
    if input.ndim < 3 or inplace:
        return NotImplemented
    kept = torch.ones_like(input[:, :, *(slice(1),) * (input.ndim - 2)])
    return input * F.dropout(kept, p, training)


_OF_IMAGES = {"nearest": "nearest", "nearest-exact": "nearest-exact", "linear": "bilinear"}


@instead_of(F.interpolate)
def _interpolate(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Rows [N, C, L] are images of one line, but for scales that are no whole numbers: PyTorch's
    kernels round those of rows and of images differently."""
    if input.ndim != 3 or mode not in _OF_IMAGES or antialias:
        return NotImplemented
    row = [None, None]
    for i, given in enumerate((size, scale_factor)):
        if given is not None:
            row[i] = (1, given) if isinstance(given, int | float) else (1, *given)
    if scale_factor is not None and any(scale % 1 for scale in row[1]):
        return NotImplemented
    options = align_corners, recompute_scale_factor
    return F.interpolate(input[:, :, None], *row, _OF_IMAGES[mode], *options)[:, :, 0]


@instead_of(F.instance_norm)
def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """A group norm of one channel a group."""
    if running_mean is not None or running_var is not None or input.ndim < 3:
        return NotImplemented
    return F.group_norm(input, input.shape[1], weight, bias, eps)


@instead_of(F.rms_norm, torch.rms_norm)
def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    dims = list(range(input.ndim - len(normalized_shape), input.ndim))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    x = input.float() if input.dtype.itemsize < 4 else input
    y = (x * torch.rsqrt((x * x).mean(dims, keepdim=True) + eps)).to(input.dtype)
    return y if weight is None else y * weight


@instead_of(torch._weight_norm)
def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    over = [i for i in range(v.ndim) if dim == -1 or i != dim % v.ndim]
    return v * (g / torch.linalg.vector_norm(v, 2, over, keepdim=True))


@instead_of(F.glu)
def _glu(input: Tensor, dim: int = -1) -> Tensor:
    a, b = input.chunk(2, dim)
    return a * torch.sigmoid(b)


@instead_of(F.pixel_shuffle)
def _pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    r, (*n, c, h, w) = upscale_factor, input.shape
    x = input.reshape(-1, c // r**2, r, r, h, w).permute(0, 1, 4, 2, 5, 3)
    return x.reshape(*n, c // r**2, h * r, w * r)


@instead_of(F.pixel_unshuffle)
def _pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    r, (*n, c, h, w) = downscale_factor, input.shape
    x = input.reshape(-1, c, h // r, r, w // r, r).permute(0, 1, 3, 5, 2, 4)
    return x.reshape(*n, c * r**2, h // r, w // r)


@instead_of(F.pad)
def _circular_pad(
    input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    if mode != "circular" or min(pad) < 0:
        return NotImplemented
    for i in range(len(pad) // 2):
        before, behind = pad[2 * i : 2 * i + 2]
        axis = input.ndim - 1 - i
        n = input.shape[axis]
        parts = input.narrow(axis, n - before, before), input, input.narrow(axis, 0, behind)
        input = torch.cat([part for part in parts if part.shape[axis]], axis)
    return input


@instead_of(F.cosine_similarity, torch.cosine_similarity)
def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    x1, x2 = torch.broadcast_tensors(x1, x2)
    a, b = (x / torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp_min(eps) for x in (x1, x2))
    return (a * b).sum(dim)


@instead_of(F.channel_shuffle)
def _channel_shuffle(input: Tensor, groups: int) -> Tensor:
    n, c, *image = input.shape
    return input.reshape(n, groups, c // groups, *image).transpose(1, 2).reshape(input.shape)


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


@instead_of(F.multi_head_attention_forward)
def _multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Of sequences [T, N, C], without the weights as a second result."""
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    a = SimpleNamespace(**bound.arguments)
    masks = [m for m in (a.attn_mask, a.key_padding_mask) if m is not None]
    kinds = {m.dtype == torch.bool for m in masks}
    more = a.bias_k, a.bias_v, a.static_k, a.static_v
    if any(x is not None for x in more) or len(kinds) == 2 or a.add_zero_attn:
        return NotImplemented
    if a.need_weights or (a.training and a.dropout_p > 0) or a.query.ndim != 3:
        return NotImplemented
    separate = a.q_proj_weight, a.k_proj_weight, a.v_proj_weight
    weights = separate if a.use_separate_proj_weight else a.in_proj_weight.chunk(3)
    biases = (None,) * 3 if a.in_proj_bias is None else a.in_proj_bias.chunk(3)
    inputs = a.query, a.key, a.value
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (a.num_heads, -1)).permute(1, 2, 0, 3)
        for x, w, b in zip(inputs, weights, biases, strict=True)
    )
    if a.attn_mask is not None and a.attn_mask.ndim == 3:  # [N heads, T, L]
        masks[0] = masks[0].unflatten(0, (-1, a.num_heads))
    if a.key_padding_mask is not None:  # [N, L]
        masks[-1] = masks[-1][:, None, None]
    mask = None
    if masks and True in kinds:  # of what is not seen
        mask = ~(masks[0] | masks[-1])
    elif masks:
        mask = masks[0] if len(masks) == 1 else masks[0] + masks[1]
    o = F.scaled_dot_product_attention(q, k, v, mask).permute(2, 0, 1, 3).flatten(2)
    return F.linear(o, a.out_proj_weight, a.out_proj_bias), None
