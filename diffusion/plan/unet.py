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

The embedding may also scale and shift z (FiLM), dropout is part of the pass that makes a and of
dz's convolution, and what resamples does so between these kernels; `plan.layers` has them all.

The gradients go straight into the flat gradient buffer. The embedding's layers stay in autograd:
together they are three matrix products, see `EmbeddingLayers`.
"""

import logging
import re
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

from triton_kernels import fused_ops as fused
from triton_kernels.fused_tf32 import in_tf32
from triton_kernels.runtime.dependent_launch import dependent_launches

from ..models.blocks import AttentionBlock, Downsample, ResBlock, Upsample
from ..models.flat_parameters import FlatParameters
from ..models.unet import UNet
from .embedding import EmbeddingLayers, Step
from .layers import (
    Feature,
    FusedAttention,
    FusedDownsample,
    FusedResBlock,
    FusedUpsample,
    Gradient,
    Norm,
    Parameters,
)
from .side_stream import SideStream
from .weight_grads import WeightGrads

DTYPES = (torch.bfloat16, torch.float16)
_MUCH_LARGER = 16  # images, by pixels
_LITTLE_MEMORY = 8 * 2**20  # bytes of an activation
_MUCH_MEMORY = 32 * 2**20
_CHANNELS = 16  # the stem's and the head's few channels are padded to a multiple of this
_DRAW = 4  # channels that one evaluation of the generator draws for
_LAYERS = {
    ResBlock: FusedResBlock,
    AttentionBlock: FusedAttention,
    Downsample: FusedDownsample,
    Upsample: FusedUpsample,
}

log = logging.getLogger(__name__)


def training_network(
    model: nn.Module,
    flat: FlatParameters,
    recompute: bool = False,  # keep fewer activations, see `plan.layers`
    ready: Callable[[int], None] | None = None,  # told how far backward is, see `GradientSum`
    urgent: bool = False,  # it wants to know as early as can be
) -> Callable[..., Tensor]:
    """What a training step calls as `forward_nhwc`: the plan if there is one for this model and
    backend, else the model itself, and the log says why."""
    backend = model.backend
    refusal = "only bf16 and TF32 on the Triton backend have it"
    if backend.name == "triton" and (backend.dtype in DTYPES or backend.allow_tf32):
        refusal = FusedUNet.refusal(model)
        if refusal is None:
            kernels = fused if backend.dtype in DTYPES else in_tf32(fused)
            return FusedUNet(model, flat, kernels, recompute, ready, urgent)
        log.warning("the layers run one by one, without the fused plan: %s", refusal)
    if recompute:
        log.warning("train.recompute has no effect without the fused plan: %s", refusal)
    return model.forward_nhwc


class FusedUNet:
    """Runs a `UNet` by the plan above. `refusal` says whether it can."""

    def __init__(
        self,
        model: UNet,
        flat: FlatParameters,
        kernels: ModuleType,
        recompute: bool = False,
        ready: Callable[[int], None] | None = None,
        urgent: bool = False,
    ) -> None:
        self.model, self.kernels, self.dtype = model, kernels, model.backend.dtype
        self.recompute, self.ready, self.urgent = recompute, ready, urgent
        self.params, self.grads = flat.views(flat.param), flat.views(flat.grad)
        self.filter_starts: dict[str, int] = {}  # of each block, in the flat buffer
        for name, grad in self.grads.items():
            if grad.ndim > 2:  # blocks are called input_blocks.3, middle_block, output_blocks.0
                block = re.match(r"middle_block|\w+\.\d+", name)[0]
                start = self.filter_starts.get(block, grad.storage_offset())
                self.filter_starts[block] = min(start, grad.storage_offset())
        self.low = flat.views(flat.low(self.dtype, tf32=self.dtype == torch.float32))
        self.aside = SideStream(flat.param.device, behind=1)
        self.weight_grads = WeightGrads(self)
        self.sums = kernels.RowSums(flat.grad)
        self.accumulates = True  # backward adds to the filters' gradients, or else writes them
        self._rest_of_grad = flat.grad[flat.filters_end :]
        self.embedding = EmbeddingLayers(model, flat, kernels)
        self.stem = Parameters(self, "input_blocks.0.0", model.input_blocks[0][0])
        self.encoder = [
            self._layers(f"input_blocks.{i}", block)
            for i, block in enumerate(model.input_blocks)
            if i > 0
        ]
        self.middle = self._layers("middle_block", model.middle_block)
        halvings = sum(
            isinstance(layer, Downsample) or getattr(layer, "resample", None) == "down"
            for block in model.input_blocks
            for layer in block
        )
        self.reduction = 4**halvings  # of pixels, in the middle
        self.decoder = [
            self._layers(f"output_blocks.{i}", block) for i, block in enumerate(model.output_blocks)
        ]
        self.head_norm = Norm(self, "out.0", model.out["0"])
        self.head = Parameters(self, "out.2", model.out["2"])

    @staticmethod
    def refusal(model: nn.Module) -> str | None:
        """Why this model has no plan, or None if it has one."""
        if not isinstance(model, UNet):
            return f"{type(model).__name__} has none"
        for name, module in model.named_modules():
            if isinstance(module, ResBlock) and module.dropout:
                channels = len(module.out_layers["0"].weight)
                if channels % _DRAW:
                    return f"{name} has dropout of {channels} channels, no multiple of {_DRAW}"
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
        emb, ready = self.embedding.beside(t, labels, rng, first)
        step = Step(emb, torch.empty_like(emb), rng, first, ready, self.embedding.blocks)
        # the embedding's layers go back on their own, as soon as `step.d_emb` is complete
        start = emb.detach().requires_grad_(emb.requires_grad)
        return _Planned.apply(start, x, step, self)

    def timesteps_known(self) -> None:
        """The timesteps and labels of the next call are there, as of the current stream; x need not
        be."""
        self.embedding.begin()

    def forget_gradients(self) -> None:
        """Zero the flat gradient but for the filters', which the next backward pass will write."""
        self._rest_of_grad.zero_()
        self.accumulates = False

    def forward(self, x: Tensor, step: Step) -> Tensor:  # [N, H, W, CI] -> [N, H, W, CO]
        self.step = step
        self.image = self._padded(x)
        weight = self._padded(self.stem.weight.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        h = self._first_feature(self.image, weight)  # its filters are new: nothing overlaps yet
        with dependent_launches(x[..., 0].numel()):
            h = self._features(h)
            a, table = self.head_norm.apply((h,), "silu")
            y = self._output(a)
        self.tape = h.x, table, None if self.recompute else a
        return y.contiguous()

    def backward(self, dy: Tensor) -> None:  # [N, H, W, CO]
        k, (h, table, a) = self.kernels, self.tape
        self.tape = None
        dy = self._padded(dy)
        smallest = dy.shape[1] * dy.shape[2] // self.reduction
        self.met = False  # whether the side stream has waited for what was held
        self._hold(h, smallest)
        self.weight_grads.waits = h.nbytes >= _LITTLE_MEMORY
        self.weight_grads.alone = False
        a = k.apply(h, None, table, "silu") if a is None else a
        self.aside.run(self.head.all_grads, a, dy)
        del a
        dz, partials = k.conv_input_grad(
            dy, self.head.weight, inputs=(h,), table=table, activation="silu"
        )
        del dy
        d = Gradient(*self.head_norm.backward(dz, h, partials, table, out=dz))
        del dz, h
        skips = []
        for i, block in reversed(list(enumerate(self.decoder))):
            self._hold(d.dx, smallest)
            d, d_skip = self._run_back(block, d, None)
            skips.append(d_skip)
            del d_skip
            self._complete(f"output_blocks.{i}")
        self.aside.release()
        # skips[i] is the gradient that the decoder sent to the encoder's feature i
        d, _ = self._run_back(self.middle, d, skips.pop())
        self._complete("middle_block")
        for i, block in reversed(list(enumerate(self.encoder, 1))):
            pixels = d.dx.shape[1] * d.dx.shape[2]
            if not self.met and (i == 1 or pixels >= _MUCH_LARGER * smallest):
                # what was held has been made up for, or nearly, while images were small
                self.aside.meet()
                self.met = True
            if i == 1:  # most of it before the end, where nothing else would run
                self.aside.apart(lambda *rows: self.sums.flush(False), *self.sums.kept)
                self.weight_grads.flush()
                self.weight_grads.alone = True
            d, _ = self._run_back(block, d, skips.pop())
            self._complete(f"input_blocks.{i}")
        self.weight_grads.flush()
        self.stem.bias_grad(d.rows)
        self.embedding.backward(self.step)
        # beside the last gradients of filters, which the side stream still makes
        self.aside.apart(lambda *rows: self.sums.flush(), *self.sums.kept)
        self.aside.run(self.stem.weight_grad, self.image, d.dx)
        self._join_after_backward()
        self.step, self.image = None, None

    def _join_after_backward(self) -> None:
        """Let the current stream wait for the others when autograd has done all that is left."""
        stream = torch.cuda.current_stream() if self.image.is_cuda else None

        def join() -> None:
            with torch.cuda.stream(stream):  # callbacks come on a thread of autograd's
                self.aside.join()
                self.embedding.join()
            self.accumulates = True

        torch.autograd.Variable._execution_engine.queue_callback(join)

    def _first_feature(self, image: Tensor, weight: Tensor) -> Feature:
        """The stem's, of an image and of filters that are both padded."""
        y, partials = self.kernels.conv_forward(image, weight, self.stem.bias, stats=True)
        return Feature(y, partials, y.shape[1] * y.shape[2])

    def _features(self, h: Feature) -> Feature:
        """What the head is given, of what the stem gives."""
        skips = [h]
        for block in self.encoder:
            h = self._run(block, h, None)
            skips.append(h)
        h = self._run(self.middle, h, None)
        for block in self.decoder:
            h = self._run(block, h, skips.pop())
        return h

    def _output(self, a: Tensor) -> Tensor:
        """The head's convolution of its activation; pixels are some channels apart."""
        co = self.head.bias.shape[0]
        width = _padded_width(co)
        y, _ = self.kernels.conv_forward(a, self.head.weight, self.head.bias, width=width)
        return y[..., :co]

    def _run(self, block: list, h: Feature, other: Feature | None) -> Feature:
        for layer in block:
            if isinstance(layer, FusedResBlock):
                h = layer.forward(h, other, self.step)
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
            with dependent_launches(d.dx[..., 0].numel()):
                if isinstance(layer, FusedResBlock):
                    d, d_other = layer.backward(d, added, self.step)
                else:
                    d = layer.backward(d, added)
        return d, d_other

    def _hold(self, x: Tensor, smallest: int) -> None:
        """Large images keep the GPU busy, and small ones do not: there the decoder's gradients of
        weights are made up for. Other processes are sent them as early as can be, and in a large
        batch they would hold too much memory."""
        pixels = x.shape[1] * x.shape[2]
        worthwhile = not self.urgent and x.nbytes < _MUCH_MEMORY
        self.aside.holding = worthwhile and pixels >= _MUCH_LARGER * smallest
        if pixels <= smallest:
            self.aside.release()

    def _complete(self, name: str) -> None:
        """The filters of this block, and so of all behind it, have their gradients when the side
        stream has done what it was given; but for what was held."""
        if not (self.urgent or self.met):
            return
        self.weight_grads.flush()  # the end is near, or somebody waits
        start = self.filter_starts.get(name)
        if self.ready is not None and start is not None:
            self.aside.run(lambda: self.ready(start))

    def _layers(self, name: str, block: nn.ModuleList) -> list:
        return [_LAYERS[type(layer)](self, f"{name}.{i}", layer) for i, layer in enumerate(block)]

    def _padded(self, x: Tensor) -> Tensor:
        """x in the plan's precision, with zeros behind its few channels."""
        width = _padded_width(x.shape[-1])
        if x.shape[-1] == width and x.dtype == self.dtype != torch.float32:
            return x
        return self.kernels.pad_channels(x, width, self.dtype)


def _padded_width(channels: int) -> int:
    return -(-channels // _CHANNELS) * _CHANNELS


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, emb: Tensor, x: Tensor, step: Step, plan: FusedUNet) -> Tensor:
        ctx.plan = plan
        return plan.forward(x, step)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[None, ...]:
        ctx.plan.backward(dy.contiguous())
        return None, None, None, None
