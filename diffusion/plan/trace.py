"""From a module to its graph: torch.export says what it calls, `lower` what that is in a plan.

Nothing here knows a network: what can be planned is what `lower` has a line for.
"""

import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from triton_kernels import reference

from ..models.layers import Layer
from .canonical import canonicalise
from .graph import Graph, PlanError
from .lower import layers, shapes  # noqa: F401  they fill the table
from .lower.arithmetic import ARITHMETIC, arithmetic
from .lower.table import LOWERINGS, Lowering
from .views import whole


@dataclass
class Traced:
    """A module's graph, and how a call of it becomes the graph's inputs and results."""

    graph: Graph
    given: list[int]  # which leaves of (args, kwargs) are the graph's inputs
    results: list[int | Any]  # of each leaf of the result: the graph's output, or what it is
    output_spec: pytree.TreeSpec

    def leaves(self, args: tuple, kwargs: dict) -> list[Tensor]:
        """The graph's inputs in a call."""
        every = pytree.tree_leaves((args, kwargs))
        return [every[i] for i in self.given]

    def assemble(self, outputs: list[Tensor]) -> Any:
        """What the module would return."""
        leaves = [outputs[r.at] if isinstance(r, _Output) else r for r in self.results]
        return pytree.tree_unflatten(leaves, self.output_spec)


@dataclass(frozen=True)
class _Output:
    at: int


def trace(
    module: nn.Module,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,  # of the framework's layers; None: their backends'
) -> Traced:
    """The graph of module(*args, **kwargs) for arguments of these shapes and dtypes. PlanError:
    something in it has no place in a plan, or it does not let itself be traced."""
    program = exported(module, args, kwargs or {}, dtype)
    traced = _Tracer(program).run((args, kwargs or {}))
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    traced.graph.trainable &= trained
    return traced


def exported(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], dtype: torch.dtype | None = None
) -> ExportedProgram:
    """What the module calls. PlanError: it depends on numbers that are not known before."""
    try:
        with _plain_layers(module, dtype):
            return torch.export.export(module, args, kwargs, strict=False)
    except (ValueError, TypeError) as error:  # of the module itself: wrong arguments
        raise error
    except Exception as error:
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PlanError(f"{type(module).__name__} cannot be traced: {what}") from error


@contextmanager
def _plain_layers(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
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
    """One walk over what was exported."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program, self.graph = program, Graph()
        self.low = Lowering(self.graph)
        self.made: dict[str, Any] = {}  # by the names of its nodes: views, or what is no tensor

    def run(self, call: tuple[tuple, dict]) -> Traced:
        given = self._begin(call)
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self.made[node.name] = self._call(node)
        results, outputs = [], []
        for spec in self.program.graph_signature.output_specs:
            if spec.kind.name != "USER_OUTPUT":
                raise PlanError(f"the module changes {spec.target or spec.arg.name} in its forward")
            if not hasattr(spec.arg, "name") or spec.arg.name not in self.made:
                results.append(getattr(spec.arg, "value", None))
                continue
            view = self.made[spec.arg.name]
            results.append(_Output(len(outputs)))
            outputs.append(self.low.gather(view))
        self.graph.outputs = outputs
        canonicalise(self.graph)
        return Traced(self.graph, given, results, self.program.call_spec.out_spec)

    def _begin(self, call: tuple[tuple, dict]) -> list[int]:
        """What the graph starts from; which of the call's leaves are inputs."""
        graph, program = self.graph, self.program
        placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
        leaves, given, at = pytree.tree_leaves(call), [], 0
        for spec in program.graph_signature.input_specs:
            if spec.kind == InputKind.USER_INPUT:
                if isinstance(leaves[at], Tensor):
                    meta = placeholders[spec.arg.name].meta["val"]
                    value = graph.value(spec.arg.name, meta.shape, meta.dtype, layout="given")
                    graph.inputs.append(value)
                    given.append(at)
                    self.made[spec.arg.name] = whole(value)
                elif spec.arg.name in placeholders:
                    self.made[spec.arg.name] = leaves[at]
                at += 1
                continue
            meta = placeholders[spec.arg.name].meta["val"]
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                value = graph.value(spec.target, meta.shape, meta.dtype, layout="given")
                graph.parameters[spec.target] = value
                if spec.kind == InputKind.PARAMETER:
                    graph.trainable.add(spec.target)
            else:
                value = graph.constant(program.constants[spec.target], spec.target)
            self.made[spec.arg.name] = whole(value)
        return given

    def _call(self, node: torch.fx.Node) -> Any:
        call = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: _Made(n.name))
        args, kwargs = pytree.tree_map(self._found, (tuple(call[0]), dict(call[1])))
        if node.target is operator.getitem:
            return args[0][args[1]]
        low = self.low
        low.name, low.target, low.meta = op_name(node.target), node.target, node.meta.get("val")
        low.source = source_of(node)
        lowering = lowering_of(low.name)
        if lowering is None:
            raise low.refuse("is an op that")
        try:
            return lowering(low, *args, **kwargs)
        except PlanError:
            raise
        except (TypeError, AssertionError, IndexError) as error:
            raise low.refuse(f"as it is called here ({error})") from error

    def _found(self, arg: Any) -> Any:
        return self.made[arg.name] if isinstance(arg, _Made) else arg


@dataclass(frozen=True)
class _Made:
    """The result of a node, in the arguments of another."""

    name: str


def op_name(target: Any) -> str:
    """aten.conv2d of the overload aten.conv2d.default."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    return getattr(target, "__name__", str(target))


def lowering_of(name: str) -> Callable | None:
    short = name.removeprefix("aten.")
    if short in LOWERINGS:
        return LOWERINGS[short]
    return arithmetic if short in ARITHMETIC and name.startswith("aten.") else None


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_of(node: torch.fx.Node) -> str:
    """The line that called it, and the module that the line was run for."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [f for f in frames if "/torch/" not in f[0]] or frames
    file, line = frames[-1] if frames else ("?", "?")
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    name = modules[-1][0] if modules else ""
    place = f"{'/'.join(file.split('/')[-2:])}:{line}"
    return f"{place} of {name}" if name else place
