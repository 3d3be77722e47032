"""Modules of the user's own files, to be planned or timed: FILE.py:FUNCTION names a function of the
number of images, which returns a module and a tuple of its arguments.

    def make(batch):
        return MyUNet(), (torch.randn(batch, 3, 64, 64), torch.rand(batch))
"""

import inspect
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..errors import ConfigError
from ..user_files import import_file

_BETWEEN = ".py:"  # the file and its function
Made = tuple[nn.Module, tuple]  # a module, and the arguments of its forward pass


def names_function(model: str) -> bool:
    """Whether it is FILE.py:FUNCTION."""
    return _BETWEEN in model


def user_function(model: str) -> Callable[[int], Made]:
    """The function that FILE.py:FUNCTION names: of the number of images it returns a module and a
    tuple of its arguments. ConfigError: there is none, or it returns something else."""
    file, _, name = model.partition(_BETWEEN)
    path = Path(f"{file}.py")
    try:
        function = getattr(import_file(path, f"model={model}"), name, None)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"model={model}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigError(f"model={model}: {path} has no function {name or 'of no name'}")

    try:
        inspect.signature(function).bind(1)
    except TypeError as error:
        raise ConfigError(
            f"model={model}: expected a function of the number of images ({error})"
        ) from None

    def made(batch: int) -> Made:
        found = function(batch)
        match found:
            case (nn.Module(), tuple()):
                return found
        raise ConfigError(f"model={model}: expected a module and a tuple of its arguments")

    return made


def in_bf16(module: nn.Module, arguments: tuple) -> Made:
    """Both, with all numbers that have a fraction in bfloat16."""
    return module.bfloat16(), tree_map_only(
        Tensor, lambda x: x.bfloat16() if x.is_floating_point() else x, arguments
    )
