"""Without a GPU the kernels run in Triton's interpreter, which is chosen before they load."""

import gc
import logging
import os
from pathlib import Path

import pytest
import torch

from .end_to_end.processes import end_all
from .interpreter import hasten

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    hasten()

# tests run side by side, and each of them would start as many processes as there are processors
os.environ["TRITON_DIFFUSION_COMPILERS"] = "0"

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_addoption(parser):
    parser.addoption(
        "--few",
        type=int,
        metavar="N",
        help="run at most N cases of each test, evenly spread: make test, which has ten minutes",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "long: --few leaves it out; make test-all runs it")
    config.addinivalue_line("markers", "slow: takes long; make test-slow runs it")
    config.addinivalue_line(
        "markers", "one_of(what): --few runs one case of those with the same what"
    )
    # pytest listens to loggers that do not propagate, and who listens to this one makes PyTorch's
    # compiler write a trace of all it does, with stacks
    logging.getLogger("torch.__trace").propagate = True
    torch.set_num_threads(1 if os.environ.get("PYTEST_XDIST_WORKER") else torch.get_num_threads())


@pytest.hookimpl(trylast=True)  # behind -m and -k
def pytest_collection_modifyitems(config, items):
    """Without a GPU its tests are not selected: a third of all, and a skipped test is set up and
    reported by its worker, too. With --few, most cases of a test with many are not."""
    there = items
    if not torch.cuda.is_available():
        there = [item for item in items if "gpu" not in item.keywords]
    if config.option.few is not None:
        there = few_of(there, config.option.few)
    taken = set(there)
    config.hook.pytest_deselected(items=[item for item in items if item not in taken])
    items[:] = there


def few_of(items, n):
    """At most n cases of each test that is not `long`, evenly spread, and one of those marked
    `one_of` the same; in their order."""
    cases = {}
    for item in items:
        if item.get_closest_marker("long"):
            continue
        mark = item.get_closest_marker("one_of")
        key = item.nodeid.partition("[")[0], mark and mark.args
        cases.setdefault(key, []).append(item)
    taken = set()
    for (_, alike), found in cases.items():
        count = 1 if alike else n
        taken.update(found[i * len(found) // count] for i in range(count))
    return [item for item in items if item in taken]


def pytest_collection_finish():
    """Python's collector need not walk again and again through what was imported, nor through the
    tests themselves, nor through each small graph that is being traced. Not beside a GPU, where
    tests look for kernels among all objects."""
    if not torch.cuda.is_available():
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True)
def exact_float32(monkeypatch):
    """What kernels are compared with multiplies float32 exactly; a test of TF32 asks for it. What a
    test has the process do instead, as `choose_backend` does, ends with the test."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    products = torch.backends.cuda.matmul  # which monkeypatch does not take
    before, products.allow_tf32 = products.allow_tf32, False
    yield
    products.allow_tf32 = before


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Of those that a test has started, also where it has failed."""
    yield
    end_all()


@pytest.fixture
def device():
    """Where kernels run: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def no_tma(monkeypatch):
    """Launchers take the interpreter for a GPU without a TMA unit and with 99 KiB of shared memory;
    a GPU runs the code of such a chip."""
    from triton_kernels.runtime import device

    if torch.cuda.is_available():
        from .kernels.other_chip import other_chip

        with other_chip(89):
            yield
    else:
        small = device.Device(tma=False, num_sms=4, shared_memory=101_376)
        monkeypatch.setattr(device, "_INTERPRETER", small)
        yield


@pytest.fixture
def no_launch(monkeypatch):
    """For what is raised before a kernel runs: its tensors may be on the CPU beside a GPU, too."""
    from triton_kernels.runtime import layout

    monkeypatch.setattr(layout, "_INTERPRETED", True)


def _folder(name: str) -> Path:
    path = SHARED / name
    if not path.is_dir():
        pytest.skip(f"no shared/{name} beside the checkout")
    return path


@pytest.fixture(scope="session")
def golden() -> Path:
    """Recorded results of other implementations."""
    return _folder("golden")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Small real data sets."""
    return _folder("data")
