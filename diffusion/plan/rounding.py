"""Where q, k and v are rounded, in a plan whose products round to TF32 what they read.

Kernels of attention want them rounded (`triton_kernels.fused_tf32`). The product that makes them
can do it as it writes them, which spares attention, forward and backward, a pass of their own, if
nothing else reads them.
"""

from typing import Any

from .graph import Graph, Node
from .launch.products import has_usual_scale

_MAKERS = ("linear", "conv_few")
_READERS = ("attention", "attention_grad")


def round_where_made(graph: Graph, kernels: Any) -> None:
    """Mark these products and their readers, if the kernels round what products read."""
    if not getattr(kernels, "ROUNDS_OPERANDS", False):
        return
    consumers = graph.consumers()
    for node in graph.nodes:
        readers = consumers.get(node.out, ())
        images = node.op in _MAKERS and len(node.out.shape) == 4
        if images and readers and all(_reads_packed(reader, node) for reader in readers):
            node.attrs["rounds"] = True
            for reader in readers:
                reader.attrs["is_rounded"] = True


def _reads_packed(reader: Node | None, maker: Node) -> bool:
    """Whether it is attention by a kernel of ours, whose q, k and v this is."""
    if reader is None or reader.op not in _READERS or not has_usual_scale(reader):
        return False
    return reader.inputs.get("qkv") is maker.out
