"""guided-diffusion's UNet a second time, as a function of its state dict, over NCHW.

Independent of `diffusion.models.unet`: the names come from `expected_shapes`, and what a layer
computes from the names that it has. Slow and plain, for tests only.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def expected_shapes(o: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters, in order, for the options of `UNet`."""
    shapes = {}
    widths = [int(o["model_channels"] * m) for m in o["channel_mult"]]
    emb = 4 * o["model_channels"]

    def affine(name, *shape):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

    def res(name, ci, co):
        affine(f"{name}.in_layers.0", ci)
        affine(f"{name}.in_layers.2", co, ci, 3, 3)
        affine(f"{name}.emb_layers.1", co * (2 if o["use_scale_shift_norm"] else 1), emb)
        affine(f"{name}.out_layers.0", co)
        affine(f"{name}.out_layers.3", co, co, 3, 3)
        if ci != co:
            affine(f"{name}.skip_connection", co, ci, 1, 1)

    def attend(name, c):
        affine(f"{name}.norm", c)
        affine(f"{name}.qkv", 3 * c, c, 1)
        affine(f"{name}.proj_out", c, c, 1)

    affine("time_embed.0", emb, o["model_channels"])
    affine("time_embed.2", emb, emb)
    if o["num_classes"]:
        shapes["label_emb.weight"] = (o["num_classes"], emb)
    affine("input_blocks.0.0", widths[0], o["in_channels"], 3, 3)
    c, block, skips = widths[0], 1, [widths[0]]
    for level, width in enumerate(widths):
        for _ in range(o["num_res_blocks"]):
            res(f"input_blocks.{block}.0", c, width)
            if 2**level in o["attention_resolutions"]:
                attend(f"input_blocks.{block}.1", width)
            c, block = width, block + 1
            skips.append(c)
        if level + 1 < len(widths):
            if o["resblock_updown"]:
                res(f"input_blocks.{block}.0", c, c)
            elif o["conv_resample"]:
                affine(f"input_blocks.{block}.0.op", c, c, 3, 3)
            block += 1
            skips.append(c)
    res("middle_block.0", c, c)
    attend("middle_block.1", c)
    res("middle_block.2", c, c)
    block = 0
    for level in range(len(widths) - 1, -1, -1):
        for i in range(o["num_res_blocks"] + 1):
            res(f"output_blocks.{block}.0", c + skips.pop(), widths[level])
            c, place = widths[level], 1
            if 2**level in o["attention_resolutions"]:
                attend(f"output_blocks.{block}.1", c)
                place = 2
            if level > 0 and i == o["num_res_blocks"]:
                if o["resblock_updown"]:
                    res(f"output_blocks.{block}.{place}", c, c)
                elif o["conv_resample"]:
                    affine(f"output_blocks.{block}.{place}.conv", c, c, 3, 3)
            block += 1
    affine("out.0", c)
    affine("out.2", o["out_channels"], c, 3, 3)
    return shapes


def oracle(state: dict, o: dict, x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
    """[N, CI, H, W] -> [N, CO, H, W] without dropout, in the dtype of `state`."""

    def has(name):
        return f"{name}.weight" in state

    def w(name):
        return state[f"{name}.weight"], state[f"{name}.bias"]

    def norm(name, x):
        return F.group_norm(x, o["num_groups"], *w(name))

    def res(name, x, resize):
        h = F.conv2d(
            resize(F.silu(norm(f"{name}.in_layers.0", x))), *w(f"{name}.in_layers.2"), 1, 1
        )
        e = F.linear(F.silu(emb), *w(f"{name}.emb_layers.1"))[..., None, None]
        if o["use_scale_shift_norm"]:
            half = e.shape[1] // 2
            h = norm(f"{name}.out_layers.0", h) * (1 + e[:, :half]) + e[:, half:]
        else:
            h = norm(f"{name}.out_layers.0", h + e)
        h = F.conv2d(F.silu(h), *w(f"{name}.out_layers.3"), 1, 1)
        skip = f"{name}.skip_connection"
        return h + (F.conv2d(resize(x), *w(skip)) if has(skip) else resize(x))

    def attend(name, x, heads):
        n, c, height, width = x.shape
        d = o["num_head_channels"] if o["num_head_channels"] > 0 else c // heads
        qkv = F.conv1d(norm(f"{name}.norm", x).flatten(2), *w(f"{name}.qkv"))  # [N, 3C, T]
        outputs = []
        for head in range(c // d):
            if o["use_new_attention_order"]:
                starts = [head * d, c + head * d, 2 * c + head * d]
            else:
                starts = [3 * d * head, 3 * d * head + d, 3 * d * head + 2 * d]
            q, k, v = (qkv[:, s : s + d] for s in starts)
            weight = torch.softmax(q.transpose(1, 2) @ k / math.sqrt(d), dim=2)
            outputs.append(v @ weight.transpose(1, 2))
        h = F.conv1d(torch.cat(outputs, dim=1), *w(f"{name}.proj_out"))
        return x + h.view(n, c, height, width)

    def keep(x):
        return x

    def halve(x):
        return F.avg_pool2d(x, 2)

    def double(x):
        return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)

    half = o["model_channels"] // 2
    sinusoids = torch.zeros(len(t), o["model_channels"], dtype=x.dtype)
    for i in range(half):
        angle = t * o["max_period"] ** (-i / half)
        sinusoids[:, i], sinusoids[:, half + i] = torch.cos(angle), torch.sin(angle)
    emb = F.silu(F.linear(sinusoids, *w("time_embed.0")))
    emb = F.linear(emb, *w("time_embed.2"))
    if labels is not None:
        emb = emb + state["label_emb.weight"][labels]

    levels, blocks = len(o["channel_mult"]), o["num_res_blocks"]
    heads_up = o["num_heads"] if o["num_heads_upsample"] == -1 else o["num_heads_upsample"]
    h = F.conv2d(x, *w("input_blocks.0.0"), 1, 1)
    skips = [h]
    for index in range(1, levels * (blocks + 1)):
        name = f"input_blocks.{index}"
        if index % (blocks + 1) == 0:
            if has(f"{name}.0.op"):
                h = F.conv2d(h, *w(f"{name}.0.op"), 2, 1)
            else:
                h = res(f"{name}.0", h, halve) if has(f"{name}.0.in_layers.0") else halve(h)
        else:
            h = res(f"{name}.0", h, keep)
            h = attend(f"{name}.1", h, o["num_heads"]) if has(f"{name}.1.qkv") else h
        skips.append(h)
    h = res("middle_block.0", h, keep)
    h = attend("middle_block.1", h, o["num_heads"])
    h = res("middle_block.2", h, keep)
    for index in range(levels * (blocks + 1)):
        name = f"output_blocks.{index}"
        h = res(f"{name}.0", torch.cat([h, skips.pop()], dim=1), keep)
        place = 1
        if has(f"{name}.1.qkv"):
            h, place = attend(f"{name}.1", h, heads_up), 2
        if index % (blocks + 1) == blocks and index < levels * (blocks + 1) - 1:
            last = f"{name}.{place}"
            if has(f"{last}.in_layers.0"):
                h = res(last, h, double)
            else:
                h = double(h)
                h = F.conv2d(h, *w(f"{last}.conv"), 1, 1) if has(f"{last}.conv") else h
    return F.conv2d(F.silu(norm("out.0", h)), *w("out.2"), 1, 1)
