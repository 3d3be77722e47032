"""A row of the fuse table, and the graph that it rewrites."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from triton_kernels.conv.upsampled import upsampled_spec
from triton_kernels.registry.spec import AttentionSpec, dtype_name
from triton_kernels.runtime.device import Device

from ..graph import Graph, Node, Value
from ..launch.products import is_of_itself
from ..launch.table import Kernels
from ..ops import PARTS

HALF = (2, 2)  # pixels of a block, or steps


NOT_IN_A_STEP = ("train", "sample")  # `Row.when`: in a step gradients have places


@dataclass(frozen=True)
class Row:
    name: str
    root: tuple[str, ...]  # ops where the pattern begins
    rewrite: Callable[["Fusing", Node], Value | None]
    # how much longer unet64 takes without it, on an H200 in bf16. "A pass" is forward and backward
    # by accelerate, "a step" one of train.py (`benchmarks.ablate rows=...`), both at commit aca892e
    # where nothing else is said; figures of an H100 are of commit 3a802e1, those of ddpm_cifar10 of
    # f52b7f1, of denoising_diffusion of 73ca7946, 83dce235. What is predicted is of a network of
    # `benchmarks.accelerated`, in bf16 or under autocast: costs of our kernels, and the time that
    # PyTorch's need for their bytes alone
    earns: str
    when: tuple[str, ...] = ("train", "step", "sample")  # the plans that it is for


On = tuple[Kernels, Device]  # what is launched, and where


class Fusing:
    """A graph that is being rewritten, and who makes and reads each value of it. A rewrite edits
    nodes, and then names each that has changed (`take`). Where a node is in the order does not
    matter: it is sorted afterwards."""

    few = 16  # channels; fewer of them, whose pixels TMA cannot address, are padded

    def __init__(
        self,
        graph: Graph,
        mode: str,
        tf32: tuple[bool, bool],  # may convolutions, may other products be in TF32
        kernels: On | None,
        before: Sequence[Node],  # the other pass, which is only looked at
    ) -> None:
        self.graph, self.mode, self.tf32 = graph, mode, tf32
        self.before = frozenset(before)
        self._kernels = kernels
        # who has made or read a value at some time, of which those count that still do
        self._made = {value: node for node in before for value in node.outputs.values()}
        self._made |= graph.producers()
        self._read = graph.consumers()
        self.gone: set[Node] = set()
        self._new: dict[Node, list[Node]] = {}  # by the node that they stand in front of

    def is_exact(self, y: Value, product: Node | None = None) -> bool:
        """Whether products of such numbers, by default of a convolution, are in float32, and left
        to kernels without an epilogue."""
        of_matrices = product is not None and product.of_matrices
        return y.dtype == torch.float32 and not self.tf32[of_matrices]

    def is_few(self, value: Value) -> bool:
        """Whether its channels are so few that they have to be padded."""
        channels, size = value.shape[-1], value.dtype.itemsize
        return size <= 4 and channels < self.few and channels * size % 16 != 0

    def padded_width(self, value: Value) -> int | None:
        """How many channels an image has that a convolution reads, or its gradient; None: those
        that are there. What a step begins with is written anew, for in float32 it may have to be
        rounded."""
        if self.mode != "step":
            return self.few if self.is_few(value) else None
        maker = self.maker(value)
        cast = maker is not None and maker.op == "cast" and maker.inputs["x"] in self.graph.inputs
        if maker is not None and not cast:
            return None
        width = -(-value.shape[-1] // self.few) * self.few
        return width if width != value.shape[-1] or value.dtype == torch.float32 else None

    def copies_less_of(self, images: Value, filters: Value) -> bool:
        """Whether parts of the images are less to copy than columns of filters, which other steps
        than a `UNet`'s copy anew in each."""
        return self.mode == "train" and filters.numel > images.numel

    def serves_upsampled(self, small: Value, channels: tuple[int, int], co: int) -> bool:
        """Whether there are kernels for a convolution of upsampled channels of the small image, and
        of channels beside them, and whether they pay, in both passes."""
        if self._kernels is None:
            return False
        kernels, gpu = self._kernels
        meta = torch.empty(small.shape, dtype=small.dtype, device="meta")
        asked = {"conv_upsampled": False, "conv_upsampled_input_grad": True}
        specs = {op: upsampled_spec(meta, *channels, co, grad=grad) for op, grad in asked.items()}
        return all(kernels.OPS[op].why_apart(spec, gpu) is None for op, spec in specs.items())

    def serves_attention_grad(self, node: Node) -> bool:
        """Whether there are kernels for the gradient of such heads. The reference has them of all
        sizes."""
        if self._kernels is None:
            return True
        kernels, gpu = self._kernels
        (n, *_, c), heads = node.inputs["o"].shape, node.attrs["heads"]
        parts = [node.inputs[role] for role in PARTS if role in node.inputs]
        t, seen = (x.numel // (n * x.shape[-1]) for x in (parts[0], parts[-1]))
        own = is_of_itself(node.inputs)
        op = kernels.OPS.get("attention_bwd" if own else "cross_attention_bwd")
        dtype = dtype_name(parts[0].dtype, self.tf32[1])
        its = {} if own else {"keys": seen, "masked": "mask" in node.inputs}
        spec = AttentionSpec(n * heads, dtype, t, c // heads, grad=True, **its)
        return op is None or op.refuse(spec, gpu) is None

    def made_by(self, op: str) -> list[Node]:
        """The nodes of an op, of the other pass too."""
        nodes = dict.fromkeys(self._made.values())
        return [node for node in nodes if node.op == op and node not in self.gone]

    def maker(self, value: Value | None, *ops: str) -> Node | None:
        """The node that makes a value, if it is one of these ops, or of any if none is named."""
        node = self._made.get(value)
        if node is None or node in self.gone or value not in node.outputs.values():
            return None
        return node if not ops or node.op in ops else None

    def uncast(self, value: Value) -> Value:
        """What a cast makes the value of, or the value itself."""
        cast = self.maker(value, "cast")
        return value if cast is None else cast.inputs["x"]

    def unwidened(self, value: Value) -> Value:
        """The same numbers in fewer bits, if that is what a cast widens, or the value itself."""
        cast = self.maker(value, "cast")
        return cast.inputs["x"] if cast is not None and cast.widens else value

    def readers(self, value: Value) -> list[Node | None]:
        """The nodes that read a value, each once; None stands for the caller of the graph."""
        return [
            node
            for node in self._read.get(value, ())
            if node is None or node not in self.gone and value in node.inputs.values()
        ]

    def reader(self, value: Value, *ops: str) -> Node | None:
        """The only node that reads a value, if it is one of these ops."""
        (first, *others) = self.readers(value) or [None]
        return first if first is not None and not others and first.op in ops else None

    def reaches(self, node: Node, *values: Value) -> bool:
        """Whether one of these values depends on a result of a node."""
        results, stack, seen = set(node.outputs.values()), list(values), set()
        while stack:
            value = stack.pop()
            if value in results:
                return True
            maker = self.maker(value)
            if maker is not None and maker not in seen:
                seen.add(maker)
                stack.extend(maker.inputs.values())
        return False

    def summands(self, node: Node) -> tuple[tuple[Value, Value], ...]:
        """What an addition of two tensors of one shape reads, in either order."""
        a, b = node.inputs["a"], node.inputs["b"]
        return ((a, b), (b, a)) if a is not b and a.shape == b.shape else ()

    def take(self, node: Node, *ended: Node) -> None:
        """Note what a changed node reads and makes, and forget nodes whose work it does now."""
        self.gone.update(ended)
        self._made |= dict.fromkeys(node.outputs.values(), node)
        for value in node.inputs.values():
            readers = self._read.setdefault(value, [])
            if node not in readers:
                readers.append(node)

    def write(self, node: Node, value: Value, *ended: Node, role: str = "") -> None:
        """Let a node make this value in the place of a result of its, the first if no role is
        named, and forget nodes whose work it does now."""
        node.outputs[role or next(iter(node.outputs))] = value
        self.take(node, *ended)

    def insert(self, before: Node, op: str, inputs: dict, outputs: dict, **attrs) -> Node:
        """A new node in front of another."""
        node = self.graph.new(op, inputs, outputs, before.source, **attrs)
        self._new.setdefault(before, []).append(node)
        self.take(node)
        return node

    def constant(self, tensor: torch.Tensor, name: str) -> Value:
        """A constant of this name, made once."""
        found = (value for value in self.graph.constants if value.name == name)
        return next(found, None) or self.graph.constant(tensor, name)

    def done(self) -> None:
        """Put new nodes into the graph, and take out those that are gone."""
        nodes = [n for node in self.graph.nodes for n in (*self._new.get(node, ()), node)]
        self.graph.nodes = [node for node in nodes if node not in self.gone]
