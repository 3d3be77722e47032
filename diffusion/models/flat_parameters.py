"""All parameters of a model in one flat buffer, so that the optimizer is one launch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from triton_kernels.runtime.device import is_rehearsal
from triton_kernels.tf32 import rounded_to_tf32

_ALIGNMENT = 64  # elements: every parameter starts at a multiple of 256 bytes (float32), 128 (bf16)
_ROW = 8  # elements, 16 bytes in 16 bits: rows of `rows_in_low` start at multiples of it

_FILTERS, _OTHERS = -2, -1  # the groups before those of `together`


class FlatParameters:
    """Moves the parameters of `model` into `param` and gives each a gradient inside `grad`.

    Every buffer has the parameters' dtype (float32) and shape [P]. A parameter keeps its shape and
    its order of strides (convolution weights stay channels_last), and is a view: to write the
    buffer is to write the model, in place. The gaps that align the parameters hold zeros and stay
    zero under every update. Filters of convolutions come first, in the order of the model, up to
    element `filters_end`; parameters whose names end in one of `together` come last and become
    neighbours, group by group and without gaps, but for those behind rows of matrices that the
    model multiplies in 16 bits (its `rows_in_low`, endings of names): in that dtype these rows, of
    all of a group, are at equal steps of multiples of 16 bytes.

    Without `trains` the model stays as it is: `param` is a copy, and there is no other buffer
    (`grad`, the moments and `ema` are names of it).
    """

    def __init__(
        self, model: nn.Module, together: tuple[str, ...] = (), trains: bool = True
    ) -> None:
        named = list(model.named_parameters())
        if not named:
            raise ValueError("the model has no parameters")
        backend = getattr(model, "backend", None)
        is_low = trains and backend is not None and backend.dtype.itemsize == 2
        in_rows = getattr(model, "rows_in_low", ()) if is_low else ()
        groups = {name: _group(name, parameter, together) for name, parameter in named}
        named.sort(key=lambda pair: groups[pair[0]])
        self._slots: dict[str, tuple[int, torch.Size, tuple[int, ...]]] = {}
        size, before, self.filters_end = 0, _FILTERS, 0
        for name, parameter in named:
            if groups[name] < 0 or groups[name] != before:  # no gaps within a group
                size = -(-size // _ALIGNMENT) * _ALIGNMENT
            before = groups[name]
            count, strides = parameter.numel(), _dense_strides(parameter)
            if groups[name] >= 0 and name.endswith(in_rows) and strides[-1] == 1:
                row = -(-parameter.shape[1] // _ROW) * _ROW
                count, strides = len(parameter) * row, (row, 1)
            self._slots[name] = (size, parameter.shape, strides)
            size += count
            if groups[name] == _FILTERS:
                self.filters_end = size
        like = named[0][1]
        self.param = _zeros(size, like)
        others = [_zeros(size, like) if trains else self.param for _ in range(3)]
        self.grad, self.exp_avg, self.exp_avg_sq = others
        values, gradients = self.views(self.param), self.views(self.grad)
        for name, parameter in named:
            if not is_rehearsal():
                values[name].copy_(parameter.data)
            if trains:
                parameter.data = values[name]
                parameter.grad = gradients[name]
        self.ema = self._copied() if trains else self.param
        self.averages: dict[float, Tensor] = {}  # further ones than `ema`, by decay
        self.shadow: Tensor | None = None  # what `low` has made, which the optimizer keeps up

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        buffers = [self.param, self.grad, self.exp_avg, self.exp_avg_sq, self.ema, self.shadow]
        buffers += self.averages.values()
        return sum(b.nbytes for b in {id(b): b for b in buffers if b is not None}.values())

    def low(self, dtype: torch.dtype, tf32: bool = False) -> Tensor:
        """The buffer that layers compute with: `param`, or its shadow in another dtype, or rounded
        to TF32 for products of float32."""
        if dtype != self.param.dtype:
            self.shadow = self._copied(dtype)
        elif tf32:
            self.shadow = self._copied() if is_rehearsal() else rounded_to_tf32(self.param)
        else:
            return self.param
        return self.shadow

    def keep_averages(self, decays: Sequence[float]) -> None:
        """Make room for further averages of these decays, which begin as the parameters are."""
        self.averages = {decay: self._copied() for decay in decays}

    def _copied(self, dtype: torch.dtype | None = None) -> Tensor:
        """The parameters, in memory of their own and in another dtype."""
        if is_rehearsal():
            return torch.empty_like(self.param, dtype=dtype)
        return self.param.to(dtype or self.param.dtype, copy=True)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The parameters' places in one of the buffers, by name, in the model's own shapes."""
        return {
            name: buffer.as_strided(shape, strides, offset)
            for name, (offset, shape, strides) in self._slots.items()
        }

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block the model computes with its EMA weights (swapped in place)."""
        trained = self.param.clone()
        self.param.copy_(self.ema)
        try:
            yield
        finally:
            self.param.copy_(trained)


def are_neighbours(views: Mapping[str, Tensor], names: Sequence[str]) -> bool:
    """Whether the rows of these views of a buffer follow one another at equal steps."""
    parts = [views[name] for name in names]
    if any(x.ndim != parts[0].ndim or x.ndim > 2 or x.stride() != parts[0].stride() for x in parts):
        return False
    starts = [x.storage_offset() for x in parts]
    ends = [x.storage_offset() + len(x) * x.stride(0) for x in parts]
    return starts[1:] == ends[:-1] and parts[0].stride(-1) == 1


def over_neighbours(first: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One view over the rows of a view and of its neighbours. A `shape` of longer rows has the gaps
    between them as well."""
    return first.as_strided(shape, first.stride())


def _zeros(size: int, like: Tensor) -> Tensor:
    """In a rehearsal, which has no numbers, memory of the host that nobody has written."""
    make = torch.empty if is_rehearsal() else torch.zeros
    return make(size, dtype=like.dtype, device=like.device)


def _group(name: str, parameter: Tensor, endings: tuple[str, ...]) -> int:
    """Which of the endings the name has, or else whether it is a filter."""
    ending = next((i for i, ending in enumerate(endings) if name.endswith(ending)), None)
    if ending is not None:
        return ending
    return _FILTERS if parameter.ndim > 2 else _OTHERS


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own strides if it is dense in some order of its dimensions."""
    expected = 1
    for size, stride in sorted(
        zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: pair[1]
    ):
        if size != 1 and stride != expected:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has gaps:"
                f" strides {parameter.stride()}"
            )
        expected *= size
    return parameter.stride()
