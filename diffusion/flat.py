"""All parameters of a model in one flat buffer, so that the optimizer is one launch."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_ALIGNMENT = 64  # elements: every parameter starts at a multiple of 256 bytes (float32), 128 (bf16)


class FlatParameters:
    """Moves the parameters of `model` into `param` and gives each a gradient inside `grad`.

    Every buffer is float32 [P]. A parameter keeps its shape and its order of strides (convolution
    weights stay channels_last), and is a view: to write the buffer is to write the model, in place.
    The gaps that align the parameters hold zeros and stay zero under every update.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        if not named:
            raise ValueError("the model has no parameters")
        self._slots: dict[str, tuple[int, torch.Size, tuple[int, ...]]] = {}
        size = 0
        for name, parameter in named:
            strides = _dense_strides(parameter)
            self._slots[name] = (size, parameter.shape, strides)
            size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        device = named[0][1].device
        self.param = torch.zeros(size, device=device)
        self.grad = torch.zeros(size, device=device)
        self.exp_avg = torch.zeros(size, device=device)
        self.exp_avg_sq = torch.zeros(size, device=device)
        values, gradients = self.views(self.param), self.views(self.grad)
        for name, parameter in named:
            values[name].copy_(parameter.data)
            parameter.data = values[name]
            parameter.grad = gradients[name]
        self.ema = self.param.clone()

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
