"""The blocks of `unet`: residual blocks, attention, and what resamples, over NHWC.

Their parameter names are places in guided-diffusion's Sequentials.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from ..runtime.backend import Backend
from .layers import Conv1d, Conv2d, GroupNorm, Layer, Linear


class Downsample(Layer):
    """[N, H, W, C] -> [N, H / 2, W / 2, C]: a convolution of stride 2, or 2x2 means.

    With padding 1 the convolution's window begins a pixel above and left of the 2x2 block that it
    stands for, with padding 0 in it: the image is padded below and to the right instead.
    """

    def __init__(self, channels: int, use_conv: bool, padding: int, backend: Backend) -> None:
        super().__init__(backend)
        self.padding = padding
        self.op = Conv2d(channels, channels, 3, stride=2, backend=backend) if use_conv else None

    def forward(self, x: Tensor) -> Tensor:
        if self.op is None:
            return self.backend.ops.avg_pool2d(x)
        if self.padding == 1:
            return self.op(x)
        padded = F.pad(x, (0, 0, 0, 1, 0, 1))  # [N, H + 1, W + 1, C]
        return self.backend.ops.conv2d(
            padded,
            self.op.weight,
            self.op.bias,
            stride=2,
            padding=0,
            allow_tf32=self.backend.allow_tf32,
        )


class Upsample(Layer):
    """[N, H, W, C] -> [N, 2H, 2W, C]: nearest neighbour, then perhaps a convolution."""

    def __init__(self, channels: int, use_conv: bool, backend: Backend) -> None:
        super().__init__(backend)
        self.conv = Conv2d(channels, channels, 3, backend=backend) if use_conv else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.backend.ops.upsample_nearest2d(x)
        return x if self.conv is None else self.conv(x)


class ResBlock(Layer):
    """skip(x) + conv(dropout(act(norm(conv(act(norm(x))) + emb)))), act = SiLU.

    With `use_scale_shift_norm` the embedding gives a scale and a shift behind the second norm
    instead of being added before it. `resample` ("up" or "down") resizes x and the first
    activation.
    """

    def __init__(
        self,
        channels: int,
        out_channels: int,
        emb_channels: int,
        *,
        num_groups: int,
        norm_eps: float,
        dropout: float,
        dropout_layer: int,  # number of this layer among those that draw dropout masks
        use_scale_shift_norm: bool,
        zero_init: bool,
        resample: str | None = None,
        resample_projection: bool = False,  # of x, if it is resampled: a 1x1 convolution behind
        backend: Backend,
    ) -> None:
        super().__init__(backend)
        self.dropout, self.dropout_layer = dropout, dropout_layer
        self.use_scale_shift_norm, self.resample = use_scale_shift_norm, resample

        def norm(c: int) -> GroupNorm:
            return GroupNorm(num_groups, c, activation="silu", eps=norm_eps, backend=backend)

        # the keys are places in guided-diffusion's Sequentials; SiLU and dropout take the others
        self.in_layers = nn.ModuleDict(
            {"0": norm(channels), "2": Conv2d(channels, out_channels, 3, backend=backend)}
        )
        emb_out = 2 * out_channels if use_scale_shift_norm else out_channels
        self.emb_layers = nn.ModuleDict({"1": Linear(emb_channels, emb_out, backend=backend)})
        self.out_layers = nn.ModuleDict(
            {
                "0": norm(out_channels),
                "3": Conv2d(out_channels, out_channels, 3, zero=zero_init, backend=backend),
            }
        )
        self.skip_connection = (
            nn.Identity()
            if out_channels == channels and not (resample and resample_projection)
            else Conv2d(channels, out_channels, 1, backend=backend)
        )

    def forward(
        self,
        x: Tensor,  # [N, H, W, C]
        emb: Tensor,  # [N, E] SiLU of the embedding, which every block starts from
        rng: Tensor | None = None,  # int64 [2]: seed, step of the dropout masks
        first: int = 0,  # global index of sample 0
    ) -> Tensor:
        ops = self.backend.ops
        h = self.in_layers["0"](x)
        if self.resample == "down":
            h, x = ops.avg_pool2d(h), ops.avg_pool2d(x)
        elif self.resample == "up":
            h, x = ops.upsample_nearest2d(h), ops.upsample_nearest2d(x)
        h = self.in_layers["2"](h)
        emb = self.emb_layers["1"](emb)
        if self.use_scale_shift_norm:
            scale, shift = emb.chunk(2, dim=1)
            h = self.out_layers["0"](h, scale, shift)
        else:
            h = self.out_layers["0"](h + emb.to(h.dtype)[:, None, None, :])
        if self.dropout > 0 and self.training:
            h = ops.dropout(h, self.dropout, rng, layer=self.dropout_layer, first=first)
        return self.skip_connection(x) + self.out_layers["3"](h)


class AttentionBlock(Layer):
    """x + proj(attention(qkv(norm(x)))) over the H * W positions of each image."""

    def __init__(
        self,
        channels: int,
        num_heads: int,
        *,
        num_groups: int,
        norm_eps: float,
        order: str,  # of the packed channels: "qkv_heads" or "heads_qkv", see the op
        zero_init: bool,
        backend: Backend,
    ) -> None:
        super().__init__(backend)
        self.channels, self.num_heads, self.order = channels, num_heads, order
        self.norm = GroupNorm(num_groups, channels, eps=norm_eps, backend=backend)
        self.qkv = Conv1d(channels, 3 * channels, backend=backend)
        self.proj_out = Conv1d(channels, channels, zero=zero_init, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).flatten(1, 2)  # [N, T, 3C]
        h = self.backend.ops.attention(
            qkv, self.num_heads, order=self.order, allow_tf32=self.backend.allow_tf32
        )
        return x + self.proj_out(h.view(x.shape))


class CrossAttentionBlock(Layer):
    """x + proj(cross_attention(q(norm(x)), kv(context))): each pixel attends to the tokens of its
    image's context (Rombach et al. 2022, section 3.3).

    k and v of a token of zeros are the bias of `kv`: so they are learned for the null token, which
    is all that an image without a context has.

    References:
        High-Resolution Image Synthesis with Latent Diffusion Models (Rombach et al., 2022),
            https://arxiv.org/abs/2112.10752
    """

    def __init__(
        self,
        channels: int,
        context_dim: int,
        num_heads: int,
        *,
        num_groups: int,
        norm_eps: float,
        zero_init: bool,
        backend: Backend,
    ) -> None:
        super().__init__(backend)
        self.channels, self.num_heads = channels, num_heads
        self.norm = GroupNorm(num_groups, channels, eps=norm_eps, backend=backend)
        self.q = Conv1d(channels, channels, backend=backend)
        self.kv = Conv1d(context_dim, 2 * channels, backend=backend)
        self.proj_out = Conv1d(channels, channels, zero=zero_init, backend=backend)

    def forward(
        self,
        x: Tensor,  # [N, H, W, C]
        context: Tensor,  # [N, 1, L, D]
        mask: Tensor,  # bool [N, L]
    ) -> Tensor:
        q, kv = self.q(self.norm(x)).flatten(1, 2), self.kv(context).flatten(1, 2)
        h = self.backend.ops.cross_attention(
            q, kv, self.num_heads, mask=mask, allow_tf32=self.backend.allow_tf32
        )
        return x + self.proj_out(h.view(x.shape))
