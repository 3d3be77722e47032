"""Which of the two assemblers in Triton's wheel makes machine code for Hopper GPUs.

Triton 3.9 takes the newer one, of CUDA 13.4, which it calls `ptxas-blackwell`, for them as well. By
it 26 of the 127 Gluon compile cases spill registers that they do not otherwise, and in 16 products
wait for each other. The older one, of CUDA 12.9, is in the same wheel.
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
