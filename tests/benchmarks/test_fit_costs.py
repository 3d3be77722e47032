"""Cost models are fitted to times, and judged by layers that they have not seen."""

import json
from collections import defaultdict
from dataclasses import asdict

import pytest
import torch

from benchmarks import fit_costs, sweep_configs, sweep_layers, sweep_norms
from triton_kernels.attention.tiles import BwdConfig, Tile
from triton_kernels.registry import choose, cost
from triton_kernels.registry.chips import CHIPS
from triton_kernels.registry.spec import AttentionSpec

from ..kernels.chips import HOPPER


def test_parameters_are_found_again():
    """What was made of known parameters, none negative."""
    a = torch.rand(60, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    known = torch.tensor([2.0, 0.0, 0.5, 0.0, 1.5], dtype=torch.float64)
    assert fit_costs.nonnegative(a, a @ known) == pytest.approx(known.tolist(), abs=1e-4)
    assert min(fit_costs.nonnegative(a, a @ known - 3 * a[:, 1])) == 0.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "gpu"),
    [("forward", HOPPER), ("weight_grads", HOPPER), ("attention", CHIPS["a100"].gpu)],
    ids=["forward", "weight_grads", "attention"],
)
def test_left_out_layers_are_chosen_for(name, gpu, tmp_path, monkeypatch):
    """Times that follow the model are fitted exactly: of each layer left out the best is found.
    Each configuration is of so many layers that one may be missing."""
    layers = sweep_layers.LAYERS["mixed"]
    some = [*layers[:14], *(layer for layer in layers[14:] if layer[3] == 1)]
    monkeypatch.setitem(sweep_layers.LAYERS, "mixed", some)
    monkeypatch.setattr(sweep_layers, "LAYERS_OF_GROUPS", sweep_layers.LAYERS_OF_GROUPS[:2])
    known, lines, layers_of = {}, [], defaultdict(set)
    op = sweep_configs.OPS[name]
    for _, spec in sweep_layers.specs((name,), ("mixed",)):
        for kernel, config in sweep_configs.candidates(op, spec, gpu):
            row = op.kernel(kernel)
            if row.work is None:
                continue
            key = cost.name(kernel, row.fitted_by, spec, config)
            terms = cost.terms(row.work(spec, gpu, config), gpu)
            of_key = known.setdefault(
                key, [2, 0.2 + len(known) % 3 / 10, 0.1] + [0] * (len(terms) - 3)
            )
            us = sum(p * t for p, t in zip(of_key, terms, strict=True))
            line = {"op": op.name, "spec": asdict(spec), "kernel": kernel, "us": us}
            lines.append((key, line | {"gpu": gpu._asdict(), "config": config._asdict()}))
            layers_of[key].add(spec)
    enough = {key for key, layers in layers_of.items() if len(layers) > fit_costs._FEWEST}
    path = tmp_path / "sweep.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for key, line in lines if key in enough))
    layers = fit_costs.read([str(path)], HOPPER)
    assert len(layers) >= 8
    found = fit_costs.leave_out(layers)
    assert len(found) == len(layers) and max(ratio for ratio, _ in found) < 1.02


def test_some_kernels_are_fitted_beside_those_that_are_stored(tmp_path):
    """Where all take twice as long as predicted, those that are named follow, others do not."""
    path, op = tmp_path / "sweep.jsonl", sweep_configs.OPS["forward"]
    with path.open("w") as out:
        for _, spec in sweep_layers.specs(("forward",), ("narrow",)):
            for kernel, config in sweep_configs.candidates(op, spec, HOPPER):
                us = 2 * op.kernel(kernel).predict(spec, HOPPER, config)
                line = {"op": op.name, "spec": asdict(spec), "kernel": kernel, "us": us}
                line |= {"gpu": HOPPER._asdict(), "config": config._asdict()}
                print(json.dumps(line), file=out)
    layers = fit_costs.read([str(path)], HOPPER)
    narrow = ("narrow_output",)
    assert set(fit_costs.fit(layers, narrow)) == set(narrow)
    found = [line.split(" | ") for _, line in fit_costs.leave_out(layers, narrow)]
    assert len(found) == len(layers) > 20
    for *_, us, taken, predicted in found:
        follows = taken.split()[0] in narrow
        assert float(predicted.strip(" |")) * (1 if follows else 2) == pytest.approx(float(us), 0.1)
    assert {taken.split()[0] in narrow for *_, taken, _ in found} == {True, False}


def test_attention_has_costs_where_products_are_mma_sync():
    """The sweep times tiles that no chip lists yet; wgmma and tcgen05 are not predicted."""
    for name, tile, spec in (
        ("attention", Tile(64, 64, 4, 2), AttentionSpec(96, "bf16", 256, 32)),
        ("attention_grad", BwdConfig(True, 64, 64, 4, 1), AttentionSpec(8, "bf16", 64, 32)),
    ):
        op = sweep_configs.OPS[name]
        work = op.kernel("tiles").work
        for chip in ("a100", "rtx3090", "rtx4090", "rtx5090"):
            gpu = CHIPS[chip].gpu
            listed = {config for _, config in choose.listed(op, spec, gpu)}
            timed = {config for _, config in sweep_configs.candidates(op, spec, gpu)}
            assert listed < timed and tile in listed and work(spec, gpu, tile).resident > 1
        assert work(spec, HOPPER, tile) is work(spec, CHIPS["b200"].gpu, tile) is None


def test_the_sweep_has_every_pass_and_kernel():
    """Layers in an order that is the same for the processes that compile and the one that times."""
    every = tuple(sweep_configs.OPS), tuple(sweep_layers.LAYERS)
    jobs = sweep_layers.specs(*every)
    assert jobs == sweep_layers.specs(*every) and len(jobs) > 180
    kernels = {
        kernel
        for name, spec in jobs
        for kernel, _ in sweep_configs.candidates(sweep_configs.OPS[name], spec, HOPPER)
    }
    assert {"tma", "tile_mma", "stationary_weights", "tma_wgrad", "row_wgrad"} <= kernels


def test_a_file_keeps_what_is_not_fitted(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"b": {"wave": 2.0}, "a": [1.0]}))
    fit_costs.write(path, {"a": (3.14159,), "c": (0.0,)})
    assert json.loads(path.read_text()) == {"a": [3.142], "b": {"wave": 2.0}, "c": [0.0]}


def test_norms_are_timed_beyond_what_is_known_to_pay():
    """Each kernel of every norm that it can compute, even where `untimed` leaves it out."""
    names = tuple(sweep_norms.OPS)
    jobs = sweep_layers.specs(names, ())
    assert jobs == sweep_layers.specs(names, ()) and {name for name, _ in jobs} == set(names)
    beyond = set()
    for name, spec in jobs:
        op = sweep_configs.OPS[name]
        for kernel, _ in sweep_configs.candidates(op, spec, HOPPER):
            assert op.cannot(op.kernel(kernel), spec, HOPPER) is None
            beyond |= {kernel} if op.why_not(op.kernel(kernel), spec, HOPPER) else set()
    assert beyond == {"one_launch", "from_partials", "small_batch"}
