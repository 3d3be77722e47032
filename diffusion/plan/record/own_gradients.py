"""Whether the gradient that an autograd.Function brings along is that of its forward.

Many functions are there to keep less, or to compute in float32, as EDM's attention. What they call
can be recorded instead, for other kernels to compute; where a gradient is something else, as that
of what has been rounded, it cannot.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import Function

from .known_numbers import unrecorded
from .own_functions import autocasts, called

_DRAWS = ((1.0, 1.0), (8.0, 1000.0))  # of arguments, and of gradients: some functions limit them
# of the largest number: sums have another order; under autocast PyTorch's products are rounded
_WITHIN, _WITHIN_LOW = 1e-3, 5e-2
_MOST = 2**22  # numbers in the arguments, of two images
_known: WeakKeyDictionary[type[Function], dict[tuple, bool]] = WeakKeyDictionary()


def is_of_forward(function: type[Function], args: Sequence[Any]) -> bool:
    """By numbers: of drawn arguments with these shapes, at most two images, results and gradients
    are what PyTorch makes of the forward. False: they differ, or the function cannot be asked so,
    as one that writes to its arguments or takes whole numbers."""
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else None for x in args]
    given = [x for x in args if isinstance(x, Tensor)]
    if not given or not all(x.is_floating_point() for x in given):
        return False
    images = {x.shape[:1] for x in given}
    if len(images) == 1 and images != {()}:
        shapes = [s and (min(s[0], 2), *s[1:]) for s in shapes]
    if sum(torch.Size(s).numel() for s in shapes if s is not None) > _MOST:
        return False
    low = {dtype for _, dtype in autocasts()}
    known = _known.setdefault(function, {})
    key = *(repr(x) if s is None else s for x, s in zip(args, shapes, strict=True)), *low
    if key not in known:
        agree = partial(_agree, function, args, shapes)
        asked = [partial(agree, *sizes, _WITHIN) for sizes in _DRAWS]
        asked += [partial(agree, *_DRAWS[0], _WITHIN_LOW, dtype) for dtype in low]
        known[key] = all(unrecorded(each) is True for each in asked)
    return known[key]


def _agree(
    function: type[Function],
    args: Sequence[Any],
    shapes: Sequence[tuple[int, ...] | None],
    size: float,
    of_grads: float,
    within: float,
    low: torch.dtype | None = None,  # that autocast casts to
) -> bool:
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: Sequence[int], size: float) -> Tensor:
        return torch.randn(shape, generator=generator) * size

    numbers = [None if s is None else drawn(s, size) for s in shapes]

    def arguments() -> list[Any]:
        copies = (x if n is None else n.clone() for x, n in zip(args, numbers, strict=True))
        return [x.requires_grad_() if isinstance(x, Tensor) else x for x in copies]

    ours, theirs = arguments(), arguments()
    with ExitStack() as stack:
        if low is not None:
            stack.enter_context(torch.autocast("cpu", low))
        (a, written), b = called(function, ours), function.apply(*theirs)
    a, b = ((y,) if isinstance(y, Tensor) else tuple(y) for y in (a, b))
    if written or any(y is x for y in a for x in ours):
        return False
    dys = [drawn(y.shape, of_grads).to(y.dtype) for y in a]
    for ys in (a, b):
        torch.autograd.backward(ys, dys)
    grads = [[x.grad for x in given if isinstance(x, Tensor)] for given in (ours, theirs)]
    same = partial(_same, within=within)
    return all(map(same, (*a, *grads[0]), (*b, *grads[1])))


def _same(a: Tensor | None, b: Tensor | None, within: float) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool((a - b).abs().max() <= within * b.abs().max())
