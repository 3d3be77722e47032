"""More modules that other people might write: layers in the manner of public repositories which no
other network of the tests has. They are among `strangers.STRANGERS`."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.plan.strangers import Residual, add

# --- Stable Cascade -------------------------------------------------------------------------------


class Response(nn.Module):
    """Global response normalisation (ConvNeXt V2), of [N, H, W, C]."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.gamma, self.beta = (nn.Parameter(torch.randn(1, 1, 1, c)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        size = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        return self.gamma * (x * size / (size.mean(-1, keepdim=True) + 1e-6)) + self.beta + x


class Stage(nn.Module):
    """A filter for each channel, an embedding as scale and shift where no norm is, and attention
    to the image and to tokens beside it; its result is an image of another size."""

    def __init__(self, c: int, emb: int, tokens: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(c, c, 3, padding=1, groups=c), nn.LayerNorm(c)
        self.begin = nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(12, c, 1))
        layers = nn.Linear(c, 4 * c), nn.GELU(), Response(4 * c), nn.Linear(4 * c, c)
        self.layers, self.film = nn.Sequential(*layers), nn.Linear(emb, 2 * c)
        self.tokens = nn.Sequential(nn.SiLU(), nn.Linear(tokens, c))
        self.attention = nn.MultiheadAttention(c, 4, batch_first=True)
        self.end = nn.Sequential(nn.ConvTranspose2d(c, 12, 2, 2), nn.PixelShuffle(2))

    def forward(self, x: Tensor, emb: Tensor, tokens: Tensor) -> Tensor:
        x = self.begin(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        x = x + self.layers(y).permute(0, 3, 1, 2)
        a, b = self.film(emb)[:, :, None, None].chunk(2, dim=1)
        x = x * (1 + a) + b
        q = x.flatten(2).permute(0, 2, 1)
        kv = torch.cat((q, self.tokens(tokens)), dim=1)
        y = self.attention(q, kv, kv, need_weights=False)[0]
        x = x + y.permute(0, 2, 1).view(x.shape)
        return F.interpolate(self.end(x), size=(9, 7), mode="bilinear", align_corners=True)


add("as Stable Cascade", lambda: Stage(16, 6, 10), (2, 3, 8, 12), (2, 6), (2, 3, 10))

# --- DiffWave -------------------------------------------------------------------------------------


class DiffWave(nn.Module):
    """Dilated convolutions over a signal, with a spectrogram and sums of what layers leave."""

    def __init__(self, c: int, mels: int, layers: int = 3) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv1d(1, c, 1), nn.Conv1d(c, 1, 1)
        self.register_buffer("table", torch.randn(50, 8), persistent=False)
        self.up = nn.ConvTranspose2d(1, 1, (3, 8), stride=(1, 4), padding=(1, 2))
        self.dilated = nn.ModuleList(
            nn.Conv1d(c, 2 * c, 3, padding=2**i, dilation=2**i) for i in range(layers)
        )
        self.step = nn.ModuleList(nn.Linear(8, c) for _ in range(layers))
        self.mels = nn.ModuleList(nn.Conv1d(mels, 2 * c, 1) for _ in range(layers))
        self.out = nn.ModuleList(nn.Conv1d(c, 2 * c, 1) for _ in range(layers))

    def forward(self, audio: Tensor, step: Tensor, mels: Tensor) -> Tensor:
        x, t, total = F.relu(self.stem(audio[:, None])), self.table[step], None
        mels = F.leaky_relu(self.up(mels[:, None]), 0.4).squeeze(1)
        for dilated, of_step, of_mels, out in zip(
            self.dilated, self.step, self.mels, self.out, strict=True
        ):
            y = dilated(x + of_step(t)[..., None]) + of_mels(mels)
            gate, y = y.chunk(2, dim=1)
            y, skip = out(torch.sigmoid(gate) * torch.tanh(y)).chunk(2, dim=1)
            x, total = (x + y) / 2**0.5, skip if total is None else skip + total
        return self.last(F.relu(total / len(self.out) ** 0.5))


add("as DiffWave", lambda: DiffWave(8, 4), (2, 24), torch.tensor([3, 40]), (2, 4, 6))

# --- masked transformers --------------------------------------------------------------------------


class Masked(nn.Module):
    """As MDT: tokens that are left out, and a learned one in the place of each."""

    def __init__(self, c: int, tokens: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, tokens, c))
        self.missing = nn.Parameter(torch.randn(1, 1, c))
        self.inner, self.outer = nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, x: Tensor, kept: Tensor, back: Tensor) -> Tensor:
        x = torch.gather(x + self.places, 1, kept[..., None].repeat(1, 1, x.shape[2]))
        x = F.gelu(self.inner(x))
        missing = self.missing.repeat(len(x), back.shape[1] - x.shape[1], 1)
        x = torch.cat((x, missing), dim=1)
        x = torch.gather(x, 1, back[..., None].repeat(1, 1, x.shape[2]))
        return self.outer(x + self.places)


order = torch.tensor([[3, 0, 4, 1, 2], [1, 2, 0, 4, 3]])
add("as MDT", lambda: Masked(8, 5), (2, 5, 8), order[:, :3], order.argsort(1))

# --- filters of resampling ------------------------------------------------------------------------


class Resamples(nn.Module):
    """As score_sde without its own kernels: zeros between pixels, flipped filters, steps of two."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 3, 3, padding=1)
        row = torch.tensor([1.0, 3.0, 3.0, 1.0])
        self.kernel = torch.outer(row, row) / 64  # neither a parameter nor a buffer

    def _filtered(self, x: Tensor, gain: int) -> Tensor:
        n, c, h, w = x.shape
        kernel = torch.flip(self.kernel.to(x) * gain, [0, 1])[None, None]
        return F.conv2d(x.reshape(n * c, 1, h, w), kernel).reshape(n, c, h - 3, w - 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self._filtered(F.pad(x, (1, 1, 1, 1)), 1)[:, :, ::2, ::2]
        n, c, h, w = y.shape
        y = F.pad(y.view(n, c, h, 1, w, 1), (0, 1, 0, 0, 0, 1)).view(n, c, 2 * h, 2 * w)
        y = self._filtered(F.pad(y, (2, 1, 2, 1)), 4)
        return self.last((x + y) / 2**0.5)


add("as score_sde resamples", lambda: Resamples(8), (2, 3, 8, 12))

# --- ControlNet -----------------------------------------------------------------------------------


class Controlled(NamedTuple):
    sample: Tensor
    controls: tuple[Tensor, ...]
    loss: Tensor | None = None


class Control(nn.Module):
    """A branch beside a frozen trunk, which takes its results from a list; its parts are
    checkpointed, and its results have names."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.stem, self.hint = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(3, c, 3, 2, 1)
        self.trunk = nn.ModuleList(Residual(c, c) for _ in range(2)).requires_grad_(False)
        self.branch = nn.ModuleList(Residual(c, c) for _ in range(2))
        self.zeros = nn.ModuleList(nn.Conv2d(c, c, 1) for _ in range(2))
        self.scales = [0.9, 0.8]

    def forward(self, x: Tensor, hint: Tensor) -> Controlled:
        x, controls = self.stem(x), []
        h = x + self.hint(hint)
        for block, zero in zip(self.branch, self.zeros, strict=True):
            h = checkpoint(block, h, use_reentrant=False)
            controls.append(zero(h))
        controls = [scale * h for scale, h in zip(self.scales, controls, strict=True)]
        left = list(controls)
        for block in self.trunk:
            x = block(x) + left.pop()
        return Controlled(x, tuple(controls))


add("as ControlNet", lambda: Control(8), (2, 3, 4, 6), (2, 3, 8, 12))
