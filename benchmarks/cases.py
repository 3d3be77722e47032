"""What a model computes: the distinct shapes of each op, and how often a training step has them.

Nothing is listed by hand. The network of a configuration runs once on the meta device, where
tensors have shapes and no data, while the reference ops note what they are called with.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import yaml

from diffusion.errors import ConfigError
from diffusion.factory import POLICY_MODELS, build_model, build_policy_model
from diffusion.models.unet import UNet
from diffusion.runtime.backend import Backend
from triton_kernels import reference

MODELS = Path(__file__).resolve().parents[1] / "configs" / "model"


@dataclass(frozen=True)
class ConvCase:
    """A convolution [N, H, W, CI] -> [N, P, Q, CO] with padding R // 2."""

    n: int
    h: int
    w: int
    ci: int
    co: int
    r: int
    s: int
    stride: int
    float32: bool  # whatever the model's precision is, as in the embedding of the timestep
    needs_dx: bool  # false where x is an image or a timestep
    op = "conv2d"

    @property
    def p(self) -> int:
        return (self.h - 1) // self.stride + 1

    @property
    def q(self) -> int:
        return (self.w - 1) // self.stride + 1

    @property
    def flops(self) -> int:
        """Of each of the three passes."""
        return 2 * self.n * self.p * self.q * self.co * self.ci * self.r * self.s

    @property
    def shape(self) -> str:
        stride = f" /{self.stride}" if self.stride > 1 else ""
        return f"{self.n}x{self.h}x{self.w} {self.ci}->{self.co} {self.r}x{self.s}{stride}"


@dataclass(frozen=True)
class NormCase:
    """A GroupNorm of [N, H, W, C] with its activation."""

    n: int
    h: int
    w: int
    c: int
    groups: int
    activation: str
    modulated: bool  # by the embedding's scale and shift
    op = "group_norm"

    @property
    def shape(self) -> str:
        film = " film" if self.modulated else ""
        return f"{self.n}x{self.h}x{self.w}x{self.c} {self.activation}{film}"


@dataclass(frozen=True)
class AttentionCase:
    """Self-attention of [N, T, 3C]."""

    n: int
    t: int
    c: int
    heads: int
    order: str
    op = "attention"

    @property
    def flops(self) -> int:
        """Of a forward pass: two products of [T, d] and [T, T] a head."""
        return 4 * self.n * self.t**2 * self.c

    @property
    def shape(self) -> str:
        return f"{self.n}x{self.t} {self.heads}x{self.c // self.heads}"


@dataclass(frozen=True)
class CrossAttentionCase:
    """Attention of queries [N, T, C] to keys and values [N, L, 2C], to some of which samples have a
    mask."""

    n: int
    t: int
    keys: int
    c: int
    heads: int
    op = "cross_attention"

    @property
    def flops(self) -> int:
        """Of a forward pass, over all keys."""
        return 4 * self.n * self.t * self.keys * self.c

    @property
    def shape(self) -> str:
        return f"{self.n}x{self.t} {self.heads}x{self.c // self.heads} keys={self.keys}"


@dataclass(frozen=True)
class AdamWCase:
    """The update of `sizes`, the parameters of a model."""

    sizes: tuple[int, ...]
    op = "adamw"

    @property
    def shape(self) -> str:
        return f"{sum(self.sizes)}"


@dataclass(frozen=True)
class DenoiseCase:
    """Noise, loss and reverse step over [N, H, W, C]."""

    n: int
    h: int
    w: int
    c: int
    op = "denoise"

    @property
    def shape(self) -> str:
        return f"{self.n}x{self.h}x{self.w}x{self.c}"


class Images(NamedTuple):
    """What a model learns: images of so many pixels a side and channels, and whether its output has
    twice as many, for a learned variance."""

    size: int = 64
    channels: int = 3
    learned_variance: bool = False


# of the models that papers train, as they train them; of all others the default
IMAGES = {
    "ddpm_cifar10": Images(32),
    "edm_ddpmpp_cifar10": Images(32),
    "adm_imagenet64": Images(64, learned_variance=True),
    "adm_imagenet128": Images(128, learned_variance=True),
    "ldm_churches": Images(32, 4),
    "ldm_320": Images(32, 4),
}

# networks for which nothing was ever measured or chosen: they say how far the speed travels
_NETWORKS = Path(__file__).parent / "networks"
UNTUNED = tuple(sorted(path.stem for path in _NETWORKS.glob("*.yaml")))

Case = ConvCase | NormCase | AttentionCase | CrossAttentionCase | AdamWCase | DenoiseCase
_TOKENS = 78  # of a context: CLIP's 77, and a null token
# rows that no model here has: heads of 64 over an image of 32x32 and of 64x64
LONGER_ATTENTION = (
    AttentionCase(16, 1024, 768, 12, "qkv_heads"),
    AttentionCase(4, 4096, 512, 8, "qkv_heads"),
)
_META = torch.device("meta")
_BACKEND = Backend("torch", reference, torch.bfloat16)
OPS = ("conv2d", "group_norm", "attention", "cross_attention", "adamw", "denoise")


def model_settings(name: str) -> dict[str, Any]:
    """The group `model` of the configuration, by name, or that of a network of `networks/`.
    ConfigError names those there are."""
    path = MODELS / f"{name}.yaml"
    if path.is_file():
        return yaml.safe_load(path.read_text())
    if name in UNTUNED:
        changes = _read_untuned(name)
        base = model_settings(changes.pop("base"))
        del changes["images"]
        return base | changes
    known = ", ".join((*sorted(p.stem for p in MODELS.glob("*.yaml")), *UNTUNED))
    raise ConfigError(f"model={name} is unknown; choose one of {known}")


def images_of(model: str, size: int | None = None) -> Images:
    """What the model of that name learns, or the same of another size."""
    if model in UNTUNED:
        images = Images(*_read_untuned(model)["images"])
    else:
        images = IMAGES.get(model, Images())
    return images if size is None else images._replace(size=size)


def _read_untuned(name: str) -> dict[str, Any]:
    """`base`, a model of the configuration; `images`, [pixels a side, channels]; what differs."""
    return yaml.safe_load((_NETWORKS / f"{name}.yaml").read_text())


def model_cases(
    model: str,
    batch: int,
    op: str = "all",
    size: int = 64,
    channels: int = 3,
    conv_resample: bool = False,  # with convolutions in down- and upsampling, whatever it has
) -> list[tuple[Case, int]]:
    """Every case of one op, or of all, with its number of calls in a training step. Of a policy's
    network the convolutions alone. Cross-attention, which the model has if it is given a context,
    is asked for by name: as often as attention."""
    if batch < 1:
        raise ConfigError(f"batch={batch}; expected at least 1")
    settings = model_settings(model)
    if settings["name"] in POLICY_MODELS:
        calls = _walk_policy(model, batch).items()
        return [
            (case, count)
            for case, count in calls
            if case.op == "conv2d" and op in ("all", "conv2d")
        ]
    cases: list[tuple[Case, int]] = [
        (case, count)
        for case, count in _walk(model, batch, size, channels, conv_resample).items()
        if op in ("all", case.op)
    ]
    if op == CrossAttentionCase.op:
        calls = model_cases(model, batch, "attention", size, channels, conv_resample)
        return [(CrossAttentionCase(a.n, a.t, _TOKENS, a.c, a.heads), k) for a, k in calls]
    if op in ("all", "adamw"):
        network = meta_model(model, size, channels, conv_resample)
        cases.append((AdamWCase(tuple(p.numel() for p in network.parameters())), 1))
    if op in ("all", "denoise"):
        cases.append((DenoiseCase(batch, size, size, channels), 1))
    return cases


def meta_model(name: str, size: int = 64, channels: int = 3, conv_resample: bool = False) -> UNet:
    """The network without data: bfloat16, on the meta device."""
    settings = model_settings(name)
    if conv_resample:
        settings["conv_resample"] = True
    with _META:
        return build_model(settings, _BACKEND, (size, size), channels, False, _META)


@lru_cache
def _walk_policy(name: str, batch: int) -> Counter[Case]:
    """Chunks of 16 actions of 2 numbers, under a condition of 1028, as published."""
    with _META, _noted_calls() as calls:
        model = build_policy_model(model_settings(name), _BACKEND, 2, 1028, _META).train()
        model.forward_nhwc(
            torch.empty(batch, 1, 16, 2),
            torch.empty(batch, dtype=torch.int64),
            torch.empty(batch, 1028),
        )
    return Counter(calls)


@lru_cache
def _walk(name: str, batch: int, size: int, channels: int, conv_resample: bool) -> Counter[Case]:
    model = meta_model(name, size, channels, conv_resample).train()
    with torch.device("meta"), _noted_calls() as calls:
        model.forward_nhwc(
            torch.empty(batch, size, size, channels),
            torch.empty(batch, dtype=torch.int64),
            rng=torch.empty(2, dtype=torch.int64),
            **({"labels": torch.empty(batch, dtype=torch.int64)} if model.num_classes else {}),
        )
    return Counter(calls)


@contextmanager
def _noted_calls() -> Iterator[list[Case]]:
    """The cases that the reference ops are called with inside of the block."""
    calls: list[Case] = []

    def noted(op: Callable, case: Callable[..., Case]) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(case(*args, **kwargs))
            return op(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, case in (("conv2d", _conv), ("group_norm", _norm), ("attention", _attention)):
            op = noted(getattr(reference, name), case)
            stack.enter_context(mock.patch.object(reference, name, op))
        yield calls


def _conv(x, weight, bias=None, *, stride=1, padding=None, **_) -> ConvCase:
    n, h, w, ci = x.shape
    co, _, r, s = weight.shape
    assert padding is None, "the cases know the padding R // 2 alone"
    return ConvCase(
        n, h, w, ci, co, r, s, stride, x.dtype == torch.float32, needs_dx=x.requires_grad
    )


def _norm(x, num_groups, *_, activation="identity", scale=None, **__) -> NormCase:
    return NormCase(*x.shape, num_groups, activation, modulated=scale is not None)


def _attention(qkv, num_heads, *, order="qkv_heads", **_) -> AttentionCase:
    n, t, c3 = qkv.shape
    return AttentionCase(n, t, c3 // 3, num_heads, order)
