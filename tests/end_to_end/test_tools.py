"""The entry points in tools/ as a user starts them."""

import pytest

from .run import run


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("tools/export.py", "ckpt=a", "formt=onnx", "out=a"), "did you mean format?"),
        (
            ("tools/export.py", "ckpt=nowhere", "format=diffusers", "out=a"),
            "nowhere does not exist",
        ),
    ],
)
def test_one_line_on_what_is_wrong(tmp_path, command, words):
    code, _, err = run(*command, cwd=tmp_path, fresh="nowhere" in words)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and len(lines) == 1 and words in lines[0], err
    assert not list(tmp_path.iterdir())
