"""Masks of dropout, and their bits."""

import torch

from triton_kernels import reference
from triton_kernels.noise.dropout import Mask


def dropped(device) -> Mask:
    return Mask(0.3, torch.tensor([0x1234_5678_9ABC, 7], device=device), layer=9, first=5)


def stored(mask, shape):
    """The mask with its bits for a tensor of this shape, as who drops stores them."""
    ones = torch.ones(shape, device=mask.rng.device)
    kept = reference.dropout(ones, mask.p, mask.rng, layer=mask.layer, first=mask.first) != 0
    bits = torch.nn.functional.pad(kept, (0, -shape[-1] % 64)).unflatten(-1, (-1, 64)).long()
    return mask._replace(words=(bits << torch.arange(64, device=bits.device)).sum(-1))
