"""Convolutions of each channel by itself, by known numbers that are the same for all: means of
blocks, copies of pixels, and FIR filters (`triton_kernels.resample.fir`), with the zeros that other
code puts between and around pixels before it, or the pixels that it mirrors there.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from triton_kernels.resample.fir import MOST_TAPS

from ..graph import Value
from ..views import View, length, whole
from .sources import source
from .table import Lowering, each

_COPY = {"taps": ((1.0,),), "up": 1, "down": 1, "border": "reflect"}  # with mirrored pixels around


def resampled(low, x, weight, bias, stride, padding, dilation, transposed, more, groups):
    """Where it is one number for every pixel of a block, its mean, or transposed what each pixel
    becomes, times a number; else a FIR filter. None: it is something else."""
    (ci, per_group, r, s), (_, c, p, q) = weight.shape, low.meta.shape
    step, zeros = to_tuple(stride, 2), to_tuple(padding, 2)
    if (ci, per_group * groups) != (c, c) or groups not in (1, c):
        return None
    if bias is not None or set(dilation) != {1}:
        return None
    taps = _numbers(low, weight)
    if taps is None:
        return None
    images, channels = _apart(x) if c == 1 else (x.dims[0], x.dims[1])
    value = low.gather(View(x.value, (images, x.dims[2], x.dims[3], channels), x.offset))
    shape, dtype, number = (length(images), p, q, length(channels)), low.meta.dtype, taps[0][0]
    if step == (r, s) and not any((*zeros, *more)) and {n for row in taps for n in row} == {number}:
        op, how = ("upsample", "factor") if transposed else ("avg_pool", "window")
        y = low.make(op, {"x": low.cast(value, dtype)}, shape, dtype, **{how: (r, s)})
        number *= 1 if transposed else r * s
        y = whole(y) if number == 1 else each(low, "affine", whole(y), scale=number, offset=0)
    elif r * s > MOST_TAPS or step[0] != step[1]:
        return None
    else:
        up, down = (step[0], 1) if transposed else (1, step[0])
        if transposed:
            taps = tuple(row[::-1] for row in taps[::-1])
            start = r - 1 - zeros[0], s - 1 - zeros[1]
        else:
            value, up, start = _without_zeros(low, value, zeros)
        how = {"taps": taps, "up": up, "down": down, "start": start}
        value, how = _without_mirrored(low, value, how, (p, q))
        y = whole(low.make("fir", {"x": low.cast(value, dtype)}, shape, dtype, **how))
    images, p, q, channels = y.dims
    return View(y.value, (images + channels, (), p, q) if c == 1 else (images, channels, p, q))


def to_tuple(given: int | Sequence[int], count: int) -> tuple[int, ...]:
    """As many numbers, of one for all or of that many."""
    given = (given,) if isinstance(given, int) else tuple(given)
    return given if len(given) == count else given * count


def _numbers(low: Lowering, weight: View) -> tuple[tuple[float, ...], ...] | None:
    """Those of the filter [R, S] that all channels have, as they are multiplied; None: they are not
    known, or not the same, or other channels are multiplied, too."""
    c, per_group, r, s = weight.shape
    filters = source(weight, low.graph.producers())
    numbers = low.numbers(filters.value)
    if numbers is None:
        return None
    sizes, steps = ([piece[i] for piece in filters.pieces] for i in (0, 1))
    numbers = numbers.contiguous().as_strided(sizes, steps, filters.offset)
    numbers = numbers.reshape(c, per_group, r, s)
    own = numbers[:, 0] if per_group == 1 else numbers.diagonal().movedim(-1, 0)
    if numbers.count_nonzero() != own.count_nonzero() or bool((own != own[:1]).any()):
        return None
    return tuple(map(tuple, own[0].to(low.meta.dtype).to(torch.float64).tolist()))


def _apart(x: View) -> tuple[tuple, tuple]:
    """Images and channels of images of one channel each: channels lie within a pixel."""
    pixel = min((step for dim in x.dims[2:] for _, step in dim), default=math.inf)
    inner = tuple(piece for piece in x.dims[0] if piece[1] < pixel)
    outer = x.dims[0][: len(x.dims[0]) - len(inner)]
    return (outer, inner) if outer + inner == x.dims[0] else (x.dims[0], ())


def _without_zeros(
    low: Lowering, value: Value, start: tuple[int, int]
) -> tuple[Value, int, tuple[int, int]]:
    """The image [N, H, W, C] before zeros were put around and between its pixels, how far apart it
    was put, and the zeros above and left of it."""
    makers, x = low.graph.producers(), value
    while (node := makers.get(x)) is not None and node.op in ("pad", "cast", "reshape"):
        behind = node.inputs["x"]
        if node.op == "pad":
            pads = node.attrs["pads"]
            if len(pads) != 4 or pads[0] != (0, 0) or pads[3] != (0, 0):
                return value, 1, start
            start = start[0] + pads[1][0], start[1] + pads[2][0]
            value = behind
        elif node.op == "cast" and x.dtype != low.meta.dtype:
            return value, 1, start
        elif node.op == "reshape" and x.shape != behind.shape:
            spread = makers.get(behind)
            up = None if spread is None or spread.op != "pad" else _between(spread.attrs["pads"])
            if up is None or len(x.shape) != 4:
                return value, 1, start
            n, h, _, w, _, c = spread.inputs["x"].shape
            if x.shape != (n, h * up, w * up, c):
                return value, 1, start
            image = low.views.gather(whole(spread.inputs["x"]), (n, h, w, c))
            return image, up, start
        x = behind
    return value, 1, start


def mirrored(low: Lowering, value: Value, start: tuple[int, int], size: tuple[int, int]) -> Value:
    """The image [N, H, W, C] with pixels around it that are mirrored, `size` in all."""
    (n, *_, c), how = value.shape, _COPY | {"start": start}
    return low.make("fir", {"x": value}, (n, *size, c), value.dtype, **how)


def _without_mirrored(
    low: Lowering, value: Value, how: dict[str, Any], size: tuple[int, int]
) -> tuple[Value, dict[str, Any]]:
    """The image before pixels were mirrored around it, where the filter sees nothing else there,
    and the filter's options for it."""
    makers = low.graph.producers()
    node = makers.get(value)
    if node is not None and node.op == "cast" and value.dtype == low.meta.dtype:
        node = makers.get(node.inputs["x"])
    if node is None or node.op != "fir" or node.attrs != _COPY | {"start": node.attrs["start"]}:
        return value, how
    up, first, window = how["up"], how["start"], (len(how["taps"]), len(how["taps"][0]))
    for n, before, p, taken in zip(node.out.shape[1:3], first, size, window, strict=True):
        last = (p - 1) * how["down"] + taken - 1 - before
        if before >= up or last >= n * up:  # zeros, too
            return value, how
    start = tuple(a + up * b for a, b in zip(first, node.attrs["start"], strict=True))
    return node.inputs["x"], how | {"start": start, "border": "reflect"}


def _between(pads: tuple[tuple[int, int], ...]) -> int | None:
    """How far apart zeros behind rows and columns put pixels, of [N, H, 1, W, 1, C]."""
    up = pads[2][1] + 1 if len(pads) == 6 else 1
    behind = (0, up - 1)
    return up if pads == ((0, 0), (0, 0), behind, (0, 0), behind, (0, 0)) else None
