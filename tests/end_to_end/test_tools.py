"""The entry points in tools/ as a user starts them."""

import pytest

from .run import run


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("tools/export.py", "ckpt=a", "formt=onnx", "out=a"), "did you mean format?"),
        (
            ("tools/export.py", "ckpt=nowhere", "format=diffusers", "out=a"),
            "ckpt=nowhere does not exist; expected a run's folder or a checkpoint's",
        ),
        (("tools/tune.py", "precision=fp8", "device=cpu"), "error: precision=fp8 is unknown"),
        (("tools/prepare.py", "src=a", "out=a.bin", "layout=word"), "layout=word is unknown"),
        (("tools/prepare.py", "src=a", "out=a.bin", "device=word"), "device=word is unknown"),
        (("tools/prepare.py", "src=nowhere", "out=a.bin"), "src=nowhere does not exist"),
        (("sample.py", "ckpt=a", "guide_ema=0.5"), "guide_ema=0.5 goes with guide=CHECKPOINT"),
        (("sample.py", "ckpt=a.pt"), "ckpt=a.pt does not exist; expected a weights file"),
    ],
)
def test_one_line_on_what_is_wrong(tmp_path, command, words):
    code, _, err = run(*command, cwd=tmp_path, fresh="ckpt=nowhere" in words)
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and len(lines) == 1 and words in lines[0], err
    assert not list(tmp_path.iterdir())
