"""Write docs/api.md from the docstrings: python docs/make_api.py."""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"

INTRODUCTION = """# Python interface

`python docs/make_api.py` generates this page from the docstrings; a test checks that it is current.
Names that are not listed here may change between versions. N, H, W and C are images, rows, columns
and channels. A ConfigError (`diffusion.errors.ConfigError`) has a message of one line for the user.
"""


def page() -> str:
    """The text of docs/api.md."""
    sys.path.insert(0, str(ROOT))
    import diffusion
    import triton_kernels
    from diffusion.data.image_set import ImageSet
    from diffusion.formats.trained import Trained
    from diffusion.models.layers import Network
    from diffusion.policies.policy import Policy, load_policy

    parts = [INTRODUCTION, "## diffusion\n"]
    for name in diffusion.__all__:
        parts.append(described(f"diffusion.{name}", getattr(diffusion, name)))
    parts.append("## Types\n")
    parts += [class_described(made) for made in (Trained, Network, ImageSet, Policy)]
    parts.append(described("diffusion.policies.policy.load_policy", load_policy))
    parts.append("## triton_kernels\n")
    parts.append(
        "Ops for contiguous NHWC tensors on a GPU; differentiable ones have gradients. Each is also"
        " an op of\n`torch.library`. `triton_kernels.reference` has all of them in plain PyTorch,"
        " for any device.\n"
    )
    for name in triton_kernels.__all__:
        parts.append(described(f"triton_kernels.{name}", getattr(triton_kernels, name)))
    return "\n".join(parts)


def described(name: str, made: Callable) -> str:
    """A heading, the definition as it stands in the source, and the docstring."""
    if inspect.isclass(made):
        return class_described(made)
    source = "\n".join(head(inspect.getsource(inspect.unwrap(made))))
    return f"### {name}\n\n```text\n{source}\n```\n\n{inspect.getdoc(made)}\n"


def class_described(made: type) -> str:
    """As `described`, with the fields and the public methods."""
    body = list(members(made))
    lines = [f"### {made.__module__}.{made.__name__}", "", inspect.getdoc(made), ""]
    return "\n".join([*lines, "```text", *body, "```", ""])


def members(made: type) -> Iterator[str]:
    """The fields with their comments, and the heads of the public methods."""
    source = inspect.getsource(made)
    (tree,) = ast.parse(source).body
    lines = source.splitlines()
    for node in tree.body:
        end = None
        if isinstance(node, ast.AnnAssign) and not node.target.id.startswith("_"):
            end = node.end_lineno
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            end = node.body[0].lineno - 1
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            end = node.body[0].lineno - 1
        if end is not None:
            yield from (line.removeprefix("    ") for line in lines[node.lineno - 1 : end])


def head(source: str) -> list[str]:
    """The lines of a definition before its body, without its decorators."""
    (node,) = ast.parse(source).body
    return source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]


if __name__ == "__main__":
    PAGE.write_text(page())
