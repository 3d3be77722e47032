"""GroupNorm (Wu and He 2018) over NHWC with the affine map, FiLM's scale and shift, and the
activation in the same pass:

    xhat = (x - mean_g) rstd_g,   mean and variance over the H W C/G values of a (sample, group)
    z    = xhat gain + offset,    gain   = weight (1 + scale)
                                  offset = bias (1 + scale) + shift
    y    = act(z)

With dz = dy act'(z), D = sum over pixels of dz, E = sum over pixels of dz xhat, both per (n, c):

    dx       = rstd (gain dz - m1 - xhat m2),   m1, m2 = sum over the group of gain D, gain E
                                                         / (H W C/G)
    d_weight = sum_n (1 + scale) E,             d_scale = weight E + bias D
    d_bias   = sum_n (1 + scale) D,             d_shift = D

z is recomputed in backward. D and E are kept per (n, c), not per group: a group may lie across the
border of a skip concat, and the gradients of weight, bias, scale and shift come from the same sums.

Small images are normalised in registers by one launch (`norm.single_program`); others take three
passes over memory forward and five backward (`norm.multi_pass`), in three launches each. On Hopper
a cluster of thread blocks keeps an image of a large batch in shared memory (`norm.cluster`): two
passes forward and three backward, in one launch each. The parameters' gradients are one small
launch more.
"""

import math

import torch
from torch import Tensor

from .. import reference
from ..activations import check_activation
from ..registry.choose import select
from ..registry.kernel import Op
from ..runtime.device import describe
from ..runtime.layout import check_affine, check_nhwc, check_second, has_kernels, is_aligned
from ..runtime.library import derivative, once_differentiable, op
from .cluster import CLUSTER, CLUSTER_GRAD
from .multi_pass import KEY, MULTI_PASS, MULTI_PASS_GRAD, Halves, Params, params_grad, spec_of
from .single_program import SINGLE_PROGRAM, SINGLE_PROGRAM_GRAD

GROUP_NORM = Op("group_norm", KEY, (SINGLE_PROGRAM, CLUSTER, MULTI_PASS), similar=False)
GROUP_NORM_GRAD = Op(
    "group_norm_bwd", KEY, (SINGLE_PROGRAM_GRAD, CLUSTER_GRAD, MULTI_PASS_GRAD), similar=False
)


def _forward(
    xs: Halves, num_groups: int, eps: float, params: Params, activation: str
) -> tuple[Tensor, Tensor]:
    """y, and mean and rstd as float32 [2, N, G]."""
    args = (xs, num_groups, eps, params, activation)

    def run(config: tuple) -> Tensor:
        return GROUP_NORM.kernel_of(config).launch(config, *args)[0]

    spec = spec_of(xs, num_groups, aligned=is_aligned(xs[0]))
    choice = select(GROUP_NORM, spec, describe(xs[0].device), run)
    return choice.kernel.launch(choice.config, *args)


def _backward(
    xs: Halves, dy: Tensor, stats: Tensor, params: Params, activation: str, needs_x: bool
) -> tuple[Halves, Tensor]:
    """The gradient of x, if that is needed, and D and E of every chunk: float32 [N, K, 2, C]."""
    args = (xs, dy, stats, params, activation)

    def run(config: tuple) -> Tensor:
        return GROUP_NORM_GRAD.kernel_of(config).launch(config, *args, True)[0][0]

    aligned = is_aligned(xs[0]) and is_aligned(dy)
    spec = spec_of(xs, stats.shape[2], grad=True, dx=needs_x, aligned=aligned)
    choice = select(GROUP_NORM_GRAD, spec, describe(xs[0].device), run)
    return choice.kernel.launch(choice.config, *args, needs_x)


# --- the op --------------------------------------------------------------------------------------


def _fake_group_norm(x, x2, weight, bias, scale, shift, num_groups, eps, activation):
    c = x.shape[3] if x2 is None else x.shape[3] + x2.shape[3]
    stats = x.new_empty((2, x.shape[0], num_groups), dtype=torch.float32)
    return x.new_empty((*x.shape[:3], c)), stats


@op("group_norm", _fake_group_norm, differentiable=True)
def _group_norm(
    x: Tensor,
    x2: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    num_groups: int,
    eps: float,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """y, and mean and rstd as float32 [2, N, G]."""
    return _forward((x, x2), num_groups, eps, (weight, bias, scale, shift), activation)


def _fake_backward(dy, x, x2, stats, weight, bias, scale, shift, activation, needed):
    inputs = (x, x2, weight, bias, scale, shift)
    return [t.new_empty(t.shape) for t, need in zip(inputs, needed, strict=True) if need]


@op("group_norm_backward", _fake_backward)
def _group_norm_backward(
    dy: Tensor,
    x: Tensor,
    x2: Tensor | None,
    stats: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    activation: str,
    needed: list[bool],
) -> list[Tensor]:
    """The gradients of x, x2, weight, bias, scale and shift, those that are needed."""
    xs, params = (x, x2), (weight, bias, scale, shift)
    grads = (None,) * 4
    dxs, sums = _backward(xs, dy, stats, params, activation, any(needed[:2]))
    if any(needed[2:]):
        grads = params_grad(sums, params, needed[2:])
    return [grad for grad, need in zip((*dxs, *grads), needed, strict=True) if need]


@derivative(of=_group_norm)
class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, x2, weight, bias, scale, shift, num_groups, eps, activation):
        inputs = (x, x2, weight, bias, scale, shift)
        y, stats = _group_norm.below_autograd(*inputs, num_groups, eps, activation)
        ctx.save_for_backward(x, x2, stats, *inputs[2:])
        ctx.activation = activation
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return y, stats

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, _):
        needed = ctx.needs_input_grad[:6]
        dy = dy.contiguous()  # autograd may hand over an expanded or permuted gradient
        grads = iter(_group_norm_backward(dy, *ctx.saved_tensors, ctx.activation, needed))
        return *(next(grads) if need else None for need in needed), None, None, None


def group_norm(
    x: Tensor,  # [N, H, W, C], or [N, H, W, C1] with x2
    num_groups: int,
    weight: Tensor | None = None,  # [C]
    bias: Tensor | None = None,  # [C]
    *,
    eps: float = 1e-5,
    activation: str = "identity",
    scale: Tensor | None = None,  # [N, C]
    shift: Tensor | None = None,  # [N, C]
    x2: Tensor | None = None,  # [N, H, W, C2]; C is then C1 + C2
) -> Tensor:  # [N, H, W, C], dtype of x
    """act((norm(x) * weight + bias) * (1 + scale) + shift); statistics and arithmetic in float32.

    With `x2` this is the norm of torch.cat((x, x2), dim=-1), which is never stored; a group may
    include channels of both.

    Parameters may have another dtype than x, such as float32; each gradient has the dtype of its
    tensor. The rows of `scale` and `shift` may be strided, as after `chunk` of an embedding.
    torch.autocast has no effect: y has the dtype of x.

    Raises ValueError if C is not a multiple of `num_groups`, and for a wrong shape, dtype, layout
    or activation.
    """
    check_nhwc("x", x)
    check_activation(activation)
    n, h, w, c = x.shape
    c += check_second(x2, n, h, w)
    if x2 is not None and x2.dtype != x.dtype:
        raise ValueError(f"x2 is {x2.dtype}; expected {x.dtype}, which x is")
    if not 1 <= num_groups <= c or c % num_groups != 0:
        raise ValueError(f"num_groups is {num_groups}; expected a divisor of the {c} channels of x")
    check_affine(n, c, weight, bias, scale, shift)
    y, _ = _group_norm(x, x2, weight, bias, scale, shift, num_groups, eps, activation)
    return y


class GroupNorm(torch.nn.GroupNorm):
    """torch.nn.GroupNorm with the activation fused: the same state dict and [N, C, *] tensors.

    A channels_last input is read without a copy; any other input is first copied to channels_last.
    The output, of shape [N, C, *], is always channels_last in memory, so a network copies once.

    On a CPU it runs plain PyTorch, so models can be built, loaded, tried and exported anywhere.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "identity",
        bias: bool = True,  # as in nn.GroupNorm of newer PyTorch
    ) -> None:
        check_activation(activation)
        if num_groups < 1:
            raise ValueError(f"num_groups is {num_groups}; expected a divisor of {num_channels}")
        super().__init__(num_groups, num_channels, eps, affine, device=device, dtype=dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:  # [N, C, *] -> [N, C, *]
        if x.ndim < 2 or x.shape[1] != self.num_channels:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; expected [N, {self.num_channels}, ...]"
            )
        nhwc = x.movedim(1, -1).contiguous()  # the copy, unless x is channels_last
        norm = group_norm if has_kernels(x) else reference.group_norm
        y = norm(
            nhwc.view(x.shape[0], 1, math.prod(x.shape[2:]), x.shape[1]),
            self.num_groups,
            self.weight,
            self.bias,
            eps=self.eps,
            activation=self.activation,
        )
        return y.view(nhwc.shape).movedim(-1, 1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"
