"""Tests. Without a GPU kernels run in Triton's interpreter, whose products are numpy's.

Numpy multiplies a kernel's tiles with as many threads as there are processors, which wait for one
another in loops. Beside another worker a product of a tile then takes more processor time than by
one thread: 2 to 16 ms instead of 0.05.
"""

import os
import sys

NUMPY_WAS_FIRST = "numpy" in sys.modules  # for instance by a plugin of pytest
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is first imported
