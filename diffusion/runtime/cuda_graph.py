"""Capturing CUDA graphs, and what may not happen meanwhile.

To destroy a graph while another is captured invalidates that one. The garbage collector does so if
its turn comes then and a graph is among what nobody wants any more: any two objects that know each
other are left to it, whoever made them.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
    """What is done within the block becomes this graph; options as of torch.cuda.graph."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options):
            yield
    finally:
        if collects:
            gc.enable()
