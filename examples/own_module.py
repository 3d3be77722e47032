"""A network of plain PyTorch, which `diffusion.accelerate` runs by Triton kernels. What would be
launched for 16 images, without a GPU; and how long that takes beside torch.compile, on a GPU:

    python -m diffusion.plan model=examples/own_module.py:make batch=16 mode=train gpu=a100
    python -m benchmarks.accelerated models=examples/own_module.py:make batch=16
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions, each behind a norm, and the timestep between them."""

    def __init__(self, a: int, b: int, emb: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, a), nn.Conv2d(a, b, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, b), nn.Conv2d(b, b, 3, padding=1)
        self.time, self.skip = nn.Linear(emb, b), nn.Conv2d(a, b, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(emb)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class OwnUNet(nn.Module):
    """Of two levels, for images [N, 3, H, W] and times t [N] from 0 to 1."""

    def __init__(self, c: int = 64) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 4 * c), nn.SiLU(), nn.Linear(4 * c, 4 * c))
        self.stem, self.head = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 3, 3, padding=1)
        self.down, self.middle, self.up = (
            Block(a, b, 4 * c) for a, b in ((c, c), (c, 2 * c), (3 * c, c))
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        emb = F.silu(self.time(t[:, None]))
        x = self.down(self.stem(x), emb)
        h = self.middle(F.avg_pool2d(x, 2), emb)
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        return self.head(self.up(torch.cat((h, x), dim=1), emb))


def make(batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The network, and arguments of a call with so many images."""
    return OwnUNet(), (torch.randn(batch, 3, 64, 64), torch.rand(batch))
