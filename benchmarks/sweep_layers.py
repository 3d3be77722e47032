"""Layers of models that people train, whose kernels `benchmarks.sweep_configs` times."""

import random
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import sweep_channel_norms, sweep_norms
from triton_kernels.registry.spec import AttentionSpec, ConvSpec, Spec, WeightGradsSpec

# names of passes: of evaluations of few images, of attention, of weight gradients in 32 bits, of
# other passes in TF32; of convolutions with a bias at most
OF_FEW = ("split", "few", "split_tf32", "split_fp32")
OF_ATTENTION = ("attention", "attention_grad")
OF_CROSS_ATTENTION = ("cross_attention", "cross_attention_grad")
OF_32_BITS = ("tf32", "fp32")
OF_TF32 = {f"{name}_tf32": name for name in ("forward", "input_grad")}
PLAIN = ("conv2d", "conv2d_dgrad")

# (rows and columns, channels of x and of y, side of the filter, batches)
LAYERS = {
    "mixed": (
        (64, 64, 64, 3, (8, 32, 128)),  # unet64
        (32, 128, 128, 3, (8, 32, 128)),
        (32, 256, 128, 3, (32,)),
        (16, 192, 192, 3, (8, 64)),
        (8, 256, 256, 3, (16, 128)),
        (8, 512, 256, 3, (64,)),
        (16, 192, 576, 1, (32,)),
        (64, 192, 192, 3, (4, 16)),  # ADM of ImageNet 64
        (32, 384, 384, 3, (16, 64)),
        (16, 576, 576, 3, (8, 32)),
        (8, 768, 768, 3, (32,)),
        (32, 384, 1152, 1, (16,)),
        (16, 1152, 576, 1, (32,)),
        (32, 256, 256, 3, (32, 128)),  # DDPM++ of CIFAR-10
        (16, 256, 256, 3, (16, 128)),
        (8, 512, 512, 3, (8, 256)),
        (16, 256, 768, 1, (64,)),
        (64, 320, 320, 3, (4, 16)),  # latents
        (32, 640, 640, 3, (8,)),
        (16, 1280, 1280, 3, (8,)),
        (64, 640, 320, 1, (4,)),
        (48, 96, 96, 3, (16,)),  # channels and images that are no powers of two
        (24, 448, 224, 3, (16,)),
        (12, 320, 640, 3, (32,)),
    ),
    "small": (  # networks of few channels
        (64, 16, 16, 3, (32,)),
        (64, 32, 32, 3, (32,)),
        (32, 40, 40, 3, (8, 64)),
        (32, 24, 24, 3, (32,)),
        (32, 80, 80, 3, (16,)),
        (16, 80, 40, 3, (64,)),
        (16, 160, 160, 3, (32,)),
        (64, 48, 48, 3, (16,)),
    ),
    "exact": (  # also products of few rows, and a stem
        (1, 256, 1024, 1, (8, 64, 128)),
        (1, 1024, 256, 1, (512,)),
        (8, 256, 256, 1, (1, 4, 32)),
        (16, 192, 576, 1, (4, 32)),
        (8, 256, 256, 3, (8, 64)),
        (16, 192, 192, 3, (8, 32)),
        (32, 128, 128, 3, (4, 32)),
        (64, 64, 64, 3, (8,)),
        (64, 3, 64, 3, (1, 8)),
    ),
    "wide": (
        (64, 192, 192, 3, (32,)),  # ADM of ImageNet 64
        (64, 384, 192, 3, (32,)),
        (32, 384, 384, 3, (32,)),
        (32, 768, 384, 3, (32,)),
        (16, 1152, 576, 3, (32,)),
        (16, 768, 768, 3, (32,)),
        (8, 1536, 768, 3, (32,)),
        (32, 320, 320, 3, (32,)),  # latents
        (16, 640, 640, 3, (32,)),
        (8, 1280, 1280, 3, (32,)),
    ),
    "pointwise": (
        (64, 384, 192, 1, (32,)),  # ADM of ImageNet 64
        (32, 384, 384, 1, (32,)),
        (32, 384, 1152, 1, (32,)),
        (16, 576, 576, 1, (32,)),
        (16, 576, 1728, 1, (32,)),
        (8, 768, 768, 1, (32,)),
        (8, 768, 2304, 1, (32,)),
        (32, 320, 960, 1, (32,)),  # latents
        (16, 640, 640, 1, (32,)),
        (8, 1280, 3840, 1, (32,)),
    ),
    "odd": (
        (24, 192, 192, 3, (64,)),
        (12, 288, 288, 3, (64,)),
        (12, 288, 864, 1, (64,)),
        (40, 160, 160, 3, (32,)),
        (20, 320, 320, 3, (32,)),
        (10, 640, 640, 3, (32,)),
    ),
    "halves": (  # channels of which a last block of 64 would have 32 or fewer
        (64, 32, 64, 3, (32,)),
        (64, 96, 96, 3, (8, 32)),
        (48, 96, 96, 3, (64,)),
        (32, 96, 192, 3, (8,)),
        (16, 160, 160, 3, (8,)),
        (32, 224, 224, 3, (4,)),
        (16, 224, 448, 3, (16,)),
        (16, 480, 480, 3, (8, 32)),
        (8, 672, 672, 3, (16,)),
        (8, 288, 288, 3, (16, 64)),
        (24, 288, 288, 3, (64,)),
        (64, 80, 80, 3, (32,)),
        (64, 160, 160, 3, (16,)),
        (40, 160, 160, 3, (64,)),
        (40, 480, 160, 3, (64,)),
        (32, 160, 320, 3, (32,)),
        (64, 224, 224, 3, (16,)),
        (32, 672, 448, 3, (16,)),
        (16, 672, 672, 3, (4, 16)),
        (32, 96, 96, 3, (16, 128)),
        (16, 288, 192, 3, (64,)),
        (16, 352, 352, 3, (16,)),
        (8, 480, 480, 3, (32,)),
        (8, 160, 160, 3, (16, 128)),
        (20, 224, 224, 3, (32,)),
        (128, 96, 96, 3, (4,)),
    ),
    "few_tiles": (  # wide layers of small images, which have fewer tiles than the GPU programs
        (4, 1280, 1280, 3, (8, 32)),
        (4, 2560, 1280, 3, (32,)),
        (4, 512, 512, 3, (64,)),
        (8, 1280, 1280, 3, (4, 16, 32)),
        (8, 2560, 1280, 3, (16,)),
        (8, 768, 768, 3, (8, 32)),
        (8, 1536, 768, 3, (32,)),
        (8, 1024, 1024, 3, (8,)),
        (8, 512, 512, 3, (16, 64)),
        (8, 256, 256, 3, (32, 64)),
        (16, 640, 640, 3, (4, 8)),
        (16, 1280, 640, 3, (4,)),
        (16, 576, 576, 3, (8, 16)),
        (16, 192, 192, 3, (8, 16)),
        (32, 384, 384, 3, (2, 4)),
        (32, 512, 256, 3, (2,)),
        (24, 448, 448, 3, (4,)),
        (12, 640, 640, 3, (8,)),
        (20, 320, 320, 3, (8,)),
    ),
    "chunks": (  # rows of pixels: chunks of actions, and samples of linear layers
        (16, 256, 256, 5, (16, 64, 256)),
        (8, 256, 512, 5, (64,)),
        (8, 512, 512, 5, (16, 64, 256)),
        (4, 512, 1024, 5, (64,)),
        (4, 1024, 1024, 5, (8, 64, 256)),
        (4, 2048, 512, 5, (64,)),
        (4, 512, 512, 5, (32, 64)),
        (8, 1024, 256, 5, (64,)),
        (8, 256, 256, 5, (64,)),
        (24, 384, 384, 3, (32,)),
        (6, 768, 768, 3, (64,)),
        (8, 512, 512, 1, (64,)),
        (64, 1024, 256, 1, (1,)),
        (256, 2048, 512, 1, (1,)),
        (64, 8192, 272, 1, (1,)),
    ),
    "narrow": (  # images, and what is made of them, in padded channels
        (64, 16, 64, 3, (1, 4, 16, 32, 128)),
        (64, 16, 192, 3, (1, 4, 16, 64)),
        (32, 16, 128, 3, (1, 4, 16, 64)),
        (32, 16, 256, 3, (1, 4, 16, 64)),
        (64, 64, 16, 3, (1, 4, 16, 32, 128)),
        (64, 128, 16, 3, (1, 4, 16, 64)),
        (32, 64, 16, 3, (1, 4, 16, 64)),
        (32, 128, 16, 3, (1, 4, 16, 64)),
    ),
    "narrow_odd": (  # rows and channels that are no powers of two, or fewer than a block
        (96, 16, 128, 3, (4, 16)),
        (28, 16, 64, 3, (16, 256)),
        (56, 16, 192, 3, (4, 32)),
        (64, 16, 32, 3, (16, 64)),
        (48, 16, 96, 3, (16, 64)),
        (96, 128, 16, 3, (4, 16)),
        (28, 64, 16, 3, (16, 256)),
        (56, 192, 16, 3, (4, 32)),
        (64, 32, 16, 3, (16, 64)),
        (48, 96, 16, 3, (16, 64)),
        (64, 32, 32, 3, (16, 64)),
        (64, 64, 32, 3, (16, 64)),
        (32, 32, 64, 3, (32, 128)),
        (28, 32, 32, 3, (256,)),
        (14, 48, 48, 3, (256,)),
    ),
}
# (rows and columns, channels of both halves of x, of y, whether the first is upsampled, batches)
LAYERS_OF_SKIPS = (
    (64, 64, 64, 64, False, (16, 128)),
    (64, 128, 64, 64, True, (16, 128)),
    (32, 128, 64, 128, False, (32, 128)),
    (32, 192, 128, 128, True, (32, 128)),
    (16, 192, 192, 192, False, (32, 128)),
    (16, 256, 192, 192, True, (32, 128)),
    (8, 256, 192, 256, False, (32, 128)),
    (32, 384, 384, 384, False, (16,)),
    (64, 192, 192, 192, False, (32,)),  # ADM of ImageNet 64
    (32, 384, 384, 384, False, (32,)),
    (32, 576, 384, 384, False, (32,)),
    (16, 576, 576, 576, False, (32,)),
    (8, 768, 768, 768, False, (32,)),
    (32, 320, 320, 320, False, (32,)),  # latents
    (32, 640, 320, 320, True, (32,)),
    (16, 640, 640, 640, False, (32,)),
    (8, 1280, 1280, 1280, False, (32,)),
    (4, 1280, 1280, 1280, False, (32,)),
    (32, 256, 256, 256, False, (64,)),  # DDPM++ of CIFAR-10
    (16, 256, 256, 256, False, (64,)),
    (48, 96, 96, 96, False, (32,)),  # channels and images that are no powers of two
    (20, 320, 320, 320, False, (64,)),
)
# the same, of one image; every third, and 1x1 filters, also of four; those of 16 and 64 too
LAYERS_OF_FEW = (
    (32, 320, 320, 3),  # latents
    (32, 640, 320, 3),
    (32, 960, 320, 3),
    (32, 320, 320, 1),
    (16, 320, 640, 3),
    (16, 640, 640, 3),
    (16, 1280, 640, 3),
    (16, 1920, 640, 3),
    (16, 640, 640, 1),
    (16, 640, 1920, 1),
    (8, 640, 1280, 3),
    (8, 1280, 1280, 3),
    (8, 2560, 1280, 3),
    (8, 1280, 1280, 1),
    (8, 1280, 3840, 1),
    (4, 1280, 1280, 3),
    (4, 2560, 1280, 3),
    (4, 1280, 1280, 1),
    (64, 64, 64, 3),  # unet64
    (64, 128, 64, 3),
    (32, 128, 128, 3),
    (32, 256, 128, 3),
    (16, 192, 192, 3),
    (16, 384, 192, 3),
    (16, 192, 576, 1),
    (16, 192, 192, 1),
    (8, 256, 256, 3),
    (8, 512, 256, 3),
    (8, 256, 768, 1),
    (8, 256, 256, 1),
    (64, 192, 192, 3),  # ADM of ImageNet 64
    (32, 384, 384, 3),
    (32, 768, 384, 3),
    (32, 384, 384, 1),
    (16, 576, 576, 3),
    (16, 1152, 576, 3),
    (8, 768, 768, 3),
    (8, 1536, 768, 3),
    (32, 256, 256, 3),  # DDPM++ of CIFAR-10
    (16, 256, 256, 3),
    (16, 512, 256, 3),
    (16, 256, 768, 1),
    (4, 256, 256, 3),
    (32, 64, 64, 3),
    (64, 64, 128, 1),
    (32, 128, 384, 1),
    (16, 448, 448, 3),  # channels and images that are no powers of two
    (12, 320, 640, 3),
    (24, 448, 224, 3),
    (8, 896, 448, 3),
)


# (heads of all samples, positions, channels of a head)
LAYERS_OF_ATTENTION = (
    (768, 256, 32),  # unet64
    (192, 256, 32),
    (1024, 64, 32),
    (256, 64, 32),
    (6, 256, 32),
    (256, 256, 64),  # ADM of ImageNet 64, latents
    (256, 64, 64),
    (192, 1024, 64),
    (24, 1024, 64),
    (64, 256, 128),
    (96, 1024, 128),
    (64, 1024, 32),
    (16, 4096, 32),
    (16, 4096, 64),
    (8, 4096, 128),
)

# (heads of all samples, queries, channels of a head, keys) of layers that attend to a text, or to
# what a policy has observed
LAYERS_OF_CROSS_ATTENTION = (
    (128, 4096, 40, 77),  # Stable Diffusion
    (128, 1024, 80, 77),
    (128, 256, 160, 77),
    (128, 64, 160, 77),
    (320, 1024, 64, 77),  # its XL
    (80, 4096, 64, 77),
    (192, 256, 32, 78),  # unet64 of texts
    (256, 64, 32, 78),
    (256, 256, 32, 8),
    (128, 1024, 40, 257),
)

# (rows and columns, channels, batches) of layers with attention, and whose weight gradients of 1x1
# filters are computed together: those of attention, of skips, and of both
LAYERS_OF_GROUPS = (
    (16, 192, (8, 32, 128)),  # unet64
    (8, 256, (32, 128)),
    (64, 64, (8, 32)),
    (32, 128, (8, 64)),
    (32, 384, (8, 32)),  # ADM of ImageNet 64
    (16, 576, (8, 32)),
    (8, 768, (32, 64)),
    (16, 256, (32, 128)),  # DDPM++ of CIFAR-10
    (32, 320, (8, 32)),  # latents
    (16, 640, (32,)),
    (8, 1280, (32,)),
    (20, 448, (16, 64)),  # channels and images that are no powers of two
)
# output channels and input channels, in the layer's
_GROUPS_OF = (
    ((3, 1), (1, 1)),
    ((3, 1), (1, 1), (3, 1), (1, 1)),
    ((1, 2), (1, 1), (3, 1)),
    ((1, 2), (1, 1.5)),
)


def specs(passes: Sequence[str], layers: Sequence[str]) -> list[tuple[str, Spec]]:
    """What is timed, in an order that is random and always the same."""
    found = []
    for group, (side, ci, co, r, batches) in ((g, layer) for g in layers for layer in LAYERS[g]):
        normed = not group.startswith("narrow") or co > 16  # no norm reads what a network returns
        for n in batches:
            rows, taps = (1, 1) if group == "chunks" else (side, r)
            given = {"n": n, "dtype": "bf16", "h": rows, "w": side, "r": taps, "s": r}
            of_filters = {"filters": (co, ci)}
            forward = ConvSpec(k=ci, c=co, stats=normed, **given, **of_filters)
            grad = ConvSpec(k=co, c=ci, first=ci, activation="silu", **given, **of_filters)
            sizes = {"p": rows, "q": side, "padding": (taps // 2, r // 2)}
            weight = ConvSpec(k=ci, c=co, **given, **of_filters, **sizes)
            named = {"forward": forward, "input_grad": grad, "weight_grad": weight}
            named |= {"conv2d": weight, "conv2d_dgrad": replace(weight, k=co, c=ci)}
            named |= {dtype: replace(weight, dtype=dtype) for dtype in OF_32_BITS}
            named |= {each: replace(named[of], dtype="tf32") for each, of in OF_TF32.items()}
            found += [(name, named[name]) for name in passes if name in named]
    for side, c1, c2, co, upsampled, batches in LAYERS_OF_SKIPS if "skip_dx" in passes else ():
        given = {"dtype": "bf16", "h": side, "w": side, "r": 1, "s": 1, "upsampled": upsampled}
        found += [("skip_dx", ConvSpec(n=n, k=co, c=c1 + c2, first=c1, **given)) for n in batches]
    for side, c, batches in LAYERS_OF_GROUPS if "weight_grads" in passes else ():
        for n in batches:
            found += [("weight_grads", _group(n, side, c, each)) for each in _GROUPS_OF]
    for i, (side, ci, co, r) in enumerate(LAYERS_OF_FEW):
        for n in (1, 4, 16, 64)[: 4 if r == 1 else 1 + (i % 3 == 0)]:
            given = {"n": n, "h": side, "w": side, "r": r, "s": r}
            for name in OF_FEW:
                given |= {"dtype": name.partition("_")[2] or "bf16", "stats": name == "few"}
                given["residual"] = name == "few" and r == 1 and ci == co
                spec = ConvSpec(k=ci, c=co, filters=(co, ci), **given)
                timed = name in passes and (n < 64 or name == "few")
                found += [(name, spec)] if timed else []
    found += [
        (name, spec)
        for norms in (sweep_norms, sweep_channel_norms)
        for name in norms.OPS
        for spec in norms.specs(name)
        if name in passes
    ]
    for name in OF_ATTENTION:
        grad = name == "attention_grad"
        for n, t, d in LAYERS_OF_ATTENTION if name in passes else ():
            found.append((name, AttentionSpec(n, "bf16", t, d, grad=grad)))
    for name in OF_CROSS_ATTENTION:
        grad = name == "cross_attention_grad"
        for n, t, d, keys in LAYERS_OF_CROSS_ATTENTION if name in passes else ():
            found.append((name, AttentionSpec(n, "bf16", t, d, grad=grad, keys=keys)))
    random.Random(0).shuffle(found)
    return found


def _group(n: int, side: int, c: int, each: Sequence[tuple[float, float]]) -> WeightGradsSpec:
    """Of blocks of 64 channels."""
    sizes = [[64 * max(1, round(times * c / 64)) for times in layer] for layer in each]
    given = {"n": n, "dtype": "bf16", "h": side, "w": side, "r": 1, "s": 1}
    given |= {"p": side, "q": side, "padding": (0, 0)}
    convs = (ConvSpec(k=ci, c=co, filters=(co, ci), **given) for co, ci in sizes)
    return WeightGradsSpec(n, "bf16", tuple(convs))
