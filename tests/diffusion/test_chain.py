"""Chains of denoisers that tabulate, and chains as CUDA graphs."""

import gc
import weakref
from dataclasses import dataclass, replace

import pytest
import torch

from diffusion.factory import SAMPLERS, make_sampler
from diffusion.process.schedule import make_schedule
from diffusion.runtime.backend import TORCH_FP32
from diffusion.runtime.cuda_graph import captured
from diffusion.sampling.chain import TabulatedDenoiser, _largest_divisor
from diffusion.sampling.guidance import guide

SHAPE = (4, 3, 5, 2)
LABELS = [2, 0, 1, 1]
NULL = 3


def plain(x, t, labels=None):
    """A smooth function of x, t and the labels."""
    phase = 0.01 * t.to(x.dtype)
    if labels is not None:
        phase = phase + labels
    return 0.8 * torch.sin(x + phase.view(-1, 1, 1, 1)) + 0.1 * x


@dataclass
class Phases:
    """The same, with its phases in a table; counts the tables made."""

    made: int = 0

    def __call__(self, x, t, labels=None):
        raise AssertionError("a chain asks for the table")

    def tabulate(self, timesteps, labels, n):
        self.made += 1
        phases = (0.01 * timesteps.float())[:, None].expand(-1, n)
        return (phases if labels is None else phases + labels,)

    def at_row(self, x, row, tables):
        phase = tables[0].index_select(0, row)[0]
        return 0.8 * torch.sin(x + phase.view(-1, 1, 1, 1)) + 0.1 * x


def sampler_of(name="ddpm", device="cpu", **options):
    return make_sampler(
        make_schedule("linear", 200), TORCH_FP32, name, device=device, **{"steps": 6, **options}
    )


@pytest.mark.parametrize("scale", [None, 1.0, 2.5], ids=["no labels", "labels", "guided"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_table_changes_nothing(name, scale):
    sampler, tables = sampler_of(name), Phases()
    labels = None if scale is None else torch.tensor(LABELS)
    chains = []
    for denoiser in (plain, tables):
        denoiser = denoiser if scale is None else guide(denoiser, scale, NULL)
        chains.append(sampler.sample(denoiser, SHAPE, seed=1, labels=labels))
    torch.testing.assert_close(*chains, rtol=1e-5, atol=1e-5)
    assert tables.made == 1


def test_a_step_alone_takes_either():
    sampler, x = sampler_of(), torch.randn(SHAPE)
    row, rng, labels = torch.tensor([2]), torch.tensor([1, 0]), torch.tensor(LABELS)
    steps = [sampler.step(d, x, row, rng, labels=labels) for d in (plain, Phases())]
    torch.testing.assert_close(*steps, rtol=1e-5, atol=1e-5)


def test_who_tabulates():
    assert isinstance(Phases(), TabulatedDenoiser) and not isinstance(plain, TabulatedDenoiser)
    # equal ones share a captured graph
    assert guide(plain, 2.0, NULL) == guide(plain, 2.0, NULL) != guide(plain, 2.5, NULL)


@pytest.mark.parametrize(
    ("steps", "shared"), [(1, 1), (50, 50), (100, 50), (99, 33), (1000, 50), (53, 1), (49, 49)]
)
def test_a_graph_divides_the_chain(steps, shared):
    assert _largest_divisor(steps, 50) == shared


# --- on the GPU -----------------------------------------------------------------------------------

CASES = {
    "ddpm": {},
    "ddpm-learned": {"variance": "learned_range"},
    "ddim": {"eta": 0.5},
    "heun": {},
    "dpmpp_2m": {},
}


def _learned(denoiser):
    return lambda x, t, labels=None: torch.cat((denoiser(x, t, labels),) * 2, dim=-1)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("scale", [None, 1.0, 2.5], ids=["no labels", "labels", "guided"])
@pytest.mark.parametrize("case", CASES.items(), ids=CASES)
def test_a_graph_has_the_bits_of_the_loop(case, scale, backend):
    import triton_kernels

    name, options = case[0].partition("-")[0], case[1]
    ops = {"torch": TORCH_FP32.ops, "triton": triton_kernels}[backend]
    backend = replace(TORCH_FP32, name=backend, ops=ops)
    denoiser = plain if "variance" not in options else _learned(plain)
    labels = None if scale is None else torch.tensor(LABELS, device="cuda")
    denoiser = denoiser if scale is None else guide(denoiser, scale, NULL)
    made = [
        make_sampler(
            make_schedule("linear", 200), backend, name, steps=60, device="cuda",
            capture=capture, **options,
        )
        for capture in (True, False)
    ]  # fmt: skip
    for seed, first in ((1, 0), (2, 7)):  # the second time the graph is replayed as it is
        captured, loop = (
            sampler.sample(denoiser, SHAPE, seed=seed, first=first, labels=labels)
            for sampler in made
        )
        assert torch.isfinite(loop).all() and torch.equal(captured, loop)
        labels = None if labels is None else labels.flip(0)


@pytest.mark.gpu
def test_batch_split_on_the_gpu():
    sampler = sampler_of("ddpm", "cuda", steps=50)
    whole = sampler.sample(plain, (6, 3, 5, 2), seed=1)
    parts = [sampler.sample(plain, (2, 3, 5, 2), seed=1, first=first) for first in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.gpu
def test_a_chain_in_a_graph_waits_for_nothing():
    sampler, done = sampler_of("ddim", "cuda", steps=100), []
    options = {"seed": 1, "progress": lambda *a: done.append(a)}
    first = sampler.sample(plain, SHAPE, **options)
    assert done == [(50, 100), (100, 100)]
    graph = sampler._captured[1]
    assert torch.equal(sampler.sample(plain, SHAPE, **options), first)
    assert sampler._captured[1] is graph
    sampler.sample(plain, (2, *SHAPE[1:]), seed=1)
    assert sampler._captured[1] is not graph


@pytest.mark.gpu
def test_tables_are_loaded_anew():
    sampler = sampler_of("ddim", "cuda")
    denoiser, labels = Phases(), torch.tensor(LABELS, device="cuda")
    for seed in range(2):
        expected = sampler_of("ddim", "cuda", capture=False).sample(
            plain, SHAPE, seed=seed, labels=labels
        )
        chain = sampler.sample(denoiser, SHAPE, seed=seed, labels=labels)
        torch.testing.assert_close(chain, expected, rtol=1e-5, atol=1e-5)
        labels = labels.flip(0)


@pytest.mark.gpu
def test_a_graph_goes_with_its_sampler():
    """Not when the garbage collector comes."""
    sampler = sampler_of("ddim", "cuda")
    gc.disable()
    try:
        chain = sampler.sample(plain, SHAPE, seed=1)
        graph = weakref.ref(sampler._captured[1])
        del sampler  # on its way
        assert graph() is None
    finally:
        gc.enable()
    loop = sampler_of("ddim", "cuda", capture=False).sample(plain, SHAPE, seed=1)
    assert torch.equal(chain, loop)


@pytest.mark.gpu
def test_no_garbage_is_collected_during_a_capture():
    """A graph that is destroyed meanwhile would invalidate it."""

    class Knot:  # which the collector alone unties
        def __init__(self):
            self.itself, self.graph = self, torch.cuda.CUDAGraph()
            with captured(self.graph):
                x.add_(1)

    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    Knot()
    with captured(graph):
        assert not gc.isenabled()
        made = [[] for _ in range(100_000)]  # enough for the collector to come
        x.add_(2)
    assert gc.isenabled() and len(made) == 100_000
    graph.replay()
    assert x.tolist() == [2] * 4
