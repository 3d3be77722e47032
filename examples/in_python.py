"""Train, load and draw from Python: python examples/in_python.py [FOLDER]."""

import sys

import torch

import diffusion

run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/in_python"
loss = diffusion.train(
    run_dir,
    dataset={"name": "elephants", "size": 16, "count": 64},
    model=diffusion.preset("model", "unet_tiny"),
    steps=10,
    batch_size=8,
    precision="fp32",
)
images = diffusion.sample(run_dir, n=4, steps=10)  # uint8 [4, 16, 16, 3]
print(f"loss {loss:.3f}, {len(images)} images of {images.shape[1:]}")

network = diffusion.load(run_dir).model  # on the GPU, if there is one
x = torch.randn(2, 3, 16, 16, device=next(network.parameters()).device)
noise = network(x, torch.tensor([10, 500], device=x.device))  # [2, 3, 16, 16]
print(f"predicted noise: {tuple(noise.shape)}, by {network.backend.name}")
