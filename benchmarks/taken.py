"""Which kernels of the registry the plans of models and the public ops take, and which nobody
takes: a kernel in that list is to be cut, or somebody to be named who needs it.

    python -m benchmarks.taken [key=value ...]

    gpu=h100,a100    of `registry.chips`; an h100 stands for an h200, too
    models=          of configs/model and of benchmarks/networks, but no policies; default: all
    batch=1,16,128   images
    what=train,evaluate
    precision=bf16   of a step: bf16, tf32 or fp32
    ops=1            also the public ops over the shapes of `benchmarks.goldens`; 0: not those
    processes=2      that rehearse, one case each

It needs no GPU. A line for each kernel: in how many cases it is taken, and by which models, if they
are few. Of what several launches can do as well the plan may only ask whether one can, so the last
line names the functions under `triton.jit` that none of the cases launches.
"""

import ast
import multiprocessing
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import ablate, goldens, harness
from benchmarks.cases import MODELS, UNTUNED, model_settings
from benchmarks.harness import ROOT, check_choice
from benchmarks.papers import Case
from diffusion.errors import ConfigError
from diffusion.factory import POLICY_MODELS
from triton_kernels.registry import choose
from triton_kernels.registry.chips import chip
from triton_kernels.runtime.device import kernels as registered
from triton_kernels.runtime.launch_recorder import rehearsal

DEFAULTS = {
    "gpu": ("h100", "a100"),
    "models": ("",),
    "batch": (1, 16, 128),
    "what": ("train", "evaluate"),
    "precision": ("bf16",),
    "ops": 1,
    "processes": 2,
}
_MANY = 6  # models that are not all named
_OPS = "public ops"


def main(arguments: Sequence[str]) -> int:
    settings = harness.parse_settings(arguments, DEFAULTS)
    users, launched = defaultdict(set), set()  # of each kernel: cases; by name
    asked = cases(settings)
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with context.Pool(settings["processes"], maxtasksperchild=1) as pool:
        pairs = zip(asked, pool.imap(_rehearsed, asked), strict=True)
        for (gpu, case), its in tqdm(pairs, total=len(asked), unit="case", disable=None):
            if "error" in its:
                print(f"! {case} on {gpu}: {its['error']}", flush=True)
                continue
            launched.update(line.split()[0] for line in its["launches"])
            for name in its["taken"]:
                users[name].add((gpu, case))
    for name in sorted(n for n in registered if "/" in n and not n.endswith("/reference")):
        found = {case.model if isinstance(case, Case) else case for _, case in users[name]}
        by = f"{len(found)} models" if len(found) > _MANY else ", ".join(sorted(found)) or "nobody"
        print(f"{name} {len(users[name])}: {by}")
    print("launched by none:", ", ".join(sorted(kernels() - launched)) or "-")
    return 0


def cases(settings: dict) -> list[tuple[str, Case | str]]:
    """By GPU. ConfigError: something unknown."""
    known = [path.stem for path in sorted(MODELS.glob("*.yaml"))]
    known = [name for name in known if model_settings(name)["name"] not in POLICY_MODELS]
    models = [name for name in settings["models"] if name] or [*known, *UNTUNED]
    for model in models:
        check_choice("models", model, (*known, *UNTUNED))
    for what in settings["what"]:
        check_choice("what", what, DEFAULTS["what"])
    found: list[Case | str] = [_OPS] * bool(settings["ops"])
    for batch in settings["batch"]:
        for model in models:
            if "train" in settings["what"]:
                found += [Case("train", model, batch, p) for p in settings["precision"]]
            if "evaluate" in settings["what"]:
                found.append(Case("evaluate", model, batch))
    for name in settings["gpu"]:
        try:
            chip(name)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return [(name, case) for name in settings["gpu"] for case in found]


def _rehearsed(asked: tuple[str, Case | str]) -> dict[str, Any]:
    name, case = asked
    gpu = chip(name).gpu
    if isinstance(case, Case):
        return ablate.rehearsed(case, ablate.ALL, gpu)
    with rehearsal(gpu), goldens.recorded(gpu) as lines, choose.noted() as notes:
        for _, run in goldens.ops(("bf16", "tf32", "fp32", "fp16")):
            run()
    return {"launches": lines, "taken": {f"{d.op.name}/{d.choice.kernel.name}" for d in notes}}


def kernels() -> set[str]:
    """The names of all that can be launched."""
    found = set()
    for path in (ROOT / "triton_kernels").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        functions = (node for node in nodes if isinstance(node, ast.FunctionDef))
        found |= {f.name for f in functions if f.name.endswith("_kernel") and f.decorator_list}
    return found


if __name__ == "__main__":
    harness.run_entry(main)
