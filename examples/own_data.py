"""A data set of your own: rings of two kinds, drawn with NumPy.

    python train.py --config-dir examples/configs plugin=examples/own_data.py dataset=rings \
        model.num_classes=auto

A loader is a function whose arguments are the settings of examples/configs/dataset/rings.yaml. It
returns all images as one uint8 tensor; a memory-mapped one (torch.from_file) is read as needed.
"""

import numpy as np
import torch

from diffusion import register_dataset
from diffusion.data import ImageSet


@register_dataset("rings")
def rings(size: int = 32, count: int = 1000, seed: int = 0) -> ImageSet:
    """`count` gray images of one ring, thin (class 0) or thick (class 1)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size] / size  # [H, W]
    centre = rng.uniform(0.3, 0.7, (2, count, 1, 1))  # of each image
    radius = rng.uniform(0.15, 0.3, (count, 1, 1))
    labels = rng.integers(0, 2, count)
    width = np.where(labels, 0.08, 0.03)[:, None, None]
    distance = np.hypot(x - centre[0], y - centre[1])  # [M, H, W]
    images = 255 * np.exp(-(((distance - radius) / width) ** 2))
    return ImageSet(
        images=torch.from_numpy(images.astype(np.uint8))[..., None],  # [M, H, W, 1]
        labels=torch.from_numpy(labels),
        class_names=("thin", "thick"),
        name="rings",
    )
