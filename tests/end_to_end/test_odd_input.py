"""Input that would hang, fill the memory or end in a traceback: one line, exit code 2, at once."""

import io
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from contextlib import suppress

import pytest
import torch
from PIL import Image

from diffusion.data import image_set
from diffusion.data.images import list_images, load_folder
from diffusion.data.rollout_file import read_rollouts
from diffusion.errors import ConfigError
from diffusion.formats.diffusers_files import read_json
from diffusion.formats.weights import load_weights
from diffusion.runs.report import report
from triton_diffusion import commands
from triton_diffusion.entry import check_paths

from .processes import finish, started
from .run import ROOT, TINY, environment, run
from .test_errors import fails

SECONDS = 20  # the most that any of these may take


@pytest.fixture(autouse=True)
def in_time():
    """What reads a pipe waits for ever, so the alarm is what ends it."""

    def late(*_):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    # a shell ignores it for what it puts into the background
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(SECONDS * 3)  # more on a machine that is busy
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    signal.signal(signal.SIGINT, interrupts)


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.fixture
def unix_socket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the names of sockets are short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
        yield tmp_path / "socket"


def picture(path, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path)


def test_a_setting_that_names_no_file(pipe, unix_socket):
    for path in (pipe, unix_socket, "/dev/zero", "/proc/self/mem", "/proc", "/sys"):
        for settings in ({"dataset": {"path": str(path)}}, {"ckpt": str(path)}, {"src": str(path)}):
            with pytest.raises(ConfigError, match="no file (or|and no) folder|no file and no"):
                check_paths(settings)
    check_paths({"dataset": {"path": "/dev/shm/data"}, "out": str(pipe.parent)})


def test_pipes_sockets_and_devices_among_the_data(tmp_path, unix_socket):
    folder = tmp_path / "data"
    picture(folder / "a.png")
    os.mkfifo(folder / "b.png")
    os.mkfifo(folder / "dataset.json")
    (folder / "c.png").symlink_to("/dev/zero")
    (folder / "d.png").symlink_to(unix_socket)
    (folder / "system").symlink_to("/proc")
    assert list_images(folder).names == ["a.png"]
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(ConfigError, match="expected an .npz"):
        read_rollouts(tmp_path)
    with pytest.raises(ConfigError, match="is a folder of the system"):
        list_images("/proc")
    os.mkfifo(tmp_path / "c.pt")
    for path in (tmp_path / "c.pt", "/dev/zero"):
        with pytest.raises(ConfigError, match="are no file"):
            load_weights(path, torch.nn.Linear(1, 1))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("{}")
    os.mkfifo(tmp_path / "run" / "metrics.csv")
    report({"runs": str(tmp_path / "run")})


def test_of_a_large_picture_nothing_is_said(tmp_path):
    """Of 90 million pixels Pillow itself warns."""
    Image.new("1", (9_500, 9_500)).save(tmp_path / "a.png")
    code = f"from diffusion.data.images import load_folder; load_folder({str(tmp_path)!r}, 8, 1)"
    assert run("-c", code) == (0, "", "")


def test_an_image_of_too_many_pixels(tmp_path):
    """In a file of a few bytes, which is refused by its header alone."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 12_500, 12_500, 8, 2, 0, 0, 0)  # at which Pillow only warns
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))
    (tmp_path / "a.png").write_bytes(png + chunk(b"IEND", b""))
    with pytest.raises(ConfigError, match="12500 x 12500 pixels; the most is 150,000,000"):
        load_folder(str(tmp_path), size=8)


def test_more_images_than_the_memory_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(image_set, "free_memory", lambda: 2**20)
    picture(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="dataset.size=2000 needs 0.0 GiB for 1 image, and 0.0"):
        load_folder(str(tmp_path), size=2000)


@pytest.mark.parametrize(
    "text",
    ['{"labels": ' + "[" * 100_000, json.dumps({"labels": [["a.png", 2**70]]})],
    ids=["deep", "beyond int64"],
)
def test_labels_that_are_none(tmp_path, text):
    picture(tmp_path / "a.png")
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(ConfigError, match="dataset.json"):
        load_folder(str(tmp_path), size=8)


def test_deep_json_of_a_directory(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="config.json cannot be read"):
        read_json(tmp_path / "config.json")


def test_a_pickle_under_another_name(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(pickle.dumps({"weight": [1.0]}, protocol=2))
    with pytest.raises(ConfigError, match="is no safetensors file: it begins like one of torch"):
        load_weights(tmp_path / "a.safetensors", torch.nn.Linear(1, 1))
    saved = io.BytesIO()
    torch.save({"weight": torch.zeros(1)}, saved)
    (tmp_path / "a.safetensors").write_bytes(saved.getvalue())
    with pytest.raises(ConfigError, match="is no safetensors file"):
        load_weights(tmp_path / "a.safetensors", torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.batch_size=99999999999999999999", "expected a whole number"),
        ("model.max_period=nan", "model.max_period=nan is wrong; expected a finite number"),
        ("model.max_period=inf", "expected a finite number"),
        ("optim.lr=nan", "optim.lr=nan is wrong; expected a finite number"),
        ("optim.betas=[0.9,nan]", "expected a list of 2 finite numbers"),
        ("model.channel_mult=[1,nan]", "expected a list of finite numbers"),
        ("train.seed=-1", "train.seed=-1; expected a whole number, at least 0"),
        ("dataset.seed=-1", "dataset.seed=-1"),
        ("optim.ema_decay=1", "optim.ema_decay=1 is outside [0, 1)"),
        ("optim.more_ema=[0.9,0.9]", "has the same decay twice"),
        ("model.num_res_blocks=1000000", "blocks; expected at most"),
        ("diffusion.num_timesteps=1000000000000", "to 1,000,000"),
        ("model.channel_mult=[1e30,1]", "makes 3.2e+31 channels; expected from 1 to 100,000"),
        ("model.model_channels=1000000000", "makes 1e+09 channels; expected from 1 to 100,000"),
        ("dataset.size=100000", "size=100000 is wrong; give one side of 1 to 8192 pixels"),
        ("dataset.count=1000000000000", "GiB for 1000000000000 images"),
    ],
)
def test_numbers_beyond_reason(tmp_path, setting, words):
    assert words in fails("train.py", *TINY, f"run_dir={tmp_path}/run", "train.steps=1", setting)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_numbers_beyond_reason_elsewhere(tmp_path):
    code, _, err = run("train.py", *TINY, "train.steps=1", f"run_dir={tmp_path}/run")
    assert code == 0, err
    ckpt = f"ckpt={tmp_path}/run"
    for setting in ("seed=-1", "label=99999999999999999999", "clip=nan", "guidance=inf", "n=1e30"):
        line = fails("sample.py", ckpt, setting)
        assert setting.partition("=")[0] in line
    assert "runs=[] is wrong" in fails("tools/report.py", "runs=[]")


def printed_into(command: str, place: str) -> tuple[int, str]:
    """(exit code, stderr) of a script or module whose output goes there."""
    shell = f"{sys.executable} {command} {place}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", f"sleep 0; {shell}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["train.py --help", "-m triton_diffusion --help"])
def test_help_into_a_pipe_that_is_closed(command):
    assert printed_into(command, "| true") == (0, "")


@pytest.mark.long
@pytest.mark.parametrize("command", ["train.py --help", "-m triton_diffusion", "tools/report.py"])
def test_output_into_a_full_disk(tmp_path, command):
    given = ""
    if "report" in command:
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text("{}")
        (run_dir / "metrics.csv").write_text("")
        given = f" runs={run_dir}"
        code, err = printed_into(command + given, "| true")
        assert (code, err) == (128 + signal.SIGPIPE, "")
    code, err = printed_into(command + given, "> /dev/full")
    assert (code, err) == (2, "error: what is printed cannot be written: No space left on device\n")


def test_a_signal_before_anything_is_read(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "busy_seconds", interrupted)
    with pytest.raises(SystemExit) as stopped:
        commands.run("train")
    assert (stopped.value.code, capsys.readouterr().err) == (128 + signal.SIGINT, "stopped\n")


def test_a_signal_that_is_lost_stops_before_anything_is_done(monkeypatch, capsys, tmp_path):
    """As one that comes while Python destroys something, where exceptions are only printed."""

    def lost():
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return 0.0

    monkeypatch.setattr(commands, "busy_seconds", lost)
    command = ["train.py", "dataset=elephants", f"run_dir={tmp_path / 'run'}"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stopped:
        commands.run("train")
    assert stopped.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().err.startswith("stopped") and not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def opened_by(process: subprocess.Popen) -> list[str]:
    """The files that it has open; it may close one while they are listed."""
    names = []
    for fd in os.listdir(f"/proc/{process.pid}/fd"):
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/{process.pid}/fd/{fd}"))
    return names


def test_a_signal_while_the_configuration_is_composed(tmp_path):
    """One of the user's own, so long that it takes a while to read."""
    (tmp_path / "experiment").mkdir()
    lines = "".join(f"  a{i}: [1, {{b: 2}}]\n" for i in range(30_000))
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\ntrain:\n{lines}")
    process = started(
        [sys.executable, str(ROOT / "train.py"), "--config-dir", str(tmp_path), "experiment=mine"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    while not any(name.endswith("mine.yaml") for name in opened_by(process)):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = finish(process, 60)
    assert process.returncode == 128 + signal.SIGINT, err
    assert err == "stopped\n"
