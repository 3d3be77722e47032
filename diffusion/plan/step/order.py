"""The order of a training step, whose gradients have places in one flat buffer.

Group kernels write them there, and sums for norms and biases are added together. What is on the
critical path, and what beside it, is as in `plan.order`.

- Weight gradients with equal filter sizes, over images of one size, form a group: up to `GROUP`, or
  until they read `GROUP_BYTES`, but never a part of a layer. With activations of fewer than
  `LITTLE` bytes, a group has one layer.
- A gradient runs alone if no group kernel supports it (other strides, padded channels), or if it
  reads something that is recomputed for it alone, which would otherwise be kept longer.
- A group uses half of the multiprocessors, except those of the last block, beside which nothing
  runs.
- In backward, while images are `LARGER` times the smallest, weight gradients are held, so that they
  run beside the smallest images; not if they keep too much memory.
- Where images are that large again, or before the last block, the streams wait for each other.
  From there on groups end with a block, and `ready` is told how much is complete. If others wait
  for it, it is told so at the end of every block.
- Sums for norms and biases are added before the last block, and at the end.
- A launch may start while its predecessor ends (`dependent_launch`), but not before the network's
  first convolution is done, or in backward its last norm, nor if the predecessor makes its weights.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ..graph import Node, Value, readers_of
from ..ops import FREE, WEIGHT_GRADS
from ..schedule.moves import Move
from ..schedule.order import GROUP, has_group_kernels, size_of_filters
from .places import EMB, Place

SHARE = 0.5  # of the multiprocessors: see docs/tried.md
GROUP_BYTES = 192 * 2**20
LITTLE = 8 * 2**20  # bytes of an activation
MOST_HELD = 32 * 2**20  # bytes of a tensor that a held gradient keeps, about
LARGER = 16  # times as many pixels
_LAYER = re.compile(r"\w+(\.\d+)*")  # up to the name of something in it
_BLOCK = re.compile(r"(\w+?\.)?\w+")  # the first two parts of a parameter's name


@dataclass(frozen=True)
class InStep:
    """What a training step has that decides its order."""

    pixels: int  # of all images
    emb: Collection[Value]  # parts of the embedding's projections
    names: Mapping[Value, str]  # of parameters, in either precision
    placed: Mapping[Value, Place]  # gradients in their places
    ends: Mapping[str, int]  # where the gradient of each filter ends in the flat buffer
    urgent: bool  # others wait for gradients of filters


def forward_moves(nodes: Sequence[Node], step: InStep) -> list[Move]:
    """The forward pass. Before the first launch that reads the embedding a step waits for it."""
    moves, begun, front, taken = [Move("begin")], False, None, False
    for node in nodes:
        if not taken and any(value in step.emb for value in node.inputs.values()):
            moves.append(Move("take"))
            taken = True
        behind = front is not None and bool(set(front.outputs.values()) & set(node.inputs.values()))
        own = begun and not (behind and front.op in ("upsampled_filters", "pad"))
        moves.append(Move("launch", (node,), step.pixels if own else None))
        if node.op not in FREE:
            begun, front = begun or node.op.startswith("conv"), node
    return moves


def backward_moves(nodes: Sequence[Node], step: InStep) -> list[Move]:
    """The backward pass."""
    return _Order(nodes, step).run()


class _Order:
    """The backward pass of a step."""

    def __init__(self, nodes: Sequence[Node], step: InStep) -> None:
        self.nodes, self.names, self.placed = nodes, step.names, step.placed
        self.urgent, placed = step.urgent, step.placed
        self.ends = dict(step.ends)  # of filters whose gradients nobody has been given yet
        self.readers = readers_of(nodes)
        # launches that write a filter's gradient
        self.left = Counter(placed[n.out].name for n in nodes if n.op in WEIGHT_GRADS)
        self.made = {value: node for node in nodes for value in node.outputs.values()}
        self.blocks = self._blocks()
        images = [[dy for dy in map(_path_gradient, block) if dy] for block in self.blocks]
        self.smallest = min(dy.shape[1] * dy.shape[2] for block in images for dy in block)
        # before it blocks have a critical path; behind it there are gradients of weights alone
        self.last = max(i for i, block in enumerate(images) if block)
        self.moves: list[Move] = []
        self.groups: dict[tuple, list[Node]] = {}
        self.offered: dict[tuple, list[Node]] = {}  # of a layer, until all of one size are there
        self.alike = Counter(
            (_LAYER.match(placed[node.out].name).group(), _size(node))
            for node in nodes
            if node.op in WEIGHT_GRADS and self._goes_with_others(node)
        )
        self.pixels: int | None = None
        self.is_met = self.reached = self.alone = False
        self.told = max(self.ends.values(), default=0)  # from here on they are complete
        first = next((n for n in nodes if n.op in WEIGHT_GRADS), None)  # the network's last
        self.waits = first is not None and first.inputs["x"].bytes >= LITTLE

    def run(self) -> list[Move]:
        feeding: list[Node] = []
        begun = False
        for block, nodes in enumerate(self.blocks):
            self._begin(nodes, block == self.last)
            for node in nodes:
                if node.op in WEIGHT_GRADS:
                    self._weight(node, feeding)
                    feeding = []
                elif self._is_on_path(node):
                    dy = _gradient(node)
                    self.pixels = self.pixels if dy is None else _pixels(dy)
                    self.moves.append(Move("launch", (node,), self.pixels if begun else None))
                    begun = begun or node.op in ("norm_backward", "skip_backward", "norm_dx")
                else:
                    feeding.append(node)
            self._end_of_block(block == len(self.blocks) - 1)
        assert not feeding, "a piece of work without a gradient of a weight"
        # beside the last gradients of weights
        self._insert_behind(("finish", "all sums"), lambda move: move.what == "launch")
        self._insert_behind(("embedding",), self._is_of_embedding)
        return self.moves

    def _insert_behind(self, whats: tuple[str, ...], is_one: Callable[[Move], bool]) -> None:
        """Moves behind the last that is one of these."""
        found = [i for i, move in enumerate(self.moves) if is_one(move)]
        if found:
            self.moves[found[-1] + 1 : found[-1] + 1] = map(Move, whats)

    def _is_of_embedding(self, move: Move) -> bool:
        """Whether it writes a part of the embedding's gradient."""
        return any(v in self.placed and self.placed[v].name == EMB for v in move.made)

    # --- what is on the path, and in which block --------------------------------------------------

    def _is_on_path(self, node: Node) -> bool:
        if node.op in WEIGHT_GRADS:
            return False
        readers = [r for v in node.outputs.values() for r in self.readers.get(v, ())]
        if node.op == "sum_pool":
            return not readers or any(r.op not in WEIGHT_GRADS for r in readers)
        if node.op in ("row_sums", "bias_grad"):
            (x,) = node.inputs.values()
            maker = self.made.get(x)
            if maker is not None and maker.op == "row_sums":
                return self._is_on_path(maker)
            return maker is not None and maker.op != "pad_channels"
        return True

    def _blocks(self) -> list[list[Node]]:
        """The nodes in order, in blocks: those that begin with one name are one."""
        blocks: list[list[Node]] = [[]]
        current = None
        for node in self.nodes:
            name = next((self.names[v] for v in node.inputs.values() if v in self.names), None)
            for value in node.outputs.values():
                if name is None and value in self.placed and self.placed[value].name != EMB:
                    name = self.placed[value].name
            block = current if name is None else _BLOCK.match(name).group()
            if block != current and blocks[-1]:
                blocks.append([])
            current = block
            blocks[-1].append(node)
        return blocks

    # --- the rules --------------------------------------------------------------------------------

    def _begin(self, nodes: list[Node], is_last: bool) -> None:
        dy = next((dy for dy in map(_gradient, nodes) if dy is not None), None)
        self.pixels = None
        if dy is None:
            return
        pixels = dy.shape[1] * dy.shape[2]
        large = pixels >= LARGER * self.smallest
        if not self.reached:
            first = next((n for n in nodes if _path_gradient(n)), None)
            most = max(dy.bytes, first.out.bytes if first else 0)  # of what is held, about
            holds = large and most < MOST_HELD
            self.reached = pixels <= self.smallest
            self.moves.append(Move("release" if self.reached else "hold" if holds else "keep"))
        if self.reached and not self.is_met and (large and pixels > self.smallest or is_last):
            self.moves.append(Move("sync"))
            self.is_met = True
        if is_last:
            self.moves.append(Move("sums"))
            self._flush()
            self.alone = True
        self.pixels = _pixels(dy)

    def _end_of_block(self, is_end: bool) -> None:
        self.pixels = None
        if not (self.urgent or self.is_met):
            return
        if self.is_met:
            self._flush()
        if is_end:  # of the pass, which is known anyway
            return
        start = max(self.ends.values(), default=0)
        if start < self.told:
            self.told = start
            self.moves.append(Move("ready", start=start))

    def _weight(self, node: Node, feeding: list[Node]) -> None:
        if feeding or not self._goes_with_others(node):
            self._given(node)
            self.moves.append(Move("weight", (node,), self.pixels, before=tuple(feeding)))
            return
        layer, key = _LAYER.match(self.placed[node.out].name).group(), _size(node)
        if any(images != key[0] for images, _ in self.groups):
            self._flush()
        offered = self.offered.setdefault((layer, key), [])
        offered.append(node)
        if len(offered) < self.alike[layer, key]:
            return
        offered.reverse()  # the layer's first is the last in backward
        if len(self.groups.get(key, ())) + len(offered) > GROUP:
            self._start(key)
        group = self.groups.setdefault(key, [])
        group += offered
        read = {v for n in group for v in (n.inputs["x"], n.inputs["dy"])}
        if not self.waits or len(group) >= GROUP or sum(v.bytes for v in read) >= GROUP_BYTES:
            self._start(key)

    def _goes_with_others(self, node: Node) -> bool:
        x = node.inputs["x"]
        again = self.made.get(x)
        is_image = len(x.shape) == 4 and (again is None or again.op != "upsample")
        return is_image and has_group_kernels(node)

    def _start(self, key: tuple) -> None:
        group = self.groups.pop(key)
        for node in group:
            self._given(node)
        share = 1.0 if self.alone else SHARE
        self.moves.append(Move("weights", tuple(group), self.pixels, share))

    def _flush(self) -> None:
        while self.groups:
            self._start(next(iter(self.groups)))

    def _given(self, node: Node) -> None:
        name = self.placed[node.out].name
        self.left[name] -= 1
        if not self.left[name]:
            self.ends.pop(name, None)


def _size(node: Node) -> tuple:
    """Of the images, and of the filters."""
    return node.inputs["x"].shape[:3], size_of_filters(node)


def _gradient(node: Node) -> Value | None:
    """The image's gradient that a node begins with."""
    values = (node.inputs.get(role) for role in ("dy", "dz", "da"))
    return next((v for v in values if v is not None and len(v.shape) == 4), None)


def _path_gradient(node: Node) -> Value | None:
    return None if node.op in WEIGHT_GRADS else _gradient(node)


def _pixels(dy: Value) -> int:
    """Of all images."""
    return dy.shape[0] * dy.shape[1] * dy.shape[2]
