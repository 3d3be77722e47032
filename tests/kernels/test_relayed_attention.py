"""The gradient of attention past whose keys queries stream (`attention/relayed.py`), which Hopper
alone runs: the order in which programs add, what is taken, and on a GPU the result."""

import random

import pytest
import torch

from triton_kernels import reference
from triton_kernels.attention import attention_backward, attention_fwd, relayed
from triton_kernels.attention.hopper import HEAD_GRAD
from triton_kernels.attention.launch import ATTENTION_GRAD, attention_bwd
from triton_kernels.attention.relayed import RELAYED, RELAYED_CONFIGS, RelayedTile, relayed_tiles
from triton_kernels.attention.tiles import FWD_CONFIGS, BwdConfig
from triton_kernels.registry.chips import CHIPS
from triton_kernels.registry.choose import select
from triton_kernels.registry.spec import AttentionSpec, dtype_name
from triton_kernels.runtime.dependent_launch import dependent_launches
from triton_kernels.runtime.device import describe, standing_for

from .attention_cases import (
    KINDS,
    OTHER_KINDS,
    RUNS_ON_GPU,
    Launched,
    assert_close,
    check_rows,
    expected_and_budgets,
    make,
    make_extreme,
    run,
)

H200 = CHIPS["h200"].gpu


# --- the order in which programs add --------------------------------------------------------------


def added(parts, share, at_a_time, seed):
    """For each block of queries the programs that add to it, in order, if those of several heads
    run as they like but wait for flags as `relayed_kernels` does; `at_a_time` fit the GPU."""
    draw, blocks, heads = random.Random(seed), parts * share, 3
    begun, steps = 0, {}  # of programs that run, how far they are
    flags = [[0] * blocks for _ in range(heads)]
    order = [[[] for _ in range(blocks)] for _ in range(heads)]
    while begun < heads * parts or steps:
        while begun < heads * parts and len(steps) < at_a_time:
            steps[begun] = 0
            begun += 1
        places = {p: (p // parts, (share * (p % parts) + m) % blocks) for p, m in steps.items()}
        free = [p for p, (head, block) in places.items() if flags[head][block] == steps[p] // share]
        assert free, f"{sorted(steps)} wait for each other"
        program = draw.choice(free)
        head, block = places[program]
        order[head][block].append(program % parts)
        flags[head][block] += 1
        steps[program] += 1
        if steps[program] == blocks:
            del steps[program]
    return order


@pytest.mark.parametrize("parts, at_a_time", [(1, 1), (2, 2), (3, 7), (5, 5), (8, 12)])
def test_programs_add_in_one_order(parts, at_a_time):
    first = added(parts, 2, at_a_time, seed=0)
    for head in first:
        for block, programs in enumerate(head):
            assert programs == [(block // 2 - i) % parts for i in range(parts)]
    for seed in range(1, 6):
        assert added(parts, 2, at_a_time, seed) == first


def test_programs_that_do_not_fit_the_gpu_would_wait_for_ever():
    with pytest.raises(AssertionError, match="wait for each other"):
        added(4, 2, 3, seed=0)


# --- what is taken --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, t, d, kind",
    [
        (192, 1024, 64, RelayedTile),
        (192, 1000, 64, RelayedTile),
        (32, 4096, 64, RelayedTile),
        (96, 1024, 128, RelayedTile),
        (16, 1024, 64, RelayedTile),
        (256, 256, 128, RelayedTile),
        (80, 576, 64, BwdConfig),
        (256, 300, 64, BwdConfig),
        (320, 256, 64, HEAD_GRAD.config),
        (128, 4096, 40, RelayedTile),
        (192, 1024, 48, RelayedTile),
        (128, 1024, 80, RelayedTile),
        (192, 1024, 44, BwdConfig),
        (192, 1024, 256, RelayedTile),
        (128, 256, 256, RelayedTile),
        (192, 1024, 264, BwdConfig),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_was_fastest_is_taken(n, t, d, kind, dtype):
    """As it was measured, by rows or by the costs that were made of these times."""
    spec = AttentionSpec(n, dtype, t, d, grad=True)
    assert type(select(ATTENTION_GRAD, spec, H200).config) is kind


@pytest.mark.parametrize(
    "gpu, spec, reason",
    [
        ("a100", AttentionSpec(8, "bf16", 1024, 64, grad=True), "wgmma"),
        ("b200", AttentionSpec(8, "bf16", 1024, 64, grad=True), "wgmma"),
        ("h200", AttentionSpec(8, "tf32", 1024, 64, grad=True), "32 bits"),
        ("h200", AttentionSpec(8, "bf16", 1024, 44, grad=True), "multiples of 8, 24 to 256"),
        ("h200", AttentionSpec(8, "bf16", 128, 128, grad=True), "the keys of one program"),
        ("h200", AttentionSpec(8, "bf16", 4096, 256, grad=True), "64 programs that wait"),
        ("h200", AttentionSpec(8, "bf16", 8192, 64, grad=True), "64 programs that wait"),
        ("h200", AttentionSpec(8, "bf16", 1024, 64, grad=True, fetchable=False), "TMA cannot read"),
    ],
)
def test_what_is_refused(gpu, spec, reason):
    assert reason in RELAYED.refuse(spec, CHIPS[gpu].gpu)
    assert isinstance(select(ATTENTION_GRAD, spec, CHIPS[gpu].gpu).config, BwdConfig)


def test_what_is_taken_is_launched(monkeypatch):
    kernels = {}
    for name in ("delta", "relayed"):
        kernels[name] = Launched()
        monkeypatch.setattr(relayed, f"attention_bwd_{name}_kernel", kernels[name])
    qkv, o = (torch.empty(16, 1000, k * 12 * 64, dtype=torch.bfloat16) for k in (3, 1))
    lse = torch.empty(16, 12, 1000)
    with standing_for(H200):
        dqkv, rows = attention_backward(o, qkv, o, lse, 12, "heads_qkv", True, allow_tf32=False)
    assert dqkv.shape == qkv.shape and rows.shape == (16 * 8, 3 * 12 * 64)
    for kernel in kernels.values():
        ((grid, options),) = kernel.calls
        assert grid == (16 * 12 * 8,)
        assert (options["T"], options["D"]) == (1000, 64)
    assert (options["num_warps"], options["maxnreg"], options["HEADS_QKV"]) == (8, 168, True)


# --- on the GPU -----------------------------------------------------------------------------------

CONFIGS = [
    pytest.param(config, d, id=f"{' '.join(map(str, config))} of {d}")
    for d in relayed.DIMS
    for config in relayed_tiles(AttentionSpec(1, "bf16", 1024, d, grad=True), H200)
]
POSITIONS = (129, 192, 256, 300, 1000, 1024)  # most have a ragged last block


def test_every_configuration_is_tested():
    assert {p.values[0] for p in CONFIGS} == set(RELAYED_CONFIGS)


def skip_unless_possible(qkv, d):
    spec = AttentionSpec(1, dtype_name(qkv.dtype), qkv.shape[1], d, grad=True)
    if reason := relayed.refuse(spec, describe(qkv.device)):
        pytest.skip(reason)


def check_config(config, shape, dtype, order, device):
    """The gradient of several runs, whose bits are the same, and rows that add up to it."""
    qkv, do = make(*shape, dtype, device)
    skip_unless_possible(qkv, shape[3])
    check_runs(config, qkv, do, shape[2], order, RUNS_ON_GPU)
    check_rows(do, qkv, (shape[2], order, False), config)


def check_runs(config, qkv, do, heads, order, runs):
    """The gradient of the first, and that all have its bits."""
    (_, exact), (_, budget) = expected_and_budgets(qkv, do, heads, order=order)
    arguments = heads, order, False
    o, lse = attention_fwd(qkv, *arguments, FWD_CONFIGS[0])
    first = attention_bwd(do, qkv, o, lse, *arguments, config)
    assert_close("dqkv", first, exact, budget)
    for _ in range(runs - 1):
        assert torch.equal(attention_bwd(do, qkv, o, lse, *arguments, config), first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, order", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("t", POSITIONS)
@pytest.mark.parametrize("config, d", CONFIGS)
def test_gpu_config(config, d, t, dtype, order, device):
    check_config(config, (2, t, 3, d), dtype, order, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, order", OTHER_KINDS.values(), ids=OTHER_KINDS)
@pytest.mark.parametrize("config, d", CONFIGS)
def test_gpu_config_of_other_kinds(config, d, dtype, order, device):
    check_config(config, (2, 420, 3, d), dtype, order, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, order", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("t", [129, 1000])
@pytest.mark.parametrize("d", [24, 40, 56, 80, 96, 160, 232])
def test_gpu_heads_that_do_not_fill_a_tile(d, t, dtype, order, device):
    """They lie side by side, so a tile would read and write the next head."""
    (config,) = relayed_tiles(AttentionSpec(1, "bf16", t, d, grad=True), H200)
    check_config(config, (2, t, 3, d), dtype, order, device)


@pytest.mark.gpu
@pytest.mark.parametrize("t", [1000, 4096])
@pytest.mark.parametrize("config, d", CONFIGS)
def test_gpu_many_programs(config, d, t, device):
    """More than fit the GPU at a time, often."""
    n, heads = (12, 5) if t == 1000 else (3, 3)
    qkv, do = make(n, t, heads, d, torch.bfloat16, device)
    skip_unless_possible(qkv, d)
    check_runs(config, qkv, do, heads, "qkv_heads", 21)


@pytest.mark.gpu
@pytest.mark.parametrize("config, d", CONFIGS)
@pytest.mark.parametrize("sign", [1, -1], ids=["large", "very_negative"])
def test_gpu_extreme_scores(config, d, sign, device):
    """Past the range of float16, as in `test_extreme_scores_stay_finite`."""
    qkv, do = make_extreme(d, sign, device)
    skip_unless_possible(qkv, d)
    o, lse = attention_fwd(qkv, 1, "qkv_heads", False, FWD_CONFIGS[0])
    exact, _ = run(reference.attention, qkv.double(), do.double(), 1)
    torch.testing.assert_close(o.double(), exact, rtol=2e-3, atol=2e-3)
    assert torch.isfinite(attention_bwd(do, qkv, o, lse, 1, "qkv_heads", False, config)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("config, d", CONFIGS)
def test_gpu_waits_for_what_it_reads(config, d, device):
    """With `dependent_launches` a kernel may begin before the ones before it are done."""
    qkv, do = make(4, 300, 3, d, torch.bfloat16, device)
    skip_unless_possible(qkv, d)
    arguments = 3, "qkv_heads", False

    def step():
        twice = attention_fwd(torch.cat([qkv, qkv]), *arguments)
        both = torch.cat([do, do]), torch.cat([qkv, qkv])
        return torch.cat([attention_bwd(*both, *twice, *arguments, config)] * 2)

    expected = step()
    with dependent_launches():
        for _ in range(RUNS_ON_GPU):
            assert torch.equal(step(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("config, d", CONFIGS)
def test_gpu_two_at_a_time(config, d, device):
    """In two streams, where programs of either wait for their own while they take the GPU."""
    qkv, do = make(8, 1024, 8, d, torch.bfloat16, device)
    skip_unless_possible(qkv, d)
    arguments = 8, "qkv_heads", False
    o, lse = attention_fwd(qkv, *arguments, FWD_CONFIGS[0])
    expected = attention_bwd(do, qkv, o, lse, *arguments, config)
    torch.cuda.synchronize()
    found = []
    for stream in [torch.cuda.Stream() for _ in range(2)] * 3:
        with torch.cuda.stream(stream):
            found.append(attention_bwd(do, qkv, o, lse, *arguments, config))
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected) for x in found)
