"""Whose variables may keep what a module leaves."""

import sys
import sysconfig
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

# whose variables and classes are of no module's tensors
_OTHERS = {*sys.stdlib_module_names, "torch", "triton", "triton_kernels", "diffusion", "sympy"}
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def keeping_files() -> dict[str, dict[str, Any]]:
    """The variables of Python's modules that may keep tensors: not of `_OTHERS`, nor of installed
    packages in which nothing is PyTorch's."""
    packages: dict[str, dict[str, ModuleType]] = {}
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package not in _OTHERS and hasattr(module, "__dict__"):
            packages.setdefault(package, {})[name] = module
    theirs = (
        modules for name, modules in packages.items() if _has_tensors(name, [*modules.values()])
    )
    return {name: vars(module) for modules in theirs for name, module in modules.items()}


_known: dict[str, tuple[int, bool]] = {}  # of how many modules of a package, the answer below


def _has_tensors(package: str, modules: list[ModuleType]) -> bool:
    """Whether one of its files may keep a tensor."""
    count, answer = _known.get(package, (0, False))
    if count != len(modules):
        answer = not all(map(_is_installed, modules)) or any(map(_knows_torch, modules))
        _known[package] = len(modules), answer
    return answer


def _is_installed(module: ModuleType) -> bool:
    return str(vars(module).get("__file__")).startswith(_INSTALLED)


def _knows_torch(module: ModuleType) -> bool:
    """Whether a variable is PyTorch's, or a module, function or class of it."""
    origins = map(_origin, list(vars(module).values()))
    return any(str(name).partition(".")[0] == "torch" for name in origins)


def _origin(x: Any) -> Any:
    """The name of a module, or of that in which a function, a class or another thing's class is."""
    kind = type(x)
    if issubclass(kind, ModuleType):
        return vars(x).get("__name__")
    named = issubclass(kind, type) or kind in (FunctionType, BuiltinFunctionType)
    return (x if named else kind).__module__


def is_theirs(name: Any) -> bool:
    return str(name).partition(".")[0] not in _OTHERS
