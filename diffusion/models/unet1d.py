"""The 1-D UNet of Diffusion Policy (Chi et al. 2023, ConditionalUnet1D): actions from observations.

It predicts the noise of a chunk of actions, conditioned on the diffusion step and on what was
observed. Time is W of an NHWC image with one row, [N, 1, T, C]. Parameter names are those of
real-stanford/diffusion_policy, so its state dicts load as they are.

Two properties of the original are kept, since its weights depend on them: the skip connection of
the first level is never used, and the norm before the output always has 8 groups.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from ..runtime.backend import TORCH_FP32, Backend
from .layers import Conv1d, ConvTranspose1d, GroupNorm, Layer, Linear

_OUT_GROUPS = 8  # of the norm before the output


class StepEmbedding(nn.Module):
    """Sinusoids of the diffusion step, in float32: [N] -> [N, dim].

    sin(t f_i) for i < dim // 2, then cos(t f_i), f_i = 10000^(-i / (dim // 2 - 1)).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        half = dim // 2
        exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32) / (half - 1)
        self.register_buffer("frequencies", torch.exp(exponent), persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        angles = t[:, None].float() * self.frequencies[None, :]  # [N, half]
        return torch.cat((angles.sin(), angles.cos()), dim=1)


class ConvBlock(Layer):
    """mish(norm(conv(x))): [N, 1, T, CI] -> [N, 1, T, CO]."""

    def __init__(
        self, channels: int, out_channels: int, kernel_size: int, n_groups: int, backend: Backend
    ) -> None:
        super().__init__(backend)
        self.block = nn.Sequential(
            Conv1d(channels, out_channels, kernel_size, backend=backend),
            GroupNorm(n_groups, out_channels, activation="mish", backend=backend),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class ResBlock(Layer):
    """skip(x) + block_1(film(block_0(x))), film(h) = scale h + bias, or h + bias, per channel.

    Scale and bias are a linear map of the condition (FiLM, Perez et al. 2018). They come behind
    the activation, and the scale is not offset by one.
    """

    def __init__(
        self,
        channels: int,
        out_channels: int,
        cond_channels: int,
        *,
        kernel_size: int,
        n_groups: int,
        cond_predict_scale: bool,
        backend: Backend,
    ) -> None:
        super().__init__(backend)
        self.cond_predict_scale = cond_predict_scale
        self.blocks = nn.ModuleList(
            [
                ConvBlock(channels, out_channels, kernel_size, n_groups, backend),
                ConvBlock(out_channels, out_channels, kernel_size, n_groups, backend),
            ]
        )
        film = 2 * out_channels if cond_predict_scale else out_channels
        # the key is a place in the original's Sequential; Mish takes the other
        self.cond_encoder = nn.ModuleDict({"1": Linear(cond_channels, film, backend=backend)})
        self.residual_conv = (
            nn.Identity()
            if out_channels == channels
            else Conv1d(channels, out_channels, 1, backend=backend)
        )

    def forward(
        self,
        x: Tensor,  # [N, 1, T, C]
        cond: Tensor,  # [N, E] Mish of the condition, which every block starts from
    ) -> Tensor:
        h = self.blocks[0](x)
        film = self.cond_encoder["1"](cond)[:, None, None, :]
        if self.cond_predict_scale:
            scale, bias = film.chunk(2, dim=3)
            h = (scale * h + bias).to(h.dtype)
        else:
            h = (h + film).to(h.dtype)
        return self.blocks[1](h) + self.residual_conv(x)


class UNet1d(Layer):
    """Predicts the noise (or x_0, or v) of a chunk of actions from x_t, t and a condition.

    Raises ConfigError if `down_dims` is no list of multiples of `n_groups`, the kernel is even or
    the step embedding has no pairs.
    """

    # each block's map of the condition to scale and bias, see `FlatParameters`
    rows_in_low = ("cond_encoder.1.weight",)

    def __init__(
        self,
        input_dim: int,  # of an action
        global_cond_dim: int | None = None,  # of the condition; None: unconditional
        diffusion_step_embed_dim: int = 256,
        down_dims: Sequence[int] = (256, 512, 1024),  # channels of each level; each halves T
        kernel_size: int = 5,  # of the blocks' convolutions, odd
        n_groups: int = 8,  # of the GroupNorms
        cond_predict_scale: bool = True,  # the condition scales channels, or shifts them alone
        backend: Backend = TORCH_FP32,  # who computes, and in which precision
    ) -> None:
        super().__init__(backend)
        self.input_dim, self.global_cond_dim = input_dim, global_cond_dim
        self._check_options(diffusion_step_embed_dim, down_dims, kernel_size, n_groups)
        self.factor = 2 ** (len(down_dims) - 1)  # T has to be a multiple of it

        embed = self.embedding_dim = diffusion_step_embed_dim
        cond_channels = embed + (global_cond_dim or 0)

        def res_block(channels: int, out_channels: int) -> ResBlock:
            return ResBlock(
                channels,
                out_channels,
                cond_channels,
                kernel_size=kernel_size,
                n_groups=n_groups,
                cond_predict_scale=cond_predict_scale,
                backend=backend,
            )

        def resample(conv: nn.Module) -> nn.Sequential:
            return nn.Sequential(OrderedDict(conv=conv))

        # the keys are places in the original's Sequential, between which is a Mish
        self.diffusion_step_encoder = nn.ModuleDict(
            {
                "0": StepEmbedding(embed),
                "1": Linear(embed, 4 * embed, backend=backend),
                "3": Linear(4 * embed, embed, backend=backend),
            }
        )
        self.down_modules = nn.ModuleList()
        for level, (ci, co) in enumerate(pairwise((input_dim, *down_dims))):
            last = level == len(down_dims) - 1
            halve = (
                nn.Identity() if last else resample(Conv1d(co, co, 3, stride=2, backend=backend))
            )
            self.down_modules.append(nn.ModuleList([res_block(ci, co), res_block(co, co), halve]))
        deepest = down_dims[-1]
        self.mid_modules = nn.ModuleList([res_block(deepest, deepest) for _ in range(2)])
        self.up_modules = nn.ModuleList()
        for ci, co in pairwise(reversed(down_dims)):
            double = resample(ConvTranspose1d(co, backend=backend))
            self.up_modules.append(
                nn.ModuleList([res_block(2 * ci, co), res_block(co, co), double])
            )
        first = down_dims[0]
        self.final_conv = nn.Sequential(
            ConvBlock(first, first, kernel_size, _OUT_GROUPS, backend),
            Conv1d(first, input_dim, 1, backend=backend),
        )

    def forward(
        self,
        x: Tensor,  # [N, T, C]
        t: Tensor | int | float,  # [N], or one for all
        global_cond: Tensor | None = None,  # [N, G]
    ) -> Tensor:  # [N, T, C], dtype of x
        """`forward_nhwc` for the original's order of dimensions."""
        if x.ndim != 3:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected [N, T, {self.input_dim}]")
        t = torch.as_tensor(t, device=x.device).expand(x.shape[0])
        return self.forward_nhwc(x.contiguous().unsqueeze(1), t, global_cond)[:, 0].to(x.dtype)

    def forward_nhwc(
        self,
        x: Tensor,  # [N, 1, T, C]
        t: Tensor,  # int64 or float [N]
        cond: Tensor | None = None,  # float [N, G], if the model has a condition
        *,
        rng: Tensor | None = None,  # for the interface of `UNet`; nothing here is random
        first: int = 0,
    ) -> Tensor:  # [N, 1, T, C], dtype of the backend
        """The network. Raises ValueError for a wrong shape, and for a condition that is missing or
        not wanted."""
        self.check_inputs(x, t, cond)
        return self.from_embedding(x, self.embed(t), cond)

    def embed(self, t: Tensor) -> Tensor:  # [N] -> float32 [N, E], in every precision
        """The embedding of the diffusion step."""
        encoder = self.diffusion_step_encoder
        return encoder["3"](F.mish(encoder["1"](encoder["0"](t))))

    def from_embedding(
        self,
        x: Tensor,  # [N, 1, T, C]
        emb: Tensor,  # [N, E] of `embed`
        cond: Tensor | None = None,  # float [N, G]
    ) -> Tensor:  # [N, 1, T, C], dtype of the backend
        """What `forward_nhwc` does behind that, of inputs that have been checked."""
        if cond is not None:
            emb = torch.cat((emb, cond.to(emb.dtype)), dim=1)
        emb = F.mish(emb).to(self.backend.dtype)

        h = x.to(self.backend.dtype)
        skips = []
        for block_0, block_1, halve in self.down_modules:
            h = block_1(block_0(h, emb), emb)
            skips.append(h)
            h = halve(h)
        for block in self.mid_modules:
            h = block(h, emb)
        for block_0, block_1, double in self.up_modules:
            h = torch.cat((h, skips.pop()), dim=3)
            h = double(block_1(block_0(h, emb), emb))
        return self.final_conv(h)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def _check_options(
        self, embed: int, down_dims: Sequence[int], kernel_size: int, n_groups: int
    ) -> None:
        if isinstance(down_dims, str) or not isinstance(down_dims, Sequence) or not down_dims:
            raise ConfigError(f"down_dims={down_dims} is not a list of channels, one a level")
        if n_groups < 1:
            raise ConfigError(f"n_groups={n_groups}; expected at least 1")
        if any(type(c) is not int or c < 1 or c % n_groups for c in down_dims):
            raise ConfigError(
                f"down_dims={list(down_dims)}; expected multiples of n_groups={n_groups}"
            )
        if down_dims[0] % _OUT_GROUPS:
            raise ConfigError(
                f"down_dims begins with {down_dims[0]}; expected a multiple of {_OUT_GROUPS}, the"
                " groups of the norm before the output"
            )
        if type(kernel_size) is not int or kernel_size < 1 or kernel_size % 2 == 0:
            raise ConfigError(f"kernel_size={kernel_size}; expected an odd number")
        if type(embed) is not int or embed < 4 or embed % 2:
            raise ConfigError(
                f"diffusion_step_embed_dim={embed}; expected an even number, at least 4"
            )

    def check_inputs(self, x: Tensor, t: Tensor, cond: Tensor | None) -> None:
        """Raise ValueError unless these are arguments of `forward_nhwc`."""
        if x.ndim != 4 or x.shape[1] != 1 or x.shape[3] != self.input_dim:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected [N, 1, T, {self.input_dim}]")
        if not x.is_contiguous():
            raise ValueError(f"x has strides {x.stride()}; expected contiguous NHWC")
        n, _, length, _ = x.shape
        if length % self.factor:
            raise ValueError(f"x has {length} time steps; expected a multiple of {self.factor}")
        if not isinstance(t, Tensor):
            raise ValueError(f"t is {t!r}; expected a tensor of shape ({n},)")
        if t.shape != (n,):
            raise ValueError(f"t has shape {tuple(t.shape)}; expected ({n},)")
        self.check_condition(cond, n)

    def check_condition(self, cond: Tensor | None, n: int) -> None:
        """Raise ValueError unless `cond` is what a batch of n needs."""
        if self.global_cond_dim is None:
            if cond is not None:
                raise ValueError("a condition was given, but the model has none (global_cond_dim)")
        elif cond is None:
            raise ValueError(f"the condition is missing; the model has [N, {self.global_cond_dim}]")
        elif cond.shape != (n, self.global_cond_dim):
            raise ValueError(
                f"the condition has shape {tuple(cond.shape)}; expected {(n, self.global_cond_dim)}"
            )
