"""What is built beside a kernel's machine code."""

from types import SimpleNamespace

from triton_kernels.runtime import compile_launches

COMPILED = SimpleNamespace(src="source", metadata="metadata")


def test_launchers_are_built_where_each_kernel_has_its_own(monkeypatch):
    """As with Triton 3.6."""
    built = []
    driver = SimpleNamespace(make_launcher=None, CudaLauncher=lambda *given: built.append(given))
    monkeypatch.setattr(compile_launches, "nvidia", driver)
    compile_launches._build_launcher(COMPILED)
    assert built == [("source", "metadata")]
    del driver.make_launcher  # as with later ones
    compile_launches._build_launcher(COMPILED)
    assert len(built) == 1


def test_a_launcher_that_cannot_be_built_is_left_to_the_launch(monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("libcuda.so cannot found!")

    driver = SimpleNamespace(make_launcher=None, CudaLauncher=refuse)
    monkeypatch.setattr(compile_launches, "nvidia", driver)
    compile_launches._build_launcher(COMPILED)
    assert "not built ahead: libcuda.so cannot found!" in capsys.readouterr().err
