"""Names of compiled kernels in Triton's cache on disk that do not depend on the process.

The name is a hash that includes the constants that a kernel, and the functions that it calls, read
from their modules. The constants of a called function count only if the function was hashed before
(Triton 3.6 and 3.7: `DependenciesFinder._update_hash` reads the constants first and computes the
hash second). The name therefore depends on which kernel a process launches first, and a process
would compile again what the cache has under another name.
"""

import os
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

import triton
from triton.runtime.jit import JITCallable


def settle_cache_folder() -> None:
    """Name the folder of Triton's cache for this process and those that it starts. Inductor names
    another in any process that it compiles in, unless there is a name: what other processes have
    compiled is then not found."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(triton.knobs.cache.dir))


def settle_cache_keys() -> None:
    """Hash every jit function of the package that is imported, those first that others call. It
    takes a fifth of a second; the interpreter compiles nothing."""
    if triton.knobs.runtime.interpret:
        return
    ours = __package__.split(".")[0]
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == ours]
    for module in modules:
        for function in vars(module).values():
            settle_cache_key(function)


def settle_cache_key(function: Any) -> None:
    """Hash a jit function after those that it calls, and the methods of a class of them; anything
    else is left alone."""
    for method in getattr(function, "hash_attrs", ()):  # as Triton says of its classes
        settle_cache_key(method)
    if not isinstance(function, JITCallable) or function.hash is not None:
        return
    for name in _names(function.fn.__code__):
        if name != function.fn.__name__:
            settle_cache_key(function.fn.__globals__.get(name))
    _ = function.cache_key


def _names(code: CodeType) -> Iterator[str]:
    """Globals, and attributes, that are read here and in the functions within."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
