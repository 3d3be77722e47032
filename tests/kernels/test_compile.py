"""What was recorded of every kernel compiles, without register spills and within shared memory; on
sm_90 with the instructions it was designed for. No GPU is needed; see compile_only.py."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import triton

from triton_kernels.norm.tables import _lanes_of

from .compile_only import SHARED_LIMIT, count_instructions, load_cases, read_resources, torn_stores
from .expected import EXPECTED, expected

CASES = load_cases()
JIT = r"@(?:triton|gluon)\.jit.*\n(?:@.*\n)*"  # above a kernel
# Registers are counted, and products overlap, with the compiler that the project is tested with.
# With another a kernel has to compile and to be safe.
PINNED = (
    f"triton=={triton.__version__}"
    in (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
)


_PATIENCE = 300  # seconds that a case may take


class _Compiler:
    """A process of its own, since this one may have loaded Triton as an interpreter. It is started
    when first asked, and again should a compilation have killed it."""

    def __init__(self):
        self.process = None

    def __call__(self, case: str) -> dict:
        if self.process is None:
            self.stderr = tempfile.TemporaryFile("w+")
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.kernels.compile_only", "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.stderr,
                cwd=Path(__file__).parents[2],
                env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
                text=True,
            )
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        late = threading.Timer(_PATIENCE, self.process.kill)
        late.start()
        answer = self.process.stdout.readline()
        late.cancel()
        if answer:
            return json.loads(answer)
        self.close()
        self.stderr.seek(0)
        return {
            "ok": False,
            "error": f"the compiler died, or took {_PATIENCE} s: " + self.stderr.read()[-4000:],
        }

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            try:
                self.process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
            self.process = None


@pytest.fixture(scope="session")
def compiled(request):
    """Results by case. Two processes work ahead through the tests that were selected; under
    pytest-xdist each worker has one and compiles what it is about to test."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    here = threading.local()
    compilers = []

    def compile_one(case):
        if not hasattr(here, "compiler"):
            here.compiler = _Compiler()
            compilers.append(here.compiler)
        return here.compiler(case)

    pool = ThreadPoolExecutor(2 if alone else 1)
    ahead = [i.callspec.params["wanted"] for i in request.session.items if _compiles(i) and alone]
    futures = {wanted: pool.submit(compile_one, wanted) for wanted in ahead}

    def result(wanted):
        if wanted not in futures:
            futures[wanted] = pool.submit(compile_one, wanted)
        return futures[wanted].result()

    yield result
    pool.shutdown(cancel_futures=True)
    for compiler in compilers:
        compiler.close()


def _compiles(item: pytest.Item) -> bool:
    return "wanted" in getattr(getattr(item, "callspec", None), "params", ())


def _of_a_kernel(name: str):
    return pytest.param(name, marks=pytest.mark.one_of(name.partition(" ")[0]))


@pytest.mark.parametrize("wanted", [*map(_of_a_kernel, CASES)])
def test_compiles(compiled, wanted):
    case, result = CASES[wanted], compiled(wanted)
    assert result["ok"], result["error"]
    arch, expect = case["arch"], expected(case)
    spilled = result["spills"]
    if PINNED:
        assert spilled <= expect.spills, f"{spilled} bytes of registers spilled: {result}"
    assert result["shared"] <= SHARED_LIMIT[arch], f"too much shared memory for sm_{arch}: {result}"
    if arch != 90:
        return
    if PINNED:
        assert not result["serial"], f"products do not overlap: {result}"
    assert result["overwritten"] == [], "memory of a barrier is given away, see gluon/pipeline.py"
    assert result["torn"] == [], "written where TMA still reads: tma.store_wait, then sync_threads"
    if expect.wgmma is not None:
        there = result["wgmma_shared"] + result["wgmma_registers"] > 0
        assert there == bool(expect.wgmma), result
    if expect.wgmma is True:
        assert result["wgmma_registers"] == 0, f"A passes through registers: {result}"
    if expect.narrow is False:
        assert result["narrow_loads"] == 0, f"loads number by number: {result}"
    if expect.tma is not None:
        assert (result["tma_loads"] > 0) == expect.tma, result


@pytest.mark.parametrize("arch", (90, 120))
def test_tables_of_wide_groups(compiled, arch):
    """One group of 200 channels, of two tensors in 64 tiles each: four warps would spill."""
    case = json.loads(json.dumps(CASES[f"norm/table_kernels:norm_table_kernel 1 sm_{arch}"]))
    for name in ("partial2_ptr", "scale_ptr", "shift_ptr"):
        case["constexprs"].pop(name, None)
        case["signature"][name] = "*fp32"
    lanes = _lanes_of(200, 1, 64, 64)
    sizes = ("BLOCK_K1", "BLOCK_K2", "BLOCK_G", "BLOCK_J")
    case["constexprs"] |= dict(zip(sizes, lanes.blocks, strict=True), K1=64, K2=64, CG=lanes.cg)
    case["options"]["num_warps"] = lanes.num_warps
    case["multiples"] = [name for name in case["multiples"] if name not in ("C1", "C")]
    result = compiled(json.dumps(case))
    assert result["ok"], result["error"]
    if PINNED:
        assert result["spills"] == 0, result


def test_every_kernel_was_recorded():
    root = Path(__file__).parents[2] / "triton_kernels"
    written = {
        f"{path.relative_to(root).with_suffix('')}:{name}".replace("/", ".")
        for path in root.rglob("*.py")
        for name in re.findall(JIT + r"def (\w+_kernel)\(", path.read_text())
    }
    compiled = {case["kernel"].removeprefix("triton_kernels.") for case in CASES.values()}
    assert written and sorted(written - compiled) == []
    assert sorted(EXPECTED.keys() - {kernel.split(":")[1] for kernel in compiled}) == []


def test_reading_of_the_compiler_s_output():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_kernel' for 'sm_90a'
ptxas info    : Function properties for _kernel
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size"""
    assert read_resources(log) == {"registers": 168, "stack": 24, "spills": 20, "serial": False}
    ptx = """
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, %rd1, %rd2, p, 1, 1;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, {%r5,%r6}, %rd2, p, 1;
    wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%r1,%r2,%r3,%r4}, %rd3, %rd4, 1, 1, 1;
    cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1];
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r2, %r3}], [%r1];
    ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    @%p1 ld.global.b16 { %rs1 }, [ %rd1 + 0 ];"""
    assert count_instructions(ptx) == {
        "wgmma_shared": 2,
        "wgmma_registers": 1,
        "tma_loads": 1,
        "narrow_loads": 1,
    }


def test_what_lies_where_tma_still_reads():
    """As `conv_single_tile` had it, whose norm was written over its result."""
    alloc = "{} = ttg.local_alloc {{allocation.offset = {} : i32}} : () -> !ttg.memdesc<64x64xbf16>"
    stage, over, beside = (
        alloc.format(*place) for place in (("%stage", 0), ("%a_buf", 8191), ("%a_buf", 8192))
    )
    store = "ttng.async_tma_copy_local_to_global %y_desc[%m0, %3] %stage : !tt.tensordesc<...>"
    turned = "%7 = ttg.memdesc_trans %a_buf {order = array<i32: 1, 0>} : !ttg.memdesc<64x64xbf16>"
    write = "ttg.local_store %6, %7 : tensor<64x64xbf16> -> !ttg.memdesc<64x64xbf16>"
    scratch = "%9 = ttg.convert_layout %8 {allocation.offset = 0 : i32} : tensor<64x64xbf16>"
    wait = "ttng.async_tma_store_wait {pendings = 0 : i32}"

    def torn(*lines):
        return torn_stores("\n".join(lines))

    assert torn(stage, store, over, turned, write, wait) == [write]
    assert torn(stage, store, scratch) == [scratch]
    assert torn(stage, store, over, turned, wait, write, scratch) == []
    assert torn(stage, store, beside, turned, write) == []


def test_a_compilation_that_fails_is_reported():
    compiler = _Compiler()
    try:
        answer = compiler("no such case")
        assert not answer["ok"]
        assert "no such case" in answer["error"]
    finally:
        compiler.close()
