"""The embedding of a planned network: its layers, and each block's projection of it.

Its kernels are small. They run on a separate stream beside the stem's convolution, and backward as
soon as the last block has written its part of the gradient.
"""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from ..models.blocks import ResBlock
from ..models.flat_parameters import FlatParameters, are_neighbours, over_neighbours
from ..models.layers import Linear
from ..models.unet import UNet
from ..runtime.backward import run_backward
from .graph import Graph, Node

# for FlatParameters: the projections of a UNet's blocks, and of a policy's
TOGETHER = (
    *("emb_layers.1.weight", "emb_layers.1.bias"),
    *("cond_encoder.1.weight", "cond_encoder.1.bias"),
)


@dataclass
class Step:
    """What one pass forward and backward has beside images."""

    rows: Tensor  # [N, E], what `EmbeddingLayers` gives, with its graph
    d_emb: Tensor  # [N, E], its gradient, to be written
    rng: Tensor | None  # int64 [2]: seed, step
    first: int  # global index of sample 0
    ready: torch.cuda.Event | None = None  # when `rows` are there; None: they are
    written: torch.cuda.Event | None = None  # when blocks have written d_emb; None: it is there

    @property
    def emb(self) -> Tensor:
        """`rows`, which the current stream waits for."""
        if self.ready is not None:
            torch.cuda.current_stream().wait_event(self.ready)
            self.ready = None
        return self.rows.detach()

    def done(self) -> None:
        """The blocks have written their parts of d_emb."""
        if self.d_emb.is_cuda:
            self.written = torch.cuda.current_stream().record_event()


class EmbeddingLayers:
    """The blocks' projections of the embedding as one matrix product.

    The flat buffer holds their weights, and their biases, side by side (see `TOGETHER`), and one
    leaf each covers them all. These layers are under autograd, in a graph of their own, but for the
    gradients of weights and biases, which go straight into the flat buffer.
    """

    def __init__(self, model: UNet, flat: FlatParameters, kernels: ModuleType) -> None:
        self.model, self.kernels = model, kernels
        device = flat.param.device
        # its kernels are small, and would wait for the programs of the stem's convolution
        high = {"priority": -1}
        self._stream = torch.cuda.Stream(device, **high) if device.type == "cuda" else None
        self._begin: torch.cuda.Event | None = None  # after it the inputs are there
        columns = projection_columns(model)
        names = list(columns)
        start = columns[names[-1]].stop
        self._step: Step | None = None  # kept while its backward pass may still run
        weights = [f"{name}.emb_layers.1.weight" for name in names]
        biases = [f"{name}.emb_layers.1.bias" for name in names]
        self.projection = Linear(4 * model.model_channels, start, backend=model.backend)
        self.projection.weight = _joined(flat, weights, (start, 4 * model.model_channels))
        self.projection.bias = _joined(flat, biases, (start,))

    def __call__(self, *inputs) -> Tensor:  # those of UNet.embed -> [N, sum of the widths]
        return self._linear(
            self.projection, self.model.embed(*inputs, self._linear, self._sinusoids)
        )

    def begin(self) -> None:
        """The inputs of the next call of `beside` are there, as of the current stream. Without this
        they are when it is called."""
        if self._stream is not None:
            self._begin = torch.cuda.current_stream().record_event()

    def beside(self, *inputs) -> tuple[Tensor, torch.cuda.Event | None]:
        """The same on a stream of its own, and when it is done."""
        if self._stream is None:
            return self(*inputs), None
        if self._begin is None:
            self.begin()
        self._stream.wait_event(self._begin)
        self._begin = None
        with torch.cuda.stream(self._stream):
            return self(*inputs), self._stream.record_event()

    def backward(self, step: Step) -> None:
        """The backward pass of these layers, on the same stream, as soon as `step.d_emb` is there:
        that is before the first block's last convolution. `join` waits for it."""
        if not step.rows.requires_grad:
            return
        if self._stream is None:
            run_backward(step.rows, step.d_emb)
            return
        self._stream.wait_event(step.written)
        with torch.cuda.stream(self._stream):
            run_backward(step.rows, step.d_emb)
        self._step = step

    def join(self) -> None:
        """Let the current stream wait for them."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._step = None

    def _sinusoids(self, t: Tensor) -> Tensor:
        frequencies = self.model.timestep_embedding.frequencies
        return self.kernels.sinusoids(t, frequencies, self.model.model_channels)

    def _linear(self, layer: Linear, x: Tensor) -> Tensor:
        return _AccumulatingLinear.apply(x, layer.weight, layer, self.kernels)


def projection_columns(model: UNet) -> dict[str, slice]:
    """Of every block, by its name, its columns in the projections side by side."""
    columns, start = {}, 0
    for name, module in model.named_modules():
        if isinstance(module, ResBlock):
            width = module.emb_layers["1"].weight.shape[0]
            columns[name] = slice(start, start + width)
            start += width
    return columns


def linears(graph: Graph) -> dict[str, Node]:
    """Products with a parameter, or with what was made of it, by the parameter's name."""
    parameters = {value: name for name, value in graph.parameters.items()}
    producers, found = graph.producers(), {}
    for node in graph.nodes:
        weight = node.inputs["weight"] if node.op == "linear" else None
        while weight not in parameters and weight in producers:
            weight = producers[weight].inputs.get("x")
        if weight in parameters:
            found[parameters[weight]] = node
    return found


def projections(graph: Graph, columns: dict[str, slice]) -> dict[Node, slice]:
    """The nodes that make blocks' projections, and those that make halves of them (scale and
    shift), with their columns in the projections side by side."""
    found, producers = {}, graph.producers()
    for name, node in linears(graph).items():
        if name.endswith(TOGETHER[0]):
            found[node] = columns[name.removesuffix(f".{TOGETHER[0]}")]
    for node in graph.nodes:
        whole = producers.get(node.inputs.get("x"))
        if node.op == "slice" and whole in found:
            start = found[whole].start + node.attrs["start"]
            found[node] = slice(start, start + node.out.shape[1])
    return found


class _AccumulatingLinear(torch.autograd.Function):
    """A linear layer that adds to the gradients of its parameters, which spares autograd's adds."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, layer: Linear, kernels: ModuleType) -> Tensor:
        ctx.save_for_backward(x, weight)  # autograd has to see one parameter, or stops here
        ctx.layer, ctx.kernels = layer, kernels
        return layer(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        grads = layer.weight.grad, layer.bias.grad
        need_dx = ctx.needs_input_grad[0]
        dx = ctx.kernels.linear_grads(x, dy.contiguous(), weight, *grads, need_dx)
        return dx, None, None, None


def _joined(flat: FlatParameters, names: list[str], shape: tuple[int, ...]) -> nn.Parameter:
    """One parameter over neighbours in the flat buffer."""
    values, gradients = flat.views(flat.param), flat.views(flat.grad)
    first, *others = names
    if not are_neighbours(values, names):
        raise ValueError(f"{', '.join(others)} do not follow {first} in the flat buffer")
    joined = nn.Parameter(over_neighbours(values[first], shape))
    joined.grad = over_neighbours(gradients[first], shape)
    return joined
