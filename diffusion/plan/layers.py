"""The layers of the planned network, see `plan.unet`: each with its forward and its backward.

A layer keeps on its tape what its backward reads, and lets go of it as it is read. With `recompute`
it keeps the inputs of its norms and their tables alone, and makes the activations behind the norms
again: one more pass over memory for each.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Protocol

from torch import Tensor, nn

from triton_kernels.noise.dropout import Mask
from triton_kernels.reductions.row_sums import RowSums
from triton_kernels.runtime.dependent_launch import dependent_launches

from ..models.blocks import AttentionBlock, Downsample, ResBlock, Upsample
from ..models.layers import Conv1d, Conv2d, GroupNorm
from .embedding import EmbeddingLayers, Step
from .side_stream import SideStream
from .weight_grads import WeightGrads

# An upsampled activation, four times its source, of more bytes than this is made again in a pass
_MUCH_MEMORY = 32 * 2**20
SUM_PROGRAMS = 128  # that take the sums of a tensor, at least


@dataclass
class Feature:
    """An activation and what the next norm has to know of it."""

    x: Tensor | None  # [N, H, W, C]; None: nobody has upsampled the source yet
    partials: Tensor  # [N, K, 2, C], see fused.reference
    pixels: int  # that the partials describe; fewer than H * W after nearest upsampling
    source: Tensor | None = None  # [N, H / 2, W / 2, C], where x is it upsampled


@dataclass
class Gradient:
    """The gradient of a Feature."""

    dx: Tensor  # [N, H, W, C]; of an upsampled Feature: of its source
    rows: Tensor  # [rows, C] of the plan's RowSums, whose sum is that of dx over samples and pixels


class Plan(Protocol):
    """What layers share."""

    kernels: ModuleType  # `triton_kernels.fused_ops` or its reference
    recompute: bool
    aside: SideStream  # for the gradients of weights and biases
    weight_grads: WeightGrads  # those of residual and attention blocks, in groups
    sums: RowSums
    accumulates: bool  # whether gradients of filters are added to what is there
    low: dict[str, Tensor]  # parameters in the precision of the arithmetic
    params: dict[str, Tensor]
    grads: dict[str, Tensor]
    embedding: EmbeddingLayers


class Parameters:
    """Weight and bias of a module as the kernels take them, and the places of their gradients."""

    def __init__(self, plan: Plan, name: str, module: nn.Module) -> None:
        self.plan = plan
        self.master = plan.params[f"{name}.weight"]
        self.weight = plan.low[f"{name}.weight"]
        self.grad_weight = plan.grads[f"{name}.weight"]
        if isinstance(module, Conv1d):
            self.weight, self.grad_weight = self.weight[..., None], self.grad_weight[..., None]
        self.bias = plan.params[f"{name}.bias"]
        self.grad_bias = plan.grads[f"{name}.bias"]

    def upsampled_filters(self, small: Tensor, channels: tuple[int, int]) -> tuple | None:
        """The filters of the kernels that convolve on the small image what was upsampled from it,
        the first so many channels; None: they do not pay."""
        plan = self.plan
        if not plan.kernels.serves_upsampled(small, channels, len(self.bias), True):
            return None
        return plan.kernels.upsampled_filters(self.master, channels[0], self.weight.dtype)

    def weight_grad(self, x: Tensor, dy: Tensor, **options) -> None:
        """Add or write the gradient of the weight, where x [N, H, W, CI] is convolved."""
        plan = self.plan
        options["accumulate"] = plan.accumulates
        plan.kernels.conv_weight_grad(x, dy, self.grad_weight, **options)

    def bias_grad(self, rows: Tensor) -> None:
        """Add the gradient of the bias, the sum of the rows [rows, CO], at the end of backward."""
        plan = self.plan
        plan.kernels.bias_grad(rows, self.grad_bias, accumulate=True, sums=plan.sums)

    def all_grads(self, x: Tensor, dy: Tensor) -> None:
        """Both, where nothing has summed dy."""
        self.bias_grad(self.plan.kernels.tensor_rows(dy, self.plan.sums))
        self.weight_grad(x, dy)


class Norm:
    """A GroupNorm whose statistics come from the layers before it."""

    def __init__(self, plan: Plan, name: str, module: GroupNorm) -> None:
        self.kernels, self.num_groups, self.eps = plan.kernels, module.num_groups, module.eps
        self.sums = plan.sums
        self.weight, self.bias = plan.params[f"{name}.weight"], plan.params[f"{name}.bias"]
        self.grad_weight, self.grad_bias = plan.grads[f"{name}.weight"], plan.grads[f"{name}.bias"]

    def _statistics(self, features: tuple[Feature, ...]) -> tuple:
        """Of what the table of the concatenated features is made."""
        partials, pixels = tuple(f.partials for f in features), tuple(f.pixels for f in features)
        return partials, pixels, self.num_groups, self.weight, self.bias, self.eps

    def apply(
        self, features: tuple[Feature, ...], activation: str, **options
    ) -> tuple[Tensor, Tensor]:
        """act(z) of the concatenated features, and the norm's table [N, 4, C]."""
        return self.kernels.norm_apply(
            features[0].x,
            features[1].x if len(features) == 2 else None,
            *self._statistics(features),
            activation,
            **options,
        )

    def apply_upsampled(
        self, features: tuple[Feature, ...], activation: str, **options
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """`apply` where the source of the first is to be upsampled, with a table of the second
        alone as well; and the first upsampled."""
        return self.kernels.norm_apply_upsampled(
            features[0].source,
            features[1].x,
            *self._statistics(features),
            activation,
            **options,
        )

    def backward(
        self, dz: Tensor, x: Tensor, partials: Tensor, table: Tensor, **options
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of x, and its rows if they are wanted."""
        grads = self.grad_weight, self.grad_bias
        return self.kernels.norm_backward(
            dz, x, partials, table, self.num_groups, *grads, sums=self.sums, **options
        )

    def skip_backward(
        self, dy: Tensor, skip_weight: Tensor, dz: Tensor, *tensors: Tensor | None, **options
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The gradients of x1 and x2 and the first one's rows, where x = [x1, x2] also went through
        a 1x1 convolution; `tensors` are x1, x2, partials and table."""
        return self.kernels.skip_backward(
            dy,
            skip_weight,
            dz,
            *tensors,
            self.num_groups,
            self.grad_weight,
            self.grad_bias,
            sums=self.sums,
            **options,
        )


class FusedResBlock:
    """skip(x) + conv(dropout(silu(norm(conv(silu(norm(x))) + emb)))), x perhaps a concat of two."""

    def __init__(self, plan: Plan, name: str, module: ResBlock) -> None:
        self.plan, self.kernels, self.module = plan, plan.kernels, module
        self.norm1 = Norm(plan, f"{name}.in_layers.0", module.in_layers["0"])
        self.conv1 = Parameters(plan, f"{name}.in_layers.2", module.in_layers["2"])
        self.norm2 = Norm(plan, f"{name}.out_layers.0", module.out_layers["0"])
        self.conv2 = Parameters(plan, f"{name}.out_layers.3", module.out_layers["3"])
        self.skip = None
        if isinstance(module.skip_connection, Conv2d):
            self.skip = Parameters(plan, f"{name}.skip_connection", module.skip_connection)
        self.columns = plan.embedding.columns(name)  # of this block in the embedding's rows
        if module.use_scale_shift_norm:
            middle = (self.columns.start + self.columns.stop) // 2
            self.scale = slice(self.columns.start, middle)
            self.shift = slice(middle, self.columns.stop)

    def forward(self, x: Feature, other: Feature | None, step: Step) -> Feature:
        k, features = self.kernels, (x,) if other is None else (x, other)
        filters = None
        if x.x is None:
            filters = self._upsampled_filters(features)
            a1, (table1, second), large = self.norm1.apply_upsampled(features, "silu")
            x = replace(x, x=large)
        else:
            a1, table1 = self.norm1.apply(features, "silu")
            a1, second = self._resample(a1), None
        features = (x, *features[1:])
        xs = tuple(f.x for f in features)
        film = self.module.use_scale_shift_norm
        emb = None if film else step.emb[:, self.columns]
        if filters is None:
            terms = self.conv1.weight, self.conv1.bias
            h, partials = k.conv_forward(a1, *terms, emb=emb, stats=True)
        else:
            h, partials = k.conv_upsampled(a1, filters, self.conv1.bias, emb=emb)
        h = Feature(h, partials, h.shape[1] * h.shape[2])
        mask = self._mask(step)
        a2, table2 = self.norm2.apply((h,), "silu", mask=mask, **self._film(step))
        if self.skip is None:
            shortcut = {"residual": self._resample(x.x)}
        else:  # more terms of the same sum
            inputs = self._shortcut_inputs(xs)
            weights = self._split(self.skip.weight[:, :, 0, 0], inputs)
            shortcut = {
                "extra": tuple(zip(inputs, weights, strict=True)),
                "extra_bias": self.skip.bias,
            }
        y, partials = k.conv_forward(a2, self.conv2.weight, self.conv2.bias, stats=True, **shortcut)
        kept = (None, None) if self.plan.recompute else (a1, a2)
        if x.source is not None and (self.plan.recompute or x.x.nbytes > _MUCH_MEMORY):
            xs = (None, *xs[1:])
        self.tape = xs, x.source, (table1, second), filters, h, table2, mask, *kept
        return Feature(y, partials, h.pixels)

    def backward(
        self, dy: Gradient, more: Tensor | None, step: Step
    ) -> tuple[Gradient, Tensor | None]:
        """The gradients of x, with `more` of it from elsewhere added, and of the concat's other.
        The memory of `more` may be used for the first."""
        k, plan = self.kernels, self.plan
        xs, source, (table1, second), filters, h, table2, mask, a1, a2 = self.tape
        self.tape = None
        if xs[0] is None and (a1 is None or filters is None):
            xs = k.upsample(source), *xs[1:]
        if a2 is None:
            a2 = k.apply(h.x, None, table2, "silu", mask=mask)

        self.conv2.bias_grad(dy.rows)
        if self.skip is not None:
            self.skip.bias_grad(dy.rows)
            self._skip_weight_grads(self._shortcut_inputs(xs), source, dy.dx)
        dz, partials = k.conv_input_grad(
            dy.dx, self.conv2.weight, inputs=(h.x,), table=table2, activation="silu", mask=mask
        )
        outputs = {"input_partials": h.partials, "bias_grad_out": self.conv1.grad_bias}
        outputs |= self._emb_grads(step)
        dh, _ = self.norm2.backward(dz, h.x, partials, table2, out=dz, rows=False, **outputs)
        step.block_done()
        del h, dz
        if a1 is None:
            a1 = self._first(xs, table1)
        grads = self.conv1.grad_weight, self.conv2.grad_weight
        plan.weight_grads.add((a1, dh, grads[0]), (a2, dy.dx, grads[1]))
        del a1, a2
        if filters is None:
            dz, partials = self._first_grad(dh, xs, table1)
            dz2 = None
        else:
            options = {"inputs": (source, xs[1]), "tables": (table1, second)}
            dz, dz2, partials = k.conv_upsampled_input_grad(
                dh, filters, **options, activation="silu"
            )
        del dh
        x1 = xs[0] if source is None else source
        upsample1 = source is not None
        if self.skip is not None and self.module.resample is None:
            x2 = xs[1] if len(xs) == 2 else None
            norm = x1, x2, partials, table1
            dx1, dx2, rows = self.norm1.skip_backward(
                dy.dx, self.skip.weight, dz, *norm, add1=more, dz2=dz2, upsample1=upsample1
            )
            return Gradient(dx1, rows), dx2
        add1 = dy.dx
        if self.module.resample is not None:
            if self.skip is not None:
                add1 = k.conv_plain_input_grad(add1, self.skip.weight)
            add1, more = self._resample_grad(add1, more), None
        place = dz if more is None else more  # a summand that nobody else reads
        adds = {"add1": add1, "add1_second": more, "out": place, "upsample1": upsample1}
        return Gradient(*self.norm1.backward(dz, x1, partials, table1, **adds)), None

    def _skip_weight_grads(
        self, xs: tuple[Tensor | None, ...], source: Tensor | None, dy: Tensor
    ) -> None:
        """The gradient of the 1x1 filters of [x1, x2]. Where x1 is absent, it is its source
        upsampled, and each of its pixels is multiplied by the sum of dy over 2x2."""
        plan, kernels = self.plan, self.kernels
        first = source if xs[0] is None else xs[0]
        grads = self._split(self.skip.grad_weight, (first, *xs[1:]))
        present = [(x, dy, grad) for x, grad in zip(xs, grads, strict=True) if x is not None]
        plan.weight_grads.add(*present)

        def work(small: Tensor, dy: Tensor) -> None:
            summed = kernels.upsample_grad(dy)
            kernels.conv_weight_grad(small, summed, grads[0], accumulate=plan.accumulates)

        if xs[0] is None:
            plan.aside.run(work, source, dy)

    def _upsampled_filters(self, features: tuple[Feature, ...]) -> tuple | None:
        """What the first convolution uses if its first channels are upsampled, and that pays."""
        small, other = features[0].source, features[1].x
        if self.skip is None:
            return None
        return self.conv1.upsampled_filters(small, (small.shape[3], other.shape[3]))

    def _first(self, xs: tuple[Tensor, ...], table: Tensor) -> Tensor:
        """What the first convolution reads."""
        other = xs[1] if len(xs) == 2 else None
        return self._resample(self.kernels.apply(xs[0], other, table, "silu"))

    def _first_grad(
        self, dh: Tensor, xs: tuple[Tensor, ...], table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """dz of the first norm, and its partials."""
        k, weight = self.kernels, self.conv1.weight
        if self.module.resample is None:
            return k.conv_input_grad(dh, weight, inputs=xs, table=table, activation="silu")
        da = self._resample_grad(k.conv_plain_input_grad(dh, weight))
        return k.activation_grad(da, xs[0], table, "silu")

    def _shortcut_inputs(self, xs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """What the 1x1 filters multiply: x, resampled if the block does that."""
        return xs if self.module.resample is None else tuple(map(self._resample, xs))

    def _resample(self, x: Tensor) -> Tensor:
        if self.module.resample == "down":
            return self.kernels.avg_pool(x)
        return self.kernels.upsample(x) if self.module.resample == "up" else x

    def _resample_grad(self, dy: Tensor, more: Tensor | None = None) -> Tensor:
        if self.module.resample == "down":
            return self.kernels.avg_pool_grad(dy, more)[0]
        assert more is None  # the input of a block that upsamples has no other consumer
        return self.kernels.upsample_grad(dy)

    def _film(self, step: Step) -> dict[str, Tensor]:
        if not self.module.use_scale_shift_norm:
            return {}
        return {"scale": step.emb[:, self.scale], "shift": step.emb[:, self.shift]}

    def _emb_grads(self, step: Step) -> dict[str, Tensor]:
        """Where the second norm's backward puts the embedding's gradient, and what it needs."""
        if not self.module.use_scale_shift_norm:
            return {"emb_grad_out": step.d_emb[:, self.columns]}
        return {
            "weight": self.norm2.weight,
            "bias": self.norm2.bias,
            "scale": step.emb[:, self.scale],
            "grad_scale_out": step.d_emb[:, self.scale],
            "grad_shift_out": step.d_emb[:, self.shift],
        }

    def _mask(self, step: Step) -> Mask | None:
        module = self.module
        if module.dropout == 0 or not module.training:
            return None
        if step.rng is None:
            raise ValueError(f"dropout={module.dropout} in training needs rng (seed, step)")
        return Mask(module.dropout, step.rng, module.dropout_layer, step.first)

    @staticmethod
    def _split(weight: Tensor, xs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return weight.split([x.shape[3] for x in xs], dim=1)


class FusedAttention:
    """x + proj(attention(qkv(norm(x))))"""

    def __init__(self, plan: Plan, name: str, module: AttentionBlock) -> None:
        self.plan, self.kernels = plan, plan.kernels
        self.num_heads, self.order = module.num_heads, module.order
        self.norm = Norm(plan, f"{name}.norm", module.norm)
        self.qkv = Parameters(plan, f"{name}.qkv", module.qkv)
        self.proj = Parameters(plan, f"{name}.proj_out", module.proj_out)

    def forward(self, x: Feature) -> Feature:
        k = self.kernels
        a, table = self.norm.apply((x,), "identity")
        qkv, _ = k.conv_forward(a, self.qkv.weight, self.qkv.bias)
        o, state = k.attention_forward(qkv.flatten(1, 2), self.num_heads, self.order)
        y, partials = k.conv_forward(
            o.view(x.x.shape), self.proj.weight, self.proj.bias, residual=x.x, stats=True
        )
        self.tape = x.x, table, None if self.plan.recompute else a, qkv, o, state
        return Feature(y, partials, y.shape[1] * y.shape[2])

    def backward(self, dy: Gradient, more: Tensor | None) -> Gradient:
        """The gradient of x, with `more` of it from elsewhere added, and perhaps in its memory."""
        k, plan = self.kernels, self.plan
        x, table, a, qkv, o, state = self.tape
        self.tape = None
        self.proj.bias_grad(dy.rows)
        plan.weight_grads.add((o.view(x.shape), dy.dx, self.proj.grad_weight))
        do = k.conv_plain_input_grad(dy.dx, self.proj.weight)
        d_qkv, rows = k.attention_backward(
            do.flatten(1, 2), qkv.flatten(1, 2), o, state, self.num_heads, self.order, plan.sums
        )
        d_qkv = d_qkv.view(qkv.shape)
        self.qkv.bias_grad(rows)
        del do, o, qkv, state
        if a is None:
            a = k.apply(x, None, table, "identity")
        plan.weight_grads.add((a, d_qkv, self.qkv.grad_weight))
        del a
        dz, partials = k.conv_input_grad(
            d_qkv, self.qkv.weight, inputs=(x,), table=table, activation="identity"
        )
        adds = {"add1": dy.dx, "add1_second": more, "out": dz if more is None else more}
        return Gradient(*self.norm.backward(dz, x, partials, table, **adds))


class FusedDownsample:
    """2x2 means, or a convolution of stride 2."""

    def __init__(self, plan: Plan, name: str, module: Downsample) -> None:
        self.plan, self.kernels, self.padding = plan, plan.kernels, module.padding
        self.conv = None if module.op is None else Parameters(plan, f"{name}.op", module.op)

    def forward(self, x: Feature) -> Feature:
        k, conv = self.kernels, self.conv
        if conv is None:
            y = k.avg_pool(x.x)
        else:
            y = k.conv_down(x.x, conv.weight, conv.bias, self.padding)
            self.tape = x.x
        return Feature(y, k.tensor_partials(y, SUM_PROGRAMS), y.shape[1] * y.shape[2])

    def backward(self, dy: Gradient, more: Tensor | None) -> Gradient:
        k, plan, conv = self.kernels, self.plan, self.conv
        if conv is None:
            return Gradient(*k.avg_pool_grad(dy.dx, more, plan.sums))
        x, self.tape = self.tape, None
        conv.bias_grad(dy.rows)
        weight_grad = partial(conv.weight_grad, stride=2, padding=self.padding)
        plan.aside.run(weight_grad, x, dy.dx)
        dx = k.conv_down_input_grad(dy.dx, conv.weight, self.padding, more)
        return Gradient(dx, k.tensor_rows(dx, plan.sums))


class FusedUpsample:
    """Nearest neighbour, then perhaps a convolution."""

    def __init__(self, plan: Plan, name: str, module: Upsample) -> None:
        self.plan, self.kernels = plan, plan.kernels
        self.conv = None if module.conv is None else Parameters(plan, f"{name}.conv", module.conv)

    def forward(self, x: Feature) -> Feature:
        k, conv = self.kernels, self.conv
        if conv is None:  # the norm behind it upsamples on its way
            return Feature(None, x.partials, x.pixels, source=x.x)
        filters = conv.upsampled_filters(x.x, (x.x.shape[3], 0))
        if filters is None:
            large = k.upsample(x.x)
            y, partials = k.conv_forward(large, conv.weight, conv.bias, stats=True)
        else:  # filters are of the launch in front, and asked for before any wait
            with dependent_launches(None):
                y, partials = k.conv_of_upsampled(x.x, filters, conv.bias)
        self.tape = x.x, filters  # what is upsampled is four times as much, and made in a pass
        return Feature(y, partials, y.shape[1] * y.shape[2])

    def backward(self, dy: Gradient, more: Tensor | None) -> Gradient:
        assert more is None  # its input has no other consumer
        k, plan, conv = self.kernels, self.plan, self.conv
        if conv is None:
            return dy  # the block behind it has already summed over the 2x2 pixels
        (x, filters), self.tape = self.tape, None
        large = k.upsample(x)
        conv.bias_grad(dy.rows)
        plan.aside.run(conv.weight_grad, large, dy.dx)
        del large, x
        if filters is None:
            dx = k.upsample_grad(k.conv_plain_input_grad(dy.dx, conv.weight))
        else:
            dx = k.conv_of_upsampled_input_grad(dy.dx, filters)
        return Gradient(dx, k.tensor_rows(dx, plan.sums))
