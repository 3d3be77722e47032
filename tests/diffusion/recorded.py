"""Rehearse training steps, a chain and a policy's call on a machine without a GPU, and print what
was noted.

python -m tests.diffusion.recorded      without TRITON_INTERPRET, which has no compiler
"""

import json
import sys

import torch

import triton_kernels
from diffusion.data.action_chunks import PolicySpec
from diffusion.factory import build_model, build_policy_model, make_sampler
from diffusion.plan.inference import InferenceUNet, sampling_network
from diffusion.plan.inference1d import real_time
from diffusion.policies.policy import Policy
from diffusion.process.schedule import make_schedule
from diffusion.runs.precompile_worker import train
from diffusion.runtime.backend import Backend, choose_backend
from diffusion.sampling.guidance import guide
from triton_kernels import canary
from triton_kernels.runtime.device import Device, describe, on_gpu
from triton_kernels.runtime.launch_recorder import rehearsal

MODEL = {
    "name": "unet",
    "model_channels": 64,
    "channel_mult": [1, 2],
    "num_res_blocks": 1,
    "attention_resolutions": [2],
    "num_head_channels": 32,
    "num_classes": 3,
    "label_dropout": 0.1,
}
TRAIN = {
    "model": MODEL,
    "diffusion": {"schedule": "linear"},
    "optim": {"lr": 1e-4},
    "train": {"batch_size": 64, "accumulate": 2, "precision": "bf16"},
    # 768 MB, of which nobody sees a byte
    "images": {"shape": [10**6, 16, 16, 3], "dtype": "uint8"},
    "labels": {"shape": [10**6], "dtype": "int64"},
    "flip": True,
}
# a table of classes that is made on the meta device imports Dynamo; on a GPU it does not
UNCONDITIONAL = TRAIN | {"model": MODEL | {"num_classes": None, "label_dropout": 0}, "labels": None}
# PyTorch's own ops look timesteps up in tables, and no kernel has drawn any
LOOKED_UP = TRAIN | {"diffusion": {"variance": "learned_range", "min_snr_gamma": 5.0}}
RESAMPLED = TRAIN | {"diffusion": {"timestep_sampler": "loss_second_moment"}}
POLICY = {
    "model": {"name": "unet1d", "down_dims": [32, 64], "diffusion_step_embed_dim": 32},
    "diffusion": {"schedule": "cosine"},
    "optim": {"lr": 1e-4, "more_ema": [0.99]},
    "train": {"batch_size": 64, "precision": "tf32"},
    "images": {"shape": [1000, 1, 16, 2], "dtype": "float32"},
    "labels": {"shape": [1000, 10], "dtype": "float32"},
    "flip": False,
}
SLOW = {"sympy", "torch._dynamo", "diffusers", "torchvision", "matplotlib"}  # to import
HOPPER = Device(tma=True, num_sms=132, shared_memory=232_448, hopper=True)


def draw() -> None:
    backend = choose_backend("auto", "bf16", torch.device("cpu"))
    assert backend == Backend("triton", triton_kernels, torch.bfloat16, allow_tf32=True)
    model = build_model(MODEL, backend, (16, 16), 3, False, torch.device("cpu")).eval()
    network = sampling_network(model)
    assert isinstance(network, InferenceUNet)
    sampler = make_sampler(make_schedule("linear", 1000), backend, "dpmpp_2m", steps=20)
    labels = torch.tensor([0, 1, 2, 0])
    sampler.rehearse(guide(network, 3.0, 3), (4, 16, 16, 3), labels)


def act() -> None:
    ranges = {"low": [-1.0, -1.0], "high": [1.0, 1.0]}
    spec = PolicySpec.from_state(
        {
            "horizon": 16,
            "observation_steps": 2,
            "action_steps": 8,
            "observations": ranges,
            "actions": ranges,
        }
    )
    backend = choose_backend("auto", "bf16", torch.device("cpu"))
    model = build_policy_model(POLICY["model"], backend, 2, 4, torch.device("cpu"))
    sampler = make_sampler(make_schedule("cosine", 100), backend, "ddpm")
    streamed = real_time(model, spec.horizon)
    assert streamed is not None
    Policy(model, sampler, spec, streamed).rehearse(3)


def names(job) -> list[str]:
    """Of the kernels, in order."""
    with rehearsal(HOPPER) as launches:
        job()
    return [launch.kernel.fn.__name__ for launch in launches]


def main() -> None:
    cpu = torch.device("cpu")
    before = describe(cpu), on_gpu(cpu)
    names(lambda: train(UNCONDITIONAL))
    canary.expected(*canary.given())
    found = {"slow imports": sorted(SLOW & set(sys.modules))}
    found |= {"train": names(lambda: train(TRAIN)), "draw": names(draw), "act": names(act)}
    found["policy"] = names(lambda: train(POLICY))
    found["looked up"] = names(lambda: train(LOOKED_UP)) + names(lambda: train(RESAMPLED))
    found["again"] = names(lambda: train(TRAIN))
    found["left as it was"] = before == (describe(cpu), on_gpu(cpu))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
