"""Functions of PyTorch expressed by ops that a plan has; they replace these while a module is
recorded. They compute the same; one that does not support a call returns NotImplemented."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.autograd_function import custom_function_call
from torch.nn.modules import transformer
from torch.nn.utils import parametrize

INSTEAD: dict[Callable, Callable] = {}


def instead_of(*functions: Callable, named: bool = False) -> Callable[[Callable], Callable]:
    """Decorator of what replaces these. It takes their arguments, or, if they are `named`, one
    object that has each as an attribute, by the signature of the first."""

    def register(ours: Callable) -> Callable:
        def with_names(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(functions[0]).bind(*args, **kwargs)
            bound.apply_defaults()
            return ours(SimpleNamespace(**bound.arguments))

        call = with_names if named else ours
        call.__name__ = functions[0].__name__  # what a refusal calls it
        INSTEAD.update(dict.fromkeys(functions, call))
        return ours

    return register


@instead_of(custom_function_call)
def _custom_function_call(function: type, *args) -> SimpleNamespace:
    """PyTorch 2.11's `checkpoint` gives what it would keep to a Function that computes nothing.
    Functionalization takes no Function, and a plan keeps what it needs: as without gradients."""
    nothing = SimpleNamespace(grad_fn=None)
    return nothing if function.__name__ == "_NoopSaveInputs" else NotImplemented


def _cast(op: str, x: Tensor) -> Tensor:
    """x as autocast would give it to an op that it calls in float32, if it does so where x is."""
    kind = x.device.type
    on = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    key = f"Autocast{kind.upper()}"
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return x.float() if on and x.dtype.itemsize < 4 and has(f"aten::{op}", key) else x


@contextmanager
def without_hints() -> Iterator[None]:
    """Within the block PyTorch's Transformer layers do not ask by a mask's numbers whether it is
    causal: their result does not depend on it."""
    asked = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = asked


@contextmanager
def parametrized_anew() -> Iterator[None]:
    """Within the block no weight is one that a call before has left in `parametrize.cached()`."""
    enabled, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = enabled


@instead_of(F.batch_norm, named=True)
def _batch_norm(a: SimpleNamespace) -> Tensor:
    if a.training or a.running_mean is None or a.running_var is None:
        return _batch_norm_of_the_batch(a)
    x, shape = a.input, (1, -1, *(1,) * (a.input.ndim - 2))
    gain = torch.rsqrt(a.running_var + a.eps)
    gain = gain if a.weight is None else gain * a.weight
    shift = -a.running_mean * gain
    shift = shift if a.bias is None else shift + a.bias
    return x * gain.view(shape).to(x.dtype) + shift.view(shape).to(x.dtype)


def _batch_norm_of_the_batch(a: SimpleNamespace) -> Tensor:
    """By the statistics of x [N, C, ...], of which averages are kept."""
    x = a.input
    F._verify_batch_size(x.shape)
    y = torch._native_batch_norm_legit(x, a.weight, a.bias, True, a.momentum, a.eps)[0]
    _keep_averages(a, [i for i in range(x.ndim) if i != 1])
    return y


def _keep_averages(a: SimpleNamespace, over: list[int]) -> None:
    """Move the averages towards the statistics over these axes, and over samples where an image
    has its own."""
    for running, statistic in ((a.running_mean, torch.mean), (a.running_var, torch.var)):
        if running is not None:
            with torch.no_grad():
                new = statistic(a.input.to(running.dtype), over)
                running.lerp_(new if 0 in over else new.mean(0), a.momentum)


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


@instead_of(F.dropout, named=True)
def _dropout_in_place(a: SimpleNamespace) -> Tensor:
    if not (a.inplace and a.training and a.p):
        return NotImplemented
    return a.input.copy_(F.dropout(a.input, a.p))


@instead_of(F.rrelu, named=True)
def _rrelu(a: SimpleNamespace) -> Tensor:
    """In evaluation."""
    slope = (a.lower + a.upper) / 2
    return NotImplemented if a.training else F.leaky_relu(a.input, slope, a.inplace)


@instead_of(F.dropout1d, F.dropout2d, F.dropout3d, named=True)
def _dropout_of_channels(a: SimpleNamespace) -> Tensor:
    """Of whole channels [N, C, ...]: one draw for each."""
    x = a.input
    if x.ndim < 3 or a.inplace:
        return NotImplemented
    kept = torch.ones_like(x[:, :, *(slice(1),) * (x.ndim - 2)])
    return x * F.dropout(kept, a.p, a.training)


_OF_IMAGES = {"nearest": "nearest", "nearest-exact": "nearest-exact", "linear": "bilinear"}


@instead_of(F.interpolate, named=True)
def _interpolate(a: SimpleNamespace) -> Tensor:
    """Rows [N, C, L] are images of one line, but for scales that are no whole numbers: PyTorch's
    kernels round those of rows and of images differently."""
    if a.input.ndim != 3 or a.mode not in _OF_IMAGES or a.antialias:
        return NotImplemented
    row = [None, None]
    for i, given in enumerate((a.size, a.scale_factor)):
        if given is not None:
            row[i] = (1, given) if isinstance(given, int | float) else (1, *given)
    if a.scale_factor is not None and any(scale % 1 for scale in row[1]):
        return NotImplemented
    options = a.align_corners, a.recompute_scale_factor
    return F.interpolate(a.input[:, :, None], *row, _OF_IMAGES[a.mode], *options)[:, :, 0]


@instead_of(F.instance_norm, named=True)
def _instance_norm(a: SimpleNamespace) -> Tensor:
    """A group norm of one channel a group; averages of its statistics may be kept, or used."""
    x, given = a.input, (a.weight, a.bias)
    if x.ndim < 3:
        return NotImplemented
    if not a.use_input_stats:
        return F.batch_norm(x, a.running_mean, a.running_var, *given, False, a.momentum, a.eps)
    _keep_averages(a, list(range(2, x.ndim)))
    return F.group_norm(x, x.shape[1], *given, a.eps)


@instead_of(F.rms_norm, torch.rms_norm, named=True)
def _rms_norm(a: SimpleNamespace) -> Tensor:
    given = _cast("rms_norm", a.input)
    dims = list(range(given.ndim - len(a.normalized_shape), given.ndim))
    eps = torch.finfo(given.dtype).eps if a.eps is None else a.eps
    x = given.float() if given.dtype.itemsize < 4 else given
    y = x * torch.rsqrt((x * x).mean(dims, keepdim=True) + eps)
    if a.weight is None or a.weight.dtype == given.dtype:
        y = y.to(given.dtype)
    return y if a.weight is None else (y * a.weight).to(given.dtype)


@instead_of(F.binary_cross_entropy_with_logits, named=True)
def _binary_cross_entropy(a: SimpleNamespace) -> Tensor:
    """Functionalization takes it apart before autocast sees it."""
    given = a.input, a.target, a.weight, a.pos_weight
    cast = [x if x is None else _cast("binary_cross_entropy_with_logits", x) for x in given]
    if all(x is y for x, y in zip(given, cast, strict=True)):
        return NotImplemented
    x, y, weight, pos_weight = cast
    how = a.size_average, a.reduce, a.reduction
    return F.binary_cross_entropy_with_logits(x, y, weight, *how, pos_weight)


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


@instead_of(F.pad, named=True)
def _circular_pad(a: SimpleNamespace) -> Tensor:
    x = a.input
    if a.mode != "circular" or min(a.pad) < 0:
        return NotImplemented
    for i in range(len(a.pad) // 2):
        before, behind = a.pad[2 * i : 2 * i + 2]
        axis = x.ndim - 1 - i
        parts = x.narrow(axis, x.shape[axis] - before, before), x, x.narrow(axis, 0, behind)
        x = torch.cat([part for part in parts if part.shape[axis]], axis)
    return x


@instead_of(F.adaptive_avg_pool2d)
def _mean_of_all_pixels(input: Tensor, output_size: Any) -> Tensor:
    """As PyTorch has it, which gives a channels_last result strides that a plan has not."""
    sizes = (output_size,) * 2 if isinstance(output_size, int) else tuple(output_size)
    return input.mean((-2, -1), keepdim=True) if sizes == (1, 1) else NotImplemented


@instead_of(F.cosine_similarity, torch.cosine_similarity)
def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    x1, x2 = torch.broadcast_tensors(x1, x2)
    a, b = (x / torch.linalg.vector_norm(x, dim=dim, keepdim=True).clamp_min(eps) for x in (x1, x2))
    return (a * b).sum(dim)


@instead_of(F.channel_shuffle)
def _channel_shuffle(input: Tensor, groups: int) -> Tensor:
    n, c, *image = input.shape
    return input.reshape(n, groups, c // groups, *image).transpose(1, 2).reshape(input.shape)


@instead_of(F.multi_head_attention_forward, named=True)
def _multi_head_attention(a: SimpleNamespace) -> tuple[Tensor, Tensor | None]:
    """Of sequences [T, N, C], whose products are of [N, T, C], as attention reads them. The weights
    are made beside them, if something reads these."""
    masks = [m for m in (a.attn_mask, a.key_padding_mask) if m is not None]
    kinds = {m.dtype == torch.bool for m in masks}
    more = a.bias_k, a.bias_v, a.static_k, a.static_v
    if any(x is not None for x in more) or len(kinds) == 2 or a.add_zero_attn:
        return NotImplemented
    if (a.need_weights and masks) or a.query.ndim != 3:
        return NotImplemented
    separate = a.q_proj_weight, a.k_proj_weight, a.v_proj_weight
    weights = separate if a.use_separate_proj_weight else a.in_proj_weight.chunk(3)
    biases = (None,) * 3 if a.in_proj_bias is None else a.in_proj_bias.chunk(3)
    inputs = a.query, a.key, a.value
    q, k, v = (  # [N, heads, T, d]
        F.linear(x.transpose(0, 1), w, b).unflatten(-1, (a.num_heads, -1)).transpose(1, 2)
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
    dropped = a.dropout_p if a.training else 0.0
    weights = _weights(q, k, dropped=dropped) if a.need_weights else None
    if dropped and a.need_weights:  # which are those of the result
        o = weights @ v
    else:
        o = F.scaled_dot_product_attention(q, k, v, mask, dropped)
    y = F.linear(o.transpose(1, 2).flatten(2), a.out_proj_weight, a.out_proj_bias).transpose(0, 1)
    if weights is not None and a.average_attn_weights:
        weights = weights.mean(1)
    return y, weights


def _weights(
    q: Tensor, k: Tensor, mask: Tensor | None = None, scale: float | None = None, dropped: float = 0
) -> Tensor:
    """dropout(softmax(scale q k^T)) of what a mask leaves, or with one that is added."""
    scores = q * (q.shape[-1] ** -0.5 if scale is None else scale) @ k.mT
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return F.dropout(scores.softmax(-1), dropped, training=dropped > 0)


@instead_of(F.scaled_dot_product_attention)
def _attention_that_drops(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """No kernel drops weights within."""
    if not dropout_p or enable_gqa:
        return NotImplemented
    if is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        attn_mask = seen.tril()
    return _weights(query, key, attn_mask, scale, dropout_p) @ value
