"""Small random networks of everything that a plan knows, for hypothesis to draw."""

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

EMB = 6
LAYERS = (
    "conv", "pointwise", "down", "down_padded", "pool", "up", "norm", "norm_act", "film", "act",
    "emb", "residual", "concat", "attention", "packed", "gate", "scale", "tokens", "dropout",
    "down_even", "wide", "skip", "swish", "vector", "mixed", "mlp", "blend", "adapted", "weighed",
)  # fmt: skip


@st.composite
def networks(draw):
    """(module, arguments) in float64."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    layers = draw(st.lists(st.sampled_from(LAYERS), min_size=2, max_size=7))
    h, w = draw(st.sampled_from([(4, 4), (6, 4), (5, 3)]))
    module = RandomNetwork(layers, draw(st.sampled_from(["silu", "gelu", "relu", "mish"])))
    args = torch.randn(2, 4, h, w), torch.randn(2, EMB)
    return module.double(), tuple(a.double() for a in args)


class RandomNetwork(nn.Module):
    """Applies the named layers, one after the other, to an image of so many channels, a multiple of
    four."""

    def __init__(self, layers: list[str], activation: str, channels: int = 4) -> None:
        super().__init__()
        self.channels = channels
        self.layers, self.activation = layers, getattr(F, activation)
        self.inside = nn.ModuleList(nn.ModuleDict(self._parts(name)) for name in layers)

    def _parts(self, name: str) -> dict[str, nn.Module]:
        c = self.channels
        norm, skipped = (lambda: nn.GroupNorm(2, c)), {"conv": nn.Conv2d(c, 2 * c, 3, padding=1)}
        parts = {
            "conv": lambda: {"conv": nn.Conv2d(c, c, 3, padding=1)},
            "pointwise": lambda: {"conv": nn.Conv2d(c, c, 1, bias=False)},
            "down": lambda: {"conv": nn.Conv2d(c, c, 3, stride=2, padding=1)},
            "down_padded": lambda: {"conv": nn.Conv2d(c, c, 3, stride=2)},
            "down_even": lambda: {"conv": nn.Conv2d(c, c, 4, stride=2, padding=1)},
            "norm": lambda: {"norm": norm()},
            "norm_act": lambda: {"norm": nn.GroupNorm(2, c, affine=False)},
            "film": lambda: {"norm": nn.GroupNorm(4, c), "linear": nn.Linear(EMB, 2 * c)},
            "emb": lambda: {"linear": nn.Linear(EMB, c)},
            "concat": lambda: {
                "norm": nn.GroupNorm(2, 2 * c),
                "conv": nn.Conv2d(2 * c, c, 3, padding=1),
            },
            "attention": lambda: {n: nn.Linear(c, c) for n in ("q", "k", "v")},
            "adapted": lambda: {
                **{n: nn.Linear(c, c) for n in ("q", "k", "v")},
                "a": nn.Linear(c, 2, bias=False),
                "b": nn.Linear(2, c, bias=False),
            },
            "packed": lambda: {"conv": nn.Conv2d(c, 3 * c, 1)},
            "gate": lambda: {"conv": nn.Conv2d(c, 2 * c, 1)},
            "tokens": lambda: {"linear": nn.Linear(c, c)},
            "wide": lambda: {"norm": norm(), "conv": nn.Conv2d(c, c, 3, padding=1)},
            "skip": lambda: {
                "norm": norm(),
                **skipped,
                "skip": nn.Conv2d(c, 2 * c, 1),
                "last": nn.Conv2d(2 * c, c, 1),
            },
            "swish": lambda: {"norm": norm()},
            "vector": lambda: {"conv": nn.Conv2d(c, c, 3, padding=1, bias=False), "norm": norm()},
            "mixed": lambda: {"linear": nn.Linear(c, c)},
            "weighed": lambda: {"norm": norm(), "conv": nn.Conv2d(c, c, 3, padding=1)},
            "blend": lambda: {"linear": nn.Linear(EMB, c), "conv": nn.Conv2d(c, c, 1)},
            "mlp": lambda: {"wider": nn.Conv2d(c, 3 * c, 1), "last": nn.Linear(3 * c, c)},
        }
        return parts[name]() if name in parts else {}

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        first = x
        for name, parts in zip(self.layers, self.inside, strict=True):
            n, c, h, w = x.shape
            before = x
            if name in ("conv", "pointwise", "down"):
                x = parts["conv"](x)
            elif name == "down_padded":
                x = parts["conv"](F.pad(x, (0, 1, 0, 1))) if min(h, w) > 1 else x
            elif name == "pool":
                x = F.avg_pool2d(x, 2) if min(h, w) > 1 else x
            elif name == "up":
                x = F.interpolate(x, scale_factor=2.0, mode="nearest") if h < 8 else x
            elif name == "norm":
                x = parts["norm"](x)
            elif name == "norm_act":
                x = self.activation(parts["norm"](x))
            elif name == "film":
                scale, shift = parts["linear"](emb)[:, :, None, None].chunk(2, dim=1)
                x = self.activation(parts["norm"](x) * (1 + scale) + shift)
            elif name == "act":
                x = self.activation(x)
            elif name == "emb":
                x = x + parts["linear"](self.activation(emb))[:, :, None, None]
            elif name == "residual":
                x = x + first if first.shape == x.shape else x * 0.5 + 1
            elif name == "concat":
                other = first if first.shape == x.shape else torch.tanh(x)
                x = parts["conv"](F.silu(parts["norm"](torch.cat((x, other), dim=1))))
            elif name in ("attention", "adapted"):  # the latter as LoRA adds to q, k and v
                rows = x.flatten(2).transpose(1, 2)
                low = parts["b"](parts["a"](rows)) if name == "adapted" else 0.0
                q, k, v = (
                    (parts[p](rows) + low).unflatten(2, (2, -1)).transpose(1, 2)
                    for p in ("q", "k", "v")
                )
                o = F.scaled_dot_product_attention(q, k, v)
                x = x + o.transpose(1, 2).reshape(n, -1, c).transpose(1, 2).view(x.shape)
            elif name == "packed":
                qkv = parts["conv"](x).flatten(2).transpose(1, 2).unflatten(2, (2, 3, -1))
                q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)
                o = F.scaled_dot_product_attention(q, k, v, scale=0.3)
                x = o.permute(0, 1, 3, 2).reshape(n, c, h, w)
            elif name == "gate":
                a, b = parts["conv"](x).chunk(2, dim=1)
                x = a * torch.sigmoid(b)
            elif name == "scale":
                x = (2 - x) / (1.5 + torch.sigmoid(x)) - 0.1 * x
            elif name == "tokens":
                rows = parts["linear"](x.permute(0, 2, 3, 1).reshape(n * h * w, c))
                x = rows.reshape(n, h, w, c).permute(0, 3, 1, 2)
            elif name == "down_even":
                x = parts["conv"](x) if min(h, w) > 1 else x
            elif name == "wide":  # in float32, with an activation that no kernel has
                wide = torch.promote_types(x.dtype, torch.float32)
                y = F.elu(_in(parts["norm"], x, wide)).to(x.dtype)
                x = parts["conv"](y)
            elif name == "skip":
                wide = torch.promote_types(x.dtype, torch.float32)
                y = parts["conv"](F.elu(_in(parts["norm"], x, wide)).to(x.dtype))
                x = parts["last"](y + parts["skip"](x))
            elif name == "swish":
                y = parts["norm"](x)
                x = y * torch.sigmoid(y) if h > w else y * torch.tanh(F.softplus(y))
            elif name == "vector":
                x = parts["conv"](x).add_(parts["norm"].bias.to(x.dtype).view(1, -1, 1, 1))
            elif name == "mixed":
                weight = parts["linear"].weight.to(x.dtype)
                x = torch.einsum("nchw,oc->nohw", x, weight) + torch.matmul(
                    weight, x.flatten(2)
                ).view(x.shape)
            elif name == "blend":
                gate = parts["linear"](emb)[:, :, None, None]
                x = gate * parts["conv"](x) + x * torch.sigmoid(gate)
            elif name == "weighed":
                x = (parts["conv"](self.activation(parts["norm"](x))) + x) / 2**0.5
            elif name == "mlp":
                y = self.activation(parts["wider"](x)).permute(0, 2, 3, 1)
                y = parts["last"](y if h > w else y.flatten(1, 2)).reshape(n, h, w, c)
                x = x + y.permute(0, 3, 1, 2)
            elif name == "dropout":
                x = F.dropout(x, 0.0, self.training)
            assert x.shape[:2] == before.shape[:2]
        return x


def _in(norm: nn.GroupNorm, x: Tensor, dtype: torch.dtype) -> Tensor:
    """A norm that computes in another dtype than that of its input."""
    weight, bias = norm.weight.to(dtype), norm.bias.to(dtype)
    return F.group_norm(x.to(dtype), norm.num_groups, weight, bias, norm.eps)
