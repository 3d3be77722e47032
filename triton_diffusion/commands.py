"""The commands by name: each is a file of configs/ and a function that takes its settings.

`triton-diffusion NAME` runs one, and so does the script of that name: train.py, sample.py, and
tools/NAME.py for all others.
"""

import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import diffusion
from diffusion.runtime.host import busy_seconds, choose_threads

from .output import HELP, show

PROGRAM = "triton-diffusion"


@dataclass(frozen=True)
class Command:
    """What runs under a name. `function` is imported when the command line is known to be right,
    for PyTorch takes seconds to import."""

    says: str  # what it does, in a line
    function: str  # MODULE:NAME, which takes the settings
    writes_out: bool = False  # jobs of a sweep that are given one `out` write beside each other
    trains: bool = False  # it has a run_dir, and knows whether it is in a sweep


COMMANDS: dict[str, Command] = {
    "train": Command("train a network", "diffusion.runs.training:train", trains=True),
    "sample": Command(
        "sample images from a trained network", "diffusion.runs.sampling:sample", writes_out=True
    ),
    "prepare": Command("put images into one file", "diffusion.runs.prepare:prepare_as_configured"),
    "evaluate": Command(
        "compare sampled images with the data: FID, KID", "diffusion.runs.evaluation:evaluate"
    ),
    "export": Command(
        "write a network for diffusers, ONNX, torch.export and others",
        "diffusion.export.run:export",
    ),
    "rollout": Command(
        "let a trained policy act", "diffusion.runs.rollout:rollout", writes_out=True
    ),
    "report": Command("show runs side by side", "diffusion.runs.report:report"),
    "average": Command(
        "make another average of the weights of a run", "diffusion.training.averaging:average"
    ),
    "benchmark": Command(
        "time sampling, beside PyTorch and others", "diffusion.runs.benchmark:benchmark"
    ),
    "tune": Command("measure which tiles are fastest on this GPU", "diffusion.runs.tune:tune"),
    "doctor": Command(
        "say what this machine has and which kernels are on", "diffusion.runs.doctor:doctor"
    ),
}


def main() -> NoReturn:
    """The console command."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-V", "--version"):
        show(f"{PROGRAM} {diffusion.__version__}")
    if name in HELP:
        show(usage())
    if name not in COMMANDS:
        print(f"error: {name} is no command; choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"{PROGRAM} {name}", *rest]
    run(name)


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"{PROGRAM} COMMAND [key=value ...]", ""]
    lines += [f"  {name:{width}}  {command.says}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", f"{PROGRAM} COMMAND --help says what the settings are"])


def run(name: str) -> NoReturn:
    """The command as its script runs it, with the arguments of this process."""
    asked: list[int] = []

    def interrupt(number: int, _: Any) -> NoReturn:
        asked.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where SIGINT is ignored
        signal.signal(signal.SIGINT, interrupt)
    try:
        _run(name, asked)
    except KeyboardInterrupt:  # while modules are imported; later ones are seen nearer by
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)


def _run(name: str, asked: Sequence[int]) -> NoReturn:
    busy = busy_seconds()
    import hydra
    from omegaconf import DictConfig

    from diffusion.presets import CONFIGS
    from diffusion.user_files import import_plugin

    from .entry import exit_codes, plain, run_entry
    from .naming import named_as_given

    @hydra.main(version_base=None, config_path=str(CONFIGS), config_name=name)
    def configured(config: DictConfig) -> Any:
        with exit_codes():
            if asked:  # Python loses what is raised while it destroys something
                raise KeyboardInterrupt
            settings = plain(config)
            choose_threads(busy)  # before anything imports PyTorch
            import_plugin(settings.pop("plugin", None))
            with named_as_given(settings):
                return call(COMMANDS[name], settings)

    run_entry(configured, name)


def call(command: Command, settings: dict[str, Any]) -> Any:
    """Run the command with these settings; of training what `train.metric` names, for sweepers."""
    from .entry import choose_out, choose_run_dir, in_sweep

    module, _, attribute = command.function.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    if command.trains:
        return function(settings, choose_run_dir(settings), sweep=in_sweep())
    if command.writes_out:
        settings = settings | {"out": choose_out(settings)}
    function(settings)
    return None
