"""What an accelerated network would launch, as it is recorded and written to a file before its
first call, and as that call launches it; as JSON.

python -m tests.plan.compiled_ahead FOLDER     without TRITON_INTERPRET
"""

import json
import sys
from pathlib import Path

import torch

from diffusion.plan.accelerate import Accelerated
from diffusion.plan.calls.dry_passes import launches_of
from diffusion.plan.record.without_gpu import cuda_autocast
from tests.kernels import chips
from tests.plan.networks import network
from triton_kernels.runtime.launch_file import read_launches, write_launches
from triton_kernels.runtime.launch_recorder import compiled_for, rehearsal

NAMES = ["diffusers: no attention, fourier", "ours: classes"]


def compared(name: str, trains: bool, path: Path) -> dict[str, list]:
    module, args, kwargs = network(name)
    fast = Accelerated(module.train(trains))
    with torch.set_grad_enabled(trains):
        with rehearsal(chips.HOPPER) as launched:
            with cuda_autocast(torch.bfloat16):
                y = fast(*args, **kwargs)
            if trains:
                getattr(y, "sample", y).float().sum().backward()
            with cuda_autocast(torch.bfloat16):
                made, *given = fast.plan_of(args, kwargs)
        tensors = made.traced.leaves(*given)
        states = dict(fast.module.named_parameters()) | dict(fast.module.named_buffers())
        tensors = [*tensors, *(states[name] for name in made.graph.parameters)]
        found = launches_of(made, tensors, chips.HOPPER)
    write_launches(found, path)
    return {
        "launched": sorted(repr(compiled_for(*launch)) for launch in launched),
        "recorded": sorted(repr(compiled_for(*launch)) for launch in found),
        "read": sorted(repr(compiled_for(*launch)) for launch in read_launches(path)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    print(
        json.dumps(
            {
                f"{name}, {trains}": compared(name, trains, folder / "launches")
                for name in NAMES
                for trains in (True, False)
            }
        )
    )
