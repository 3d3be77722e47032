"""What `benchmarks.accelerated` would compile for a small network, as JSON: of a step, of an
evaluation.

python -m tests.benchmarks.accelerated_kernels      without TRITON_INTERPRET
"""

import json
from collections.abc import Iterator
from unittest import mock

from benchmarks import accelerated
from tests.kernels import chips
from triton_kernels.runtime.launch_recorder import Launch

SMALL = {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}


def kernels(what: str) -> list:
    """The architecture, the processes that compile, and the names of all kernels."""
    found = []

    def compile_launches(launches: list[Launch], arch: int, processes: int) -> Iterator[Launch]:
        found.extend([arch, processes, sorted({launch.kernel.__name__ for launch in launches})])
        yield from launches

    settings = {"models": ("small",), "batch": (2,), "what": (what,), "processes": 3}
    with (
        mock.patch.object(accelerated, "NETWORKS", {"small": SMALL}),
        mock.patch.object(accelerated, "compile_launches", compile_launches),
    ):
        accelerated.compile_kernels(settings, chips.HOPPER)
    return found


if __name__ == "__main__":
    print(json.dumps([kernels("train"), kernels("evaluate")]))
