"""The planned network against autograd through the layers, in float64."""

import copy

import pytest
import torch

from diffusion.backend import Backend
from diffusion.flat import FlatParameters
from diffusion.fused_unet import TOGETHER, FusedUNet
from diffusion.unet import UNet
from triton_kernels import fused_reference, reference

DOUBLE = Backend("torch", reference, dtype=torch.float64)

MODELS = {
    "three_levels": {"channel_mult": (1, 2, 3), "attention_resolutions": (2, 4)},
    "one_level": {"channel_mult": (1,), "attention_resolutions": (1,)},
    "two_blocks": {"channel_mult": (1, 2), "num_res_blocks": 2, "attention_resolutions": ()},
    "classes": {"channel_mult": (1, 2), "attention_resolutions": (), "num_classes": 3},
    "legacy_attention": {
        "channel_mult": (1, 1),
        "attention_resolutions": (2,),
        "use_new_attention_order": False,
    },
    "learned_variance": {"channel_mult": (1, 2), "attention_resolutions": (), "out_channels": 6},
}


def make(options: dict, size: tuple[int, int] = (8, 12)) -> UNet:
    torch.manual_seed(0)
    settings = {
        "image_size": size,
        "in_channels": 3,
        "model_channels": 32,
        "out_channels": 3,
        "num_res_blocks": 1,
        "attention_resolutions": (),
        "num_head_channels": 16,
        "num_groups": 8,
        "conv_resample": False,
        "use_new_attention_order": True,
        "zero_init": False,
        "backend": DOUBLE,
    } | options
    return UNet(**settings).double()


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_output_and_every_gradient(options):
    model = make(options)
    twin = copy.deepcopy(model)
    flat = FlatParameters(model, together=TOGETHER)
    plan = FusedUNet(model, flat, fused_reference)
    x, t = torch.randn(2, 8, 12, 3).double(), torch.tensor([3, 700])
    labels = torch.tensor([2, 0]) if model.num_classes else None
    y = plan(x, t, labels)
    expected = twin.forward_nhwc(x, t, labels)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    grads = flat.views(flat.grad)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-8, atol=1e-9, msg=name)


def test_gradients_add_up_over_micro_batches():
    model = make(MODELS["three_levels"])
    flat = FlatParameters(model, together=TOGETHER)
    plan = FusedUNet(model, flat, fused_reference)
    x, t = torch.randn(4, 8, 12, 3).double(), torch.arange(4)
    plan(x, t).square().sum().backward()
    whole = flat.grad.clone()
    flat.grad.zero_()
    for part in (slice(0, 1), slice(1, 4)):
        plan(x[part], t[part]).square().sum().backward()
    torch.testing.assert_close(flat.grad, whole)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"conv_resample": True}, "conv_resample"),
        ({"dropout": 0.1}, "dropout"),
        ({"use_scale_shift_norm": True}, "use_scale_shift_norm"),
        ({"model_channels": 24}, "24 channels"),
    ],
)
def test_says_why_not(options, reason):
    assert reason in FusedUNet.refusal(make({"channel_mult": (1, 2)} | options))


def test_covers_the_models_it_is_for():
    assert FusedUNet.refusal(make({"channel_mult": (1, 2)})) is None
    assert FusedUNet.refusal(torch.nn.Linear(2, 2)) is not None
