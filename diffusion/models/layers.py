"""The layers of the networks: they hold parameters in PyTorch's shapes and call the backend's ops.

Activations are contiguous NHWC. Parameters are initialised as PyTorch initialises nn.Conv2d,
nn.Linear and nn.GroupNorm, drawing the same numbers from the same seed.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..runtime.backend import TORCH_FP32, Backend


class Layer(nn.Module):
    """A module whose arithmetic is done by `backend.ops`."""

    def __init__(self, backend: Backend = TORCH_FP32) -> None:
        super().__init__()
        self.backend = backend

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Layer":
        """What `to`, `cuda` and `cpu` call: a backend that follows is that of the new device. A
        layer without parameters, such as a mean, has that of the layer around it."""
        super()._apply(fn, recurse)
        parameter = next(self.parameters(), None)
        if parameter is not None and self.backend.follows is not None:
            set_backend(self, self.backend.on(parameter.device))
        return self


class Network(Layer):
    """Base class of networks for images, in training and sampling. Your own network subclasses it
    and defines `forward_nhwc` (docs/extending.md)."""

    num_classes: int | None = None  # None: it takes no labels
    null_label: int | None = None  # the label of no class, for classifier-free guidance
    condition_channels: int = 0  # of x: an image condition, after the channels that it learns
    vector_dim: int = 0  # size of a vector condition
    context_dim: int = 0  # size of the tokens of a sequence condition
    condition_dropout: float = 0  # how often training replaces a condition by zeros

    def forward_nhwc(
        self,
        x: Tensor,  # [N, H, W, CI], contiguous
        t: Tensor,  # int64 or float [N]
        labels: Tensor | None = None,  # int64 [N], if there are classes
        *,
        rng: Tensor | None = None,  # int64 [2]: seed, step; what randomness in training depends on
        first: int = 0,  # global index of sample 0
    ) -> Tensor:  # [N, H, W, CO], in any dtype
        """Predicts noise (or x_0, or v) from x_t and t."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,  # [N, CI, H, W]
        t: Tensor,  # [N]
        labels: Tensor | None = None,  # int64 [N], if the model has classes
        *,
        rng: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:  # [N, CO, H, W] in channels_last memory, dtype of x
        """`forward_nhwc` for PyTorch's order of dimensions, called as guided-diffusion's."""
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; expected [N, {self.in_channels}, H, W]"
            )
        nhwc = x.permute(0, 2, 3, 1).contiguous()  # no copy if x is channels_last
        y = self.forward_nhwc(nhwc, t, labels, rng=rng, first=first)
        return y.permute(0, 3, 1, 2).to(x.dtype)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def set_backend(model: nn.Module, backend: Backend) -> None:
    """Let every layer of `model` compute with `backend` from now on; parameters are not touched."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.backend = backend


class Conv2d(Layer):
    """Convolution with padding R // 2: [N, H, W, CI] -> [N, P, Q, CO].

    `weight` is [CO, CI, R, S] in channels_last memory. `zero` starts weight and bias at zero.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        zero: bool = False,
        backend: Backend = TORCH_FP32,
    ) -> None:
        super().__init__(backend)
        self.stride = stride
        shape = (out_channels, in_channels, kernel_size, kernel_size)
        self.weight, self.bias = _affine_parameters(shape, zero)

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.ops.conv2d(
            x,
            self.weight,
            self.bias,
            stride=self.stride,
            allow_tf32=self.backend.allow_tf32,
        )


class Conv1d(Layer):
    """Convolution along W with padding S // 2: [N, H, W, CI] -> [N, H, Q, CO].

    `weight` has nn.Conv1d's shape [CO, CI, S], in [CO, S, CI] memory. With S = 1 this is the
    pointwise convolution of guided-diffusion's attention blocks.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 1,
        *,
        stride: int = 1,
        zero: bool = False,
        backend: Backend = TORCH_FP32,
    ) -> None:
        super().__init__(backend)
        self.stride = stride
        self.weight, self.bias = _affine_parameters((out_channels, in_channels, kernel_size), zero)

    def forward(self, x: Tensor) -> Tensor:
        return self.backend.ops.conv2d(
            x,
            self.weight.unsqueeze(2),
            self.bias,
            stride=self.stride,  # of a single row too, which stays
            allow_tf32=self.backend.allow_tf32,
        )


class ConvTranspose1d(Layer):
    """nn.ConvTranspose1d(C, C, 4, stride=2, padding=1): [N, 1, T, C] -> [N, 1, 2T, C].

        y[2m]     = W_1 x[m] + W_3 x[m - 1]
        y[2m + 1] = W_2 x[m] + W_0 x[m + 1]

    so it is one convolution of stride 1 with 2C channels out, [even, odd], over the taps
    m - 1, m, m + 1: in NHWC memory its result, [T, 2C], is [2T, C] already. `weight` has PyTorch's
    shape [CI, CO, 4].
    """

    def __init__(self, channels: int, *, backend: Backend = TORCH_FP32) -> None:
        super().__init__(backend)
        self.weight, self.bias = _affine_parameters((channels, channels, 4), zero=False)

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.permute(2, 1, 0)  # [4, CO, CI]
        zeros = torch.zeros_like(w[:2])
        taps = torch.cat((w[3:], w[1:2], zeros, w[2:3], w[:1]))  # three of even steps, of odd ones
        taps = taps.unflatten(0, (2, 3)).transpose(1, 2).flatten(0, 1)  # [2CO, 3, CI]
        y = self.backend.ops.conv2d(
            x,
            taps.movedim(2, 1).unsqueeze(2),  # [2CO, CI, 1, 3]
            self.bias.repeat(2),
            allow_tf32=self.backend.allow_tf32,
        )
        n, h, t, c = x.shape
        return y.view(n, h, 2 * t, c)


class Linear(Layer):
    """x W^T + b: [N, CI] -> [N, CO], with `weight` [CO, CI]. A 1x1 convolution over one pixel."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        backend: Backend = TORCH_FP32,
    ) -> None:
        super().__init__(backend)
        self.weight, self.bias = _affine_parameters((out_features, in_features), zero=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.backend.ops.conv2d(
            x[:, None, None, :],
            self.weight[:, :, None, None],
            self.bias,
            allow_tf32=self.backend.allow_tf32,
        )
        return y.flatten(1)


class GroupNorm(Layer):
    """Group normalisation and activation: [N, H, W, C] -> [N, H, W, C], statistics in float32."""

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        *,
        activation: str = "identity",
        eps: float = 1e-5,
        backend: Backend = TORCH_FP32,
    ) -> None:
        super().__init__(backend)
        self.num_groups, self.activation, self.eps = num_groups, activation, eps
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))

    def forward(
        self,
        x: Tensor,
        scale: Tensor | None = None,  # [N, C]
        shift: Tensor | None = None,  # [N, C]
    ) -> Tensor:
        """act((norm(x) * weight + bias) * (1 + scale) + shift)."""
        return self.backend.ops.group_norm(
            x,
            self.num_groups,
            self.weight,
            self.bias,
            eps=self.eps,
            activation=self.activation,
            scale=scale,
            shift=shift,
        )


class TimestepEmbedding(nn.Module):
    """Sinusoids of the timestep, in float32: [N] -> [N, dim].

    cos(t f_i) for i < dim // 2, then sin(t f_i), f_i = max_period^(-i / (dim // 2 - freq_shift));
    an odd `dim` ends in a zero (Vaswani et al. 2017, section 3.5, in the order of guided-diffusion
    and unet.cu, which have no shift; Ho et al. 2020 has 1).
    """

    def __init__(self, dim: int, max_period: float = 10000, freq_shift: float = 0) -> None:
        super().__init__()
        half = dim // 2
        self.odd = dim % 2
        index = torch.arange(half, dtype=torch.float32, device="cpu")  # meta's takes a second
        exponent = -math.log(max_period) * index / (half - freq_shift)
        self.register_buffer("frequencies", torch.exp(exponent), persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        angles = t[:, None].float() * self.frequencies[None, :]  # [N, half]
        zero = [torch.zeros_like(angles[:, :1])] * self.odd
        return torch.cat([angles.cos(), angles.sin(), *zero], dim=1)


def _affine_parameters(shape: tuple[int, ...], zero: bool) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight and bias of a linear map as PyTorch draws them: uniform in +-1 / sqrt(fan_in), which
    is He et al. 2015 with a = sqrt(5). The weight's input channels come last in memory."""
    weight, bias = torch.empty(shape), torch.empty(shape[0])
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    nn.init.uniform_(bias, -bound, bound)
    if zero:  # after the draw, so that the layers behind it see the same random numbers
        weight.zero_(), bias.zero_()
    return nn.Parameter(weight.movedim(1, -1).contiguous().movedim(-1, 1)), nn.Parameter(bias)
