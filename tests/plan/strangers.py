"""Modules that other people might write, small, with what they are called with."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DiTTransformer2DModel,
    UNet2DConditionModel,
    UNet2DModel,
    VQModel,
)
from torch import Tensor, nn

from benchmarks import denoising_diffusion

T = torch.tensor([3, 400])
STRANGERS: dict[str, Callable[[], tuple[nn.Module, tuple, dict]]] = {}


def stranger(function: Callable) -> Callable:
    STRANGERS[function.__name__] = function
    return function


def add(name: str, module: Callable[[], nn.Module], *args, **kwargs) -> None:
    """Arguments that are tuples are shapes."""
    STRANGERS[name] = lambda: (module(), tuple(map(_tensor, args)), kwargs)


def _tensor(given):
    return torch.randn(given) if isinstance(given, tuple) else given


# --- diffusers ------------------------------------------------------------------------------------

_SMALL = {"layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 8}


def _unet(down: tuple[str, str], up: tuple[str, str], **options) -> UNet2DModel:
    blocks = {"down_block_types": down, "up_block_types": up, "attention_head_dim": 8}
    return UNet2DModel(**(_SMALL | {"sample_size": 8} | blocks | options))


_PLAIN = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
_SKIP = ("SkipDownBlock2D", "AttnSkipDownBlock2D"), ("AttnSkipUpBlock2D", "SkipUpBlock2D")
_CHANNELS = {"block_out_channels": (32, 32)}  # of which these blocks have groups of four
LABELS = {"class_labels": torch.tensor([1, 5])}
add("UNet2DModel, FIR and skips", lambda: _unet(*_SKIP, **_CHANNELS), (2, 3, 8, 8), T)
add("UNet2DModel, classes", lambda: _unet(*_PLAIN, num_class_embeds=10), (2, 3, 8, 8), T, **LABELS)
learned = {"time_embedding_type": "learned", "num_train_timesteps": 1000}
add("UNet2DModel, learned times", lambda: _unet(*_PLAIN, **learned), (1, 3, 12, 8), T[:1])


def _conditional(**options) -> UNet2DConditionModel:
    down = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    up = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    more = {"cross_attention_dim": 24, "attention_head_dim": 8, "sample_size": 8}
    return UNet2DConditionModel(**(_SMALL | down | up | more | options))


def _masked() -> dict[str, Tensor]:
    return {"encoder_attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1] * 5])}


LATENTS, TOKENS = (2, 4, 8, 8), (2, 5, 24)
add("UNet2DConditionModel", _conditional, LATENTS, T, TOKENS)
add("UNet2DConditionModel, a mask", _conditional, LATENTS, T, TOKENS, **_masked())
linear = {"use_linear_projection": True, "num_class_embeds": 6}
add("as Stable Diffusion 2", lambda: _conditional(**linear), LATENTS, T, TOKENS, **LABELS)


@stranger
def controlnet():
    down = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 8}
    more = {"cross_attention_dim": 24, "conditioning_embedding_out_channels": (16, 32)}
    module = ControlNetModel(in_channels=4, **_SMALL, **down, **more)
    args = torch.randn(LATENTS), T, torch.randn(TOKENS), torch.randn(2, 3, 16, 16)
    return module, args, {}


def _autoencoder() -> AutoencoderKL:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "latent_channels": 4}
    return AutoencoderKL(**_SMALL, **blocks, up_block_types=("UpDecoderBlock2D",) * 2)


add("the decoder of AutoencoderKL", lambda: _autoencoder().decoder, (1, 4, 4, 6))
add("the encoder of AutoencoderKL", lambda: _autoencoder().encoder, (1, 3, 8, 8))
quantized = {"block_out_channels": (16,), "norm_num_groups": 8}
add("the decoder of VQModel", lambda: VQModel(**quantized).decoder, (1, 3, 8, 8))


@stranger
def transformer():
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2}
    more = {"sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10, "norm_num_groups": 4}
    module = DiTTransformer2DModel(**sizes, **more).eval()  # which drops no labels
    return module, (torch.randn(2, 4, 8, 8),), {"timestep": T % 9, **LABELS}


# --- convolutional networks -----------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        norms = (nn.GroupNorm(1 if c % 4 else 4, c) for c in (a, b))
        first, second = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
        self.body = nn.Sequential(next(norms), nn.SiLU(), first, next(norms), nn.SiLU(), second)
        self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.body(x)


class Hourglass(nn.Module):
    """Lists of modules, buffers, arguments by name, and a dict of results."""

    def __init__(self, *channels: int) -> None:
        super().__init__()
        pairs = list(zip(channels, channels[1:], strict=False))
        self.stem = nn.Conv2d(3, channels[0], 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b) for a, b in pairs)
        self.up = nn.ModuleList(Residual(2 * b, a) for a, b in reversed(pairs))
        self.out = nn.Conv2d(channels[0], 3, 3, padding=1)
        self.register_buffer("mean", torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x: Tensor, *, scale: float = 1.0, more: dict | None = None) -> dict:
        h, skips = self.stem((x - self.mean) / 0.5), []
        for block in self.down:
            h = block(h)
            skips.append(h)
            h = F.avg_pool2d(h, 2)
        for block in self.up:
            h = F.interpolate(h, scale_factor=2, mode="nearest")
            h = block(torch.cat([h, skips.pop()], 1))
        y = self.out(h) * scale + self.count
        y = y if more is None else y + more["bias"][:, :, None, None]
        return {"image": y, "features": [h, None], "mean": y.mean((1, 2, 3)), "name": "small"}


add("channels of 7, 96 and 20", lambda: Hourglass(7, 96, 20), (2, 3, 16, 8))
add("channels of 320", lambda: Hourglass(320, 320), (1, 3, 4, 6), scale=2.0)
given = {"more": {"bias": torch.tensor([[1.0, 2.0, 3.0]])}}
add("tensors in a dict", lambda: Hourglass(8, 12), (1, 3, 8, 16), **given)


class ConvNeXt(nn.Module):
    def __init__(self, c: int, groups: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=groups), nn.LayerNorm(c)
        self.wide, self.narrow = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)
        self.scale = nn.Parameter(torch.full((c,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(F.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


def _convnext() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 12, 4, 4), ConvNeXt(12, 1), ConvNeXt(12, 12))


add("ConvNeXt", _convnext, (2, 3, 16, 24))


class Bottleneck(nn.Module):
    """Batch norms, squeeze and excitation, in place."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(c, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, c, 3, 2, 1, bias=False), nn.BatchNorm2d(c)
        self.skip = nn.Conv2d(c, c, 1, 2, bias=False)
        parts = nn.Conv2d(c, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, c, 1), nn.Sigmoid()
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), *parts)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)), inplace=True)
        y = self.norm2(self.second(y))
        y = y * self.squeeze(y)
        y += self.skip(x)
        return F.relu_(y)


class Video(nn.Module):
    """Layers of images, of frames, and attention over frames, of [N, C, F, H, W]."""

    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.stem, self.heads = nn.Conv3d(3, c, (1, 5, 5), padding=(0, 2, 2)), heads
        self.norms = nn.ModuleList(nn.GroupNorm(4, c) for _ in range(3))
        self.image = nn.Conv3d(c, c, (1, 3, 3), padding=(0, 1, 1))
        self.frames = nn.Conv3d(c, c, (3, 1, 1), padding=(1, 0, 0))
        self.down = nn.Conv3d(c, c, (1, 4, 4), (1, 2, 2), (0, 1, 1))
        self.qkv, self.last = nn.Linear(c, 3 * c, bias=False), nn.Conv3d(c, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        h = self.image(F.silu(self.norms[0](x)))
        x = self.down(x + self.frames(F.silu(self.norms[1](h))))
        rows = self.norms[2](x).permute(0, 3, 4, 2, 1).flatten(1, 2)  # [N, H W, F, C]
        parts = self.qkv(rows).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(2, 3) for y in parts)
        y = ((q * q.shape[-1] ** -0.5) @ k.mT).softmax(-1) @ v
        y = y.transpose(2, 3).flatten(3).unflatten(1, x.shape[3:])
        return self.last(x + y.permute(0, 4, 3, 1, 2))


add("a video", lambda: Video(16, 2), (2, 3, 4, 6, 8))


class Magnitudes(nn.Module):
    """As EDM2: filters of one norm, numbers around each product, sums that are weighted."""

    def __init__(self, c: int) -> None:
        super().__init__()
        sizes = (c, 3, 3, 3), (c, c, 3, 3), (c, c, 3, 3), (c, c, 1, 1), (3, c, 3, 3)
        self.filters = nn.ParameterList(torch.randn(size) for size in sizes)
        self.gain = nn.Parameter(torch.rand(1, c, 1, 1))

    def _conv(self, x: Tensor, at: int) -> Tensor:
        w = self.filters[at]
        norm = torch.linalg.vector_norm(w, dim=(1, 2, 3), keepdim=True)
        w = w / torch.add(1e-4, norm, alpha=w[0].numel() ** -0.5)
        return F.conv2d(x, w / w[0].numel() ** 0.5, padding=w.shape[-1] // 2)

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.full((self.gain.numel(), 1, 2, 2), 0.25, dtype=x.dtype, device=x.device)
        x = self._conv(x, 0)
        x = F.conv2d(x, mean.to(x.dtype), groups=len(mean), stride=2)
        y = self._conv(F.silu(x) / 0.596, 1)
        y = self._conv(F.silu(y * self.gain.to(y.dtype)) / 0.596, 2)
        x = self._conv(x, 3).lerp(y, 0.3) / 0.58**0.5
        return self._conv(x, 4)


add("magnitudes", lambda: Magnitudes(16), (2, 3, 8, 12))


class Embedded(nn.Module):
    """Whose images are multiplied with an embedding where no norm is: as EDM2's blocks, between
    two activations, and as Stable Cascade's."""

    def __init__(self, c: int, emb: int) -> None:
        super().__init__()
        sizes = (3, c), (c, c), (c, c), (c, 3)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in sizes)
        self.gain = nn.Linear(emb, c)
        self.films = nn.ModuleList(nn.Linear(emb, 2 * c) for _ in range(2))

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        first, second, third, last = self.convs
        gain = self.gain(emb)[:, :, None, None] + 1
        (a, b), (c, d) = (film(emb)[:, :, None, None].chunk(2, dim=1) for film in self.films)
        y = first(x)
        y = F.silu(y * gain.to(y.dtype))
        y = F.gelu(second(y) * (1 + a) + b)
        return last(third(y) * (1 + c) + d)


add("products with an embedding", lambda: Embedded(16, 6), (2, 3, 8, 12), (2, 6))


@stranger
def residual_network():
    begin = nn.Conv2d(3, 16, 7, 2, 3), nn.MaxPool2d(3, 2, 1)
    end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    module = nn.Sequential(*begin, Bottleneck(16), Bottleneck(16), *end).eval()
    return module, (torch.randn(2, 3, 33, 40),), {}


class Rows(nn.Module):
    """Of signals [N, C, L], as 1-D networks resample."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv1d(2, c, 7, padding=3), nn.GroupNorm(4, c)
        self.down, self.up = nn.Conv1d(c, c, 4, 2, 1), nn.Upsample(scale_factor=2)
        self.out = nn.Conv1d(2 * c, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.mish(self.norm(self.stem(x)))
        return self.out(torch.cat([self.up(self.down(x)), x], 1))


add("signals", lambda: Rows(12), (2, 2, 16))

# --- attention of other kinds ---------------------------------------------------------------------


class LinearAttention(nn.Module):
    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(1, c)
        self.qkv, self.out = nn.Conv2d(c, 3 * c, 1, bias=False), nn.Conv2d(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, 1)
        q, k, v = (t.reshape(n, self.heads, c // self.heads, h * w) for t in parts)
        context = torch.einsum("ncdt,ncet->ncde", k.softmax(-1), v)
        o = torch.einsum("ncde,ncdt->ncet", context, q.softmax(-2) * 0.3)
        return x + self.out(o.reshape(n, c, h, w))


class WithMemory(nn.Module):
    """As denoising-diffusion-pytorch 2 attends: keys and values of their own beside those of the
    image, linear or not; the other by PyTorch's attention."""

    def __init__(self, c: int, linear: bool, heads: int = 2, d: int = 4) -> None:
        super().__init__()
        self.heads, self.linear, self.norm = heads, linear, denoising_diffusion.RMSNorm(c)
        self.memory = nn.Parameter(torch.randn(2, heads, d, 3))
        self.qkv = nn.Conv2d(c, 3 * heads * d, 1, bias=False)
        out = nn.Conv2d(heads * d, c, 1)
        self.out = nn.Sequential(out, denoising_diffusion.RMSNorm(c)) if linear else out

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, dim=1)
        q, k, v = (t.reshape(n, self.heads, -1, h * w) for t in parts)  # [N, heads, d, T]
        mk, mv = (m.expand(n, -1, -1, -1) for m in self.memory)
        k, v = torch.cat((mk, k), dim=-1), torch.cat((mv, v), dim=-1)
        if self.linear:
            q, k = q.softmax(dim=-2) * q.shape[2] ** -0.5, k.softmax(dim=-1)
            o = torch.einsum("bhde,bhdn->bhen", torch.einsum("bhdn,bhen->bhde", k, v), q)
        else:
            rows = (t.transpose(-1, -2) for t in (q, k, v))
            o = F.scaled_dot_product_attention(*rows).transpose(-1, -2)
        return self.out(o.reshape(n, -1, h, w)) + x


class Normed(nn.Module):
    """A UNet of its blocks, which halves images by moving pixels into channels."""

    def __init__(self, c: int = 8) -> None:
        super().__init__()
        self.stem, self.time = nn.Conv2d(3, c, 7, padding=3), nn.Linear(1, 8)
        blocks = (c, c), (2 * c, 2 * c), (3 * c, c)
        self.blocks = nn.ModuleList(denoising_diffusion.Residual(a, b, 8) for a, b in blocks)
        self.attention = nn.ModuleList([WithMemory(c, True), WithMemory(2 * c, False)])
        self.down = nn.Conv2d(4 * c, 2 * c, 1)
        up = nn.Upsample(scale_factor=2), nn.Conv2d(2 * c, 2 * c, 3, padding=1)
        self.up, self.last = nn.Sequential(*up), nn.Conv2d(c, 3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = self.time(t[:, None] / 1000)
        h = self.attention[0](self.blocks[0](self.stem(x), t))
        n, c, height, width = h.shape
        small = h.reshape(n, c, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
        small = self.down(small.reshape(n, 4 * c, height // 2, width // 2))
        large = self.up(self.attention[1](self.blocks[1](small, t)))
        return self.last(self.blocks[2](torch.cat((large, h), dim=1), t))


class ByEinsum(nn.Module):
    """As guided-diffusion has it."""

    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Conv1d(c, 3 * c, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        rows = self.qkv(x.view(n, c, -1)).view(n * self.heads, -1, h * w)
        q, k, v = rows.chunk(3, 1)
        weights = torch.einsum("nct,ncs->nts", q * 0.5, k * 0.5).float().softmax(-1).to(v.dtype)
        return x + torch.einsum("nts,ncs->nct", weights, v).reshape(n, c, h, w)


class OfPlaces(nn.Module):
    """Whose scores have a bias of where query and key are."""

    def __init__(self, c: int, size: int) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(c, 3 * c), nn.Parameter(torch.randn(size, size))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + ((q @ k.mT) * 0.25 + self.bias).softmax(-1) @ v


class Gated(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.wide, self.out = nn.LayerNorm(c), nn.Linear(c, 8 * c), nn.Linear(4 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        a, gate = self.wide(self.norm(x)).chunk(2, -1)
        return x + self.out(a * F.gelu(gate, approximate="tanh"))


class OfTwoMasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of = nn.MultiheadAttention(16, 4, batch_first=True, kdim=8, vdim=12)

    def forward(self, x: Tensor, k: Tensor, v: Tensor, padded: Tensor, later: Tensor) -> Tensor:
        masks = {"key_padding_mask": padded, "attn_mask": later, "need_weights": False}
        return self.of(x, k, v, **masks)[0]


def _image(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), module, nn.Conv2d(16, 3, 1))


def _encoder(**options) -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **options)


add("linear attention", lambda: _image(LinearAttention(16, 4)), (2, 3, 4, 6))
add("norms over channels", Normed, (2, 3, 4, 6), T.float())
add("attention by einsum", lambda: _image(ByEinsum(16, 4)), (2, 3, 4, 6))
add("attention with a bias", lambda: OfPlaces(16, 5), (2, 5, 16))
add("gated linear units", lambda: nn.Sequential(Gated(8), Gated(8)), (2, 5, 8))
padded = torch.tensor([[0, 0, 0, 1, 1], [0] * 5]).bool()
later = torch.ones(6, 5).triu(1).bool()
add("two masks", OfTwoMasks, (2, 6, 16), (2, 5, 8), (2, 5, 12), padded, later)
add("TransformerEncoderLayer", lambda: _encoder(norm_first=True), (2, 6, 16))
add("TransformerEncoderLayer in evaluation", lambda: _encoder(activation="gelu").eval(), (2, 6, 16))


class Later(nn.Module):
    """As Diffusion Policy's transformer: PyTorch's layers, and a mask that is a buffer."""

    def __init__(self, c: int = 16, positions: int = 5) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(c, 4, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerDecoder(layer, 2)
        mask = nn.Transformer.generate_square_subsequent_mask(positions, dtype=torch.float64)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.layers(x, memory, tgt_mask=self.mask.to(x.dtype))


add("TransformerDecoder with a mask", Later, (2, 5, 16), (2, 3, 16))


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class SR3(nn.Module):
    """A residual block of SR3 (Saharia et al. 2021), with attention over rows and columns."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.GroupNorm(4, c), Swish(), nn.Conv2d(c, b, 3, padding=1))
            for c in (a, b)
        )
        self.noise, self.skip = nn.Linear(2, 2 * b), nn.Conv2d(a, b, 1)
        self.norm, self.qkv = nn.GroupNorm(4, b), nn.Conv2d(b, 3 * b, 1, bias=False)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        steps = torch.arange(1, dtype=level.dtype, device=level.device)
        angles = level[:, None] * torch.exp(-steps[None])
        t = self.noise(torch.cat([angles.sin(), angles.cos()], -1))
        gamma, beta = t.view(len(x), -1, 1, 1).chunk(2, dim=1)
        x = self.second((1 + gamma) * self.first(x) + beta) + self.skip(x)
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, 2, -1, h, w).chunk(3, dim=2)
        weights = torch.einsum("bnchw, bncyx -> bnhwyx", q, k).contiguous() / c**0.5
        weights = weights.view(n, 2, h, w, -1).softmax(-1).view(n, 2, h, w, h, w)
        o = torch.einsum("bnhwyx, bncyx -> bnchw", weights, v).contiguous()
        return o.view(n, c, h, w) + x


class ByChannels(nn.Module):
    """As EDM's and score_sde's layers: biases added behind, in place, a product by einsum."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.filters, self.matrix = nn.Conv2d(3, c, 3), nn.Linear(c, c)
        self.norm, self.film = nn.GroupNorm(2, c), nn.Linear(2, 2 * c)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        y = F.conv2d(x, self.filters.weight.to(x.dtype), padding=1)
        y = y.add_(self.filters.bias.to(y.dtype).reshape(1, -1, 1, 1))
        params = (emb @ self.film.weight.t()).add_(self.film.bias)[:, :, None, None]
        scale, shift = params.chunk(chunks=2, dim=1)
        y = F.silu(torch.addcmul(shift, self.norm(y), scale + 1)).permute(0, 2, 3, 1)
        y = torch.einsum("abcd,de->abce", y, self.matrix.weight) + self.matrix.bias
        return y.permute(0, 3, 1, 2) / np.sqrt(2.0)


class Halved(nn.Module):
    """A block of EDM's DDPM++ and of score_sde's NCSN++, whose sums keep their variance; with
    attention if it does not resample."""

    def __init__(
        self, a: int, b: int, emb: int, resample: Callable | None = None, number: float = 0.5**0.5
    ) -> None:
        super().__init__()
        self.number = number
        self.norms = nn.ModuleList(nn.GroupNorm(c // 2, c, eps=1e-6) for c in (a, b, b))
        self.convs = nn.ModuleList(nn.Conv2d(c, b, 3, padding=1) for c in (a, b))
        self.emb, self.qkv = nn.Linear(emb, b), nn.Conv2d(b, 3 * b, 1)
        self.proj = nn.Conv2d(b, b, 1)
        self.skip = nn.Conv2d(a, b, 1) if a != b or resample else nn.Identity()
        self.resample, self.attends = resample or nn.Identity(), resample is None

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.convs[0](self.resample(F.silu(self.norms[0](x))))
        h = F.silu(self.norms[1](h + self.emb(emb)[:, :, None, None]))
        x = (self.convs[1](h) + self.skip(self.resample(x))) * self.number
        if not self.attends:
            return x
        qkv = self.qkv(self.norms[2](x)).flatten(2).unflatten(1, (3, -1)).transpose(2, 3)
        o = F.scaled_dot_product_attention(*qkv.unsqueeze(2).unbind(1)).squeeze(1)
        return (x + self.proj(o.mT.unflatten(2, x.shape[2:]))) / np.float64(1 / self.number)


class SumsOfOneVariance(nn.Module):
    """A UNet of such blocks."""

    def __init__(self, c: int, emb: int, number: float = 0.5**0.5) -> None:
        super().__init__()
        up = partial(F.interpolate, scale_factor=2.0, mode="nearest")
        self.stem, self.head = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 3, 3, padding=1)
        down, d = partial(F.avg_pool2d, kernel_size=2), 2 * c
        sizes = (c, c, None), (c, c, down), (c, d, None), (d, d, up)
        of = {"emb": emb, "number": number}
        self.blocks = nn.ModuleList(Halved(a, b, resample=r, **of) for a, b, r in sizes)
        self.last = Halved(3 * c, c, **of)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        large = self.blocks[0](self.stem(x), emb)
        x = large
        for block in self.blocks[1:]:
            x = block(x, emb)
        return self.head(self.last(torch.cat((x, large), dim=1), emb))


class NumbersBehind(nn.Module):
    """Numbers behind convolutions where no published network has them: two of them, with one added,
    in front of a sum and of FiLM, of what is upsampled, halved, projected and padded, and behind
    convolutions of what was upsampled."""

    def __init__(self, c: int, emb: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 3, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, c) for _ in range(9))
        self.convs = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for _ in range(8))
        self.norm, self.conv = nn.GroupNorm(4, 2 * c), nn.Conv2d(2 * c, c, 3, padding=1)
        self.skip, self.film = nn.Conv2d(2 * c, c, 1), nn.Linear(emb, 2 * c)
        self.qkv, self.proj = nn.Conv2d(c, 3 * c, 1), nn.Linear(c, c)

    def _of_norm(self, i: int, x: Tensor) -> Tensor:
        return self.convs[i](F.silu(self.norms[i](x)))

    def forward(self, x: Tensor, emb: Tensor) -> tuple[Tensor, Tensor]:
        x = 3 * self.stem(x)
        scale, shift = self.film(emb)[:, :, None, None].chunk(2, dim=1)
        h = self.norms[0](-0.7 * self._of_norm(1, x)) * (1 + scale) + shift
        x = (self.convs[0](h) * 0.5 + x) * 3 / 2
        half = F.avg_pool2d((self._of_norm(2, x) + x) * -1.5, 2)
        small = (self._of_norm(3, half) + half) * 0.25
        h = self.convs[4](F.interpolate(half, scale_factor=2.0)) / 4
        x = (self._of_norm(5, h) + x) * 0.6 + 0.1
        both = torch.cat((F.interpolate(small, scale_factor=2.0), x), dim=1)
        h = self.conv(F.silu(self.norm(both))) * 0.3
        x = (self._of_norm(6, h) + self.skip(both)) * 1.1
        qkv = (2 * self.qkv(self.norms[4](small))).flatten(2).unflatten(1, (3, -1)).transpose(2, 3)
        o = F.scaled_dot_product_attention(*qkv.unsqueeze(2).unbind(1)).squeeze(1)
        o = (self.proj(o) + small.flatten(2).mT) * 0.9
        x = x + F.interpolate(o.mT.unflatten(2, half.shape[2:]), scale_factor=2.0)
        y = self.convs[7](self.norms[7](x)) * 0.8
        return y.sin(), self.head(F.silu(self.norms[8](y))) * 7


class Fourier(nn.Module):
    """Of few frequencies, as neural operators have it."""

    def __init__(self, c: int, modes: int = 2) -> None:
        super().__init__()
        self.modes, self.weight = modes, nn.Parameter(torch.randn(2, c, c, modes, modes, 2))

    def forward(self, x: Tensor) -> Tensor:
        m, found = self.modes, torch.fft.rfft2(x.to(self.weight.dtype))  # which bfloat16 lacks
        y = torch.zeros_like(found)
        for part, weight in zip((slice(0, m), slice(-m, None)), self.weight, strict=True):
            weight = torch.view_as_complex(weight)
            y[:, :, part, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, part, :m], weight)
        return x + torch.fft.irfft2(y, s=x.shape[-2:])


LEVELS = torch.tensor([0.3, 0.9])
add("as SR3", lambda: SR3(8, 16), (2, 8, 4, 6), LEVELS)
add("biases behind", lambda: ByChannels(8), (2, 3, 4, 6), (2, 2))
add("sums of one variance", lambda: SumsOfOneVariance(8, 6), (2, 3, 8, 12), (2, 6))
add("numbers behind convolutions", lambda: NumbersBehind(8, 6), (2, 3, 8, 12), (2, 6))
add("Fourier layers", lambda: _image(Fourier(16)), (1, 3, 8, 6))

# --- what a module may do to tensors --------------------------------------------------------------


class Shared(nn.Module):
    """One layer under two names, and one parameter of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(4, 4, 3, padding=1)
        self.third.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(F.silu(self.first(x))))


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> tuple:
        y = self.conv(x)
        y[:, :2] = 0.5
        y[:, 2:, 1:3] *= 2
        y[:, 3] = x[:, 0]
        return y, x, x[:, :1], None, 3


class Resampled(nn.Module):
    """As EDM's networks resample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.register_buffer("filter", torch.ones(4, 1, 2, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(self.weight, dim=(1, 2, 3), keepdim=True)
        y = F.conv_transpose2d(x, self.filter * 4, groups=4, stride=2)
        y = F.conv2d(y, self.weight / (norm + 1e-4), padding=1)
        return F.conv2d(F.mish(y), self.filter, groups=4, stride=2)


class OfUnitNorm(nn.Module):
    """A convolution of EDM2 (Karras et al. 2024), whose filters have norm 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        norm = torch.linalg.vector_norm(w, dim=(1, 2, 3), keepdim=True)
        norm = torch.add(1e-4, norm, alpha=(norm.numel() / w.numel()) ** 0.5)
        return F.conv2d(x, w / norm / w[0].numel() ** 0.5, padding=1)


class Rounded(nn.Module):
    """Casts that lose numbers, second names of ops in place, and an array of numpy's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        filters = np.outer(np.float32([1, 2, 1]), [1, 2, 1])[None, None]
        filters = torch.as_tensor(filters, dtype=x.dtype, device=x.device).tile([3, 1, 1, 1])
        x = F.conv2d(x, filters / filters.sum(), groups=3)
        x = x.multiply_(2 + t.long().to(x.dtype)).clip_(-3, 3)
        return self.conv(x) + (4 * x).int().to(x.dtype).mean()


def _normed() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 8, 3))


add("shared layers", Shared, (2, 4, 6, 6))
add("written to", Written, (2, 4, 6, 6))
add("rounded and clipped", Rounded, (2, 3, 9, 8), torch.tensor(1.75))
add("filters of norm 1", OfUnitNorm, (2, 4, 6, 6))
add("resampled by filters", Resampled, (2, 4, 4, 6))
add("weight norm", lambda: nn.Sequential(_normed(), nn.GLU(1), nn.PReLU(4)), (2, 4, 6, 6))


class LowRank(nn.Module):
    """As peft adapts a layer (Hu et al. 2021), whose input is cast to the parameters' type."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer, self.dropout = layer, nn.Identity()
        self.a = nn.Linear(layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        x = x.to(self.a.weight.dtype)
        return y + self.b(self.a(self.dropout(x))) * 2.0


def _adapted() -> UNet2DConditionModel:
    """Attention's layers, while all others are frozen."""
    net = _conditional().requires_grad_(False)
    for name, part in list(net.named_modules()):
        if isinstance(part, nn.Linear) and name.split(".")[-1] in ("to_q", "to_k", "to_v"):
            parent, _, last = name.rpartition(".")
            setattr(net.get_submodule(parent), last, LowRank(part, 4))
    return net


add("with LoRA", _adapted, LATENTS, T, TOKENS)


class Mixed(nn.Module):
    """A decoder's block, of which autocast keeps some tensors in more bits: what is upsampled,
    what is added to that and concatenated with it, and a norm with scale and shift of these."""

    def __init__(self, low=torch.bfloat16, wide=torch.float32, width=8):
        super().__init__()
        self.low, self.wide, both = low, wide, 2 * width
        channels = width, width, both, width
        self.layers = nn.ModuleList(nn.Conv2d(n, width, 3, padding=1, dtype=low) for n in channels)
        self.skip, self.film = nn.Conv2d(both, width, 1), nn.Linear(6, 2 * both)
        self.norms = nn.ModuleList(nn.GroupNorm(4, n, dtype=wide) for n in (width, both))
        self.skip.to(low), self.film.to(low)

    def forward(self, x, emb):  # [N, width, H, W], [N, 6], in fewer bits
        small, lateral = self.layers[0](x), self._large(x)
        h = self._large(F.silu(self.norms[0](small.to(self.wide))).to(self.low))
        stream = self._large(small.to(self.wide)) + self.layers[1](h)
        both = torch.cat((stream, lateral.to(self.wide)), dim=1)
        film = self.film(emb)[..., None, None].chunk(2, dim=1)
        scale, shift = (part.to(self.wide) for part in film)
        h = F.silu(self.norms[1](both) * (1 + scale) + shift).to(self.low)
        y = self.layers[2](h) + self.skip(both.to(self.low))
        return self.layers[3](self._large(stream).to(self.low)), y.to(self.wide)

    @staticmethod
    def _large(x):
        return F.interpolate(x, scale_factor=2.0, mode="nearest")
