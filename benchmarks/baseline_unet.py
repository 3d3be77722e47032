"""The UNet that the framework is measured against: plain PyTorch, written to be fast.

The architecture and the parameter names of `diffusion.models.unet.UNet`, over NCHW, which should be
channels_last in memory: q, k and v then come out of one projection as views, attention is
scaled_dot_product_attention, and nothing permutes data.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion.errors import ConfigError
from diffusion.models.layers import TimestepEmbedding

# what is not built here has to have this value
_FIXED = {
    "dropout": 0.0,
    "num_classes": None,
    "use_scale_shift_norm": False,
    "resblock_updown": False,
    "label_dropout": 0.0,
    "use_new_attention_order": True,
}
_IGNORED = ("name", "zero_init", "num_heads_upsample")  # parameters are loaded, not drawn


def build_baseline(settings: dict[str, Any], channels: int) -> "BaselineUNet":
    """The baseline of a group `model` of the configuration. ConfigError if an option has a value
    that the baseline does not have."""
    settings = {k: v for k, v in settings.items() if k not in _IGNORED}
    for key, value in _FIXED.items():
        if settings.pop(key, value) != value:
            raise ConfigError(f"model.{key}: the baseline has {value} alone; try model=unet64")
    return BaselineUNet(channels=channels, **settings)


class ResBlock(nn.Module):
    """skip(x) + conv(silu(norm(conv(silu(norm(x))) + linear(emb)))); emb has its SiLU behind it."""

    def __init__(self, channels: int, out: int, emb_channels: int, groups: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(groups, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.Identity(), nn.Linear(emb_channels, out))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(groups, out), nn.SiLU(), nn.Identity(), nn.Conv2d(out, out, 3, padding=1)
        )
        self.skip_connection = nn.Identity() if out == channels else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.in_layers(x) + self.emb_layers(emb)[:, :, None, None]
        return self.skip_connection(x) + self.out_layers(h)


class AttentionBlock(nn.Module):
    """x + proj(attention(qkv(norm(x))))."""

    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, height, width = x.shape
        tokens = self.norm(x).permute(0, 2, 3, 1).reshape(n, height * width, c)  # a view
        qkv = F.linear(tokens, self.qkv.weight.squeeze(2), self.qkv.bias)
        q, k, v = qkv.view(n, -1, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, -1, c)
        h = F.linear(h, self.proj_out.weight.squeeze(2), self.proj_out.bias)
        return x + h.view(n, height, width, c).permute(0, 3, 1, 2)


class Downsample(nn.Module):
    def __init__(self, channels: int, use_conv: bool) -> None:
        super().__init__()
        self.op = (
            nn.Conv2d(channels, channels, 3, stride=2, padding=1) if use_conv else nn.AvgPool2d(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


class Upsample(nn.Module):
    def __init__(self, channels: int, use_conv: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if use_conv else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class BaselineUNet(nn.Module):
    """(x [N, C, H, W], t [N]) -> [N, C, H, W]. Arguments as in `diffusion.models.unet.UNet`."""

    def __init__(
        self,
        channels: int,  # of the images
        model_channels: int,
        channel_mult: Sequence[float],
        num_res_blocks: int,
        attention_resolutions: Sequence[int],
        num_groups: int = 32,
        num_heads: int = 1,
        num_head_channels: int = -1,
        conv_resample: bool = True,
        max_period: float = 10000,
    ) -> None:
        super().__init__()
        emb_channels = 4 * model_channels
        widths = [int(mult * model_channels) for mult in channel_mult]

        def block(c: int, out: int) -> ResBlock:
            return ResBlock(c, out, emb_channels, num_groups)

        def attention(c: int) -> AttentionBlock:
            heads = num_heads if num_head_channels == -1 else c // num_head_channels
            return AttentionBlock(c, heads, num_groups)

        self.timestep_embedding = TimestepEmbedding(model_channels, max_period)
        self.time_embed = nn.Sequential(
            nn.Linear(model_channels, emb_channels),
            nn.SiLU(),
            nn.Linear(emb_channels, emb_channels),
        )
        ch = widths[0]
        self.input_blocks = nn.ModuleList([nn.ModuleList([nn.Conv2d(channels, ch, 3, padding=1)])])
        skips = [ch]
        for level, width in enumerate(widths):
            for _ in range(num_res_blocks):
                layers: list[nn.Module] = [block(ch, width)]
                ch = width
                if 2**level in attention_resolutions:
                    layers.append(attention(ch))
                self.input_blocks.append(nn.ModuleList(layers))
                skips.append(ch)
            if level < len(widths) - 1:
                self.input_blocks.append(nn.ModuleList([Downsample(ch, conv_resample)]))
                skips.append(ch)
        self.middle_block = nn.ModuleList([block(ch, ch), attention(ch), block(ch, ch)])
        self.output_blocks = nn.ModuleList()
        for level, width in reversed(list(enumerate(widths))):
            for i in range(num_res_blocks + 1):
                layers = [block(ch + skips.pop(), width)]
                ch = width
                if 2**level in attention_resolutions:
                    layers.append(attention(ch))
                if level > 0 and i == num_res_blocks:
                    layers.append(Upsample(ch, conv_resample))
                self.output_blocks.append(nn.ModuleList(layers))
        self.out = nn.Sequential(
            nn.GroupNorm(num_groups, ch), nn.SiLU(), nn.Conv2d(ch, channels, 3, padding=1)
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        emb = F.silu(self.time_embed(self.timestep_embedding(t)))

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
