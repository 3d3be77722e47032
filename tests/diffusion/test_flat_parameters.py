"""Flat parameters: views that keep shapes, strides and values."""

import copy

import pytest
import torch
from torch import nn

from diffusion.models.flat_parameters import FlatParameters, are_neighbours, over_neighbours
from diffusion.models.unet import UNet
from diffusion.models.unet1d import UNet1d
from diffusion.plan.embedding import TOGETHER
from diffusion.runtime.backend import Backend
from triton_kernels import reference
from triton_kernels.registry.chips import chip
from triton_kernels.runtime.device import is_rehearsal, standing_for


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.GroupNorm(1, 5), nn.Flatten(), nn.Linear(45, 2))
    return model.to(memory_format=torch.channels_last)


def test_values_shapes_and_strides_stay():
    model = small_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    flat = FlatParameters(model)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.stride() == before[name].stride()
        assert p.untyped_storage().data_ptr() == flat.param.untyped_storage().data_ptr()
    weight = model[0].weight
    assert weight.permute(0, 2, 3, 1).is_contiguous()


def test_every_parameter_is_aligned():
    flat = FlatParameters(small_model())
    for view in flat.views(flat.param).values():
        assert view.storage_offset() % 64 == 0


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 21), (torch.bfloat16, 24)], ids=str)
def test_rows_in_16_bits_begin_at_multiples_of_16_bytes(dtype, step):
    """Those of a policy's FiLM, one after the other; not a UNet's, whose embedding is float32."""
    low = Backend("torch", reference, dtype)
    policy = UNet1d(2, 5, diffusion_step_embed_dim=16, down_dims=(16, 32), backend=low)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    flat = FlatParameters(policy, together=TOGETHER)
    views = flat.views(flat.param)
    names = [name for name in views if name.endswith("cond_encoder.1.weight")]
    assert all(torch.equal(views[name], x) for name, x in before.items())
    assert {views[name].stride() for name in names} == {(step, 1)}
    assert are_neighbours(views, names)
    whole = over_neighbours(views[names[0]], (sum(len(views[name]) for name in names), step))
    assert torch.equal(whole[:, :21], torch.cat([before[name] for name in names]))
    assert not whole[:, 21:].any()
    sizes = {
        "image_size": 8,
        "in_channels": 3,
        "out_channels": 3,
        "num_groups": 3,
        "attention_resolutions": (),
    }
    unet = UNet(model_channels=9, num_res_blocks=1, channel_mult=(1,), backend=low, **sizes)
    FlatParameters(unet, together=TOGETHER)
    assert all(p.is_contiguous() for p in unet.parameters() if p.ndim == 2)


def test_backward_fills_the_flat_gradient():
    model = small_model()
    twin = copy.deepcopy(model)
    flat = FlatParameters(model)
    x = torch.randn(4, 3, 5, 5)
    model(x).square().sum().backward()
    twin(x).square().sum().backward()
    gradients = flat.views(flat.grad)
    for name, p in twin.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad)


def test_gaps_stay_zero_under_updates():
    flat = FlatParameters(small_model())
    used = torch.zeros_like(flat.param, dtype=torch.bool)
    for view in flat.views(used).values():
        view.fill_(True)
    assert not flat.param[~used].any()


def test_writing_the_buffer_writes_the_model():
    model = small_model()
    flat = FlatParameters(model)
    flat.param.fill_(0.5)
    assert all((p == 0.5).all() for p in model.parameters())


def test_averaged_swaps_in_place_and_back():
    model = small_model()
    flat = FlatParameters(model)
    trained = flat.param.clone()
    flat.ema.fill_(2.0)
    pointers = [p.data_ptr() for p in model.parameters()]
    with flat.averaged():
        assert all((p == 2).all() for p in model.parameters())
    assert torch.equal(flat.param, trained)
    assert pointers == [p.data_ptr() for p in model.parameters()]


def test_a_parameter_with_gaps_is_refused():
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.zeros(4, 8)[:, ::2])
    with pytest.raises(ValueError, match="gaps"):
        FlatParameters(model)


def test_only_a_rehearsal_has_no_numbers():
    """Nor does another chip's code that is launched here, for which launchers take the GPU."""
    for rehearses in (False, True):
        model = nn.Linear(3, 5)
        before = model.weight.detach().clone()
        with standing_for(chip("a100").gpu, rehearses=rehearses):
            assert is_rehearsal() == rehearses
            flat = FlatParameters(model)
            low = flat.low(torch.bfloat16)
        if not rehearses:
            assert torch.equal(model.weight, before) and torch.equal(low, flat.param.bfloat16())
            assert torch.equal(flat.ema, flat.param) and not flat.grad.any()
    assert not is_rehearsal()
