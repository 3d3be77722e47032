"""The UNet with forward and backward planned together: no autograd between its layers.

Every layer is y = conv(act(norm(x))) + bias + embedding + residual, and its kernels are cut so that
no pass over memory is made for an addition, a bias, a statistic or a concatenation:

    forward                                        backward, given dy
    table   mean, rstd, gain, offset per (n, c)    dz = (dy * conv^T) act'(z); its sums per (n, c)
            from the sums of the layers before     coeff, and the gradients of gain, offset, bias
    a       act(z), one pass, of one tensor or       and embedding, from the sums
            of the two halves of a concat          dx = p dz + q x + r + what other consumers of x
    y       conv(a) + bias + emb + residual;         sent, one pass, written as two halves
            its sums per (n, c)                    gradient of the weight, off the critical path

The gradients go straight into the flat gradient buffer. The embedding's layers stay in autograd:
together they are three matrix products, see `EmbeddingLayers`.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triton_kernels import fused

from .flat import FlatParameters
from .layers import Conv1d, Conv2d, GroupNorm, Linear
from .side_stream import SideStream
from .unet import AttentionBlock, Downsample, ResBlock, UNet, Upsample

TOGETHER = ("emb_layers.1.weight", "emb_layers.1.bias")  # for FlatParameters
_DTYPES = (torch.bfloat16, torch.float16)
_CHANNELS = 16  # the stem's and the head's few channels are padded to a multiple of this


log = logging.getLogger(__name__)


def training_network(model: nn.Module, flat: FlatParameters) -> Callable[..., Tensor]:
    """What a training step calls as `forward_nhwc`: the plan if there is one for this model and
    backend, else the model itself, and the log says why."""
    backend = model.backend
    if backend.name != "triton" or backend.dtype not in _DTYPES:
        return model.forward_nhwc
    refusal = FusedUNet.refusal(model) or _missing_tile(model)
    if refusal is not None:
        log.warning("the layers run one by one, without the fused plan: %s", refusal)
        return model.forward_nhwc
    return FusedUNet(model, flat, fused)


def _missing_tile(model: UNet) -> str | None:
    """Why the fused convolutions cannot do the shapes of this model on this GPU, or None."""
    for size, weight, border in _convolutions(model):
        shape = (1, *size, weight[1])
        if not fused.conv_fused_supported(shape, weight, model.backend.dtype, border):
            halves = "" if border is None else f" of {border} and {weight[1] - border}"
            return (
                f"this GPU has no tile for the convolution of {weight[1]} channels{halves} into"
                f" {weight[0]} over {size[0]}x{size[1]} pixels"
            )
    return None


def _convolutions(
    model: UNet,
) -> Iterator[tuple[tuple[int, int], tuple[int, ...], int | None]]:
    """The plan's convolutions: (H, W), [CO, CI, R, S], and where one input of two ends."""
    height, width = model.image_size
    channels = model.input_blocks[0][0].weight.shape[0]
    yield (height, width), (channels, _CHANNELS, 3, 3), None
    for layer in model.layers():
        size = (height, width)
        if isinstance(layer, ResBlock):
            first, second = layer.in_layers["2"].weight, layer.out_layers["3"].weight
            yield size, tuple(first.shape), channels if first.shape[1] != channels else None
            yield size, tuple(second.shape), None
            channels = second.shape[0]
        elif isinstance(layer, AttentionBlock):
            yield size, (3 * channels, channels, 1, 1), None
            yield size, (channels, channels, 1, 1), None
        elif isinstance(layer, Downsample):
            height, width = height // 2, width // 2
        elif isinstance(layer, Upsample):
            height, width = height * 2, width * 2
    yield (height, width), (_CHANNELS, channels, 3, 3), None


@dataclass
class Feature:
    """An activation and what the next norm has to know of it."""

    x: Tensor  # [N, H, W, C]
    partials: Tensor  # [N, K, 2, C], see fused_reference
    pixels: int  # that the partials describe; fewer than H * W after nearest upsampling
    source: Tensor | None = None  # [N, H / 2, W / 2, C], where x is it upsampled


@dataclass
class Gradient:
    """The gradient of a Feature."""

    dx: Tensor  # [N, H, W, C]; of an upsampled Feature: of its source
    rows: Tensor  # [rows, C], whose sum is that of dx over samples and pixels
    sums: object | None = None  # the plan's RowSums, if the rows are its own


class _Parameters:
    """Weight and bias of a module as the kernels take them, and the places of their gradients."""

    def __init__(self, plan: "FusedUNet", name: str, module: nn.Module) -> None:
        self.weight = plan.low[f"{name}.weight"]
        self.grad_weight = plan.grads[f"{name}.weight"]
        if isinstance(module, Conv1d):
            self.weight, self.grad_weight = self.weight[..., None], self.grad_weight[..., None]
        self.bias = plan.params[f"{name}.bias"]
        self.grad_bias = plan.grads[f"{name}.bias"]


class _Norm:
    def __init__(self, plan: "FusedUNet", name: str, module: GroupNorm) -> None:
        self.kernels, self.num_groups, self.eps = plan.kernels, module.num_groups, module.eps
        self.sums = plan.sums
        self.weight, self.bias = plan.params[f"{name}.weight"], plan.params[f"{name}.bias"]
        self.grad_weight, self.grad_bias = plan.grads[f"{name}.weight"], plan.grads[f"{name}.bias"]

    def table(self, *features: Feature) -> Tensor:  # [N, 4, C]
        return self.kernels.norm_table(
            tuple(f.partials for f in features),
            tuple(f.pixels for f in features),
            self.num_groups,
            self.weight,
            self.bias,
            self.eps,
        )

    def grad_table(self, partials: Tensor, table: Tensor, pixels: int, **outputs) -> Tensor:
        return self.kernels.norm_grad_table(
            partials,
            table,
            pixels,
            self.num_groups,
            self.grad_weight,
            self.grad_bias,
            accumulate=True,
            sums=self.sums,
            **outputs,
        )


class _ResBlock:
    """skip(x) + conv(silu(norm(conv(silu(norm(x))) + emb))), x perhaps a concat of two."""

    def __init__(self, plan: "FusedUNet", name: str, module: ResBlock) -> None:
        self.kernels, self.aside, self.sums = plan.kernels, plan.aside, plan.sums
        self.norm1 = _Norm(plan, f"{name}.in_layers.0", module.in_layers["0"])
        self.conv1 = _Parameters(plan, f"{name}.in_layers.2", module.in_layers["2"])
        self.norm2 = _Norm(plan, f"{name}.out_layers.0", module.out_layers["0"])
        self.conv2 = _Parameters(plan, f"{name}.out_layers.3", module.out_layers["3"])
        self.skip = None
        if isinstance(module.skip_connection, Conv2d):
            self.skip = _Parameters(plan, f"{name}.skip_connection", module.skip_connection)
        self.columns = plan.embedding.columns(name)  # of this block in the embedding's rows

    def forward(self, x: Feature, other: Feature | None, emb: Tensor) -> Feature:
        k, features = self.kernels, (x,) if other is None else (x, other)
        xs = tuple(f.x for f in features)
        table1 = self.norm1.table(*features)
        a1 = k.apply(x.x, None if other is None else other.x, table1, "silu")
        h, partials = k.conv_forward(
            a1, self.conv1.weight, self.conv1.bias, emb=emb[:, self.columns], stats=True
        )
        h = Feature(h, partials, h.shape[1] * h.shape[2])
        table2 = self.norm2.table(h)
        a2 = k.apply(h.x, None, table2, "silu")
        if self.skip is None:
            shortcut = {"residual": x.x}
        else:  # more terms of the same sum
            weights = self._split(self.skip.weight[:, :, 0, 0], xs)
            shortcut = {
                "extra": tuple(zip(xs, weights, strict=True)),
                "extra_bias": self.skip.bias,
            }
        y, partials = k.conv_forward(a2, self.conv2.weight, self.conv2.bias, stats=True, **shortcut)
        self.tape = xs, x.source, table1, a1, h, table2, a2
        return Feature(y, partials, h.pixels)

    def backward(
        self, dy: Gradient, more: Tensor | None, d_emb: Tensor
    ) -> tuple[Gradient, Tensor | None]:
        """The gradients of x, with `more` of it from elsewhere added, and of the concat's other."""
        k, (xs, source, table1, a1, h, table2, a2) = self.kernels, self.tape
        self.tape = None

        def last_parameters() -> None:
            k.conv_weight_grad(a2, dy.dx, self.conv2.grad_weight, accumulate=True)
            _bias_grad(k, dy, self.conv2)
            if self.skip is not None:
                _bias_grad(k, dy, self.skip)
                grads = self._split(self.skip.grad_weight, xs)
                for x, grad in zip(xs, grads, strict=True):
                    k.conv_weight_grad(x, dy.dx, grad, accumulate=True)

        self.aside.run(last_parameters)
        dz, partials = k.conv_input_grad(
            dy.dx, self.conv2.weight, inputs=(h.x,), table=table2, activation="silu"
        )
        coeff = self.norm2.grad_table(
            partials,
            table2,
            h.pixels,
            input_partials=h.partials,
            emb_grad_out=d_emb[:, self.columns],
            bias_grad_out=self.conv1.grad_bias,
        )
        dh, _, _ = k.norm_dx(dz, h.x, None, coeff)
        self.aside.run(lambda: k.conv_weight_grad(a1, dh, self.conv1.grad_weight, accumulate=True))
        dz, partials = k.conv_input_grad(
            dh, self.conv1.weight, inputs=xs, table=table1, activation="silu"
        )
        coeff = self.norm1.grad_table(partials, table1, h.pixels)
        x1 = xs[0] if source is None else source
        x2 = xs[1] if len(xs) == 2 else None
        options = {"sums": self.sums, "upsample1": source is not None}
        if self.skip is None:
            adds = {"add1": dy.dx, "add1_second": more}
            dx1, dx2, rows = k.norm_dx(dz, x1, x2, coeff, **adds, **options)
        else:
            weight = self.skip.weight
            dx1, dx2, rows = k.skip_dx(dy.dx, weight, dz, x1, x2, coeff, add1=more, **options)
        return Gradient(dx1, rows, self.sums), dx2

    @staticmethod
    def _split(weight: Tensor, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return weight.split([x.shape[3] for x in xs], dim=1)


class _Attention:
    """x + proj(attention(qkv(norm(x))))"""

    def __init__(self, plan: "FusedUNet", name: str, module: AttentionBlock) -> None:
        self.kernels, self.aside, self.sums = plan.kernels, plan.aside, plan.sums
        self.num_heads, self.order = module.num_heads, module.order
        self.norm = _Norm(plan, f"{name}.norm", module.norm)
        self.qkv = _Parameters(plan, f"{name}.qkv", module.qkv)
        self.proj = _Parameters(plan, f"{name}.proj_out", module.proj_out)

    def forward(self, x: Feature) -> Feature:
        k = self.kernels
        table = self.norm.table(x)
        a = k.apply(x.x, None, table, "identity")
        qkv, _ = k.conv_forward(a, self.qkv.weight, self.qkv.bias)
        o, state = k.attention_forward(qkv.flatten(1, 2), self.num_heads, self.order)
        y, partials = k.conv_forward(
            o.view(x.x.shape), self.proj.weight, self.proj.bias, residual=x.x, stats=True
        )
        self.tape = x, table, a, qkv, o, state
        return Feature(y, partials, y.shape[1] * y.shape[2])

    def backward(self, dy: Gradient, more: Tensor | None) -> Gradient:
        """The gradient of x, with `more` of it from elsewhere added."""
        k, (x, table, a, qkv, o, state) = self.kernels, self.tape
        self.tape = None

        def proj_parameters() -> None:
            _bias_grad(k, dy, self.proj)
            grad = self.proj.grad_weight
            k.conv_weight_grad(o.view(dy.dx.shape), dy.dx, grad, accumulate=True)

        self.aside.run(proj_parameters)
        do = k.conv_plain_input_grad(dy.dx, self.proj.weight)
        d_qkv = k.attention_backward(
            do.flatten(1, 2), qkv.flatten(1, 2), o, state, self.num_heads, self.order
        ).view(qkv.shape)

        def qkv_parameters() -> None:
            k.column_sum(d_qkv, self.qkv.grad_bias)
            k.conv_weight_grad(a, d_qkv, self.qkv.grad_weight, accumulate=True)

        self.aside.run(qkv_parameters)
        dz, partials = k.conv_input_grad(
            d_qkv, self.qkv.weight, inputs=(x.x,), table=table, activation="identity"
        )
        coeff = self.norm.grad_table(partials, table, x.x.shape[1] * x.x.shape[2])
        dx, _, rows = k.norm_dx(dz, x.x, None, coeff, add1=dy.dx, add1_second=more, sums=self.sums)
        return Gradient(dx, rows, self.sums)


class _Downsample:
    def __init__(self, plan: "FusedUNet") -> None:
        self.kernels = plan.kernels

    def forward(self, x: Feature) -> Feature:
        y = self.kernels.avg_pool(x.x)
        return Feature(y, self.kernels.tensor_partials(y), y.shape[1] * y.shape[2])

    def backward(self, dy: Gradient, more: Tensor | None) -> Gradient:
        return Gradient(*self.kernels.avg_pool_grad(dy.dx, more))


class _Upsample:
    def __init__(self, plan: "FusedUNet") -> None:
        self.kernels = plan.kernels

    def forward(self, x: Feature) -> Feature:
        return Feature(self.kernels.upsample(x.x), x.partials, x.pixels, source=x.x)

    def backward(self, dy: Gradient, more: Tensor | None) -> Gradient:
        assert more is None  # its input has no other consumer
        return dy  # the block behind it has already summed over the 2x2 pixels


class EmbeddingLayers:
    """The blocks' projections of the embedding as one matrix product.

    The flat buffer holds their weights, and their biases, side by side (see `TOGETHER`), and one
    leaf each covers them all.
    """

    def __init__(self, model: UNet, flat: FlatParameters) -> None:
        self.model = model
        names = [name for name, module in model.named_modules() if isinstance(module, ResBlock)]
        self._columns, start = {}, 0
        for name in names:
            width = model.get_submodule(f"{name}.emb_layers.1").weight.shape[0]
            self._columns[name] = slice(start, start + width)
            start += width
        weights = [f"{name}.emb_layers.1.weight" for name in names]
        biases = [f"{name}.emb_layers.1.bias" for name in names]
        self.projection = Linear(4 * model.model_channels, start, backend=model.backend)
        self.projection.weight = _joined(flat, weights, (start, 4 * model.model_channels))
        self.projection.bias = _joined(flat, biases, (start,))

    def columns(self, name: str) -> slice:
        """The columns of a block in `__call__`'s result."""
        return self._columns[name]

    def __call__(self, *inputs) -> Tensor:  # those of UNet.embed -> [N, sum of the widths]
        return self.projection(self.model.embed(*inputs))


def _joined(flat: FlatParameters, names: list[str], shape: tuple[int, ...]) -> nn.Parameter:
    """One parameter over neighbours in the flat buffer."""
    values = flat.views(flat.param)
    offset = values[names[0]].storage_offset()
    end = offset
    for name in names:
        if values[name].storage_offset() != end:
            raise ValueError(f"{name} does not follow its neighbour in the flat buffer")
        end += values[name].numel()
    joined = nn.Parameter(flat.param[offset:end].view(shape))
    joined.grad = flat.grad[offset:end].view(shape)
    return joined


class FusedUNet:
    """Runs a `UNet` by the plan above. `refusal` says whether it can."""

    def __init__(self, model: UNet, flat: FlatParameters, kernels: ModuleType) -> None:
        self.model, self.kernels, self.dtype = model, kernels, model.backend.dtype
        self.params, self.grads = flat.views(flat.param), flat.views(flat.grad)
        self.low = flat.views(flat.low(self.dtype))
        self.aside = SideStream(flat.param.device)  # the gradients of weights and biases
        self.sums = kernels.RowSums(flat.grad)
        self.embedding = EmbeddingLayers(model, flat)
        self.stem = _Parameters(self, "input_blocks.0.0", model.input_blocks[0][0])
        self.encoder = [
            [self._layer(f"input_blocks.{i}.{j}", layer) for j, layer in enumerate(block)]
            for i, block in enumerate(model.input_blocks)
            if i > 0
        ]
        self.middle = [
            self._layer(f"middle_block.{j}", layer) for j, layer in enumerate(model.middle_block)
        ]
        self.decoder = [
            [self._layer(f"output_blocks.{i}.{j}", layer) for j, layer in enumerate(block)]
            for i, block in enumerate(model.output_blocks)
        ]
        self.head_norm = _Norm(self, "out.0", model.out["0"])
        self.head = _Parameters(self, "out.2", model.out["2"])

    @staticmethod
    def refusal(model: nn.Module) -> str | None:
        """Why this model has no plan, or None if it has one."""
        if not isinstance(model, UNet):
            return f"{type(model).__name__} has none"
        for option, wanted in (
            ("conv_resample", False),
            ("downsample_padding", 1),
            ("resblock_updown", False),
            ("use_scale_shift_norm", False),
            ("dropout", 0),
        ):
            if getattr(model, option) != wanted:
                return f"it does not cover model.{option}={getattr(model, option)}"
        for name, module in model.named_modules():
            if isinstance(module, GroupNorm) and len(module.weight) % _CHANNELS:
                return f"{name} has {len(module.weight)} channels, no multiple of {_CHANNELS}"
        return None

    def __call__(
        self,
        x: Tensor,
        t: Tensor,
        labels: Tensor | None = None,
        *,
        rng: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """As `UNet.forward_nhwc`; backward adds to the flat gradient."""
        emb = self.embedding(t, labels, rng, first)
        return _Planned.apply(emb, x.to(self.dtype), self)

    def forward(self, emb: Tensor, x: Tensor) -> Tensor:  # [N, E], [N, H, W, CI]
        k = self.kernels
        self.d_emb = torch.empty_like(emb)
        self.image = _pad_channels(x, 3)
        y, partials = k.conv_forward(
            self.image, _pad_channels(self.stem.weight, 1), self.stem.bias, stats=True
        )
        h = Feature(y, partials, y.shape[1] * y.shape[2])
        skips = [h]
        for block in self.encoder:
            h = self._run(block, h, None, emb)
            skips.append(h)
        h = self._run(self.middle, h, None, emb)
        for block in self.decoder:
            h = self._run(block, h, skips.pop(), emb)
        table = self.head_norm.table(h)
        a = k.apply(h.x, None, table, "silu")
        co = self.head.bias.shape[0]
        weight, bias = _pad_channels(self.head.weight, 0), _pad_channels(self.head.bias, 0)
        y, _ = k.conv_forward(a, weight, bias)
        self.tape = h, table, a, weight
        return y[..., :co].contiguous()

    def backward(self, dy: Tensor) -> Tensor:  # [N, H, W, CO] -> gradient of emb [N, E]
        k, (h, table, a, weight) = self.kernels, self.tape
        self.tape = None
        k.column_sum(dy, self.head.grad_bias)
        dy = _pad_channels(dy, 3)
        dz, partials = k.conv_input_grad(dy, weight, inputs=(h.x,), table=table, activation="silu")
        _padded_weight_grad(k, a, dy, self.head.grad_weight)
        coeff = self.head_norm.grad_table(partials, table, h.x.shape[1] * h.x.shape[2])
        dx, _, rows = k.norm_dx(dz, h.x, None, coeff, sums=self.sums)
        d = Gradient(dx, rows, self.sums)
        del a, dz, h, dx
        skips = []
        for block in reversed(self.decoder):
            d, d_skip = self._run_back(block, d, None)
            skips.append(d_skip)
        # skips[i] is the gradient that the decoder sent to the encoder's feature i
        d, _ = self._run_back(self.middle, d, skips.pop())
        for block in reversed(self.encoder):
            d, _ = self._run_back(block, d, skips.pop())
        _bias_grad(k, d, self.stem)
        _padded_weight_grad(k, self.image, d.dx, self.stem.grad_weight)
        self.aside.join()
        self.sums.flush()
        d_emb, self.d_emb, self.image = self.d_emb, None, None
        return d_emb

    def _run(self, block: list, h: Feature, other: Feature | None, emb: Tensor) -> Feature:
        for layer in block:
            if isinstance(layer, _ResBlock):
                h = layer.forward(h, other, emb)
                other = None
            else:
                h = layer.forward(h)
        return h

    def _run_back(
        self, block: list, d: Gradient, more: Tensor | None
    ) -> tuple[Gradient, Tensor | None]:
        """Back through a block whose input also has the gradient `more` from elsewhere."""
        d_other = None
        for i, layer in reversed(list(enumerate(block))):
            added = more if i == 0 else None
            if isinstance(layer, _ResBlock):
                d, d_other = layer.backward(d, added, self.d_emb)
            else:
                d = layer.backward(d, added)
        return d, d_other

    def _layer(self, name: str, module: nn.Module):
        if isinstance(module, ResBlock):
            return _ResBlock(self, name, module)
        if isinstance(module, AttentionBlock):
            return _Attention(self, name, module)
        if isinstance(module, Downsample):
            return _Downsample(self)
        assert isinstance(module, Upsample), type(module)
        return _Upsample(self)


def _bias_grad(kernels: ModuleType, dy: Gradient, conv: _Parameters) -> None:
    """The gradient of the bias of the convolution whose output dy is the gradient of."""
    kernels.bias_grad(dy.rows, conv.grad_bias, accumulate=True, sums=dy.sums)


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, emb: Tensor, x: Tensor, plan: FusedUNet) -> Tensor:
        ctx.plan = plan
        return plan.forward(emb, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.plan.backward(dy.contiguous()), None, None


def _pad_channels(x: Tensor, dim: int) -> Tensor:
    """Zeros behind dimension `dim` up to a multiple of _CHANNELS."""
    missing = -x.shape[dim] % _CHANNELS
    if not missing:
        return x
    padded = F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing])
    return padded.contiguous(memory_format=torch.channels_last) if dim < 2 < x.ndim else padded


def _padded_weight_grad(kernels: ModuleType, x: Tensor, dy: Tensor, out: Tensor) -> None:
    """`conv_weight_grad` where x or dy has more channels than `out`."""
    shape = (dy.shape[3], x.shape[3], *out.shape[2:])
    padded = torch.zeros(shape, dtype=out.dtype, device=out.device)
    padded = padded.contiguous(memory_format=torch.channels_last)
    kernels.conv_weight_grad(x, dy, padded)
    out += padded[: out.shape[0], : out.shape[1]]
