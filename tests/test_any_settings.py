"""Random settings at every entry point: they run, or one line says what is wrong with them.

For 20 seconds; in the environment TRITON_DIFFUSION_FUZZ_SECONDS=600 for longer,
TRITON_DIFFUSION_FUZZ_SEED=7 for others, TRITON_DIFFUSION_FUZZ_ONLY="train sample" for some.
"""

import copy
import math
import os
import time
import unittest
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from diffusion.export.run import export
from diffusion.runs.benchmark import benchmark
from diffusion.runs.doctor import doctor
from diffusion.runs.evaluation import evaluate
from diffusion.runs.prepare import prepare
from diffusion.runs.report import report
from diffusion.runs.rollout import rollout
from diffusion.runs.sampling import sample
from diffusion.runs.training import train
from diffusion.runs.tune import tune
from diffusion.settings import construct, flattened
from diffusion.training.averaging import average
from triton_diffusion.entry import CONFIGS, check_paths, exit_codes, plain

from .end_to_end.run import TINY

SECONDS = float(os.environ.get("TRITON_DIFFUSION_FUZZ_SECONDS", 20))

ONLY = os.environ.get("TRITON_DIFFUSION_FUZZ_ONLY", "").split()  # of the entry points

# what is wrong almost anywhere, and what is right somewhere; nothing that is right but takes hours
NUMBERS = (0, 1, -1, 2, 3, 0.5, -0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf)
NUMBERS += (2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**400)
TEXTS = ("", "x", "auto", "none", "null", "..", "/proc", "/dev/null", "a\0b", "ä" * 300, "{}")
ATOMS = st.one_of(
    st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.booleans(), st.none(), st.text(max_size=4)
)
VALUES = st.one_of(
    ATOMS,
    ATOMS,
    st.lists(ATOMS, max_size=3),
    st.dictionaries(st.sampled_from(("name", "size", "x")), ATOMS, max_size=2),
    st.just([[[[1]]]]),
)
# a large number of these is no mistake: the run takes that long, or the disk and memory it is given
ENDLESS = {"train.steps", "n", "latency_calls", "max_steps", "seconds", "shown", "fid_images"}
ENDLESS |= {"train.fid_images", "dataset.episodes", "dataset.count", "train.sample_count"}
ENDLESS |= {
    "train.sample_steps",
    "steps",
    "batch_size",
    "train.batch_size",
    "backend",
    "device",
    "rows",
    "compile",
    "minutes",
}


def composed(name: str, *overrides: str) -> dict:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        settings = plain(compose(name, overrides=list(overrides)))
        settings.pop("plugin", None)  # which the command line takes out
        return settings


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    """(configuration, function of one) of each entry point; each ends in a second as it is."""
    folder = tmp_path_factory.mktemp("any")
    quiet = ("train.steps=1", "train.sample_every=0", f"run_dir={folder}/trained")
    trained = composed("train", *TINY, *quiet)
    train(trained, folder / "trained")
    ckpt, out = f"ckpt={folder}/trained", f"out={folder}/out/x"
    quick = ("n=2", "steps=1", "device=cpu")
    return folder, {
        "train": (trained, lambda config: train(config, folder / "out" / uuid.uuid4().hex)),
        "sample": (composed("sample", ckpt, *quick, f"{out}.npz"), sample),
        "average": (composed("average", ckpt, "decay=0.5"), average),
        "export": (composed("export", ckpt, "format=guided_diffusion", f"{out}.pt"), export),
        "report": (composed("report", f"runs={folder}", f"{out}.md"), report),
        "benchmark": (composed("benchmark", ckpt, *quick, f"{out}", "rows=[torch]"), benchmark),
        "evaluate": (composed("evaluate", ckpt, *quick, f"{out}.csv"), evaluate),
        "rollout": (composed("rollout", ckpt, "n=1", "device=cpu"), rollout),
        "prepare": (
            composed("prepare", f"src={folder}/trained", f"{out}.packed", "size=4"),
            lambda config: construct(prepare, config, ""),
        ),
        "doctor": (composed("doctor", "step=false", "device=cpu", f"{out}.json"), doctor),
        "tune": (composed("tune", "model=unet_tiny", "size=8", "batch=2", "device=cpu"), tune),
    }


def changed(config: dict, changes: dict) -> dict:
    config = copy.deepcopy(config)
    for key, value in changes.items():
        *groups, last = key.split(".")
        place = config
        for group in groups:
            place = place[group] if isinstance(place, dict) else {}
        if isinstance(place, dict):
            place[last] = value
    return config


@pytest.mark.slow
def test_any_settings(entries, monkeypatch, capsys):
    folder, entries = entries
    monkeypatch.chdir(folder)
    ends = time.monotonic() + SECONDS
    counts = dict.fromkeys(entries, 0)

    @seed(int(os.environ.get("TRITON_DIFFUSION_FUZZ_SEED", 0)))
    @settings(
        max_examples=100_000,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def any_settings(data):
        name = data.draw(st.sampled_from(sorted(ONLY or entries)))
        config, run = entries[name]
        groups = sorted(key for key, value in config.items() if isinstance(value, dict))
        keys = sorted(key for key, _ in flattened(config) if key not in ENDLESS) + groups
        which = st.lists(st.sampled_from(keys), min_size=1, max_size=2, unique=True)
        changes = {key: data.draw(VALUES) for key in data.draw(which)}
        code, began = 0, time.monotonic()
        if began > ends:
            raise unittest.SkipTest  # which ends the search at once
        try:
            with exit_codes():
                check_paths(tried := changed(config, changes))
                run(tried)
        except SystemExit as end:
            code = end.code
        took = time.monotonic() - began
        counts[name] += 1
        assert code in (0, 2), (name, changes)
        assert took < 30, (name, changes, took)
        said = capsys.readouterr().err
        if code == 2:
            (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
            half = [p for p in Path(folder, "out").rglob("*") if p.name.startswith(".writing")]
            assert not half, (name, changes, line)

    with suppress(unittest.SkipTest):
        any_settings()
    assert sum(counts.values()) >= 20, counts
    print(counts)
