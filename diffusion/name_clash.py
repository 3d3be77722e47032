"""`triton_kernels` is the name of two packages: this project's, and one of Triton's authors.

In one environment the one that was installed last has overwritten the other's `__init__.py`, and
what comes of it is an ImportError far from its cause.
"""

from importlib.util import find_spec
from pathlib import Path

_NAME = "triton_kernels"
_OURS = "torch.ops.triton_kernels"  # stands in the docstring of our __init__.py
_WAY_OUT = (
    "triton-diffusion needs its own package of that name: install it in an environment without the"
    f" other one, or `pip uninstall {_NAME}` and `pip install --force-reinstall --no-deps"
    " triton-diffusion`"
)


def check_name() -> None:
    """ImportError, in a line, unless `import triton_kernels` gives this project's package."""
    spec = find_spec(_NAME)
    if spec is None or spec.origin is None:  # its __init__.py went with the other package
        raise ImportError(f"{_NAME} is not there, or incomplete; {_WAY_OUT}", name=_NAME)
    path = Path(spec.origin)
    if _OURS not in path.read_text(errors="replace"):
        raise ImportError(f"{path} is of another project; {_WAY_OUT}", name=_NAME, path=str(path))
