"""The UNet that the framework is measured against: plain PyTorch, written to be fast.

The architecture and the parameter names of `diffusion.models.unet.UNet`, over NCHW, which should be
channels_last in memory: q, k and v then come out of one projection as views, attention is
scaled_dot_product_attention, and nothing permutes data.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion.errors import ConfigError
from diffusion.models.layers import TimestepEmbedding

_FIXED = {
    "condition_dropout": None,
    "context_resolutions": None,
    "label_dropout": 0.0,
}  # what is not built here has to have this value
_IGNORED = ("name", "zero_init")  # parameters are loaded, not drawn


def build_baseline(
    settings: dict[str, Any], channels: int, learned_variance: bool = False
) -> "BaselineUNet":
    """The baseline of a group `model` of the configuration. ConfigError if an option has a value
    that the baseline does not have."""
    settings = {k: v for k, v in settings.items() if k not in _IGNORED}
    for key, value in _FIXED.items():
        if settings.pop(key, value) != value:
            raise ConfigError(f"model.{key}: the baseline has {value} alone; try model=unet64")
    return BaselineUNet(
        channels=channels, out_channels=channels * (1 + learned_variance), **settings
    )


class ResBlock(nn.Module):
    """skip(x) + conv(dropout(silu(norm(conv(silu(norm(x))) + linear(emb))))); emb has its SiLU
    behind it. With `film` the embedding scales and shifts the second norm's result instead.
    `resize` is of x and of what the first convolution reads."""

    def __init__(
        self,
        channels: int,
        out: int,
        emb_channels: int,
        norm: Callable[[int], nn.GroupNorm],
        dropout: float,
        film: bool,
        resize: nn.Module | None = None,
        projected: bool = False,  # a 1x1 convolution behind what resizes x
    ) -> None:
        super().__init__()
        self.film, self.resize = film, resize
        self.in_layers = nn.Sequential(
            norm(channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1)
        )
        width = 2 * out if film else out
        self.emb_layers = nn.Sequential(nn.Identity(), nn.Linear(emb_channels, width))
        self.out_layers = nn.Sequential(
            norm(out), nn.SiLU(), nn.Dropout(dropout), nn.Conv2d(out, out, 3, padding=1)
        )
        same = out == channels and not (resize is not None and projected)
        self.skip_connection = nn.Identity() if same else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        norm1, silu, conv1 = self.in_layers
        h = silu(norm1(x))
        if self.resize is not None:
            h, x = self.resize(h), self.resize(x)
        h, emb = conv1(h), self.emb_layers(emb)[:, :, None, None]
        if self.film:
            norm2, *rest = self.out_layers
            scale, shift = emb.chunk(2, dim=1)
            h = norm2(h) * (1 + scale) + shift
            for layer in rest:
                h = layer(h)
        else:
            h = self.out_layers(h + emb)
        return self.skip_connection(x) + h


class AttentionBlock(nn.Module):
    """x + proj(attention(qkv(norm(x))))."""

    def __init__(
        self, channels: int, heads: int, norm: Callable[[int], nn.GroupNorm], legacy: bool
    ) -> None:
        super().__init__()
        self.heads, self.legacy = heads, legacy  # the order of the packed channels
        self.norm = norm(channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, height, width = x.shape
        tokens = self.norm(x).permute(0, 2, 3, 1).reshape(n, height * width, c)  # a view
        qkv = F.linear(tokens, self.qkv.weight.squeeze(2), self.qkv.bias)
        if self.legacy:
            qkv = qkv.view(n, -1, self.heads, 3, c // self.heads).permute(3, 0, 2, 1, 4)
        else:
            qkv = qkv.view(n, -1, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, -1, c)
        h = F.linear(h, self.proj_out.weight.squeeze(2), self.proj_out.bias)
        return x + h.view(n, height, width, c).permute(0, 3, 1, 2)


class Downsample(nn.Module):
    def __init__(self, channels: int, use_conv: bool, padding: int) -> None:
        super().__init__()
        self.behind = use_conv and padding == 0  # the image is padded below and to the right
        self.op = (
            nn.Conv2d(channels, channels, 3, stride=2, padding=padding)
            if use_conv
            else nn.AvgPool2d(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.op(F.pad(x, (0, 1, 0, 1)) if self.behind else x)


class Upsample(nn.Module):
    def __init__(self, channels: int, use_conv: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if use_conv else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class Double(nn.Module):
    """Nearest neighbour."""

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="nearest")


class BaselineUNet(nn.Module):
    """(x [N, C, H, W], t [N], labels [N]) -> [N, CO, H, W]. Arguments as in
    `diffusion.models.unet.UNet`."""

    def __init__(
        self,
        channels: int,  # of the images
        out_channels: int,
        model_channels: int,
        channel_mult: Sequence[float],
        num_res_blocks: int,
        attention_resolutions: Sequence[int],
        num_groups: int = 32,
        num_heads: int = 1,
        num_head_channels: int = -1,
        num_heads_upsample: int = -1,
        conv_resample: bool = True,
        max_period: float = 10000,
        dropout: float = 0.0,
        num_classes: int | None = None,
        use_scale_shift_norm: bool = False,
        resblock_updown: bool = False,
        use_new_attention_order: bool = True,
        norm_eps: float = 1e-5,
        freq_shift: float = 0,
        downsample_padding: int = 1,
        stem_channels: int = -1,
        decoder_attention: str = "all",
        resample_projection: bool = False,
    ) -> None:
        super().__init__()
        emb_channels = 4 * model_channels
        widths = [int(mult * model_channels) for mult in channel_mult]

        def norm(c: int) -> nn.GroupNorm:
            return nn.GroupNorm(num_groups, c, eps=norm_eps)

        def block(c: int, out: int, resize: nn.Module | None = None) -> ResBlock:
            options = dropout, use_scale_shift_norm, resize, resample_projection
            return ResBlock(c, out, emb_channels, norm, *options)

        def attention(c: int, heads: int) -> AttentionBlock:
            heads = heads if num_head_channels == -1 else c // num_head_channels
            return AttentionBlock(c, heads, norm, not use_new_attention_order)

        def down(c: int) -> nn.Module:
            if resblock_updown:
                return block(c, c, nn.AvgPool2d(2))
            return Downsample(c, conv_resample, downsample_padding)

        def up(c: int) -> nn.Module:
            return block(c, c, Double()) if resblock_updown else Upsample(c, conv_resample)

        heads_up = num_heads if num_heads_upsample == -1 else num_heads_upsample
        self.timestep_embedding = TimestepEmbedding(model_channels, max_period, freq_shift)
        self.time_embed = nn.Sequential(
            nn.Linear(model_channels, emb_channels),
            nn.SiLU(),
            nn.Linear(emb_channels, emb_channels),
        )
        self.num_classes = num_classes
        if num_classes is not None:
            self.label_emb = nn.Embedding(num_classes, emb_channels)
        ch = widths[0] if stem_channels == -1 else stem_channels
        self.input_blocks = nn.ModuleList([nn.ModuleList([nn.Conv2d(channels, ch, 3, padding=1)])])
        skips = [ch]
        for level, width in enumerate(widths):
            for _ in range(num_res_blocks):
                layers: list[nn.Module] = [block(ch, width)]
                ch = width
                if 2**level in attention_resolutions:
                    layers.append(attention(ch, num_heads))
                self.input_blocks.append(nn.ModuleList(layers))
                skips.append(ch)
            if level < len(widths) - 1:
                self.input_blocks.append(nn.ModuleList([down(ch)]))
                skips.append(ch)
        self.middle_block = nn.ModuleList([block(ch, ch), attention(ch, num_heads), block(ch, ch)])
        self.output_blocks = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            for i in range(num_res_blocks + 1):
                layers = [block(ch + skips.pop(), width)]
                ch = width
                attends = decoder_attention == "all" or i == num_res_blocks
                if 2**level in attention_resolutions and attends:
                    layers.append(attention(ch, heads_up))
                if level > 0 and i == num_res_blocks:
                    layers.append(up(ch))
                self.output_blocks.append(nn.ModuleList(layers))
        self.out = nn.Sequential(norm(ch), nn.SiLU(), nn.Conv2d(ch, out_channels, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        emb = self.time_embed(self.timestep_embedding(t))
        if labels is not None:
            emb = emb + self.label_emb(labels)
        emb = F.silu(emb)

        def run(layers: nn.ModuleList, h: Tensor) -> Tensor:
            for layer in layers:
                h = layer(h, emb) if isinstance(layer, ResBlock) else layer(h)
            return h

        skips = []
        for layers in self.input_blocks:
            x = run(layers, x)
            skips.append(x)
        x = run(self.middle_block, x)
        for layers in self.output_blocks:
            x = run(layers, torch.cat((x, skips.pop()), dim=1))
        return self.out(x)
