"""What an accelerated network in 16 bits would launch on a GPU that need not be there, as JSON.

python -m tests.plan.on_a_gpu      without TRITON_INTERPRET, whose kernels are run and not compiled
"""

import json

import torch

from diffusion import accelerate
from diffusion.plan.record.without_gpu import cuda_autocast
from tests.kernels import chips
from tests.plan.networks import NAMES, network
from triton_kernels.runtime.launch_recorder import rehearsal

LOW = "autocast", "parameters"


def launched(name: str, low: str) -> list[str]:
    """The kernels of a forward and a backward pass, each once; `low`: what is in bf16."""
    module, (x, *args), kwargs = network(name)
    if low == "parameters":
        module, x = module.bfloat16(), x.bfloat16()
    with rehearsal(chips.HOPPER) as launches:
        with cuda_autocast(torch.bfloat16, enabled=low == "autocast"):
            y = accelerate(module)(x, *args, **kwargs)
        y = getattr(y, "sample", y)
        y.float().sum().backward()
    return sorted({launch.kernel.__name__ for launch in launches})


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({f"{name} {low}": launched(name, low) for name in NAMES for low in LOW}))
