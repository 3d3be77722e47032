"""Evaluations by the plan that are given labels, vectors or a context, in chains and one by one."""

import copy
from dataclasses import replace as replaced

import pytest
import torch

import triton_kernels
from diffusion.factory import make_sampler
from diffusion.models.conditions import Conditions
from diffusion.models.layers import set_backend
from diffusion.plan import inference
from diffusion.plan.inference import InferenceUNet
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32, Backend
from diffusion.sampling.guidance import guide
from triton_kernels import fused_ops as fused, reference
from triton_kernels.reference import fused as fused_reference

from .test_fused_unet import DOUBLE, MODELS, given, make


@pytest.mark.parametrize("classes", [None, 3, 9])
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("large", [False, True], ids=["a table", "too large a table"])
def test_a_chain(classes, scale, large, monkeypatch):
    """With fewer and more classes than samples: a row a class, or a row a sample."""
    if classes is None and scale != 1:
        pytest.skip("guidance needs classes")
    if large:
        monkeypatch.setattr("diffusion.plan.inference._TABLE_BYTES", 1000)
    options = {"channel_mult": (1,), "num_classes": classes}
    options |= {"label_dropout": 0.1} if classes else {}
    model = make(options).eval()
    twin = copy.deepcopy(model)
    sampler = make_sampler(make_schedule("linear", 100), model.backend, "ddim", steps=3)
    labels = torch.tensor([1, 0, 2]) if classes else None
    chains = [
        sampler.sample(guide(denoiser, scale, classes), (3, 8, 12, 3), seed=1, labels=labels)
        for denoiser in (InferenceUNet(model, fused_reference), twin.forward_nhwc)
    ]
    torch.testing.assert_close(*chains, rtol=1e-5, atol=1e-5)


def test_labels_by_the_kernels_themselves(device):
    """A guided chain in float16, with a row of the table for each class, and for each sample. Not
    clipped: where x_0 is at the limit is chance with a network that has learned nothing, and says
    which of two chains is further off."""
    for classes in (3, 9):
        options = {"channel_mult": (1,), "num_classes": classes, "label_dropout": 0.1}
        model = make(options, (8, 8)).float().to(device).eval()
        labels, chains = torch.tensor([2, 0], device=device), []
        for backend in (
            TORCH_FP32,
            Backend("torch", reference, torch.float16),
            Backend("triton", triton_kernels, torch.float16),
        ):
            set_backend(model, backend)
            planned = backend.name == "triton"
            network = InferenceUNet(model, fused) if planned else model.forward_nhwc
            network = guide(network, 3.0, classes, backend.dtype)
            sampler = make_sampler(
                make_schedule("linear", 100), backend, "ddim", steps=2, clip=None, device=device
            )
            chains.append(sampler.sample(network, (2, 8, 8, 3), seed=1, labels=labels))
        exact, low, ours = chains
        assert (ours - exact).norm() <= 2 * (low - exact).norm()


@pytest.mark.parametrize("classes", [None, 3, 9])
def test_a_table_is_kept_where_it_serves_any_labels(classes):
    model = make({"channel_mult": (1,), "num_classes": classes})
    plan, t = InferenceUNet(model, fused_reference), torch.tensor([70, 40, 3])
    draws = [torch.tensor(labels) if classes else None for labels in ([2, 0, 2, 1], [0, 1, 1, 2])]
    tables = [plan.tabulate(t, labels, 4) for labels in draws]
    kept = classes != 9  # of which four samples need fewer rows
    assert (tables[0][0] is tables[1][0]) == kept
    for timesteps in (t, t.flip(0)):
        for labels in draws:
            table, *index = plan.tabulate(timesteps, labels, 4)
            for row, step in zip(table, timesteps, strict=True):
                emb = plan.embedding(step.expand(4), labels, None, 0)
                mine = row[index[0]] if index else row.expand(4, -1)
                torch.testing.assert_close(mine, emb)


@pytest.mark.parametrize(("classes", "labels"), [(3, None), (None, torch.tensor([0]))])
def test_labels_that_are_missing_or_not_wanted(classes, labels):
    plan = InferenceUNet(make({"channel_mult": (1,), "num_classes": classes}), fused_reference)
    with pytest.raises(ValueError, match="labels (are missing|were given)"):
        plan.tabulate(torch.tensor([3, 1]), labels, 1)


@pytest.mark.parametrize("most", [inference._TABLE_BYTES, 0], ids=["table", "every step"])
def test_vectors_of_samples_in_chains_with_guidance(monkeypatch, most):
    """Each sample has a row of its own, or its embedding in every step."""
    monkeypatch.setattr(inference, "_TABLE_BYTES", most)
    model = make(MODELS["vector"] | {"label_dropout": 0.1}).eval()
    twin = copy.deepcopy(model)
    sampler = make_sampler(make_schedule("linear", 100), DOUBLE, "ddim", steps=3)
    conditions = given(model)
    chains = [
        sampler.sample(guide(net, 2.0, 3, drops=True), (2, 8, 12, 3), seed=1, labels=conditions)
        for net in (InferenceUNet(model, fused_reference), twin.forward_nhwc)
    ]
    torch.testing.assert_close(*chains, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("most", [inference._TABLE_BYTES, 0], ids=["table", "every step"])
@pytest.mark.parametrize("name", ["context", "context and all else"])
def test_contexts_in_chains_with_guidance(monkeypatch, name, most):
    """Keys and values are made once for a chain, of any length."""
    monkeypatch.setattr(inference, "_TABLE_BYTES", most)
    model = make(MODELS[name] | {"label_dropout": 0.1 if "num_classes" in MODELS[name] else 0})
    twin = copy.deepcopy(model.eval())
    sampler = make_sampler(make_schedule("linear", 100), DOUBLE, "ddim", steps=3)
    plan, more = InferenceUNet(model, fused_reference), given(model)
    null = model.null_label
    for conditions in (
        more,
        replaced(more, context=more.context[:, :2], present=more.present[:, :2]),
    ):
        chains = [
            sampler.sample(
                guide(net, 2.0, null, drops=True), (2, 8, 12, 3), seed=1, labels=conditions
            )
            for net in (plan, twin.forward_nhwc)
        ]
        torch.testing.assert_close(*chains, rtol=1e-5, atol=1e-5)


def test_contexts_that_are_missing_or_not_wanted():
    t, more = torch.tensor([3, 1]), given(make(MODELS["context"]))
    plan = InferenceUNet(make(MODELS["context"]).eval(), fused_reference)
    with pytest.raises(ValueError, match="a context is missing; the model has context_dim=6"):
        plan.tabulate(t, None, 2)
    with pytest.raises(ValueError, match=r"contexts have shape \(2, 5, 6\); expected \(3, "):
        plan.tabulate(t, more, 3)
    plan = InferenceUNet(make({"channel_mult": (1,)}).eval(), fused_reference)
    with pytest.raises(ValueError, match="a context is given; the model has context_dim=0"):
        plan.tabulate(t, more, 2)


def test_vectors_that_are_missing_or_not_wanted():
    t, labels = torch.tensor([3, 1]), torch.tensor([0])
    plan = InferenceUNet(make(MODELS["vector"]).eval(), fused_reference)
    with pytest.raises(ValueError, match="a vector is missing; the model has vector_dim=5"):
        plan.tabulate(t, labels, 1)
    plan = InferenceUNet(make(MODELS["classes"]).eval(), fused_reference)
    with pytest.raises(ValueError, match="a vector is given; the model has vector_dim=0"):
        plan.tabulate(t, Conditions(labels, vector=torch.ones(1, 3)), 1)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 3], r"labels lie in \[0, 3\]; expected \[0, 2\]"),
        ([-1, 0], r"labels lie in \[-1, 0\]"),
        ([0], r"shape \(1,\), of torch.int64; expected int64 \(2,\)"),
        ([0, 1, 2], r"shape \(3,\), of torch.int64; expected int64 \(2,\)"),
        ([0.0, 1.0], "of torch.float32; expected int64"),
    ],
    ids=str,
)
def test_labels_that_have_no_row_in_the_table(labels, message):
    plan = InferenceUNet(make({"channel_mult": (1,), "num_classes": 3}), fused_reference)
    with pytest.raises(ValueError, match=message):
        plan.tabulate(torch.tensor([3, 1]), torch.tensor(labels), 2)
