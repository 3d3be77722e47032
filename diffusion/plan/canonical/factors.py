"""Numbers that what a product reads or makes is multiplied with are numbers of its filters, where a
norm makes these (EDM2, KarrasUnet), whose `factor` takes them for nothing:

    conv(s x, W) = s conv(x, W) = conv(x, s W)
    s ((1 - t) a + t conv(x, W)) = s (1 - t) a + conv(x, s t W)

Each was a pass over the image, forward and backward. The sum of a block and its skip is then a sum
as any other, which the product's launch adds. A number behind a product that reads fewer numbers
than it makes, as the second of LoRA's, goes in front of it: s (x W) = (s x) W.
"""

import math

import torch

from ..graph import Graph, Node, Value

_ATEN = torch.ops.aten


def fold_factors(graph: Graph) -> None:
    """Move them, in place; nodes that nobody reads then are left."""
    folding = _Folding(graph)
    for node in list(graph.nodes):
        if node.op in ("conv", "linear"):
            folding.in_front(node)
        elif node.op == "affine":
            folding.behind(node)
    graph.sort()


def takes_factor(norm: Node) -> bool:
    """Whether what a norm over channels makes is linear in its `factor`."""
    return not {"bias", "shift"} & set(norm.inputs) and norm.attrs["activation"] == "identity"


class _Folding:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers, self.readers = graph.producers(), graph.consumers()

    def in_front(self, product: Node) -> None:
        """conv(s x, W)"""
        scaled = self._scaled(product.inputs["x"])
        if scaled is not None and self._reads_alone(product, scaled.out):
            if self._take(product, scaled.attrs["scale"]):
                product.inputs["x"] = scaled.inputs["x"]
                self.readers[scaled.inputs["x"]].append(product)

    def behind(self, node: Node) -> None:
        """s conv(x, W), or s (a + conv(x, W)), where the sum may be weighted."""
        x, scale = node.inputs["x"], node.attrs["scale"]
        maker = self.makers.get(x)
        if self._scaled(node.out) is None or maker is None or not self._reads_alone(node, x):
            return
        if self._absorbs(self._made(x), scale) or self._scales_fewer(maker, scale):
            self._replace(node, maker)
            return
        parts = _summands(maker)
        if parts is None or any(value.shape != node.out.shape for value, _ in parts):
            return
        if not any(self._can(maker, value) for value, _ in parts):
            return
        terms = [self._multiplied(maker, value, part * scale) for value, part in parts]
        maker.op, maker.attrs = "add", {}
        maker.inputs = dict(zip("ab", terms, strict=True))
        self._replace(node, maker)

    def _replace(self, node: Node, maker: Node) -> None:
        """Let the maker of what a node multiplies make its result."""
        self.graph.nodes.remove(node)
        maker.outputs = {"y": node.out}
        self.makers[node.out] = maker

    def _scales_fewer(self, product: Node, number: float) -> bool:
        """Whether a product reads so much less than it makes, and it is multiplied there now."""
        if product.op not in ("conv", "linear") or "bias" in product.inputs:
            return False
        x = product.inputs["x"]
        if 2 * x.numel > product.out.numel:
            return False
        product.inputs["x"] = self._multiplied(product, x, number)
        return True

    def _multiplied(self, total: Node, value: Value, number: float) -> Value:
        """A multiple of a summand, by its maker if that can."""
        if number == 1 or self._can(total, value) and self._absorbs(self._made(value), number):
            return value
        spec = {"y": (value.shape, value.dtype)}
        new = self.graph.new("affine", {"x": value}, spec, total.source, scale=number, offset=0)
        self.graph.nodes.append(new)  # which sorting puts where it belongs
        self.makers[new.out] = new
        self.readers[new.out] = [total]
        self.readers[value].append(new)
        return new.out

    def _can(self, reader: Node, value: Value) -> bool:
        """Whether a value that this node alone reads is made by one that can multiply it."""
        maker = self._made(value)
        if maker is None or not self._reads_alone(reader, value):
            return False
        scales = self._scaled(maker.out) is not None
        return scales or "bias" not in maker.inputs and self._norm_of(maker) is not None

    def _absorbs(self, maker: Node | None, number: float) -> bool:
        """Whether a node makes a multiple of what it makes from now on."""
        if maker is None:
            return False
        if self._scaled(maker.out) is not None:
            maker.attrs["scale"] *= number
            return True
        return "bias" not in maker.inputs and self._take(maker, number)

    def _made(self, value: Value) -> Node | None:
        """The node that makes it, perhaps in another order, for that alone."""
        node = self.makers.get(value)
        while node is not None and node.op in ("reshape", "layout"):
            before = node.inputs["x"]
            node = self.makers.get(before) if self._reads_alone(node, before) else None
        return node

    def _take(self, product: Node, number: float) -> bool:
        norm = self._norm_of(product)
        if norm is not None:
            norm.attrs["factor"] *= number
        return norm is not None

    def _norm_of(self, product: Node) -> Node | None:
        """The norm that makes a product's filters for it alone."""
        if product.op not in ("conv", "linear"):
            return None
        reader, value = product, product.inputs["weight"]
        while self._reads_alone(reader, value) and (node := self.makers.get(value)) is not None:
            if node.op == "channel_norm":
                return node if takes_factor(node) else None
            if node.op == "mul" and node.inputs["b"].numel == 1:
                reader, value = node, node.inputs["a"]
            elif node.op in ("reshape", "cast", "layout"):
                reader, value = node, node.inputs["x"]
            else:
                return None
        return None

    def _scaled(self, value: Value) -> Node | None:
        """The node that makes it by multiplying with a number that says something."""
        node = self.makers.of(value, "affine")
        if node is None or node.attrs["offset"] or not value.dtype.is_floating_point:
            return None
        return node if 0 < abs(node.attrs["scale"]) < math.inf else None

    def _reads_alone(self, reader: Node, value: Value) -> bool:
        return all(r is reader for r in self.readers.get(value, ())) and value in self.readers


def _summands(node: Node) -> tuple[tuple[Value, float], ...] | None:
    """What a node adds up, each with a number; None: it does no such thing."""
    if node.op == "add":
        parts = tuple((value, 1.0) for value in node.inputs.values())
    elif node.op == "arith" and node.attrs["target"] == _ATEN.lerp.Scalar:
        weight = node.attrs["arguments"][2][1]
        parts = tuple(zip(node.inputs.values(), (1 - weight, weight), strict=False))
    else:
        return None
    alike = {value.dtype for value, _ in parts} == {node.out.dtype}
    several = len({value for value, _ in parts}) == 2
    return parts if alike and several and all(n for _, n in parts) else None
