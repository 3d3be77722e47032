"""Arguments and results of a module as trees: PyTorch's, in which dataclasses are branches too."""

import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn


class _Fields:
    """A dataclass while its tree is flattened."""

    def __init__(self, instance: Any) -> None:
        self.type = type(instance)
        names = [f.name for f in dataclasses.fields(instance)]
        self.names = tuple(name for name in names if hasattr(instance, name))
        self.values = [_branches(getattr(instance, name)) for name in self.names]


def _made(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    instance = kind.__new__(kind)  # neither __init__ nor __post_init__ takes its fields
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


pytree.register_pytree_node(_Fields, lambda x: (x.values, (x.type, x.names)), _made)


def _branches(tree: Any) -> Any:
    return pytree.tree_map(lambda x: _Fields(x) if _is_dataclass(x) else x, tree, is_leaf=_is_size)


def _is_size(x: Any) -> bool:
    """Whether it is a tensor's shape, of which PyTorch's trees would make a tuple."""
    return isinstance(x, torch.Size)


def _is_dataclass(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and not isinstance(x, type | dict | nn.Module)


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Its leaves, and the tree without them, of which `pytree.tree_unflatten` makes it again."""
    return pytree.tree_flatten(_branches(tree), is_leaf=_is_size)


def leaves(tree: Any) -> list[Any]:
    return flatten(tree)[0]


def tensors_in(tree: Any) -> list[Tensor]:
    """Those in a call's arguments or results, of whose objects none is a branch."""
    kind = type(tree)
    if kind is tuple or kind is list:  # as nearly all are: PyTorch's trees take ten times as long
        return [x for branch in tree for x in tensors_in(branch)]
    if kind in _LEAVES:
        return []
    if isinstance(tree, Tensor):
        return [tree]
    if kind is dict:
        return tensors_in([*tree.values()])
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


_LEAVES = {type(None), bool, int, float, str, torch.dtype, torch.device}


_SIMPLE = (Tensor, nn.Module, type, Enum, torch.dtype, torch.device, str, bytes, int, float)
_MANY = (set, frozenset, list, tuple)  # with classes of theirs, which are no branches


def holds_tensors(leaf: Any) -> bool:
    """Whether a leaf that is an object, such as a distribution or a dict of a class of its own, has
    tensors among its attributes or in it, which a plan does not see."""
    seen, rest = set(), [leaf]
    while rest:
        x = rest.pop()
        if id(x) in seen or isinstance(x, _SIMPLE):
            continue
        seen.add(id(x))
        members = x.values() if isinstance(x, Mapping) else x if isinstance(x, _MANY) else ()
        inner = pytree.tree_leaves([*state_of(x).values(), *members])
        if any(isinstance(y, Tensor) for y in inner):
            return True
        rest += inner
    return False


def state_of(x: Any) -> dict[str, Any]:
    """What an object has in attributes and in slots."""
    return getattr(x, "__dict__", {}) | slots_of(x)


def slots_of(x: Any) -> dict[str, Any]:
    slots = [getattr(kind, "__slots__", ()) for kind in type(x).__mro__]
    names = [n for given in slots for n in ((given,) if isinstance(given, str) else given)]
    return {n: getattr(x, n) for n in names if not n.startswith("__") and hasattr(x, n)}


def version_of(x: Tensor) -> tuple[int, int]:
    """Another where somebody has written to it, or has set its `data`; not what is written through
    `data`, which PyTorch does not count."""
    place = x.data_ptr() if x.layout is torch.strided else 0
    return place, 0 if x.is_inference() else x._version
