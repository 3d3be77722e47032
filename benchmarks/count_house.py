"""What one has to know of the kernels, counted: of this tree, or of commits.

    python -m benchmarks.count_house [COMMIT ...]
    python -m benchmarks.count_house list=thresholds        where each of them is, and what it says

    kernels      functions under `triton.jit` or `gluon.jit` whose names end in `_kernel`
    choices      functions outside of kernels that say whether one can or should run: they return
                 bool, or a reason why not (`-> str | None`)
    thresholds   lines with private constants of a module that are numbers, or collections of them:
                 sizes of tiles and launches, and limits
    limits       those of them that choices in their file name
    files, lines of Python

in `triton_kernels` without `reference`, whose lines are counted apart, and the lines of the plan,
of the kernels' tests, and of these what says by hand which kernels are compiled and how.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_CASES = ("cases_", "record_cases", "expected")
_PRIVATE = re.compile(r"_[A-Z][A-Z0-9_]*")


def sources(commit: str | None) -> Iterator[tuple[str, str]]:
    """Path and text of every Python file of a commit, or of the files that git knows here."""
    if commit is None:
        for path in _git("ls-files", "*.py").splitlines():
            if (ROOT / path).exists():
                yield path, (ROOT / path).read_text()
        return
    for path in _git("ls-tree", "-r", "--name-only", commit).splitlines():
        if path.endswith(".py"):
            yield path, _git("show", f"{commit}:{path}")


def count(files: Iterator[tuple[str, str]]) -> dict[str, int]:
    """By what is counted."""
    names = ("kernels", "choices", "thresholds", "limits", "files", "lines")
    found = dict.fromkeys((*names, "reference", "plan", "tests", "cases"), 0)
    for path, text in files:
        lines = text.count("\n")
        if path.startswith("tests/kernels/"):
            found["tests"] += lines
            found["cases"] += lines if Path(path).name.startswith(_CASES) else 0
        elif path.startswith(("diffusion/plan/", "diffusion/planned/")):
            found["plan"] += lines
        elif path.startswith("triton_kernels/") and "/reference/" in path:
            found["reference"] += lines
        elif path.startswith("triton_kernels/"):
            found["files"] += 1
            found["lines"] += lines
            for name, nodes in _in(ast.parse(text)).items():
                found[name] += len(nodes)
    return found


def places(files: Iterator[tuple[str, str]], name: str) -> Iterator[str]:
    """file:line: text of all kernels, choices, thresholds or limits."""
    for path, text in files:
        if path.startswith("triton_kernels/") and "/reference/" not in path:
            lines = text.splitlines()
            for node in _in(ast.parse(text))[name]:
                yield f"{path}:{node.lineno}: {lines[node.lineno - 1]}"


def _in(module: ast.Module) -> dict[str, list[ast.stmt]]:
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    kernels = [f for f in functions if _is_jit(f)]
    choices = [f for f in functions if f not in kernels and _chooses(f)]
    thresholds = [s for s in module.body if isinstance(s, ast.Assign) and _is_threshold(s)]
    named = {name for choice in choices for name in _names(choice)}
    return {
        "kernels": [f for f in kernels if f.name.endswith("_kernel")],
        "choices": choices,
        "thresholds": thresholds,
        "limits": [s for s in thresholds if not named.isdisjoint(_names(*s.targets))],
    }


def _names(*nodes: ast.AST) -> set[str]:
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


def _is_jit(function: ast.FunctionDef) -> bool:
    decorators = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return any(isinstance(d, ast.Attribute) and d.attr == "jit" for d in decorators)


def _chooses(function: ast.FunctionDef) -> bool:
    return function.returns is not None and ast.unparse(function.returns) in ("bool", "str | None")


def _is_threshold(node: ast.Assign) -> bool:
    names = [t for t in node.targets if isinstance(t, ast.Name) and _PRIVATE.fullmatch(t.id)]
    if isinstance(node.targets[0], ast.Tuple):
        names = [t for t in node.targets[0].elts if _PRIVATE.fullmatch(ast.unparse(t))]
    return bool(names) and _of_numbers(node.value)


def _of_numbers(value: ast.expr) -> bool:
    """Whether an expression is made of numbers alone."""
    if isinstance(value, ast.Constant):
        return type(value.value) in (int, float)
    if isinstance(value, ast.BinOp):
        return _of_numbers(value.left) and _of_numbers(value.right)
    if isinstance(value, ast.UnaryOp):
        return _of_numbers(value.operand)
    if isinstance(value, ast.Tuple | ast.List | ast.Set):
        return bool(value.elts) and all(map(_of_numbers, value.elts))
    return (
        isinstance(value, ast.Dict) and bool(value.values) and all(map(_of_numbers, value.values))
    )


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    commits = sys.argv[1:]
    if commits and commits[0].startswith("list="):
        print(*places(sources(None), commits[0].removeprefix("list=")), sep="\n")
        return
    columns = {"now": count(sources(None))} if not commits else {}
    columns |= {commit: count(sources(commit)) for commit in commits}
    print("|" + "|".join(["", *columns]) + "|\n|---|" + "---:|" * len(columns))
    for name in next(iter(columns.values())):
        print("|" + "|".join([name, *(f"{c[name]:,}" for c in columns.values())]) + "|")


if __name__ == "__main__":
    main()
