"""Selects one of the two assemblers in Triton's wheel for Hopper GPUs.

Triton 3.9 uses the newer one, of CUDA 13.4, which it calls `ptxas-blackwell`, for Hopper too. With
it, 26 of the 127 Gluon compile cases spill more registers than with Triton 3.7.1, and in 16 the
products are serialised. With the older one, of CUDA 12.9 and in the same wheel, products are not
serialised, and 6 of 43 examined cases spill more. The effect on a GPU has not been measured.
"""

import os
from pathlib import Path

from triton.backends.nvidia import compiler

_VARIABLE = "TRITON_PTXAS_BLACKWELL_PATH"  # Triton's own


def prefer_older_ptxas() -> None:
    """For a Hopper GPU, before the first kernel is compiled: in this process, and in those that it
    starts. What the environment says already is left alone."""
    taken = Path(compiler.get_ptxas(90).path)
    older = taken.with_name("ptxas")
    if taken.name == "ptxas-blackwell" and older.is_file() and _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = str(older)
