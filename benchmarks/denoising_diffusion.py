"""The UNet of denoising-diffusion-pytorch (lucidrains, version 2.2.5), as it computes by default:
norms over channels, FiLM, linear attention but at the smallest images, each with a memory of keys
and values, and pixels that move into channels where images are halved.

For `benchmarks.accelerated`; in the result's form of diffusers.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Output:
    sample: Tensor


class RMSNorm(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.scale, self.g = c**0.5, nn.Parameter(torch.ones(1, c, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) * self.g * self.scale


class Block(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.proj, self.norm = nn.Conv2d(a, b, 3, padding=1), RMSNorm(b)

    def forward(self, x: Tensor, film: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = self.norm(self.proj(x))
        if film is not None:
            scale, shift = film
            x = x * (scale + 1) + shift
        return F.silu(x)


class Residual(nn.Module):
    def __init__(self, a: int, b: int, emb: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(emb, 2 * b))
        self.first, self.second = Block(a, b), Block(b, b)
        self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        film = self.mlp(emb)[:, :, None, None].chunk(2, dim=1)
        return self.second(self.first(x, film)) + self.skip(x)


class Attention(nn.Module):
    def __init__(self, c: int, linear: bool, heads: int = 4, d: int = 32, memory: int = 4) -> None:
        super().__init__()
        self.heads, self.linear, self.norm = heads, linear, RMSNorm(c)
        self.memory = nn.Parameter(torch.randn(2, heads, d, memory))
        self.qkv = nn.Conv2d(c, 3 * heads * d, 1, bias=False)
        out = nn.Conv2d(heads * d, c, 1)
        self.out = nn.Sequential(out, RMSNorm(c)) if linear else out

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, dim=1)
        q, k, v = (t.reshape(n, self.heads, -1, h * w) for t in parts)  # [N, heads, d, T]
        mk, mv = (m.expand(n, -1, -1, -1) for m in self.memory)
        k, v = torch.cat((mk, k), dim=-1), torch.cat((mv, v), dim=-1)
        scale = q.shape[2] ** -0.5
        if self.linear:
            context = torch.einsum("bhdn,bhen->bhde", k.softmax(dim=-1), v)
            o = torch.einsum("bhde,bhdn->bhen", context, q.softmax(dim=-2) * scale)
        else:
            scores = torch.einsum("bhdi,bhdj->bhij", q, k) * scale
            o = torch.einsum("bhij,bhdj->bhdi", scores.softmax(dim=-1), v)
        return self.out(o.reshape(n, -1, h, w))


class Halved(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4 * a, b, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        x = x.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4)
        return self.conv(x.reshape(n, 4 * c, h // 2, w // 2))


class Unet(nn.Module):
    """`sample_size` is the side of its images."""

    def __init__(self, sample_size: int, dim: int, dim_mults: tuple[int, ...]) -> None:
        super().__init__()
        emb, widths = 4 * dim, [dim, *(dim * m for m in dim_mults)]
        levels = list(zip(widths, widths[1:], strict=False))
        last, self.dim = len(levels) - 1, dim
        self.stem = nn.Conv2d(3, dim, 7, padding=3)
        self.time = nn.Sequential(nn.Linear(dim, emb), nn.GELU(), nn.Linear(emb, emb))

        def level(width: int, other: int, linear: bool, change: nn.Module) -> nn.ModuleList:
            blocks = (Residual(width + other, width, emb) for _ in range(2))
            return nn.ModuleList([*blocks, Attention(width, linear), change])

        def down(a: int, b: int, at: int) -> nn.Module:
            return Halved(a, b) if at < last else nn.Conv2d(a, b, 3, padding=1)

        def up(a: int, b: int, at: int) -> nn.Module:
            conv = nn.Conv2d(b, a, 3, padding=1)
            return nn.Sequential(nn.Upsample(scale_factor=2), conv) if at > 0 else conv

        self.downs = nn.ModuleList(
            level(a, 0, i < last, down(a, b, i)) for i, (a, b) in enumerate(levels)
        )
        middle = Residual(widths[-1], widths[-1], emb), Attention(widths[-1], False)
        self.middle = nn.ModuleList([*middle, Residual(widths[-1], widths[-1], emb)])
        self.ups = nn.ModuleList(
            level(b, a, i < last, up(a, b, i)) for i, (a, b) in reversed(list(enumerate(levels)))
        )
        self.final, self.out = Residual(2 * dim, dim, emb), nn.Conv2d(dim, 3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Output:
        half = self.dim // 2
        steps = torch.arange(half, device=x.device) * (-math.log(10000) / (half - 1))
        angles = t[:, None] * torch.exp(steps)
        emb = self.time(torch.cat((angles.sin(), angles.cos()), dim=-1).to(x.dtype))
        x = start = self.stem(x)
        skips = []
        for first, second, attention, change in self.downs:
            x = first(x, emb)
            skips.append(x)
            x = second(x, emb)
            x = attention(x) + x
            skips.append(x)
            x = change(x)
        first, attention, second = self.middle
        x = first(x, emb)
        x = second(attention(x) + x, emb)
        for first, second, attention, change in self.ups:
            x = first(torch.cat((x, skips.pop()), dim=1), emb)
            x = second(torch.cat((x, skips.pop()), dim=1), emb)
            x = change(attention(x) + x)
        return Output(self.out(self.final(torch.cat((x, start), dim=1), emb)))
