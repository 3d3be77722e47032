"""Diffusion Policy's ConditionalUnet1D a second time, as a function of its state dict, over NCT.

Independent of `diffusion.models.unet1d`: what a layer computes is told by the names and shapes that
it has. Slow and plain, for tests only.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def policy_oracle(state: dict[str, Tensor], groups: int, x: Tensor, t: Tensor, cond: Tensor | None):
    """[N, T, C] -> [N, T, C], in the dtype of `state`."""

    def w(name):
        return state[f"{name}.weight"], state[f"{name}.bias"]

    def block(name, x, groups=groups):
        weight, bias = w(f"{name}.block.0")
        h = F.conv1d(x, weight, bias, padding=weight.shape[2] // 2)
        return F.mish(F.group_norm(h, groups, *w(f"{name}.block.1")))

    def res(name, x):
        h = block(f"{name}.blocks.0", x)
        film = F.linear(F.mish(emb), *w(f"{name}.cond_encoder.1"))
        if film.shape[1] == 2 * h.shape[1]:
            scale, shift = film.view(len(film), 2, -1, 1).unbind(1)
            h = scale * h + shift
        else:
            h = h + film[:, :, None]
        h = block(f"{name}.blocks.1", h)
        skip = f"{name}.residual_conv"
        return h + (F.conv1d(x, *w(skip)) if f"{skip}.weight" in state else x)

    def count(kind):
        return len({name.split(".")[1] for name in state if name.startswith(f"{kind}_modules.")})

    embed = state["diffusion_step_encoder.1.weight"].shape[1]
    half = embed // 2
    emb = torch.zeros(len(t), embed, dtype=x.dtype)
    for i in range(half):
        angle = t.to(x.dtype) * math.exp(-i * math.log(10000) / (half - 1))
        emb[:, i], emb[:, half + i] = torch.sin(angle), torch.cos(angle)
    emb = F.mish(F.linear(emb, *w("diffusion_step_encoder.1")))
    emb = F.linear(emb, *w("diffusion_step_encoder.3"))
    emb = emb if cond is None else torch.cat((emb, cond), dim=1)

    h, skips = x.transpose(1, 2), []
    for level in range(count("down")):
        for i in (0, 1):
            h = res(f"down_modules.{level}.{i}", h)
        skips.append(h)
        if f"down_modules.{level}.2.conv.weight" in state:
            h = F.conv1d(h, *w(f"down_modules.{level}.2.conv"), stride=2, padding=1)
    for i in (0, 1):
        h = res(f"mid_modules.{i}", h)
    for level in range(count("up")):
        h = torch.cat((h, skips.pop()), dim=1)
        for i in (0, 1):
            h = res(f"up_modules.{level}.{i}", h)
        h = F.conv_transpose1d(h, *w(f"up_modules.{level}.2.conv"), stride=2, padding=1)
    h = F.conv1d(block("final_conv.0", h, 8), *w("final_conv.1"))
    return h.transpose(1, 2)
