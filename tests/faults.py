"""Break runs in the ways that machines and people break them, and count what is lost:
python -m tests.faults [kills=16] [flips=200] [tries=3] [restarts=5] [seed=0] [out=FILE].

A run of eight steps at the smallest size is made once, unbroken, and one of two processes. Then
others are broken and gone on with, and have to end with the same parameters, averages, moments and
rows of metrics.csv, bit for bit. The table of docs/reliability.md is what this prints; it ends with
1 if anything was lost or went unnoticed. It takes some five minutes on two cores and no GPU.
"""

import contextlib
import inspect
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from diffusion.data.packed import load_packed, packed_writer
from diffusion.errors import ConfigError
from diffusion.formats.checkpoint import verify_checkpoint
from diffusion.formats.checkpoint_folder import latest_checkpoint, list_checkpoints, step_in_name

from .end_to_end.processes import finish, ranks
from .fault_runs import LONG, STEPS, Faults, Row, end, together, wait_for

HANG_SECONDS = 6  # after which a process that is suspended is taken to hang, instead of 25

IMAGES, SIDE = 300, 8  # of the packed file


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def killed(faults: Faults, count: int) -> Row:
    row = Row("killed (SIGKILL) at a random time", expected="goes on, ends with the same bits")
    while row.tried < count:
        run_dir = faults.new()
        for _ in range(min(4, count - row.tried)):
            copy, _ = faults.start(run_dir)
            time.sleep(faults.random.uniform(0, 1.1 * faults.seconds))
            end(copy)
            row.tried += 1
            with contextlib.suppress(FileNotFoundError):
                for checkpoint in list_checkpoints(run_dir / "checkpoints"):
                    verify_checkpoint(checkpoint)  # a named folder is complete
        code, said = faults.train(run_dir)
        litter = [path.name for path in run_dir.rglob(".*")]
        if code != 0 or not faults.is_whole(run_dir) or litter:
            row.wrong.append(f"{run_dir}: {code} {said[-300:]} {litter}")
    return row


def broken_together(faults: Faults, row: Row, number: signal.Signals, count: int) -> Row:
    """Send a signal to one of two processes behind a random step."""
    whole = faults.whole_together
    for _ in range(count):
        run_dir, behind = faults.new(), faults.random.randrange(2, 25)
        torchrun = together(run_dir)
        until = time.monotonic() + LONG
        while not (last := latest_checkpoint(run_dir / "checkpoints")) or (
            step_in_name(last) < behind
        ):
            if torchrun.poll() is not None or time.monotonic() > until:
                raise SystemExit("\n".join(finish(torchrun, 0.1)))
            time.sleep(0.005)
        os.kill(ranks(torchrun.pid)[faults.random.randrange(2)], number)
        out, err = finish(torchrun, LONG)
        again = out.count("resuming from") == 1
        row.check(
            torchrun.returncode == 0 and again and faults.is_whole(run_dir, whole),
            f"{torchrun.returncode} {out[-300:]} {err[-600:]}",
        )
    return row


def killed_together(faults: Faults, count: int) -> Row:
    row = Row(
        "one of two processes killed under torchrun --max-restarts",
        expected="both are started again, go on, end with the same bits",
    )
    return broken_together(faults, row, signal.SIGKILL, count)


def hanging(faults: Faults, count: int) -> Row:
    row = Row(
        "one of two processes suspended under torchrun --max-restarts",
        expected="the other one ends, both are started again, end with the same bits",
    )
    os.environ["TRITON_DIFFUSION_HANG_SECONDS"] = str(HANG_SECONDS)
    return broken_together(faults, row, signal.SIGSTOP, count)


def flipped(faults: Faults, count: int) -> Row:
    row = Row("a bit of a checkpoint flipped", expected="refused, the file named")
    run_dir = faults.copy()
    last = latest_checkpoint(run_dir / "checkpoints")
    files = sorted(last.iterdir())
    for _ in range(count):
        file = faults.random.choice(files)
        bit = faults.random.randrange(8 * file.stat().st_size)
        flip(file, bit)
        said = ""
        try:
            verify_checkpoint(last)
        except ConfigError as error:
            said = str(error)
        row.check(file.name in said, f"bit {bit} of {file.name}: {said}")
        flip(file, bit)
    return row


def damaged(faults: Faults, count: int) -> Row:
    row = Row(
        "the newest checkpoint damaged (swapped, another step's, cut, missing, edited)",
        expected=f"refused; of {count}, what the error says to do ends with the same bits",
    )

    def swap(last: Path, one: str, two: str) -> None:
        (last / one).rename(last / "x")
        (last / two).rename(last / one)
        (last / "x").rename(last / two)

    def foreign(last: Path, name: str) -> None:
        shutil.copy(list_checkpoints(last.parent)[-2] / name, last / name)

    def edit(last: Path, name: str, old: str, new: str) -> None:
        text = (last / name).read_text()
        assert old in text, (name, old)
        (last / name).write_text(text.replace(old, new))

    def cut(last: Path, name: str) -> None:
        os.truncate(last / name, faults.random.randrange((last / name).stat().st_size))

    names = ("model", "ema", "optimizer", "ema_0.1")
    files = [f"{name}.safetensors" for name in names] + ["state.json", "config.yaml"]
    cases: list[Callable[[Path], object]] = [
        lambda last: swap(last, "model.safetensors", "ema.safetensors"),
        lambda last: swap(last, "ema.safetensors", "ema_0.1.safetensors"),
        lambda last: edit(last, "config.yaml", "name: unet", "name: unit"),
        lambda last: edit(last, "state.json", f'"step": {STEPS}', '"step": 3'),
        lambda last: edit(last, "state.json", '"seed": 0', '"seed": 1'),
        lambda last: edit(last, "state.json", '"dataset_size": 12', '"dataset_size": 13'),
        lambda last: (last / "SHA256SUMS").unlink(),
        *(lambda last, name=name: foreign(last, name) for name in files[:-1]),
        *(lambda last, name=name: cut(last, name) for name in files),
        *(lambda last, name=name: (last / name).unlink() for name in files),
    ]
    for i, case in enumerate(cases):
        run_dir = faults.copy()
        case(latest_checkpoint(run_dir / "checkpoints"))
        if i % max(1, len(cases) // count) == 0:  # the whole way round for some of them
            code, said = faults.train(run_dir)
            right = code == 2 and faults.goes_on(run_dir, said)
        else:
            said, right = "", False
            try:
                verify_checkpoint(latest_checkpoint(run_dir / "checkpoints"))
            except ConfigError:
                right = True
        row.check(right, f"case {i}: {said[-300:]}")
        shutil.rmtree(run_dir)
    return row


def full_disk(faults: Faults, count: int) -> Row:
    row = Row("no room for a checkpoint (a limit on files)", expected="refused, then goes on")
    largest = max(path.stat().st_size for path in faults.checkpoint.iterdir())
    for _ in range(count):
        run_dir, limit = faults.new(), faults.random.randrange(3000, largest)
        copy, said = faults.start(run_dir)
        wait_for(lambda run_dir=run_dir: latest_checkpoint(run_dir / "checkpoints"), said)
        end(copy)
        before = list_checkpoints(run_dir / "checkpoints")
        code, said = faults.train(
            run_dir,
            before=lambda limit=limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )
        kept = list_checkpoints(run_dir / "checkpoints") == before
        refused = code == 2 and "error: cannot save" in said
        goes_on = faults.train(run_dir)[0] == 0 and faults.is_whole(run_dir)
        row.check(kept and refused and goes_on, f"{code} {said[-300:]}")
    return row


def second_process(faults: Faults, count: int) -> Row:
    row = Row(
        "a second process in the same run_dir", expected="refused, the first ends undisturbed"
    )
    run_dir = faults.new()
    first, said = faults.start(run_dir)
    wait_for((run_dir / "lock").exists, said)
    os.kill(first, signal.SIGSTOP)  # so that it does not end meanwhile
    for _ in range(count):
        code, error = faults.train(run_dir)
        row.check(code == 2 and f"process {first}" in error, f"{code} {error[-300:]}")
    os.kill(first, signal.SIGCONT)
    if faults.ending_of(first, said)[0] != 0 or not faults.is_whole(run_dir):
        row.wrong.append(said.read_text()[-300:])
    return row


def diverging(faults: Faults, count: int) -> Row:
    row = Row(
        "a run that diverges", expected="stops, names the last good checkpoint, overwrites none"
    )
    for _ in range(count):
        run_dir, lr = faults.new(), faults.random.choice(("1e39", "1e60", "1e300"))
        copy, said = faults.start(run_dir)
        wait_for(lambda run_dir=run_dir: latest_checkpoint(run_dir / "checkpoints"), said)
        end(copy)
        before = list_checkpoints(run_dir / "checkpoints")
        code, said = faults.train(run_dir, f"optim.lr={lr}")
        done = before[-1].name == faults.checkpoint.name
        named = f"last good checkpoint is {before[-1]}" in said or done
        kept = list_checkpoints(run_dir / "checkpoints") == before
        goes_on = done or faults.train(run_dir)[0] == 0
        row.check(
            code == 2 and named and kept and goes_on and faults.is_whole(run_dir),
            f"{code} {said[-300:]}",
        )
    return row


def write_images(path: Path) -> None:
    generator = np.random.default_rng(0)
    with packed_writer(path, (SIDE, SIDE), 3) as writer:
        for _ in range(IMAGES):
            writer.append(generator.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8), 0)


def flipped_images(faults: Faults, count: int) -> Row:
    row = Row("a bit of a .packed file flipped", expected="refused when opened or first read")
    path = faults.folder / "a.packed"
    write_images(path)
    for _ in range(count):
        bit = faults.random.randrange(8 * path.stat().st_size)
        flip(path, bit)
        seen = False
        try:
            load_packed(path).check()
        except ConfigError as error:
            seen = path.name in str(error)
        row.check(seen, f"bit {bit}")
        flip(path, bit)
    load_packed(path).check()
    return row


def killed_prepare(faults: Faults, count: int) -> Row:
    row = Row(
        "prepare killed while it writes", expected="the old file stays, the next one cleans up"
    )
    folder = faults.folder / "prepare"
    folder.mkdir()
    path = folder / "a.packed"
    write_images(path)
    before = path.read_bytes()
    for _ in range(count):
        copy = os.fork()
        if copy == 0:
            while True:
                write_images(path)
        time.sleep(faults.random.uniform(0, 0.2))
        end(copy)
        same = path.read_bytes() == before
        write_images(folder / "b.packed")
        left = sorted(p.name for p in folder.iterdir())
        row.check(same and left == ["a.packed", "b.packed"], f"{left}")
    return row


def all_faults(
    kills: int = 16, flips: int = 200, tries: int = 3, restarts: int = 5, seed: int = 0
) -> Iterator[Row]:
    """Every kind of fault, one after the other."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder), seed)
        for break_it, count in (
            (killed, kills),
            (killed_together, restarts),
            (hanging, min(1, restarts)),
            (flipped, flips),
            (damaged, tries),
            (full_disk, tries),
            (second_process, tries),
            (diverging, tries),
            (flipped_images, flips),
            (killed_prepare, 4 * tries),
        ):
            if count:
                yield break_it(faults, count)


def main(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    given = dict(argument.partition("=")[::2] for argument in arguments)
    out = given.pop("out", None)
    valid = inspect.signature(all_faults).parameters
    for name, value in given.items():
        if name not in valid or not value.isdecimal():
            expected = ", ".join(f"{key}=NUMBER" for key in valid)
            print(f"error: {name}={value} is wrong; expected {expected}, out=FILE", file=sys.stderr)
            return 2
    lines = ["| fault | tried | what has to happen | otherwise |", "|---|---:|---|---:|"]
    wrong = []
    print("\n".join(lines), flush=True)
    for row in all_faults(**{name: int(value) for name, value in given.items()}):
        lines.append(f"| {row.fault} | {row.tried} | {row.expected} | {len(row.wrong)} |")
        print(lines[-1], flush=True)
        wrong += row.wrong
    if out is not None:
        Path(out).write_text("\n".join(lines) + "\n")
    for what in wrong:
        print(what, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads that wait for each other do not outlive a fork
    sys.exit(main(sys.argv[1:]))
