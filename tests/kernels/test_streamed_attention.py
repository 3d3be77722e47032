"""Attention past whose queries keys stream (`attention/streamed.py`), which Hopper alone runs: what
is taken, and on a GPU its result and logarithms against the reference in float64."""

import pytest
import torch

from triton_kernels import reference
from triton_kernels.attention import attention_fwd, streamed
from triton_kernels.attention.hopper import HeadTile
from triton_kernels.attention.launch import ATTENTION, attention_bwd
from triton_kernels.attention.streamed import (
    KEPT,
    KEPT_CONFIGS,
    STREAMED,
    STREAMED_CONFIGS,
    KeptTile,
    StreamedTile,
    streamed_tiles,
)
from triton_kernels.attention.tiles import FWD_CONFIGS, Tile
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
    check_output,
    expected_and_budgets,
    make,
    make_extreme,
    run,
)

H200 = CHIPS["h200"].gpu


# --- what is taken --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, t, d, kind",
    [
        (192, 1024, 64, KeptTile),
        (192, 1000, 64, KeptTile),
        (192, 1024, 32, KeptTile),
        (32, 4096, 64, StreamedTile),
        (96, 1024, 128, StreamedTile),
        (320, 256, 64, HeadTile),
        (320, 64, 128, Tile),
        (128, 4096, 40, StreamedTile),
        (192, 1024, 48, KeptTile),
        (128, 1024, 80, StreamedTile),
        (192, 1024, 44, Tile),
        (192, 1024, 256, StreamedTile),
        (192, 1024, 264, Tile),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_was_fastest_is_taken(n, t, d, kind, dtype):
    """As it was measured, by rows or by the costs that were made of these times."""
    assert type(select(ATTENTION, AttentionSpec(n, dtype, t, d), H200).config) is kind


@pytest.mark.parametrize(
    "gpu, spec, reason",
    [
        ("a100", AttentionSpec(8, "bf16", 1024, 64), "wgmma"),
        ("b200", AttentionSpec(8, "bf16", 1024, 64), "wgmma"),
        ("h200", AttentionSpec(8, "tf32", 1024, 64), "32 bits"),
        ("h200", AttentionSpec(8, "bf16", 1024, 44), "heads of 44 channels"),
        ("h200", AttentionSpec(8, "bf16", 1024, 64, fetchable=False), "TMA cannot read"),
    ],
)
def test_what_is_refused(gpu, spec, reason):
    for kernel in (KEPT, STREAMED):
        assert reason in kernel.refuse(spec, CHIPS[gpu].gpu)
    assert isinstance(select(ATTENTION, spec, CHIPS[gpu].gpu).config, Tile)


def test_heads_of_128_have_no_registers_beside_another_program():
    spec = AttentionSpec(8, "bf16", 1024, 128)
    assert "heads of 128 channels; it has multiples of 8, 8 to 64" == KEPT.refuse(spec, H200)
    assert STREAMED.refuse(spec, H200) is None


@pytest.mark.parametrize(
    "name, heads, d, grid, warps, registers",
    [("kept", 12, 64, 16 * 12 * 8, 8, 128), ("streamed", 6, 128, 16 * 6 * 8, 4, 168)],
)
def test_what_is_taken_is_launched(name, heads, d, grid, warps, registers, monkeypatch):
    kernel = Launched()
    monkeypatch.setattr(streamed, f"attention_fwd_{name}_kernel", kernel)
    qkv = torch.empty(16, 1000, 3 * heads * d, dtype=torch.bfloat16)
    with standing_for(H200):
        o, lse = attention_fwd(qkv, heads, "qkv_heads", False)
    assert o.shape == (16, 1000, heads * d) and lse.shape == (16, heads, 1000)
    ((launched_grid, options),) = kernel.calls
    assert launched_grid == (grid,)
    assert (options["num_warps"], options["maxnreg"]) == (warps, registers)
    assert (options["T"], options["BLOCK_D"], options["HEADS_QKV"]) == (1000, d, False)


# --- on the GPU -----------------------------------------------------------------------------------

CONFIGS = [
    pytest.param(config, d, id=f"{config.kernel} {' '.join(map(str, config))} of {d}")
    for tiles, dims in (
        (lambda *_: KEPT_CONFIGS, streamed.KEPT_DIMS),
        (streamed_tiles, streamed.STREAMED_DIMS),
    )
    for d in dims
    for config in tiles(AttentionSpec(1, "bf16", 1024, d), H200)
]
POSITIONS = (1, 17, 64, 100, 256, 1000, 1024)  # at 1000 the last block is ragged


def test_every_configuration_is_tested():
    assert {p.values[0] for p in CONFIGS} == {*KEPT_CONFIGS, *STREAMED_CONFIGS}


def skip_unless_possible(config, qkv, d):
    spec = AttentionSpec(1, dtype_name(qkv.dtype), qkv.shape[1], d)
    refuse = streamed.refuse_kept if type(config) is KeptTile else streamed.refuse_streamed
    if reason := refuse(spec, describe(qkv.device)):
        pytest.skip(reason)


def check_config(config, shape, dtype, order, device):
    """Output and logarithms of several runs, whose bits are the same."""
    qkv, do = make(*shape, dtype, device)
    skip_unless_possible(config, qkv, shape[3])
    first, *others = check_output(config, qkv, do, shape[2], order)
    for again in others:
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


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
    check_config(config, (2, 300, 3, d), dtype, order, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, order", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("t", [17, 1000])
@pytest.mark.parametrize("d", [8, 24, 40, 56, 80, 96, 112, 160, 232])
@pytest.mark.parametrize("config", [*KEPT_CONFIGS, *STREAMED_CONFIGS], ids=str)
def test_gpu_heads_that_do_not_fill_a_tile(config, d, t, dtype, order, device):
    """They lie side by side, so a tile would read and write the next head."""
    if type(config) is StreamedTile and (config.step == 64) != (d > 128):
        pytest.skip("it has other keys")
    check_config(config, (2, t, 3, d), dtype, order, device)


@pytest.mark.gpu
@pytest.mark.parametrize("config, d", CONFIGS)
def test_gpu_many_programs(config, d, device):
    """More than fit the GPU at a time."""
    check_config(config, (12, 1000, 5, d), torch.bfloat16, "qkv_heads", device)


@pytest.mark.gpu
@pytest.mark.parametrize("t", [100, 1024])
@pytest.mark.parametrize("config, d", CONFIGS)
def test_gpu_gradient_from_its_logarithms(config, d, t, device):
    qkv, do = make(2, t, 3, d, torch.bfloat16, device)
    skip_unless_possible(config, qkv, d)
    (_, exact), (_, budget) = expected_and_budgets(qkv, do, 3)
    o, lse = attention_fwd(qkv, 3, "qkv_heads", False, config)
    dqkv = attention_bwd(do, qkv, o, lse, 3, "qkv_heads", False)
    assert_close("dqkv", dqkv, exact, budget)


@pytest.mark.gpu
@pytest.mark.parametrize("config, d", CONFIGS)
@pytest.mark.parametrize("sign", [1, -1], ids=["large", "very_negative"])
def test_gpu_extreme_scores(config, d, sign, device):
    """Past the range of float16, as in `test_extreme_scores_stay_finite`: keys differ a little."""
    qkv, do = make_extreme(d, sign, device)
    skip_unless_possible(config, qkv, d)
    o, lse = attention_fwd(qkv, 1, "qkv_heads", False, config)
    exact, _ = run(reference.attention, qkv.double(), do.double(), 1)
    torch.testing.assert_close(o.double(), exact, rtol=2e-3, atol=2e-3)
    assert torch.isfinite(lse).all()


@pytest.mark.gpu
@pytest.mark.parametrize("config, d", CONFIGS)
def test_gpu_waits_for_what_it_reads(config, d, device):
    """With `dependent_launches` a kernel may begin before the ones before it are done."""
    qkv, _ = make(4, 300, 3, d, torch.bfloat16, device)
    skip_unless_possible(config, qkv, d)

    def step():
        o, lse = attention_fwd(torch.cat([qkv, qkv]), 3, "qkv_heads", False, config)
        return torch.cat([o, o]), torch.cat([lse, lse])

    expected = step()
    with dependent_launches():
        for _ in range(RUNS_ON_GPU):
            assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))


@pytest.mark.gpu
def test_gpu_what_tma_cannot_read(device):
    """qkv that does not begin at a multiple of 16 bytes has another kernel."""
    n, t, heads, d = 2, 300, 3, 64
    qkv, _ = make(n, t, heads, d, torch.bfloat16, device)
    moved = torch.zeros(qkv.numel() + 1, dtype=qkv.dtype, device=device)[1:].view_as(qkv)
    moved.copy_(qkv)
    expected = attention_fwd(qkv, heads, "qkv_heads", False, FWD_CONFIGS[1])
    actual = attention_fwd(moved, heads, "qkv_heads", False)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.02, atol=0.01)
