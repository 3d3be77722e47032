"""The cases of single operations, and what their providers compute."""

import pytest
import torch

from benchmarks import harness, measure, providers, run
from benchmarks.cases import (
    AttentionCase,
    ConvCase,
    CrossAttentionCase,
    NormCase,
    meta_model,
    model_cases,
)
from benchmarks.harness import WrongResult
from benchmarks.providers import experiments

from .small import CPU, TINY


def test_unet64_has_its_known_convolutions():
    cases = dict(model_cases("unet64", 32, "conv2d"))
    counts = {case.shape: count for case, count in cases.items()}
    assert counts["32x64x64 64->64 3x3"] == 7
    assert counts["32x64x64 192->64 3x3"] == 1
    assert counts["32x8x8 512->256 3x3"] == 2
    assert counts["32x64x64 3->64 3x3"] == counts["32x64x64 64->3 3x3"] == 1
    assert not [c for c in cases if c.stride != 1]  # this model pools
    assert {c.shape for c in cases if not c.needs_dx} == {
        "32x64x64 3->64 3x3",
        "32x1x1 64->256 1x1",
    }
    assert {(c.h, c.w) for c in cases if c.float32} == {(1, 1)}  # the embedding
    assert sum(cases.values()) == sum(
        1 for name, p in meta_model("unet64").named_parameters() if p.ndim > 1
    )


@pytest.mark.parametrize("model", ["unet64", "adm64", "unet_tiny"])
@pytest.mark.parametrize("batch", [1, 32])
def test_cases_add_up_to_the_models_flops(model, batch):
    found = model_cases(model, batch)
    flops = sum(count * case.flops for case, count in found if hasattr(case, "flops"))
    assert flops == batch * meta_model(model).flops_per_image


def test_unet64_has_its_known_norms_and_attentions():
    norms, attentions = (dict(model_cases("unet64", 128, op)) for op in ("group_norm", "attention"))
    assert sum(norms.values()) == 56
    assert norms[NormCase(128, 64, 64, 64, 32, "silu", False)] == 8
    assert attentions == {
        AttentionCase(128, 256, 192, 6, "qkv_heads"): 5,
        AttentionCase(128, 64, 256, 8, "qkv_heads"): 6,
    }
    crossed = dict(model_cases("unet64", 128, "cross_attention"))
    assert crossed[CrossAttentionCase(128, 256, 78, 192, 6)] == 5 and len(crossed) == 2
    [(adamw, _)] = model_cases("unet64", 128, "adamw")
    assert sum(adamw.sizes) == 20_494_211


def test_strides_and_film_are_noted():
    cases = [case for case, _ in model_cases("adm64", 4)]
    assert any(case.modulated for case in cases if isinstance(case, NormCase))
    assert "2x9x7 3->5 3x3 /2" == ConvCase(2, 9, 7, 3, 5, 3, 3, 2, False, True).shape


def test_longer_rows_of_attention_are_asked_for():
    settings = run.DEFAULTS | {"batch": (32,), "passes": ("fwd",)}
    shapes = {e.shape for e in run.select(settings, ("attention",))}
    longer = {e.shape for e in run.select(settings | {"longer": 1}, ("attention", "adamw"))}
    assert longer - shapes == {"16x1024 12x64", "4x4096 8x64"}


def test_convolutions_of_other_models():
    plain, resampled = (
        dict(model_cases("unet64", 2, "conv2d", conv_resample=c)) for c in (False, True)
    )
    added = {case.shape for case in resampled} - {case.shape for case in plain}
    assert "2x64x64 64->64 3x3 /2" in added
    policy = {case.shape for case, _ in model_cases("unet1d", 3, "conv2d")}
    assert {"3x1x16 256->256 1x5", "3x1x16 256->256 1x3 /2", "3x1x1 256->1024 1x1"} <= policy
    assert model_cases("unet1d", 3, "attention") == []


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(providers.group_norm, "_GNNHWC", False)
    [line] = providers.absent("group_norm")
    assert "gnnhwc" in line and "not installed" in line
    assert providers.absent("conv2d") == []


# in the interpreter; a kernel that is compiled would read the CPU's memory
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@interpreted
@pytest.mark.parametrize("case", TINY, ids=lambda c: f"{c.op} {c.shape}")
def test_every_provider_agrees_with_the_reference(case):
    """All but the compiler, which would take minutes; on a GPU a run checks that as well."""
    for experiment in experiments(case, 1, "fp32"):
        inputs = experiment.inputs(CPU)
        before = {k: x.clone() for k, x in inputs.items()}
        exact, budget = measure.expected(experiment, inputs)
        assert experiment.bytes > 0
        if experiment.least is not None:
            outputs = experiment.least.prepare(inputs)()
            written = sum(x.nbytes for x in outputs)
            assert experiment.least.bytes == {1: 2 * written, 2: 5 * written // 2}[len(outputs)]
        assert set(experiment.providers) > {"triton"}
        for name in experiment.providers:
            if name != "compile":
                measure.verify(experiment, name, inputs, exact, budget)
        assert all(torch.equal(inputs[k], x) for k, x in before.items())


@interpreted
def test_half_precision_gets_a_budget_of_its_own():
    for experiment in experiments(TINY[0], 1, "fp16"):
        inputs = experiment.inputs(CPU)
        exact, budget = measure.expected(experiment, inputs)
        assert exact[0].dtype == torch.float32
        assert 1e-4 < max(budget) < 2e-3
        for name in experiment.providers:
            measure.verify(experiment, name, inputs, exact, budget)


def test_others_may_round_a_little_worse():
    exact = [torch.ones(8)]
    measure.check("torch-nchw", [torch.full((8,), 1.015)], exact, [1e-2])
    with pytest.raises(WrongResult, match="output 0"):
        measure.check("triton", [torch.full((8,), 1.015)], exact, [1e-2])


def test_a_wrong_result_is_refused():
    exact = [torch.ones(8)]
    harness.check([torch.ones(8)], exact, [1e-5])
    for wrong in (torch.full((8,), 1.01), torch.full((8,), torch.nan), torch.ones(4)):
        with pytest.raises(WrongResult, match="output 0"):
            harness.check([wrong], exact, [1e-3])
