"""What the network begins with: images, and sinusoids of timesteps."""

import torch
import torch.nn.functional as F

from .norms import operand


def sinusoids(t, frequencies, width):
    """cos(t f), then sin(t f), then zeros: [N, width], in the frequencies' precision."""
    angles = t[:, None].float() * frequencies[None, :]
    return F.pad(torch.cat([angles.cos(), angles.sin()], 1), (0, width - 2 * len(frequencies)))


def pad_channels(x, width, dtype, *, tf32=False):
    """x [..., C] with zeros behind its channels, in that dtype, or in TF32."""
    return operand(F.pad(x, (0, width - x.shape[-1])).to(dtype), tf32)


def reorder(x, out):
    """out = x, of another dtype and in another order of memory."""
    out.copy_(x)


def begin_step(x, channels, dtype, table=None, row=None, index=None, tf32=False):
    """(x with zeros behind its channels up to so many, table[row, index]). With `tf32` the image is
    rounded to TF32."""
    image = operand(F.pad(x, [0, channels - x.shape[3]]).to(dtype), tf32)
    if table is None:
        return image, None
    rows = table.index_select(0, row)[0]
    return image, rows if index is None else rows.index_select(0, index)
