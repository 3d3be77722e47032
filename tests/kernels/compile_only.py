"""Compile kernels for GPUs that this machine does not have, and report what came out.

    python -m tests.kernels.compile_only [--arch 90 ...] [PATTERN]    a JSON line a kernel and chip

Triton and the ptxas in its wheel need no GPU to compile. What is compiled are launches that were
recorded (`record_cases`, which writes `recorded_cases.jsonl`). Each line there is a case:

    arch       the chip that it was recorded for
    job        the first that launches it there
    kernel     "package.module:_kernel"
    signature  {argument: type}, as in Triton: "*bf16", "i32", "tensordesc<bf16[1,4,32,64]>"
    constexprs {argument: value}; None for an absent pointer. Every argument is in one of the two.
    multiples  integer arguments that are multiples of 16 (pointers always are)
    options    {"num_warps": 4, "num_stages": 3}

What is expected of a kernel is in `expected.py`.
"""

import argparse
import contextlib
import importlib
import io
import json
import math
import os
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ARCHES = (80, 89, 90, 100, 120)
# Shared memory that one block may have, bytes (CUDA programming guide, compute capabilities).
SHARED_LIMIT = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


RECORDED = Path(__file__).with_name("recorded_cases.jsonl")


def box_layout(dtype: str, shape: list[int]) -> Any:
    """How a box that TMA fetches lies in the shared memory of a Gluon kernel."""
    from triton.experimental.gluon import language as gl

    bits = 32 if dtype == "fp32" else 16
    return gl.NVMMASharedLayout(min(128, shape[-1] * bits // 8), bits, rank=len(shape))


def load_cases() -> dict[str, dict]:
    """All cases, by "module/kernel, number, sm_arch"."""
    cases: dict[str, dict] = {}
    counts: dict[tuple, int] = defaultdict(int)
    for line in RECORDED.read_text().splitlines():
        case = json.loads(line)
        module, name = case["kernel"].removeprefix("triton_kernels.").split(":")
        counts[name, case["arch"]] += 1
        number = counts[name, case["arch"]]
        cases[f"{module.replace('.', '/')}:{name} {number} sm_{case['arch']}"] = case
    return cases


def compile_case(case: dict) -> dict:
    """Compile one case. The result has `ok` and, if not ok, `error`; otherwise
    `registers` and `spills` (bytes) of a thread, `stack` (bytes), `serial`: whether each wgmma is
    waited for before the next one begins, `shared` (bytes), the numbers of instructions
    `wgmma_shared`, `wgmma_registers` (where A comes from) and `tma_loads`, and on sm_90
    `overwritten`, as `overwritten_barriers`, and `torn`, as `torn_stores`."""
    try:
        ptx, shared, log, tiled = _compile(case)
        memory = {}
        if case["arch"] == 90:
            allotted = _allocated(tiled)
            memory = {"overwritten": overwritten_barriers(allotted), "torn": torn_stores(allotted)}
    except Exception as error:  # whatever the compiler raises is the result
        return {"ok": False, "error": f"{type(error).__name__}: {error}"[-4000:]}
    resources = read_resources(log) | count_instructions(ptx) | memory
    return {"ok": True, "shared": shared, **resources}


def read_resources(log: str) -> dict[str, int]:
    """Registers, stack and spills from what `ptxas -v` says."""
    frame = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    stack, stored, loaded = map(int, re.search(frame, log).groups())
    registers = int(re.search(r"Used (\d+) registers", log).group(1))
    serial = "wgmma.mma_async instructions are serialized" in log
    return {"registers": registers, "stack": stack, "spills": max(stored, loaded), "serial": serial}


def count_instructions(ptx: str) -> dict[str, int]:
    """wgmma by where A comes from (B is always in shared memory), and tiles loaded by TMA."""
    # wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {accumulators}, A, B descriptor, ...;
    sources = re.findall(r"wgmma\.mma_async[^{;]*\{[^}]*\},\s*(\{|%)", ptx)
    return {
        "wgmma_shared": sources.count("%"),
        "wgmma_registers": sources.count("{"),
        "narrow_loads": len(re.findall(r"ld\.global[\w.:]*\.[bu]16\b", ptx)),
        "tma_loads": len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)),
    }


def overwritten_barriers(tiled: str) -> list[str]:
    """What lies on a barrier that is never invalidated, of a kernel in the compiler's language once
    shared memory is allotted. To the GPU such a one stays a barrier: if it turns to another process
    and back, it writes the barrier's state over what lies there."""
    if "ttng.inval_barrier" in tiled:  # of Triton's own making, and then all of them
        return []
    barriers, others = [], []
    for line in tiled.splitlines():
        place = _place(line)
        if place is None:
            continue
        is_barrier = re.search(r"ttg\.local_alloc.*memdesc<[\dx]+xi64", line)
        (barriers if is_barrier else others).append((*place, line.strip()))
    return [
        line
        for start, end, line in others
        if any(start < last and first < end for first, last, _ in barriers)
    ]


def torn_stores(tiled: str) -> list[str]:
    """What is written where TMA may still read another buffer, which it stores. The compiler takes
    that one's memory as free behind the store, but until `async_tma_store_wait` it is not. Ways
    back in loops are not looked at, nor buffers that the warps of a partition are given."""
    places: dict[str, tuple[int, int]] = {}
    buffers: dict[str, str] = {}  # of views
    stored: set[str] = set()
    found = []
    for line in tiled.splitlines():
        if "ttng.async_tma_store_wait" in line or re.search(r"\bpartition\d+\(", line):
            stored = set()
            continue
        name, place = None, None  # of what is written
        if buffer := re.search(r"(%[\w#]+) = ttg\.local_alloc( %)?", line):
            buffers[buffer[1]], places[buffer[1]] = buffer[1], _place(line)
            name, place = buffer[1], places[buffer[1]] if buffer[2] else None
        elif view := re.search(r"(%[\w#]+) = ttg\.memdesc_\w+ (%[\w#]+)", line):
            if view[2] in buffers:
                buffers[view[1]] = buffers[view[2]]
        elif source := re.search(r"ttng\.async_tma_\w+_to_global %\w+\[.*?\] (%[\w#]+)", line):
            stored |= {buffers[source[1]]} if source[1] in buffers else set()
        elif target := re.search(r"(?:local_store %[\w#]+,|_to_local %\w+\[.*?\]) (%[\w#]+)", line):
            name = buffers.get(target[1])
            place = places.get(name)
        else:
            place = _place(line)
        others = [places[other] for other in stored if other != name]
        if place and any(place[0] < end and start < place[1] for start, end in others):
            found.append(line.strip())
    return found


def _place(line: str) -> tuple[int, int] | None:
    """First byte of what a line is allotted, and the one behind its last."""
    offset = re.search(r"allocation\.offset = (\d+)", line)
    if offset is None:
        return None
    start, size = int(offset[1]), 1  # of what warps hand each other, the first byte will do
    if buffer := re.search(r"ttg\.local_alloc.*memdesc<([\dx]+)x[a-z]+(\d+)", line):
        size = math.prod(map(int, buffer[1].split("x"))) * int(buffer[2]) // 8
    return start, start + size


def _allocated(tiled: str) -> str:
    """A kernel in the compiler's language for GPUs, once it has allotted shared memory."""
    if "ttng.init_barrier" not in tiled:
        return ""
    from triton._C.libtriton import ir, nvidia, passes

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(tiled)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)  # as the compiler's own `make_llir` begins
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 80)
    manager.run(module, "allocate")
    return str(module)


def _compile(case: dict) -> tuple[str, int, str, str]:
    """PTX, bytes of shared memory, what `ptxas -v` said, and the compiler's own language."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.cache import get_cache_manager

    from triton_kernels.runtime.ptxas import prefer_older_ptxas

    arch = case["arch"]
    if arch == 90:
        prefer_older_ptxas()
    module, name = case["kernel"].split(":")
    kernel = getattr(importlib.import_module(module), name)
    while not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn  # below the autotuner and the heuristics
    signature = dict(case["signature"])
    constexprs = {name: _in_tuples(value) for name, value in case["constexprs"].items()}
    for argument in kernel.arg_names:
        if argument in constexprs:
            signature[argument] = "constexpr"
        elif argument not in signature:
            raise KeyError(f"{argument} of {name} is neither in signature nor in constexprs")
    unknown = (set(signature) | set(constexprs)) - set(kernel.arg_names)
    if unknown:
        raise KeyError(f"{name} has no argument {', '.join(sorted(unknown))}")
    signature = {argument: signature[argument] for argument in kernel.arg_names}
    if kernel.is_gluon():
        signature = {argument: _with_layout(kind) for argument, kind in signature.items()}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*") or argument in case["multiples"]
    }

    def build():
        make_source = GluonASTSource if kernel.is_gluon() else ASTSource
        source = make_source(kernel, signature, constexprs, attrs)
        with contextlib.redirect_stdout(io.StringIO()) as log:
            compiled = triton.compile(
                source, target=GPUTarget("cuda", arch, 32), options=dict(case["options"])
            )
        return compiled, log.getvalue()

    triton.knobs.nvidia.dump_ptxas_log = True
    compiled, log = build()
    cache = get_cache_manager(compiled.hash)
    if log:
        cache.put(log, "ptxas.log", binary=False)
    elif path := cache.get_file("ptxas.log"):
        log = Path(path).read_text()
    else:  # compiled before by somebody who did not keep the log
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.always_compile = True
            compiled, log = build()
        cache.put(log, "ptxas.log", binary=False)
    return compiled.asm["ptx"], compiled.metadata.shared, log, compiled.asm["ttgir"]


def _in_tuples(value: Any) -> Any:
    """A constant as kernels have it: JSON knows lists alone."""
    return tuple(map(_in_tuples, value)) if isinstance(value, list) else value


def _with_layout(kind: str) -> str:
    """The type of a box, which Gluon wants to know the layout of."""
    box = re.fullmatch(r"tensordesc<(\w+)\[([\d,]+)\]>", kind)
    if box is None:
        return kind
    shape = [int(size) for size in box[2].split(",")]
    return f"tensordesc<{box[1]}{shape},{box_layout(box[1], shape)!r}>"


def _serve() -> None:
    """Answer each line of stdin, a case or the name of a recorded one, by a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the compiler prints is not an answer
    cases = load_cases()
    for line in sys.stdin:
        line = line.rstrip("\n")
        case = json.loads(line) if line.startswith("{") else cases[line]
        print(json.dumps(compile_case(case)), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile kernels without a GPU.")
    parser.add_argument("pattern", nargs="?", default="", help="part of a case's name")
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHES, default=ARCHES)
    parser.add_argument("--serve", action="store_true", help="read requests from stdin")
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported
    if arguments.serve:
        return _serve()
    for key, case in load_cases().items():
        if arguments.pattern in key and case["arch"] in arguments.arch:
            print(json.dumps({"case": key, **compile_case(case)}), flush=True)


if __name__ == "__main__":
    main()
