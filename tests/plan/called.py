"""Calls of every op that a plan has a line for, with every option that PyTorch gives it: what a
strange module may say. `CASES` has them by name, which is the code of most; `refused` is what the
PlanError says of those that have no place in a plan."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import triton_kernels.noise.dropout  # noqa: F401  whose op is called here

_generator = torch.Generator()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator.manual_seed(sum(shape)))


@dataclass
class Case:
    call: Callable  # of the inputs, and a layer or the parameters
    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...] = ()
    layer: nn.Module | None = None
    refused: str = ""


class Called(nn.Module):
    """The call as a module, behind a product that a plan has."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.layer = case, case.layer
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.theirs = nn.ParameterList(case.parameters)

    def forward(self, *inputs: Tensor):
        inputs = [x * self.gain if x.is_floating_point() else x for x in inputs]
        given = self.theirs if self.layer is None else [self.layer]
        return self.case.call(*inputs, *given)


CASES: dict[str, Case] = {}
IMAGE, ROW, ROWS = (2, 4, 6, 8), (2, 4, 8), (3, 8)


def add(name: str, call: Callable, *inputs, of=(), refused: str = "") -> None:
    """Inputs and parameters are tensors, or shapes of random ones."""
    assert name not in CASES, name
    inputs, of = (
        tuple(numbers(*x) if isinstance(x, tuple) else x for x in given) for given in (inputs, of)
    )
    CASES[name] = Case(call, inputs, of, None, refused)


def add_layer(layer: nn.Module, shape: tuple[int, ...], refused: str = "", name: str = "") -> None:
    name = name or str(layer) + ("" if layer.training else " in evaluation")
    assert name not in CASES, name
    torch.manual_seed(len(CASES))
    for p in layer.parameters():
        nn.init.normal_(p, std=0.5)
    CASES[name] = Case(lambda x, layer: layer(x), (numbers(*shape),), (), layer, refused)


def of_code(text: str) -> dict[str, str]:
    """Pieces of code, two spaces apart, to what is said if they are refused: code -> said."""
    entries = [e.strip() for e in re.split(r"\n|  ", text) if e.strip()]
    return {code: said for code, _, said in (e.partition(" -> ") for e in entries)}


def add_layers(shape: tuple[int, ...], text: str) -> None:
    for code, refused in of_code(text).items():
        add_layer(eval(f"nn.{code}"), shape, refused, code)


def add_calls(parameters: str, *inputs, text: str, of=()) -> None:
    for code, refused in of_code(text).items():
        add(code, eval(f"lambda {parameters}: {code}", globals()), *inputs, of=of, refused=refused)


# --- convolutions and products --------------------------------------------------------------------

add_layers(
    IMAGE,
    """
    Conv2d(4, 6, 3)  Conv2d(4, 6, 3, bias=False)  Conv2d(4, 6, 3, stride=2)
    Conv2d(4, 6, 3, stride=(1, 2), padding=(0, 2))  Conv2d(4, 6, 3, padding='same')
    Conv2d(4, 6, 3, padding='valid')  Conv2d(4, 6, 2, padding='same')
    Conv2d(4, 6, 1)  Conv2d(4, 6, 1, stride=2, padding=1)
    Conv2d(4, 6, 3, padding=1, padding_mode='reflect')
    Conv2d(4, 6, 3, padding=1, padding_mode='replicate')
    Conv2d(4, 6, 3, padding=1, padding_mode='circular')
    Conv2d(4, 6, 3, dilation=2)
    Conv2d(4, 6, 3, dilation=(1, 2))
    Conv2d(4, 6, 3, groups=2)
    ConvTranspose2d(4, 3, 2, 2)
    """,
)
add_layer(nn.Conv2d(4, 6, 3, padding=1), (4, 6, 8), name="Conv2d without a batch")
add_layers(
    ROW,
    """
    Conv1d(4, 4, 3)  Conv1d(4, 4, 3, stride=2, padding=1)  Conv1d(4, 4, 3, padding='same')
    Conv1d(4, 4, 3, padding=1, padding_mode='circular')
    Conv1d(4, 4, 3, dilation=2)
    Conv1d(4, 4, 3, groups=4)
    ConvTranspose1d(4, 3, 3, stride=2, output_padding=1)
    """,
)
VIDEO = (2, 3, 4, 6, 5)
add_layers(
    VIDEO,
    """
    Conv3d(3, 4, 3)  Conv3d(3, 4, 1)  Conv3d(3, 4, 1, bias=False)
    Conv3d(3, 4, (1, 3, 3), padding=(0, 1, 1))  Conv3d(3, 4, (1, 4, 4), (1, 2, 2), (0, 1, 1))
    Conv3d(3, 4, (3, 1, 1), padding=(1, 0, 0))  Conv3d(3, 4, (3, 1, 1), padding='same', bias=False)
    Conv3d(3, 4, (2, 1, 1))
    Conv3d(3, 4, (1, 3, 3), stride=(2, 1, 1))  Conv3d(3, 4, (1, 3, 3), padding=1)
    Conv3d(3, 4, (3, 1, 1), stride=(2, 1, 1))  Conv3d(3, 4, (3, 1, 1), stride=2, padding=1)
    Conv3d(3, 4, (1, 3, 1))  Conv3d(3, 4, (1, 3, 3), dilation=(1, 2, 2))
    Conv3d(3, 3, (1, 3, 3), groups=3)
    ConvTranspose3d(3, 4, (1, 4, 4), (1, 2, 2), (0, 1, 1))
    """,
)

add_layers(ROWS, "Linear(8, 5)")
add_layers(IMAGE, "Linear(8, 5, bias=False)")
WRONG = "weight and bias of"
weight = numbers(5, 8)
add("linear of one row", F.linear, (8,), of=((5, 8), (5,)))
add("linear of one filter", F.linear, ROWS, of=((8,),), refused=WRONG)
add("linear of a tensor that is no parameter", lambda x: F.linear(x, weight, weight[:, 0]), ROWS)
add("linear of such a tensor, called by name", lambda x: F.linear(input=x, weight=weight), ROWS)
add("linear of a tensor that came with the call", F.linear, ROWS, (5, 8), (5,))
add("linear bias of rows", F.linear, ROWS, of=((5, 8), (3, 5)), refused=WRONG)
add("addmm", torch.addmm, (5,), ROWS, (8, 5))
add("addmm bias of rows", torch.addmm, (3, 5), ROWS, (8, 5))
add("addmm bias of one", torch.addmm, (1, 5), ROWS, (8, 5))
products = """
    torch.addmm(b, x, w, beta=2)  torch.addmm(b, x, w, alpha=0.5)
    torch.mm(x, w)  torch.mm(x, w, out_dtype=torch.float32) -> out_dtype
"""
if not torch.__version__.startswith("2.11."):  # which takes the type for a tensor
    products += "    torch.ops.aten.addmm.dtype(b, x, w, torch.float32) -> out_dtype\n"
add_calls("b, x, w", (5,), ROWS, (8, 5), text=products)
add("matmul", torch.matmul, ROW, of=((8, 5),))
add("matmul of one row", torch.matmul, (8,), of=((8, 5),))
add("matmul of a column", torch.matmul, ROWS, of=((8,),))
add("matmul of a batch", torch.matmul, ROW, (2, 8, 5))
add("bmm", torch.bmm, ROW, (2, 8, 5))
add("baddbmm", torch.baddbmm, (2, 4, 5), ROW, (2, 8, 5))
einsum = "torch.einsum('nc,oc->no', x, w)"
add_calls("x, w", ROWS, of=((5, 8),), text=einsum)
add("bilinear", F.bilinear, ROWS, (3, 4), of=((2, 8, 4),))

# --- norms and activations ------------------------------------------------------------------------

layers = """
    GroupNorm(2, 4)  GroupNorm(2, 4, affine=False)  GroupNorm(2, 4, eps=0.1)
    InstanceNorm2d(4, track_running_stats=True)
    InstanceNorm2d(4)  BatchNorm2d(4)  BatchNorm2d(4, affine=False, momentum=0.3)
    BatchNorm2d(4, momentum=None) -> __float__ of a tensor
    BatchNorm2d(4, track_running_stats=False)  BatchNorm2d(4).eval()  LocalResponseNorm(2)
    LayerNorm(8)  LayerNorm(8, elementwise_affine=False)
    LayerNorm(8, bias=False)  RMSNorm(8)
    ReLU()  ReLU(inplace=True)  SiLU()  SiLU(inplace=True)  Mish()  Mish(inplace=True)
    GELU()  GELU(approximate='tanh')  Sigmoid()  Tanh()  Softsign()
    Softplus()  ELU()  LeakyReLU()  Hardswish()
    ReLU6()  GLU()  PReLU()  Softmax(1)
"""
add_layers(IMAGE, layers)
add_layer(nn.GroupNorm(2, 4), ROW, name="GroupNorm of rows")
add_layer(nn.GroupNorm(2, 8), ROWS, name="GroupNorm of one pixel")
add_layer(nn.GroupNorm(2, 4), (2, 4, 3, 4, 5), name="GroupNorm of a volume")
add_calls("x, w", IMAGE, of=((4,),), text="F.group_norm(x, 2, w)")
# of a bias that asks for a gradient, without a weight, PyTorch's own backward pass fails
add_calls("x, b", IMAGE, of=((4,),), text="F.group_norm(x, 2, None, b.detach())")
add_calls("x", ROWS, text="F.softmax(x, -1, dtype=torch.float64)")

# --- attention ------------------------------------------------------------------------------------

HEADS, KEYS = (2, 3, 6, 4), (2, 3, 5, 4)
seen = torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)
seen_by_all = seen[:, None, None].expand(2, 3, 6, 5).clone()
seen_by_query, seen_by_head = torch.ones(6, 5).tril() > 0, numbers(3, 1, 5) > 0
attention = F.scaled_dot_product_attention
masks = """
    attention(q, k, v)  attention(q, k, v, scale=0.3)  attention(q, k, v, seen[:, None, None])
    attention(q, k, v, seen[:1])
    attention(q, k, v, seen[:, None, None].expand(2, 3, 6, 5))
    attention(q, k, v, seen_by_all)
    attention(q, k, v, seen_by_query)
    attention(q, k, v, seen_by_head)
    attention(q, k, v, seen[:, None, None].float())
    attention(q, k, v, dropout_p=0.5, enable_gqa=True) -> dropout_p=0.5
    attention(q, k, v, is_causal=True)
    attention(q, k, v, dropout_p=1e-12)  attention(q, k, v, None, 1e-12, True, scale=0.3)
    attention(q, k, v, seen_by_query, 1e-12)  attention(q, k, v, seen_by_query.float(), 1e-12)
    attention(q, k[:, :1], v[:, :1], enable_gqa=True)
    attention(q, k, v[..., :2])
"""
add_calls("q, k, v", HEADS, KEYS, KEYS, text=masks)
add("attention of one head", attention, ROW, ROW, ROW)
self_attention = "net(x, x, x, need_weights=False)[0]  net(x, x, x)[0]  net(x, x, x)[1]"
for code, refused in of_code(self_attention).items():
    call, layer = eval(f"lambda x, net: {code}"), nn.MultiheadAttention(8, 2, batch_first=True)
    CASES[f"MultiheadAttention, {code}"] = Case(call, (numbers(*ROW),), (), layer, refused)
    layer, name = nn.MultiheadAttention(8, 2, batch_first=True, dropout=1e-12), f"dropping, {code}"
    CASES[f"MultiheadAttention, {name}"] = Case(call, (numbers(*ROW),), (), layer, refused)

# --- resampling and padding -----------------------------------------------------------------------

resampled = """
    F.interpolate(x, scale_factor=2)  F.interpolate(x, scale_factor=(2, 3))
    F.interpolate(x, size=(12, 24))  F.interpolate(x, size=(6, 8))
    F.interpolate(x, scale_factor=2.0, recompute_scale_factor=True)
    F.interpolate(x, scale_factor=2.05, recompute_scale_factor=True)
    F.interpolate(x, scale_factor=2, mode='nearest-exact')
    F.interpolate(x, size=(12, 16), mode='nearest-exact')
    F.interpolate(x, size=(9, 12))
    F.interpolate(x, size=(9, 12), mode='nearest-exact')
    F.interpolate(x, scale_factor=0.5)
    F.interpolate(x, scale_factor=2.1)
    F.interpolate(x, scale_factor=2.1, mode='nearest-exact')
    F.interpolate(x, scale_factor=2, mode='bilinear')
    F.interpolate(x, scale_factor=2, mode='bilinear', align_corners=True)
    F.interpolate(x, scale_factor=0.5, mode='bilinear', antialias=True)
    F.interpolate(x, scale_factor=2, mode='bicubic')
    F.interpolate(x, scale_factor=0.5, mode='area')
    F.interpolate(x[0], scale_factor=2)  F.interpolate(x[0], scale_factor=(3,))
    F.interpolate(x[0], size=12)  F.interpolate(x[0], size=[24])
    F.interpolate(x[0], size=12, mode='nearest-exact')
    F.interpolate(x[0], scale_factor=2.1)
    F.interpolate(x[0], scale_factor=2, mode='linear')
    F.interpolate(x[0], size=13, mode='linear', align_corners=True)
    F.interpolate(x, scale_factor=2, mode='linear') -> Got 4D input, but linear mode needs 3D input
    torch.ops.aten.upsample_nearest2d(x, [12, 16], 2.0, 2.0)
    torch.ops.aten.upsample_nearest2d(x, [12, 16], 2.0, 2.2)
    torch.ops.aten.upsample_nearest2d.vec(x, None, [2.0, 3.0])
    torch.ops.aten._upsample_nearest_exact2d(x, [12, 16], 2.0, 2.0)
    torch.ops.aten._upsample_nearest_exact2d(x, [12, 16], 2.0, 2.2)
    torch.ops.aten._upsample_nearest_exact2d.vec(x, None, [2.0, 3.0])
    F.avg_pool2d(x[0], 2)
    F.pad(x, (1, 2))  F.pad(x, (0, 1, 2, 0), 'constant', 0)  F.pad(x, (1, 0, 0, 0, 0, 3))
    F.pad(x, (1, 1), value=2.0)
    F.pad(x, (-1, 1))
    F.pad(x, (1, 1, 1, 1), 'reflect')
    F.pad(x, (1, 1, 1, 1), 'replicate')
    F.pad(x, (1, 1, 1, 1), 'circular')
"""
add_calls("x", IMAGE, text=resampled)
layers = """
    UpsamplingNearest2d(scale_factor=2)
    AvgPool2d(2)  AvgPool2d((3, 2))  AvgPool2d(2, stride=2)  AvgPool2d(2, count_include_pad=False)
    AvgPool2d(4)  AvgPool2d(2, stride=1)
    AvgPool2d(3, stride=3, padding=1)
    AvgPool2d(4, ceil_mode=True)
    AvgPool2d(2, divisor_override=3)
    AvgPool2d(3, stride=3, padding=1, count_include_pad=False)
    MaxPool2d(2)  AdaptiveAvgPool2d(2)
    AdaptiveAvgPool2d(1)  PixelShuffle(2)
    PixelUnshuffle(2)  ChannelShuffle(2)
"""
add_layers(IMAGE, layers)
add_layers(
    ROW,
    """
    AvgPool1d(2)  AvgPool1d(3)  AvgPool1d(2, count_include_pad=False)
    AvgPool1d(2, stride=1)  AvgPool1d(2, padding=1)
    AvgPool1d(3, ceil_mode=True)
    """,
)

# --- embeddings and dropout -----------------------------------------------------------------------

embeddings = """
    F.embedding(i, w)  F.embedding(i, w, padding_idx=1)  F.embedding(i, w, padding_idx=-2)
    F.embedding(i, w, norm_type=1.0)  F.embedding(i, w, max_norm=0.5) -> changes theirs.0
    F.embedding(i, w, scale_grad_by_freq=True) -> scale_grad_by_freq=True
    F.embedding(i, w, sparse=True) -> sparse=True  F.embedding_bag(i, w) -> _forward_only
"""
add_calls("i, w", torch.tensor([[1, 2, 2], [0, 1, 1]]), of=((4, 6),), text=embeddings)
layers = """
    Dropout(0.0)  Dropout(1.0)  Dropout(0.0, inplace=True)  Dropout(0.5).eval()
    Dropout(0.5, inplace=True).eval()  AlphaDropout(0.5)
    FeatureAlphaDropout(0.5)  RReLU() -> rrelu
"""
add_layers(IMAGE, layers)
rng = torch.tensor([5, 6])
dropout = torch.ops.triton_kernels.dropout
drawn = "dropout(x, 0.5, rng, 1, 0)  dropout(x.T, 0.5, rng, 1, 0) -> in another order"
add_calls("x", ROWS, text=drawn)

# --- shapes ---------------------------------------------------------------------------------------

shapes = """
    x.permute(0, 2, 3, 1)  x.permute(0, -1, -2, 1)  x.transpose(1, -1)  x.mT  x.T  x[0, 0].t()
    x.swapaxes(1, 2)  x.movedim(1, -1)
    x.unsqueeze(0)  x.unsqueeze(-1)  x[:1].squeeze()  x[:1].squeeze(0)  x[:1].squeeze(-4)
    x.squeeze(0)  x[:1, :1].squeeze((0, -3))  x.flatten(1)  x.unflatten(-1, (2, 4))  x.view(2, -1)
    x.transpose(1, 2).reshape(2, -1)  x.permute(0, 2, 3, 1).reshape(2, 6, -1)
    x[:, :1].expand(2, 5, 6, 8)  x[0, 0].expand(3, -1, -1)
    x.repeat(1, 2, 1, 1)  x.repeat(3, 1, 1, 1, 2)  torch.tile(x, (2,))  x.repeat_interleave(2, 1)
    x[:, 1:3]  x[..., 1:]  x[:, :, ::2]  x[:, :, 1:-1:3]  x[..., -3:]  x[:, 5:]  x[:, -1]
    x[:, 0, ..., -2]  x.select(-1, -1)  x.narrow(-2, 1, 3)
    torch.cat(x.unbind())  torch.stack(x.unbind(-1), -2)  torch.stack(x.unbind(1)[1:])
    torch.cat(x.chunk(3, 1), -3)  torch.cat(x.chunk(3, -1)[::-1], -1)
    torch.cat(x.split(4, 2)[::-1], 2)  torch.cat(x.split([1, 7], -1)[::-1], -1)
    torch.cat(x.tensor_split(3, -1)[::-1], -1)  torch.cat([x, x * 2], -1)
    torch.cat([x, x.permute(0, 1, 2, 3)[..., :1]], dim=-1)  torch.cat([x, torch.zeros(0)], 1)
    torch.cat([x, x.double()], 1)  torch.stack([x, x])  torch.stack([x, x], -1)
    torch.hstack([x, x])  torch.ops.aten.stack([x, x], 1)
    x.clone()  x.clone(memory_format=torch.channels_last)
    x.contiguous(memory_format=torch.channels_last)  x.to(memory_format=torch.channels_last)
    x.to(torch.float64)  x.double().float()  x.to(torch.float64, non_blocking=True, copy=True)
    x.detach() * x  x.data + x
    torch.ops.aten.expand(x[:1], [2, 4, 6, 8], implicit=True)
    torch.ops.aten.lift_fresh(x)  torch.ops.aten.lift_fresh_copy(x)  torch.ops.aten.alias(x)
    torch.ops.aten.split.sizes(x, [1, 3], 1)[1]  torch.ops.aten.split.Tensor(x, 3, 1)[1]
    torch.ops.aten._unsafe_view(x, [8, 48])
    torch.slice_copy(x, 1, 0, 2)  x.rot90(2, (2, 3))  x.flip(-1)
    x.roll(1, -1)  x.unfold(2, 2, 2)  x.diagonal()
    x.view(torch.int32).float() -> dtype=torch.int32  x.tril()
    x.as_strided((2, 3), (1, 2)) -> as_strided  x.mean((2, 3))  x.sum(1)
    x.amax(1)  x.var(1)  x.norm()  x.sort(-1)[0]
    x.topk(2)[0]  x.argmax(1) * x[:, 0]
"""
add_calls("x", IMAGE, text=shapes)
in_no_table = """
    F.cosine_similarity(x, x.flip(1))  x.sort(dim=-1, stable=True)[0]
    x.median(1)[0]  torch.var_mean(x, 1)[1]  x.cumprod(1)
    F.celu(x)  F.unfold(x, 2)  F.adaptive_max_pool2d(x, 2)  F.rrelu(x)  x.long().float() + x
    F.pairwise_distance(x, 2 * x)  F.cross_entropy(x, x[:, 0].long() % 2, label_smoothing=0.1)
    torch.gru_cell(x[0, 0], x[0, 1], x[0].tile(1, 4, 1)[0], x[0].tile(1, 4, 1)[1])
    F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)  torch.linalg.inv(x[0, 0, :, :6])
    torch.complex(x, 2 * x).abs()  torch.fft.rfft2(x).abs()  torch.fft.fft(x).conj().imag
    torch.view_as_real(torch.fft.fft(x) * (1 + 2j))  (torch.fft.fft(x) @ (x * 1j).mT).real
    torch.fft.irfft2(torch.fft.fftshift(torch.fft.rfft2(x)) + x.sum())
    torch.bernoulli(x.sigmoid()) * x
"""
add_calls("x", IMAGE, text=in_no_table)

# --- arithmetic -----------------------------------------------------------------------------------


def doubled(x: Tensor, where) -> Tensor:
    """In the elements that an index names, as a softmax of some channels is written in place."""
    x = x.clone()
    x[where] = x[where] * 2
    return x


arithmetic = """
    x + y  x + 2  2 + x  x - y  x - 2  2 - x  x * y  x * 2  x / y  x / 2  2 / x  x / 0  x / -0.0
    -x  x**2  x.abs() ** y  2**x  x % 3  x * True
    torch.add(x, y, alpha=3)  torch.add(x, 2, alpha=3)  torch.sub(x, y, alpha=3)
    torch.sub(x, 2, alpha=3)  torch.rsub(x, y, alpha=3)  torch.rsub(x, 2, alpha=3)
    torch.add(0.5, x, alpha=3)  torch.sub(0.5, x, alpha=3)
    torch.rsub(x, y)  torch.div(x, y, rounding_mode='floor')
    torch.div(x, 2, rounding_mode='trunc')  x.detach() // 2 + x
    torch.floor_divide(x.detach(), y.detach().abs() + 1) + x  torch.remainder(x, y.abs() + 1)
    x + y.double()  x.double() * y  x + torch.tensor(2)
    x * torch.tensor(2.0, dtype=torch.float64)  x.half() + 2  x.bfloat16() * y.bfloat16()
    (x > 0) * y  (x > 0).float() + y  ((x > 0) & (y > 0) | (x > y)) * x  (x == y) * x
    (x != y) * x  (x <= y) * x  (x < y) * x  (x >= y) * x  ~(x >= y) * x
    torch.arange(8) * x  torch.arange(8) / 3 + x  x + torch.arange(6)[:, None]
    x[:, :1] + y  y + x[:1]  x[0, 0, 0] * y  x.transpose(2, 3) + y.transpose(2, 3)
    x.permute(1, 0, 2, 3) * y[:1].permute(1, 0, 2, 3)  x[:, :1] * y[:, :, :1]
    x.mT + y[:, :, :, :6].mT[:, :, :1]  x.clone().add_(y)  x.clone().mul_(2)
    torch.abs(x)  torch.ceil(x) + x  torch.floor(x) * x  torch.sign(x) * y  torch.square(x)
    torch.clamp(x, -1, 1)  torch.clamp(x, min=0.5)  x.clamp(max=y)
    torch.cos(x)  torch.sin(x)  torch.exp(x)  torch.log(x.abs())  torch.reciprocal(x)
    torch.rsqrt(x.abs())  torch.sqrt(x.abs())  torch.sigmoid(x)  torch.tanh(x)
    x.cumsum(-1)  x.cumsum(1, dtype=torch.float64)
    torch.maximum(x, y)  torch.minimum(x, y)  torch.where(x > y, x, y)  torch.where(x > 0, x, 0.0)
    x.masked_fill(y > 0, -2.0)  x.masked_fill(y > 0, y[0, 0, 0, 0])
    x[:, [2, 0]]  x[[1, 0], :, [2, 3]]  x[[1, 0]]  x[:, torch.tensor([2, 0])]
    x[:, (2, 0)]  x[:, range(2)]  doubled(x, 1)  doubled(x, [1, 0])  doubled(x, (0, [2, 0]))
    doubled(x, (..., range(2)))  doubled(x, (slice(None), torch.tensor([2, 0])))
    x.index_select(1, torch.tensor([2, 0, 2]))  x.gather(1, torch.tensor([2, 0]).expand(2, 4, 6, 2))
    torch.gather(x, 1, torch.tensor([2, 0]).expand(2, 4, 6, 2), sparse_grad=True)
    torch.zeros_like(x) + y  torch.ones_like(x, dtype=torch.float64) + y  torch.full_like(x, 3) + y
    torch.full_like(x, 3, memory_format=torch.channels_last) * y
    x.new_zeros(8) + y  x.new_ones(8) + y  x.new_full((8,), 2.0) + y  torch.full((8,), 2.0) + y
    torch.zeros(8) + x  torch.ones(8) * x  torch.zeros(8, device=x.device) + x
    torch.scalar_tensor(2.0) * x  F.one_hot(torch.arange(6), 8) * x
    torch.bitwise_not(x > 0) * y  torch.bitwise_xor(x > 0, y > 0) * x  (torch.arange(8) << 2) * x
    (torch.arange(8) >> 1) * x  torch.bitwise_left_shift(torch.arange(8), 1) * x
    torch.logical_not(x) * y  torch.logical_or(x > 0, y > 0) * x
    torch.logical_and(x > 0, y > 0) * x
    torch.quantile(x, 0.3, 1)  x.abs().quantile(0.9, dim=-1, keepdim=True)  x.quantile(0.5)
    torch.nanquantile(x, 0.5, 2)  torch.quantile(x, torch.tensor([0.1, 0.5], dtype=x.dtype), 1)
    x.clamp_min(0)  torch.lerp(x, y, 0.3)  torch.hypot(x, y)
    torch.addcmul(x, x, y, value=2)  torch.nan_to_num(x)
    torch.erf(x)  torch.logsumexp(x, 1)  torch.rand(8) + x
    torch.randn_like(x) + x  torch.normal(x, 2.0) * x  torch.rand(8, generator=_generator) -> own
    torch.outer(x[0, 0, 0], y[0, 0, 0])
    torch.cat([x.reshape(2, 6, 32), y.reshape(2, 6, 32)], 1)[:, 3:9].reshape(x.shape) * y
"""
add_calls("x, y", IMAGE, IMAGE, text=arithmetic)
