"""Whatever is launched first, a kernel has one name in Triton's cache."""

from tests.end_to_end.run import run

# A process of its own, since this one may have loaded Triton as an interpreter.
SCRIPT = """
import importlib, pkgutil, sys
import triton_kernels
from triton.runtime.jit import JITCallable
from triton_kernels.runtime.cache_keys import settle_cache_key, settle_cache_keys

functions = {}
for module in pkgutil.walk_packages(triton_kernels.__path__, "triton_kernels."):
    for name, value in vars(importlib.import_module(module.name)).items():
        if isinstance(value, JITCallable):
            functions[value.fn.__module__, value.fn.__name__] = value

def keys(first):
    for function in functions.values():
        function.hash, function.used_global_vals = None, {}
    for name in first:
        settle_cache_key(functions[name])
    settle_cache_keys()
    assert all(function.hash is not None for function in functions.values())
    return {name: function.cache_key for name, function in functions.items()}

names = sorted(functions)
assert len(names) > 100
assert keys(names) == keys(names[::-1]) == keys(())
"""


def test_names_do_not_depend_on_the_order():
    code, _, err = run("-c", SCRIPT)
    assert code == 0, err[-2000:]
