"""The 1-D conditional UNet of Diffusion Policy as a plain PyTorch module, [N, C, T], the other side
of the benchmark.

It has the names and shapes of `diffusion.models.unet1d`'s parameters, so their state dicts load.
"""

import math
from collections import OrderedDict
from itertools import pairwise

import torch
from torch import Tensor, nn


class StepEmbedding(nn.Module):
    """Sinusoids of the diffusion step: float32 [N] -> [N, dim]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.half = dim // 2
        self.rate = -math.log(10000) / (self.half - 1)

    def forward(self, t: Tensor) -> Tensor:
        index = torch.arange(self.half, device=t.device, dtype=torch.float32)
        angles = t[:, None].float() * torch.exp(index * self.rate)
        return torch.cat((angles.sin(), angles.cos()), dim=1)


class ConvBlock(nn.Module):
    def __init__(self, channels: int, out_channels: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv1d(channels, out_channels, kernel_size, padding=kernel_size // 2),
            nn.GroupNorm(groups, out_channels),
            nn.Mish(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class ResBlock(nn.Module):
    def __init__(
        self,
        channels: int,
        out_channels: int,
        cond: int,
        kernel_size: int,
        groups: int,
        scale: bool,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.blocks = nn.ModuleList(
            [
                ConvBlock(channels, out_channels, kernel_size, groups),
                ConvBlock(out_channels, out_channels, kernel_size, groups),
            ]
        )
        film = out_channels * (2 if scale else 1)
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(cond, film))
        same = channels == out_channels
        self.residual_conv = nn.Identity() if same else nn.Conv1d(channels, out_channels, 1)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        h = self.blocks[0](x)
        film = self.cond_encoder(cond)[:, :, None]
        if self.scale:
            scale, bias = film.chunk(2, dim=1)
            h = scale * h + bias
        else:
            h = h + film
        return self.blocks[1](h) + self.residual_conv(x)


class ConditionalUnet1D(nn.Module):
    """[N, C, T], [N], [N, G] -> [N, C, T]."""

    def __init__(
        self,
        input_dim: int,
        global_cond_dim: int,
        *,
        diffusion_step_embed_dim: int = 256,
        down_dims: tuple[int, ...] = (256, 512, 1024),
        kernel_size: int = 5,
        n_groups: int = 8,
        cond_predict_scale: bool = True,
    ) -> None:
        super().__init__()
        embed = diffusion_step_embed_dim

        def res_block(channels: int, out_channels: int) -> ResBlock:
            return ResBlock(
                channels,
                out_channels,
                embed + global_cond_dim,
                kernel_size,
                n_groups,
                cond_predict_scale,
            )

        def resample(conv: nn.Module) -> nn.Sequential:
            return nn.Sequential(OrderedDict(conv=conv))

        self.diffusion_step_encoder = nn.Sequential(
            StepEmbedding(embed),
            nn.Linear(embed, 4 * embed),
            nn.Mish(),
            nn.Linear(4 * embed, embed),
        )
        self.down_modules = nn.ModuleList()
        for level, (ci, co) in enumerate(pairwise((input_dim, *down_dims))):
            last = level == len(down_dims) - 1
            halve = nn.Identity() if last else resample(nn.Conv1d(co, co, 3, 2, 1))
            self.down_modules.append(nn.ModuleList([res_block(ci, co), res_block(co, co), halve]))
        deepest = down_dims[-1]
        self.mid_modules = nn.ModuleList([res_block(deepest, deepest) for _ in range(2)])
        self.up_modules = nn.ModuleList()
        for ci, co in pairwise(down_dims[::-1]):
            double = resample(nn.ConvTranspose1d(co, co, 4, 2, 1))
            self.up_modules.append(
                nn.ModuleList([res_block(2 * ci, co), res_block(co, co), double])
            )
        first = down_dims[0]
        self.final_conv = nn.Sequential(
            ConvBlock(first, first, kernel_size, 8), nn.Conv1d(first, input_dim, 1)
        )

    def forward(self, x: Tensor, t: Tensor, global_cond: Tensor) -> Tensor:
        encoder = self.diffusion_step_encoder
        emb = encoder[3](encoder[2](encoder[1](encoder[0](t).to(x.dtype))))
        cond = torch.cat((emb, global_cond), dim=1)
        h, skips = x, []
        for block_0, block_1, halve in self.down_modules:
            h = block_1(block_0(h, cond), cond)
            skips.append(h)
            h = halve(h)
        for block in self.mid_modules:
            h = block(h, cond)
        for block_0, block_1, double in self.up_modules:
            h = torch.cat((h, skips.pop()), dim=1)
            h = double(block_1(block_0(h, cond), cond))
        return self.final_conv(h)


class DdpmStep(nn.Module):
    """A forward and an ancestral step, for torch.compile to see as one."""

    def __init__(self, model: ConditionalUnet1D, rows: Tensor, timesteps: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("rows", rows)  # float32 [K, 8], of a Sampler
        self.register_buffer("timesteps", timesteps)  # [K]

    def forward(self, x: Tensor, row: Tensor, cond: Tensor) -> Tensor:  # x float32 [N, C, T]
        a, b, c, d, e, sigma, _, _ = self.rows[row][0].unbind()
        t = self.timesteps[row].expand(x.shape[0])
        output = self.model(x.to(cond.dtype), t, cond).float()
        x_0 = (a * x + b * output).clamp(-1, 1)
        return c * x_0 + d * x + e * output + sigma * torch.randn_like(x)
