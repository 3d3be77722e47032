"""The graph of a network: values, and the nodes that compute them.

A value stands for a tensor: a shape and a dtype. Its memory is contiguous in the order of its
shape, and images are always [N, H, W, C]. A node computes one or more values from others, which
have names in the node, like the arguments of a function. `OPS` defines what each node computes;
`execute` selects the kernels.

    trace -> differentiate -> fuse -> schedule -> execute

Each of these takes a graph and returns a graph, or a list of its nodes.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# what a traced network is made of
FORWARD = {
    "conv": "x [N, H, W, CI] * weight [CO, CI, R, S] + bias; stride, padding (y0, y1, x0, x1)",
    "linear": "x [..., CI] weight [CO, CI]^T + bias: over images, a convolution with 1x1 filters",
    "group_norm": "act(((x - mean) rstd weight + bias) (1 + scale) + shift), x [N, ..., C]",
    "layer_norm": "(x - mean) rstd weight + bias, over the last `axes` axes; mean and rstd",
    "act": "activation(x)",
    "attention": "softmax(q k^T scale) v of each head, of `PARTS`, over keys of a mask; its state",
    "cat": "x0, x1, ... side by side along an axis",
    "add": "a + b, where b may have length 1 along axes of a",
    "mul": "a b, likewise",
    "affine": "scale x + offset, both numbers",
    "upsample": "each pixel becomes a block of `factor` pixels",
    "avg_pool": "means over blocks of `window` pixels",
    "slice": "start to stop along an axis",
    "pad": "zeros before and behind, along each axis",
    "dropout": "x / (1 - p) where a draw says so, else 0; by `rng` and `layer`, or PyTorch's state",
    "draw": "numbers of PyTorch's generator: `target`, of x0, x1, ...; on the device of `beside`",
    "cast": "x in another dtype",
    "embedding": "rows of weight, by index; row `unchanged`, if not -1, has no gradient",
    "reshape": "the same memory under another shape",
    "detach": "x, to which no gradient is sent",
    "layout": "a copy in another order: `pieces` are (size, stride) in x, from `offset` on",
    "arith": "a function that PyTorch has the kernel of, as of timesteps and labels: `target`",
}
# what a group norm becomes, so that its parts can be joined to what is around it: see `norms`
NORM = {
    "moments": "partials [N, K, 2, C] of x: sums, and squares about the mean, of K tiles of pixels",
    "norm_table": "table [N, 4, C] (mean, rstd, g, b) from the partials of one or two tensors",
    "norm_apply": "act((x - mean) rstd g + b) of one tensor, or of two side by side",
}
# what backward is made of, beside the above
BACKWARD = {
    "conv_dx": "the gradient of x in conv",
    "conv_dw": "the gradient of weight in conv",
    "linear_dx": "the gradient of x in linear",
    "linear_dw": "the gradient of weight in linear",
    "norm_act_grad": "dz = da act'(z), and its partials: sums of dz and of dz xhat",
    "norm_grad_table": "coeff [N, 3, C] (p, q, r), and the gradients of weight, bias, scale, shift",
    "norm_dx": "p dz + q x + r, of one tensor or two",
    "layer_norm_grad": "the gradients of x, weight and bias in layer_norm",
    "act_grad": "dy act'(x)",
    "attention_grad": "the gradients of the parts of attention",
    "sum_pool": "sums over blocks of `window` pixels",
    "sum": "sums over axes, of which each stays with length 1 or not",
    "embedding_grad": "rows of dy added up by index",
    "layout_grad": "what layout read, put back where it was",
    "arith_grad": "the gradients of arguments of arith, of which `of` are the numbers",
}
# what fusing makes of these: see `fuse`
FUSED = {
    "casts": "x0, x1, ... in another dtype, as y0, y1, ...: parameters, once in a call",
    "columns": "channels start to stop, where they lie: rows are further apart",
    "pad_channels": "zeros behind the channels, up to `width`, in another dtype",
    "conv_fused": "conv or linear + emb [N, C] + residual + extra columns^T; and partials of it",
    "norm": "norm_table and norm_apply, and dropout if there is an rng; the table, and words of it",
    "conv_input_grad": "conv_dx times act'(z), and its partials",
    "skip_dx": "norm_dx + dy weight, the input gradient of a 1x1 convolution beside the norm",
}
# what a training step makes of it, whose gradients go into one flat buffer: see `step`
STEP = {
    "norm_of_upsampled": "norm of upsample(x0) beside x1, the table of x1, and upsample(x0)",
    "conv_down": "a 3x3 conv of stride 2",
    "conv_down_dx": "the gradient of its x, + add",
    "avg_pool_grad": "a quarter of dy for each of 2x2 pixels, + add; and rows of it",
    "norm_backward": "norm_grad_table and norm_dx",
    "skip_backward": "norm_grad_table and skip_dx",
    "conv_upsampled_dx": "conv_input_grad of conv_upsampled: of the small image, and of x1",
    "conv_of_upsampled_dx": "the gradient of x in conv_of_upsampled",
    "row_sums": "sums of x over pixels, of any number of images",
    "bias_grad": "sums of rows",
    "accumulate": "x, added to what is there",
}
# what a forward pass becomes where nothing runs beside it: see `join`
JOINED = {
    "conv_few": "conv_fused, by whichever kernel is quickest alone",
    "conv_split": "parts of conv and the 1x1 terms, that have to be added up",
    "sum_parts": "these + bias + emb + residual, and partials of it",
    "resample_parts": "the same, and it upsampled or its 2x2 means",
    "norm_single_cta": "norm without partials, of x, of parts, or of 2x2 means",
    "norm_of_sums": "norm without a table",
    "norm_upsampled": "the same of upsample(x0) beside x1, and perhaps upsample(x0)",
    "conv_norm": "conv_fused, and the norm of it, beside another tensor perhaps",
    "conv_norm_grid_sync": "the same of larger images, by programs that wait for one another",
    "norm_conv": "conv_fused of norm(x)",
    "norm_conv_of_two": "conv_fused of norm([x0, x1])",
    "upsampled_filters": "sums of taps that multiply a small image, and filters of the others",
    "conv_of_upsampled": "conv(upsample(x)), on x",
    "conv_upsampled": "conv(a), of which the first channels were upsampled",
    "projected_attention": "attention of x [Wq, Wk, Wv], or of norm(x)",
}
# what it becomes where images are rows of a few positions, see `join.stages`; sums are in parts,
# and an activation is what no launch has made: film(mish(norm(sums))) + residual
STAGED = {
    "film_weights": "linear layers of one tensor, side by side, cut by the parts of its concat",
    "project": "mish(z) weight^T + bias",
    "stem_weights": "filters [CO, CI, 1, S] as [CI, S, CO]",
    "stage_weights": "filters, and 1x1 ones beside them, in the order in which programs read them",
    "stage": "sums of the convolution of an activation, and of a 1x1 one; and the activation",
    "head": "a 1x1 convolution of an activation",
}
# what attention is of: qkv [N, ..., 3C]; or q [N, ..., C] and kv [N, ..., 2C], or k and v, of as
# many positions or of others
PARTS = ("qkv", "q", "kv", "k", "v")
FREE = ("reshape", "columns", "detach")  # which make no memory
OPS = FORWARD | NORM | BACKWARD | FUSED | STEP | JOINED | STAGED


class PlanError(ValueError):
    """A module cannot be planned. The message names what, and the line and module it came from."""


@dataclass(eq=False)
class Value:
    """A tensor of the plan."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def has_gradients(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def exact(self) -> torch.dtype:
        """What sums of it are kept in."""
        kept = self.dtype == torch.float64 or self.dtype.is_complex
        return self.dtype if kept else torch.float32

    def __repr__(self) -> str:
        return f"{self.name}{list(self.shape)}"


@dataclass(eq=False)
class Node:
    """One operation."""

    op: str
    inputs: dict[str, Value]
    outputs: dict[str, Value]
    attrs: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    tf32: bool = True  # whether it may multiply float32 in TF32

    @property
    def out(self) -> Value:
        """The first result, which most nodes have alone."""
        return next(iter(self.outputs.values()))

    def many(self, role: str) -> list[Value]:
        """The inputs role0, role1, ... of those that take any number."""
        return many(self.inputs, role)

    @property
    def draws(self) -> bool:
        """Whether two of it, of the same inputs, make different numbers."""
        return self.op in ("dropout", "draw")

    @property
    def keeps_size(self) -> bool:
        """Whether the images of a convolution or linear layer, or of its gradient, have one size:
        its stride is 1, and around them are as many zeros as its odd filters need."""
        r, s = self.inputs.get("weight", self.out).shape[2:] or (1, 1)
        same = (r // 2, r // 2, s // 2, s // 2)
        how = self.attrs.get("stride", (1, 1)), self.attrs.get("padding", same)
        return how == ((1, 1), same) and r % 2 == s % 2 == 1

    def __repr__(self) -> str:
        made = ", ".join(map(repr, self.outputs.values()))
        read = ", ".join(f"{k}={v.name}" for k, v in self.inputs.items())
        said = ", ".join(f"{k}={v}" for k, v in self.attrs.items())
        return f"{made} = {self.op}({read}{'; ' if said else ''}{said})"


def many(inputs: Mapping[str, Any], role: str) -> list[Any]:
    """inputs role0, role1, ..."""
    return [v for k, v in inputs.items() if k.startswith(role) and k[len(role) :].isdigit()]


def numbered(role: str, values: Iterable[Value]) -> dict[str, Value]:
    """Inputs of a node that takes any number."""
    return {f"{role}{i}": v for i, v in enumerate(values)}


class Graph:
    """Nodes in an order in which they can run, and what they begin and end with."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[Value] = []  # what the caller gives
        self.parameters: dict[str, Value] = {}  # by their names in the module; buffers, too
        self.trainable: set[str] = set()  # of these, the ones that a gradient may be asked of
        self.constants: dict[Value, Tensor] = {}
        self.outputs: list[Value] = []
        self.why: dict[Value, list[str]] = {}  # what made a value as it is made, and the figures
        self.source = ""  # the line of the module that new nodes are made for
        self._names: dict[str, int] = {}

    def value(self, name: str, shape: Iterable[int], dtype: torch.dtype) -> Value:
        """A new value, whose name gets a number if another has it."""
        number = self._names.get(name, 0)
        self._names[name] = number + 1
        shape = tuple(int(s) for s in shape)
        return Value(f"{name}.{number}" if number else name, shape, dtype)

    def new(
        self,
        op: str,
        inputs: dict[str, Value | None],
        outputs: dict[str, tuple],  # role: (shape, dtype)
        source: str = "",  # "": the graph's
        **attrs: Any,
    ) -> Node:
        """A node that is not among the others yet; inputs that are None are left out."""
        assert op in OPS, op
        given = {k: v for k, v in inputs.items() if v is not None}
        several = len(outputs) > 1
        made = {
            role: self.value(f"{op}.{role}" if several else op, *spec)
            for role, spec in outputs.items()
        }
        return Node(op, given, made, attrs, source or self.source)

    def node(self, *what: Any, **attrs: Any) -> Node:
        """Append a node, see `new`."""
        self.nodes.append(self.new(*what, **attrs))
        return self.nodes[-1]

    def make(
        self,
        op: str,
        inputs: dict[str, Value | None],
        shape: Iterable[int],
        dtype: torch.dtype,
        **more: Any,
    ) -> Value:
        """Append a node of one result; the result."""
        return self.node(op, inputs, {"y": (shape, dtype)}, **more).out

    def constant(self, tensor: Tensor, name: str = "constant") -> Value:
        value = self.value(name, tensor.shape, tensor.dtype)
        self.constants[value] = tensor
        return value

    def reason(self, value: Value, why: str) -> None:
        """Say why a value is made as it is."""
        self.why.setdefault(value, []).append(why)

    def producers(self) -> dict[Value, Node]:
        return {value: node for node in self.nodes for value in node.outputs.values()}

    def consumers(self) -> dict[Value, list[Node]]:
        """The nodes that read a value, each once; a result of the graph has None among them."""
        readers: dict[Value, list[Node | None]] = {}
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs.values()):
                readers.setdefault(value, []).append(node)
        for value in self.outputs:
            readers.setdefault(value, []).append(None)
        return readers

    def substitute(self, new: dict[Value, Value]) -> None:
        """Let everybody who reads a key of `new` read its value; which may be a key, too."""

        def final(value: Value) -> Value:
            while value in new:
                value = new[value]
            return value

        for node in self.nodes:
            node.inputs = {role: final(value) for role, value in node.inputs.items()}
        self.outputs = [final(value) for value in self.outputs]

    def prune(self) -> None:
        """Forget nodes that nobody reads."""
        wanted, kept = set(self.outputs), []
        for node in reversed(self.nodes):
            if any(value in wanted for value in node.outputs.values()):
                kept.append(node)
                wanted.update(node.inputs.values())
        self.nodes = kept[::-1]
        self.constants = {v: t for v, t in self.constants.items() if v in wanted}

    def sort(self) -> None:
        """Put nodes behind what they read, and otherwise leave them in their order."""
        producers, begun, done, order = self.producers(), set(), set(), []
        for root in self.nodes:
            stack = [root]
            while stack:
                node = stack[-1]
                waits = [
                    producers[v]
                    for v in node.inputs.values()
                    if v in producers and id(producers[v]) not in done
                ]
                if waits and id(node) not in done:
                    assert id(node) not in begun, f"{node} waits for itself"
                    begun.add(id(node))
                    stack.extend(waits)
                    continue
                stack.pop()
                if id(node) not in done:
                    done.add(id(node))
                    order.append(node)
        self.nodes = order

    def check(self, given: Iterable[Value] = ()) -> None:
        """Every value is made before it is read, and once, where these are there, too."""
        known = {*self.inputs, *self.parameters.values(), *self.constants, *given}
        for node in self.nodes:
            missing = [v for v in node.inputs.values() if v not in known]
            assert not missing, f"{node} reads {missing} before it is made"
            again = [v for v in node.outputs.values() if v in known]
            assert not again, f"{node} makes {again} again"
            known.update(node.outputs.values())
        assert all(v in known for v in self.outputs), "a result is never made"

    def rename(self) -> None:
        """Call what nodes make by their ops and numbers, in the order in which they run."""
        numbers: dict[str, int] = {}
        for node in self.nodes:
            numbers[node.op] = number = numbers.get(node.op, 0) + 1
            for role, value in node.outputs.items():
                value.name = f"{node.op}{number}" + ("" if role == "y" else f".{role}")

    def count(self) -> dict[str, int]:
        """How many nodes there are of each op."""
        counts: dict[str, int] = {}
        for node in self.nodes:
            counts[node.op] = counts.get(node.op, 0) + 1
        return counts

    def __str__(self) -> str:
        return "\n".join(f"{node}  # {node.source}" for node in self.nodes)
