"""A network of your own: a stack of residual convolutions, without levels or attention.

    python train.py --config-dir examples/configs plugin=examples/own_model.py model=conv_stack
    python sample.py ckpt=RUN plugin=examples/own_model.py

Its settings are the arguments behind `out_channels`; examples/configs/model/conv_stack.yaml names
them. The layers are this project's, so on a GPU each is a Triton kernel; any nn.Module would do.
"""

from torch import Tensor, nn

from diffusion import register_model
from diffusion.models.layers import Conv2d, GroupNorm, Linear, Network, TimestepEmbedding
from diffusion.runtime.backend import TORCH_FP32, Backend


class Block(nn.Module):
    """x + conv(act(norm(x) (1 + s) + b)), where (s, b) are a linear map of the embedding."""

    def __init__(self, width: int, backend: Backend) -> None:
        super().__init__()
        self.norm = GroupNorm(8, width, activation="silu", backend=backend)
        self.conv = Conv2d(width, width, 3, zero=True, backend=backend)
        self.modulation = Linear(width, 2 * width, backend=backend)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        scale, shift = self.modulation(embedding).chunk(2, dim=1)  # [N, C] each
        return x + self.conv(self.norm(x, scale.contiguous(), shift.contiguous()))


@register_model("conv_stack")
class ConvStack(Network):
    """[N, H, W, CI] -> [N, H, W, CO], for images of any size."""

    def __init__(
        self,
        image_size: tuple[int, int],  # (H, W); this one does not need it
        in_channels: int,
        out_channels: int,
        width: int = 64,  # channels; a multiple of 8
        depth: int = 6,  # blocks
        backend: Backend = TORCH_FP32,
    ) -> None:
        super().__init__(backend)
        self.in_channels = in_channels
        self.time = TimestepEmbedding(width)
        self.first = Conv2d(in_channels, width, 3, backend=backend)
        self.blocks = nn.ModuleList(Block(width, backend) for _ in range(depth))
        self.norm = GroupNorm(8, width, activation="silu", backend=backend)
        self.last = Conv2d(width, out_channels, 3, zero=True, backend=backend)

    def forward_nhwc(
        self,
        x: Tensor,  # [N, H, W, CI]
        t: Tensor,  # [N]
        labels: Tensor | None = None,
        *,
        rng: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:  # [N, H, W, CO]
        """Predicts the noise in x."""
        embedding = self.time(t)
        h = self.first(x.to(self.backend.dtype))
        for block in self.blocks:
            h = block(h, embedding)
        return self.last(self.norm(h))
