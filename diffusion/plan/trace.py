"""From a module to its graph: `record` lists its calls, and `lower` translates them to nodes.

Nothing here depends on a particular network: `lower` defines which calls can be planned.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

from triton_kernels import reference

from ..models.layers import Layer
from .canonical.canonical import canonicalise
from .graph import Graph, PlanError
from .known_buffers import KnownBuffers
from .lower import attention_by_hand, by_pytorch, images, shapes  # noqa: F401  they fill the table
from .lower.arithmetic import draw, function, is_function
from .lower.shapes import detached
from .lower.table import LOWERINGS, Lowering, understood
from .reads import Reads, reads_of
from .record.draws import is_draw
from .record.kept import refuse_kept
from .record.record import record
from .record.recording import Call, Recording
from .trees import flatten, holds_tensors, leaves, tensors_in
from .views import View, whole


@dataclass
class Traced:
    """A module's graph, and how a call of it becomes the graph's inputs and results."""

    graph: Graph
    given: list[int]  # which leaves of (args, kwargs) are the graph's inputs
    results: list[int | Any]  # of each leaf of the result: the graph's output, or what it is
    output_spec: pytree.TreeSpec
    reads: Reads  # what the module read of itself
    buffers: KnownBuffers  # of which the graph has the numbers
    # parameters and buffers; the graph's last outputs are what they are behind the call
    written: list[str]

    def leaves(self, args: tuple, kwargs: dict) -> list[Tensor]:
        """The graph's inputs in a call."""
        every = leaves((args, kwargs))
        return [every[i] for i in self.given]

    def assemble(self, outputs: list[Tensor]) -> Any:
        """What the module would return."""
        made = [outputs[r.at] if isinstance(r, _Output) else r for r in self.results]
        return pytree.tree_unflatten(made, self.output_spec)


@dataclass(frozen=True)
class _Output:
    at: int


def trace(
    module: nn.Module,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,  # of the framework's layers; None: their backends'
    forward: Callable | None = None,  # a function of the module that is called in its place
) -> Traced:
    """The graph of module(*args, **kwargs) for arguments of these shapes and dtypes. PlanError:
    something in it has no place in a plan, or it does not let itself be traced."""
    for i, x in enumerate(leaves((args, kwargs))):
        if isinstance(x, Tensor) and x.numel() == 0:
            raise PlanError(f"its argument {i} is {list(x.shape)}: no plan is for empty tensors")
        if isinstance(x, Tensor) and x.layout is not torch.strided:
            raise PlanError(f"its argument {i} is {x.layout}: no plan is for sparse tensors")
    with plain_layers(module, dtype), reads_of() as names:
        recording = record(module, args, kwargs or {}, forward)
        again = partial(record, module, args, kwargs or {}, forward)
        refuse_kept(recording, dict(names), again)
    buffers = {k: x for k, x in module.named_buffers() if k not in recording.written}
    reads = Reads(names, recording, module)
    traced = _Tracer(recording, KnownBuffers(buffers)).run(reads)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    traced.graph.trainable &= trained
    return traced


@contextmanager
def plain_layers(module: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """The framework's layers call PyTorch's ops, which a trace can read, whatever their backend."""
    ops = SimpleNamespace(**{k: v for k, v in vars(reference).items() if callable(v)})
    # draws of dropout are an op of their own
    ops.conv2d, ops.group_norm, ops.dropout = _conv2d, _group_norm, _dropout
    ours = [layer for layer in module.modules() if isinstance(layer, Layer)]
    backends = [layer.backend for layer in ours]
    for layer, backend in zip(ours, backends, strict=True):
        layer.backend = replace(backend, name="torch", ops=ops, dtype=dtype or backend.dtype)
    try:
        yield
    finally:
        for layer, backend in zip(ours, backends, strict=True):
            layer.backend = backend


def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int | tuple[int, int] | None = None,
    allow_tf32: bool = False,
) -> Tensor:
    """`reference.conv2d` without its care for PyTorch's kernels of float16 on a CPU."""
    padding = (weight.shape[2] // 2, weight.shape[3] // 2) if padding is None else padding
    bias = None if bias is None else bias.to(x.dtype)
    y = F.conv2d(x.permute(0, 3, 1, 2), weight.to(x.dtype), bias, stride, padding)
    return y.permute(0, 2, 3, 1).contiguous()


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: str = "identity",
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """`reference.group_norm` as its formula, without its care for PyTorch's kernels on a CPU."""
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    params = [None if p is None else p.to(dtype) for p in (weight, bias)]
    z = torch.group_norm(x.to(dtype).permute(0, 3, 1, 2), num_groups, *params, eps)
    z = z.permute(0, 2, 3, 1)
    z = z if scale is None else z * (1 + scale.to(dtype)[:, None, None, :])
    z = z if shift is None else z + shift.to(dtype)[:, None, None, :]
    return reference.ACTIVATION_FUNCTIONS[activation](z).to(x.dtype)


def _dropout(x: Tensor, p: float, rng: Tensor, *, layer: int, first: int = 0) -> Tensor:
    return torch.ops.triton_kernels.dropout(x, p, rng, layer, first)


class _Tracer:
    """One walk over what was recorded."""

    def __init__(self, recording: Recording, buffers: KnownBuffers) -> None:
        self.recording, self.graph, self.buffers = recording, Graph(), buffers
        self.low = Lowering(self.graph, recording.differentiable, buffers.numbers)
        self.made: dict[int, View] = {}  # by the tensors' ids
        # of these, what is made under `no_grad`: it is detached where something else reads it, and
        # has the nodes that it would have with gradients
        self.apart: set[int] = set()

    def run(self, reads: Reads) -> Traced:
        given = self._begin()
        for call in self.recording.calls:
            self._call(call)
        result, spec = flatten(self.recording.result)
        results, outputs = [], []
        for leaf in result:
            if isinstance(leaf, Tensor):
                results.append(_Output(len(outputs)))
                outputs.append(self.low.gather(self._seen(leaf)))
            elif holds_tensors(leaf):
                name = type(leaf).__name__
                raise PlanError(
                    f"the result has tensors in a {name}, into which no plan puts any; return"
                    " tensors, dicts or dataclasses"
                )
            elif isinstance(leaf, Iterator):
                raise PlanError("the result is a generator, which a call makes once; give a list")
            else:
                results.append(leaf)
        written = self.recording.written
        outputs += [self.low.gather(detached(self.low, self.made[id(x)])) for x in written.values()]
        self.graph.outputs, self.graph.source = outputs, ""
        canonicalise(self.graph)
        return Traced(self.graph, given, results, spec, reads, self.buffers, list(written))

    def _begin(self) -> list[int]:
        """What the graph starts from; which of the call's leaves are inputs."""
        graph, recording, given = self.graph, self.recording, []
        for i, x in enumerate(recording.inputs):
            if isinstance(x, Tensor):
                value = graph.value(f"input{i}", x.shape, x.dtype)
                graph.inputs.append(value)
                given.append(i)
                self.made[id(x)] = whole(value)
        for name, x in (recording.parameters | recording.buffers).items():
            value = graph.value(name, x.shape, x.dtype)
            graph.parameters[name] = value
            if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
                graph.in_order.add(value)
            self.made[id(x)] = whole(value)
        graph.trainable |= set(recording.parameters)
        for x, constant in recording.constants:
            self.made[id(x)] = whole(graph.constant(constant))
        return given

    def _call(self, call: Call) -> None:
        several = not isinstance(call.result, Tensor)
        metas = list(call.result) if several else [call.result]
        low = self.low
        low.name = f"{call.target.namespace}.{call.target._opname}"  # aten.conv2d
        low.function, low.target = call.function, call.target
        low.meta, self.graph.source = metas if several else call.result, call.source
        found = self._seen if call.differentiable else self._found
        args, kwargs = pytree.tree_map_only(Tensor, found, (call.args, call.kwargs))
        lowering = LOWERINGS.get(low.name.removeprefix("aten."))
        if is_function(call.target) and (lowering is None or _has_complex(lowering, call)):
            lowering = function
        if lowering is None and is_draw(call.target):
            lowering = draw
        if lowering is None:
            raise low.refuse("is an op that")
        try:
            args, kwargs = understood(low, lowering, args, kwargs)
            made = lowering(low, *args, **kwargs)
        except PlanError:
            raise
        except (TypeError, ValueError, AssertionError, IndexError) as error:
            raise low.refuse(f"as it is called here ({error})") from error
        made = made if isinstance(made, list | tuple) else [made]
        # of several, such as a norm's statistics, perhaps only the first
        for meta, view in zip(metas, made, strict=False):
            if (view.shape, view.value.dtype) != (tuple(meta.shape), meta.dtype):
                raise low.refuse(f"whose result is {meta.dtype} {list(meta.shape)}")
            self.made[id(meta)] = view
            (self.apart.discard if call.differentiable else self.apart.add)(id(meta))
            if low.differentiable and id(meta) in self.recording.rewritten:
                self.made[id(meta)] = self._rewritten(meta)
                self.apart.discard(id(meta))

    def _rewritten(self, x: Tensor) -> View:
        """What a parameter is after the forward pass has written to it."""
        of = self.graph.parameters[self.recording.rewritten[id(x)]]
        value = self.low.gather(self._seen(x), of.shape)
        y = self.low.make("rewritten", {"x": value, "of": of}, of.shape, of.dtype)
        return whole(y, tuple(x.shape))

    def _seen(self, x: Tensor) -> View:
        """What was made of it, as a call that records gradients reads it."""
        return detached(self.low, self._found(x)) if id(x) in self.apart else self._found(x)

    def _found(self, x: Tensor) -> View:
        if id(x) not in self.made:
            raise self.low.refuse("of an op's second result, or of numbers made unseen,")
        return self.made[id(x)]


def _has_complex(lowering: Callable, call: Call) -> bool:
    """Whether it computes with complex numbers, which no kernel and no gradient here does."""
    tensors = tensors_in((call.args, call.kwargs, call.result))
    moves = lowering.__module__ == shapes.__name__
    return not moves and any(x.is_complex() for x in tensors)
