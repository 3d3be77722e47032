"""group_norm's ways and their configurations, at the shapes of a model; most of it on a GPU."""

import dataclasses

import pytest
import torch

from triton_kernels.activations import ACTIVATIONS
from triton_kernels.norm import cluster as group_norm_cluster, multi_pass
from triton_kernels.norm.cluster import CLUSTER
from triton_kernels.norm.group_norm import GROUP_NORM, GROUP_NORM_GRAD, group_norm
from triton_kernels.norm.multi_pass import spec_of
from triton_kernels.norm.single_program import SINGLE_PROGRAM
from triton_kernels.registry.choose import select
from triton_kernels.registry.spec import NormSpec
from triton_kernels.runtime.device import Device

from .chips import HOPPER
from .group_norm_cases import (  # noqa: F401  fixtures, and a mark for every test here
    check,
    each_way,
    force,
    make_case,
    of_two,
    pytestmark,
    relative_error,
    run,
)
from .taken import take

SUMS = {
    "few": multi_pass._SUMS,
    "statistics of few": multi_pass._STATS,
    "one warp": multi_pass._ONE_WARP,
}

# --- on the GPU: bf16, the model's shapes, every entry of the config lists -----------------------

_MODEL_SHAPES = [
    (32, 64, 64, 64),
    (8, 64, 64, 192),
    (32, 32, 32, 128),
    (8, 32, 32, 320),
    (32, 16, 16, 192),
    (8, 16, 16, 448),
    (32, 8, 8, 256),
    (8, 8, 8, 512),
    (1, 256, 256, 64),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", _MODEL_SHAPES, ids=str)
def test_model_shapes(shape, dtype, device):
    case = make_case(shape, modulated=shape[0] == 8, dtype=dtype, device=device)
    check(*case, 32, "silu")
    first, second = (run(group_norm, *case, 32, "silu") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a is None or torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_activations_in_bf16(act, path, device):
    check(*make_case((2, 13, 11, 40), dtype=torch.bfloat16, device=device), 8, act)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 64, 64, 64), (3, 33, 31, 192)], ids=str)
@pytest.mark.parametrize("sums", SUMS)
def test_every_config(sums, shape, device, monkeypatch):
    monkeypatch.setattr(Device, "busy", 1)
    monkeypatch.setattr(multi_pass, "_config", lambda *_: SUMS[sums])
    case = make_case(shape, dtype=torch.bfloat16, device=device)
    force("stream", monkeypatch)
    for _ in range(3):
        check(*case, 32, "silu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 16, 16, 192), (3, 7, 9, 320)], ids=str)
def test_every_resident_config(shape, device, monkeypatch):
    case = make_case(shape, dtype=torch.bfloat16, device=device)
    configs = SINGLE_PROGRAM.configs(spec_of((case[0], None), 32), HOPPER)
    assert len(configs) >= 5
    for config in configs:
        take(monkeypatch, group_norm=config, group_norm_bwd=config)
        for _ in range(3):
            check(*case, 32, "silu")


@pytest.mark.parametrize(("hw", "c"), [(4096, 64), (4096, 192), (1024, 128), (256, 320)], ids=str)
@pytest.mark.parametrize("tensors", [1, 2], ids=["forward", "backward"])
def test_clusters_have_whole_groups_and_tiles(tensors, hw, c):
    configs = group_norm_cluster._candidates(hw, c, 32, tensors)
    assert configs
    for config in configs:
        channels = config.parts * config.block_c
        pixels = config.ctas * config.num_warps * 256 // config.block_c
        assert c % channels == 0 and channels % (c // 32) == 0 and hw % pixels == 0


def test_what_no_cluster_can_hold(device):
    assert not group_norm_cluster._candidates(256 * 256, 64, 32, 1)  # 8 MiB
    assert not group_norm_cluster._candidates(4096, 65, 5, 1)  # tiles are of 32 channels or more
    assert not group_norm_cluster._candidates(37 * 41, 64, 32, 1)  # odd pixels
    spec = spec_of((torch.ones(2, 64, 64, 64, device=device), None), 32)
    assert "32 bits" in CLUSTER.refuse(spec, HOPPER)
    spec = dataclasses.replace(spec, dtype="bf16")
    assert CLUSTER.refuse(spec, HOPPER) is None
    for other in ({"aligned": False}, {"c2": 64}, {"grad": True, "dx": False}):
        assert CLUSTER.refuse(dataclasses.replace(spec, **other), HOPPER)


_CLUSTER_SHAPES = [(5, 64, 64, 64), (3, 64, 64, 192), (5, 16, 32, 128), (5, 16, 16, 320)]


@pytest.mark.gpu
@pytest.mark.parametrize("tensors", [1, 2], ids=["forward", "backward"])
@pytest.mark.parametrize("shape", _CLUSTER_SHAPES, ids=str)
def test_every_cluster_config(shape, tensors, device, monkeypatch):
    """Also with so many rounds, which batches as small as this one do not get."""
    monkeypatch.setattr(
        group_norm_cluster, "_clusters", lambda tasks, config, _: -(-tasks // config.rounds)
    )
    case = make_case(shape, dtype=torch.bfloat16, device=device)
    for config in group_norm_cluster._candidates(shape[1] * shape[2], shape[3], 32, tensors):
        force("cluster", monkeypatch)
        take(monkeypatch, **{"group_norm_bwd" if tensors == 2 else "group_norm": config})
        for _ in range(2):
            check(*case, 32, "silu")


def test_a_measured_kernel_may_refuse():
    """What was measured for a shape is no way for a tensor of it that is not aligned."""
    spec = NormSpec(32, "bf16", 64, 64, 64)
    for op in (GROUP_NORM, GROUP_NORM_GRAD):
        grad = dataclasses.replace(spec, grad=op is GROUP_NORM_GRAD)
        choice = select(op, grad, HOPPER)
        assert (choice.kernel.name, choice.why) == ("cluster", "measured")
        other = select(op, dataclasses.replace(grad, aligned=False), HOPPER)
        assert other.kernel.name == "multi_pass"


def test_without_rows_large_images_are_for_clusters():
    """And images that fit registers for them; others for passes."""
    chip = HOPPER._replace(num_sms=114)
    for n, side, c, kernel in (
        (128, 64, 64, "cluster"),
        (8, 64, 64, "multi_pass"),
        (8, 16, 256, "single_program"),
        (512, 16, 256, "single_program"),
        (8, 30, 100, "multi_pass"),
    ):
        for op, grad in ((GROUP_NORM, False), (GROUP_NORM_GRAD, True)):
            groups = 32 if c % 32 == 0 else 5
            spec = NormSpec(n, "bf16", side, side, c, groups=groups, grad=grad)
            assert select(op, spec, chip).kernel.name == kernel, spec


@pytest.mark.gpu
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_activations_in_a_cluster(act, dtype, device, monkeypatch):
    force("cluster", monkeypatch)
    affine = act != "mish"
    case = make_case((2, 16, 32, 96), affine=affine, modulated=affine, dtype=dtype, device=device)
    check(*case, 16, act)


@pytest.mark.gpu
def test_statistics_of_a_large_mean_in_a_cluster(device):
    """As in `test_large_mean`; a float16 about 1e3 is right to half a deviation, as it is given."""
    x, _, _ = make_case((2, 64, 64, 64), offset=1e3, dtype=torch.float16, device=device)
    x[:, 0, 0] = 0
    params = (None,) * 4
    config = CLUSTER.configs(spec_of((x, None), 32), HOPPER)[0]
    _, stats = CLUSTER.launch(config, (x, None), 32, 1e-5, params, "identity")
    groups = x.double().view(2, 4096, 32, 2)
    var, mean = torch.var_mean(groups, (1, 3), correction=0)
    assert (
        relative_error(stats[0], mean) < 1e-6
        and relative_error(stats[1], (var + 1e-5).rsqrt()) < 1e-5
    )


@pytest.mark.gpu
def test_clusters_beside_other_work(device, monkeypatch):
    """Thread blocks of a cluster wait for each other; kernels in other streams take places."""
    force("cluster", monkeypatch)
    case = make_case((64, 64, 64, 64), dtype=torch.bfloat16, device=device)
    expected = run(group_norm, *case, 32, "silu")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run(group_norm, *case, 32, "silu"))
    torch.cuda.synchronize()
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device):
    """More than 2^31 elements: the last sample equals the same sample alone."""
    x = torch.randn(2, 1, 1, 64, device=device, dtype=torch.float16).expand(2, 4100, 4200, 64)
    x = x.contiguous()
    x[1, -1, -1] += 3
    weight, bias = torch.randn(2, 64, device=device)
    y = group_norm(x, 32, weight, bias, activation="silu")
    assert torch.equal(y[1:], group_norm(x[1:], 32, weight, bias, activation="silu"))


@pytest.mark.gpu
def test_captured_in_a_graph(device):
    x, params, dy = make_case((4, 16, 16, 64), dtype=torch.bfloat16, device=device)
    want = run(group_norm, x, params, dy, 32, "silu")
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(group_norm, x, params, dy, 32, "silu")
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        got = run(group_norm, x, params, dy, 32, "silu")
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


_DECODER_SHAPES = [(8, 64, 64, 64, 128), (8, 32, 32, 128, 192), (8, 16, 16, 192, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [*_DECODER_SHAPES, (8, 8, 8, 256, 256), (3, 33, 31, 130, 30)], ids=str
)
def test_model_shapes_of_two(shape, dtype, path, device, monkeypatch):
    *shape, c1, c2 = shape
    x, params, dy = make_case((*shape, c1 + c2), dtype=dtype, device=device)
    if path == "resident" and shape[1] > 16:
        pytest.skip("too large for one launch")
    check(x, params, dy, 32, "silu", c1=c1)
    first, second = (run(of_two(group_norm, c1), x, params, dy, 32, "silu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_two_are_never_one_in_memory(device):
    """Forward needs y and little else."""
    x1, x2 = (torch.randn(8, 64, 64, c, device=device, dtype=torch.bfloat16) for c in (64, 128))
    y = group_norm(x1, 32, x2=x2)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = group_norm(x1, 32, x2=x2)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.2 * y.numel() * y.element_size()


@pytest.mark.gpu
@pytest.mark.parametrize("sums", SUMS)
def test_every_config_of_two(sums, device, monkeypatch):
    monkeypatch.setattr(Device, "busy", 1)
    monkeypatch.setattr(multi_pass, "_config", lambda *_: SUMS[sums])
    case = make_case((3, 33, 31, 320), dtype=torch.bfloat16, device=device)
    force("stream", monkeypatch)
    for _ in range(3):
        check(*case, 32, "silu", c1=192)
