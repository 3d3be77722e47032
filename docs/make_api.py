"""Write docs/api.md from the docstrings: python docs/make_api.py."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

QUOTED = re.compile(r'(: |-> )"([^"]+)"')  # an annotation that is a string
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
        " for any device. A tensor of\nanother device, shape, dtype or layout than stated raises"
        " ValueError. `first` is the global index of\nsample 0: what is drawn depends on the seed,"
        " the step and the sample's global index alone.\n"
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
    """The fields with their comments, properties as fields, and the heads of the public methods."""
    source = inspect.getsource(made)
    (tree,) = ast.parse(source).body
    lines = source.splitlines()
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and not node.target.id.startswith("_"):
            yield from taken(lines, node.lineno, node.end_lineno)
        elif isinstance(node, ast.FunctionDef) and "property" in decorators(node):
            said = "".join(f"  # {sentence}" for sentence in first_sentence(node))
            yield f"{node.name}: {ast.unparse(node.returns)}{said}"
        elif isinstance(node, ast.FunctionDef) and (
            node.name == "__init__" or not node.name.startswith("_")
        ):
            yield from taken(lines, node.lineno, node.body[0].lineno - 1)
            for sentence in first_sentence(node):
                yield from textwrap.wrap(
                    sentence, 100, initial_indent="    # ", subsequent_indent="    # "
                )


def taken(lines: list[str], first: int, last: int) -> list[str]:
    """Lines of a class's body, numbered from 1, without their indentation."""
    return [line.removeprefix("    ") for line in lines[first - 1 : last]]


def decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def first_sentence(node: ast.FunctionDef) -> list[str]:
    """Of the docstring, without its full stop; none without a docstring."""
    said = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return [said.split(". ")[0].rstrip(".")] if said else []


def head(source: str) -> list[str]:
    """The lines of a definition before its body, without its decorators."""
    (node,) = ast.parse(source).body
    lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    return [QUOTED.sub(r"\1\2", line) for line in lines]


if __name__ == "__main__":
    PAGE.write_text(page())
