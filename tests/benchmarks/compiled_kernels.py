"""What benchmarks would compile before they time anything, as JSON: the kernels by benchmark,
with a + where they are dependent launches.

python -m tests.benchmarks.compiled_kernels      without TRITON_INTERPRET
"""

import json
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

from benchmarks import (
    accelerated,
    other_networks,
    papers,
    precompile,
    scaling,
    sweep_configs,
    sweep_joins,
    train_step,
)
from tests.kernels import chips
from triton_kernels.runtime.launch_recorder import Launch

SMALL = other_networks.of_diffusers(
    "UNet2DModel",
    sample_size=16,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    layers_per_block=1,
    norm_num_groups=8,
)


def name_of(launch: Launch) -> str:
    return launch.kernel.__name__ + "+" * launch.options.get("launch_pdl", False)


def kernels(module: ModuleType, *arguments: str) -> list:
    """The architecture, the processes that compile, and the names of all kernels."""
    found = []

    def compile_launches(launches: list[Launch], arch: int, processes: int) -> Iterator[Launch]:
        found.extend([arch, processes, sorted({name_of(launch) for launch in launches})])
        yield from launches

    chip = f"compile_for={json.dumps(chips.HOPPER)}"
    with mock.patch.object(precompile, "compile_launches", compile_launches):
        assert module.main([*arguments, "processes=3", chip]) == 0
    return found


def all_kernels() -> dict[str, list]:
    """By benchmark."""
    tiny = "model=unet_tiny", "size=16", "batch=2"
    found = {
        "train_step": kernels(train_step, *tiny, "providers=triton-bf16,triton-fp32,eager-bf16"),
        "scaling": kernels(scaling, *tiny),
        "sweep_joins": kernels(sweep_joins, "what=norm"),
        "sweep_configs": kernels(sweep_configs, "passes=few,norm_apply,forward", "shapes=12"),
    }
    one = "models=unet_tiny", "batch=1", "what=evaluate", "evaluate=1"
    found["papers"] = kernels(papers, *one)
    small = "models=small", "batch=2"
    with mock.patch.object(other_networks, "NETWORKS", {"small": SMALL}):
        for what in ("train", "evaluate"):
            found[f"accelerated {what}"] = kernels(accelerated, *small, f"what={what}")
    return found


if __name__ == "__main__":
    print(json.dumps(all_kernels()))
