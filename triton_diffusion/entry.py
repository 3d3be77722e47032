"""The door between Hydra and the project: configuration in, plain dict out, errors as one line.

Every entry script has the same few lines: a function from a plain dict, wrapped by `hydra.main`,
started by `run_entry`. Nothing behind the door knows of Hydra.
"""

import difflib
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import diffusion
from diffusion.errors import ConfigError, check_readable, lack_of_memory
from diffusion.presets import CONFIGS, for_path
from diffusion.runtime.interrupt import Interrupted
from diffusion.settings import flattened, shown

from . import sweep
from .naming import PATHS
from .output import HELP, exit_where_nobody_reads, show
from .resume import own_settings

_OURS = Path(diffusion.__file__).resolve().parent
_MULTIRUN = ("-m", "--multirun")
_CONFIG_DIR = ("--config-dir", "-cd")
_WITH_VALUE = (*_CONFIG_DIR, "--config-path", "-cp", "--config-name", "-cn", "--cfg", "-c")
_WITH_VALUE += ("--package", "-p")
_ALONE = (*HELP, *_MULTIRUN, "--hydra-help", "--version", "--resolve", "--run", "-r")
_ALONE += ("--shell-completion", "-sc", "--info", "-i", "--experimental-rerun")
_SYNTAX = "()[]{},'\"\\$"  # of lists, quotes, sweeps and interpolations in Hydra's language
_LISTED = 20  # keys or choices at most in a message

# ${first_given:A,B} in a configuration: A, or B if that is null
OmegaConf.register_new_resolver(
    "first_given", lambda *values: next(filter(None, values), None), replace=True
)


def plain(config: DictConfig) -> dict[str, Any]:
    """The configuration as a dict of dicts, lists, strings, numbers, booleans and None."""
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{missing[0]} is not set; give it as {missing[0]}=VALUE")
        settings = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        raise ConfigError(" ".join(str(error).split())) from error
    check_paths(settings)
    return settings


def check_paths(settings: dict[str, Any]) -> None:
    """ConfigError for a setting that names what is no file and no folder."""
    for key, value in flattened(settings):
        if key.rpartition(".")[2] in PATHS and isinstance(value, str):
            check_readable(key, value)


def choose_run_dir(settings: dict[str, Any]) -> Path:
    """The folder of this run: as given or runs/DATASET-TIME, and within it one a job of a sweep."""
    hydra, given, several = HydraConfig.get(), settings.get("run_dir"), in_sweep()
    if given is None:
        name = (settings.get("dataset") or {}).get("name", "run")
        given = hydra.sweep.dir if several else f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if given == "" or isinstance(given, list | dict | bool):
        raise ConfigError(f"run_dir={shown(given)} is wrong; expected text or null")
    return Path(str(given)) / (hydra.sweep.subdir if several else "")


def choose_out(settings: dict[str, Any]) -> str | None:
    """Where this job writes: `out`, but of a sweep that gives all jobs the same one with the number
    of the job behind its name."""
    out = settings.get("out")
    same = {f"out={out}", f"out='{out}'"} & set(
        sys.argv
    )  # not out=a.png,b.png or out='${seed}.png'
    if not in_sweep() or not same:
        return out
    path = Path(str(out))
    return str(path.with_name(f"{path.stem}_{HydraConfig.get().job.num}{path.suffix}"))


def in_sweep() -> bool:
    """Whether this is one of several jobs."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


@contextmanager
def exit_codes() -> Iterator[None]:
    """Exit with 2 after one line on what the user gave wrong (more than the memory holds is that
    too), 128 + the signal's number where a run was interrupted and saved. Goes around the body of a
    `hydra.main` function, since Hydra prints lines of its own for an exception that reaches it.

    In a job of a sweep the line is an exception, which `sweep.Jobs` writes down, and the next job
    runs; not under torchrun, where the processes could then be at different jobs."""
    try:
        sweep.check_not_stopped()
        with exit_where_nobody_reads():
            yield
            sys.stdout.flush()
    except ConfigError as error:
        _fail(str(error), of_job=True)
    except KeyboardInterrupt:  # before or after the steps, which save first
        _stop("stopped; what was begun since then is not saved", signal.SIGINT)
    except Interrupted as stop:
        again = _again(stop.checkpoint, sys.argv[1:])
        _stop(f"stopped; {stop}; go on with {again}", stop.signal)
    except (MemoryError, RuntimeError) as error:
        lack = lack_of_memory(error)
        if lack is None:
            raise
        reason = next(iter(str(lack).splitlines()), type(lack).__name__)
        _fail(
            f"memory does not suffice ({reason}); take a smaller batch or model, or in training"
            " train.accumulate or train.recompute=true",
            of_job=True,
        )


def _again(checkpoint: Path | None, arguments: Sequence[str]) -> str:
    """What goes on with a run that was interrupted: a folder named after the time is not found
    again by the command alone."""
    if checkpoint is None or any(argument.startswith("run_dir=") for argument in arguments):
        return "the same command"
    run_dir = checkpoint.parents[1]
    sweep = any(argument in _MULTIRUN for argument in arguments)
    return f"the same command and run_dir={run_dir.parent if sweep else run_dir}"


def run_entry(main: Callable[[], Any], config_name: str) -> NoReturn:
    """Run a `hydra.main` function; what Hydra finds wrong becomes one line and exit code 2."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through to here
    warnings.formatwarning = _one_line(warnings.formatwarning)
    sys.argv[1:] = readable(sys.argv[1:])
    wrong = wrong_option(sys.argv[1:], config_name) or wrong_choice(sys.argv[1:], config_name)
    if wrong is not None:
        _fail(wrong)
    try:
        if set(HELP) & set(sys.argv[1:]):
            with exit_codes():
                show(as_called(describe(config_name, sys.argv[1:])))
        if "--version" in sys.argv[1:]:
            show(f"triton-diffusion {diffusion.__version__}")
        if config_name == "train":
            with exit_codes():
                own = own_settings(sys.argv[1:], config_folders(sys.argv[1:]))
                sys.argv[1:] = with_own(own, sys.argv[1:])
        with exit_where_nobody_reads():
            main()
    except KeyboardInterrupt as stop:  # while the configuration is composed, or between jobs
        _stop("stopped", next(iter(stop.args), signal.SIGINT))
    except (HydraException, OmegaConfBaseException) as error:
        _fail(explain(error, config_name, sys.argv[1:]))
    except ValueError as error:
        if "No trials are completed" in str(error) and sweep.current() is not None:
            _end_sweep()  # all of Optuna's failed
        if "Config group override" not in str(error):  # Hydra's own, without a type of its own
            raise
        groups = ", ".join(sorted(_groups(config_name)))
        _fail(f"null is no choice of a group of the configuration, which are {groups}")
    except Exception as error:
        if type(error).__name__ not in sweep.DIED:
            raise
        _end_sweep(f"a process of the launcher died ({type(error).__name__})")
    _end_sweep()


def _end_sweep(died: str | None = None) -> NoReturn:
    """Say which jobs failed, if this was a sweep, and which was best, if it was a search; exit with
    2 if one failed or a process died."""
    jobs = sweep.current()
    failed = [] if jobs is None else list(jobs.failures())
    best = None if jobs is None else jobs.best()
    if best is not None:
        print(best, flush=True)
    for folder, reason in failed:
        print(f"failed: {folder}: {reason}", file=sys.stderr)
    said = [died] if died else []
    said += [f"{len(failed)} of the sweep's jobs failed"] if failed else []
    if said:
        _fail(f"{'; '.join(said)}; tools/report.py runs={jobs.folder} shows all")
    sys.exit(0)


def as_called(text: str) -> str:
    """With the names of scripts as the user has them: a wheel brings no scripts, only the console
    command."""
    program, _, command = sys.argv[0].partition(" ")
    if not command:
        return text
    return re.sub(r"(?:python )?(?:tools/(\w+)|\b(train|sample))\.py\b", rf"{program} \1\2", text)


def _one_line(otherwise: Callable[..., str]) -> Callable[..., str]:
    """How a warning is shown: the project's own are for the user, who does not want to know in
    which line of which file they are given; those of libraries as before."""

    def shown_as(message: Warning, category: type, filename: str, *rest: Any) -> str:
        ours = Path(filename).resolve().is_relative_to(_OURS)
        if not ours:
            return otherwise(message, category, filename, *rest)
        return as_called(f"warning: {message}\n")

    return shown_as


def readable(arguments: Sequence[str]) -> list[str]:
    """The arguments as Hydra can read them: it takes options before or behind the settings alone,
    and no ~ at all, which shells replace at the beginning of a word but not behind `dataset.path=`;
    and no letters beyond ASCII nor a second = (in ckpt=epoch=0550.ckpt) but in quotes."""
    options, settings = _parted(arguments)
    pairs = (argument.partition("=") for argument in settings)
    given = [key + equals + _readable_value(value) for key, equals, value in pairs]
    return [*options, *given]


def with_own(own: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The arguments with the settings of the run in front of those that the user gave."""
    options, settings = _parted(arguments)
    return [*options, *own, *settings]


def wrong_option(arguments: Sequence[str], config_name: str) -> str | None:
    """What to say of an option that there is not, as of `--steps 10`; None if all are Hydra's."""
    options, settings = _parted(arguments)
    values = {value for name, value in pairwise(options) if name in _WITH_VALUE}
    for option in options:
        name, _, value = option.partition("=")
        known = name in (*_ALONE, *_WITH_VALUE) or option in values
        if known or not re.fullmatch(r"--[a-z][\w.-]*|-[a-z]", name):  # -cdFOLDER is Hydra's too
            continue
        key = name.lstrip("-").replace("-", "_")
        valid = sorted(_keys(config_name, settings))
        same = [path for path in valid if key in (path, path.rpartition(".")[2])]
        near = [*same, *_near(key, valid)][:1]
        hint = f", here {near[0]}={value or 'VALUE'}" if near else ""
        return f"{name} is no option; settings are given as KEY=VALUE{hint}"
    return None


def wrong_choice(arguments: Sequence[str], config_name: str) -> str | None:
    """What to say of a list where a group takes one choice, on which Hydra fails; None if there is
    none."""
    for argument in _parted(arguments)[1]:
        group, _, value = argument.partition("=")
        if value.startswith("[") and group in _groups(config_name):
            return _unknown(argument, value, sorted(_choices(group)))
    return None


def _parted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(options with their values, settings)."""
    options, settings = [], []
    rest = iter(arguments)
    for argument in rest:
        (options if argument.startswith("-") else settings).append(argument)
        if argument in _WITH_VALUE:
            options += [value for value in [next(rest, None)] if value is not None]
    return options, settings


def _readable_value(value: str) -> str:
    value = os.path.expanduser(value) if value.startswith("~/") else value
    needs_quotes = not value.isascii() or "=" in value
    return f"'{value}'" if needs_quotes and not set(value) & set(_SYNTAX) else value


def describe(config_name: str, arguments: Sequence[str] = ()) -> str:
    """The settings as the files of the configuration have them, with what these say of each; of the
    groups what the `arguments` choose, or the experiment or data set among them."""
    folders = config_folders(arguments)
    lines = _settings(CONFIGS / f"{config_name}.yaml")
    groups = _defaults(config_name)
    given = dict(argument.partition("=")[::2] for argument in arguments)
    changed = _overridden("experiment", given.get("experiment"), folders)
    dataset = given.get("dataset", changed.get("dataset"))
    changed = _overridden("dataset", dataset, folders) | changed
    for group, default in sorted(groups.items(), key=lambda item: item[0] != "dataset"):
        chosen = given.get(group, changed.get(group, default))
        choices = sorted({choice for folder in folders for choice in _choices(group, folder)})
        lines += ["", f"{group}={chosen or 'null'}  # one of {', '.join(choices)}"]
        if chosen in choices:
            lines += [f"  {line}" for line in _settings(_found(group, chosen, folders))]
        elif chosen not in (None, "null"):
            raise ConfigError(_unknown(f"{group}={chosen}", chosen, choices))
    return "\n".join(lines)


def config_folders(arguments: Sequence[str]) -> list[Path]:
    """Where the files of the configuration are: the user's own --config-dir before ours."""
    own = [folder for name, folder in pairwise(arguments) if name in _CONFIG_DIR]
    joined = (argument.partition("=") for argument in arguments)
    own += [folder for name, _, folder in joined if name in _CONFIG_DIR and folder]
    return [*(Path(folder) for folder in own), CONFIGS]


def _found(group: str, choice: str | None, folders: Sequence[Path]) -> Path:
    files = (folder / group / f"{choice}.yaml" for folder in folders)
    return next((file for file in files if file.is_file()), CONFIGS / group / f"{choice}.yaml")


def _overridden(group: str, choice: str | None, folders: Sequence[Path]) -> dict[str, str | None]:
    """What a choice of a group takes of other groups."""
    path = _found(group, choice, folders)
    listed = _listed(path) if path.is_file() else {}
    return {re.sub(r"override /|@.*", "", name): value for name, value in listed.items()}


def _settings(path: Path) -> list[str]:
    """The lines of a configuration's file but those that are for Hydra."""
    blocks = re.split(r"^(?=\S)", path.read_text(), flags=re.MULTILINE)
    ours = "".join(b for b in blocks if not re.match(r"defaults:|hydra:|# @package", b))
    return re.sub(r"\n{2,}", "\n\n", ours).strip().splitlines()


def explain(error: Exception, config_name: str, arguments: Sequence[str] = ()) -> str:
    """Hydra's message as one line that names the nearest valid key or choice. What is valid depends
    on the `arguments` that choose of a group."""
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override)
    if isinstance(error, InstantiationException):  # of a launcher or sweeper
        what, _, key = str(error).partition("\nfull_key: ")
        said = f"{key or 'hydra'}: {what.split(', set env var')[0]}"
        return " ".join(f"{said} ({error.__cause__})".split() if error.__cause__ else said.split())
    chain = f"{error}\n{error.__cause__ or ''}"
    key = re.search(r"full_key: (\S+)|Could not override '([^']+)'|Key '([^']+)' is not", chain)
    choice = re.search(r"Could not find '([^']+)'", chain)
    several = re.search(r"Ambiguous value for argument '(.*)'", chain)
    if several:
        return _several(several[1])
    if choice:
        group, _, value = choice[1].rpartition("/")
        for known in _groups(config_name):  # of which a path may be taken for a choice
            if choice[1].startswith(f"{known}/"):
                group, value = known, choice[1].removeprefix(f"{known}/")
        if group.startswith("hydra/"):
            return (
                f"{group}={value} is not installed; pip install 'triton-diffusion[sweep]' brings"
                " hydra/launcher=joblib, submitit_local, submitit_slurm and hydra/sweeper=optuna"
            )
        instead = for_path(group, value)
        return _unknown(f"{group}={value}", value, sorted(_choices(group)), instead)
    if key:
        name = next(part for part in key.groups() if part).lstrip("+~")
        return _unknown(name, name, sorted(_keys(config_name, arguments)))
    first = re.split(r"\n\n|\nSee ", str(error))[0]
    return " ".join(first.split())


def _unreadable(override: str) -> str:
    key, equals, value = override.partition("=")
    if not equals:
        return f"{key} is no setting; expected KEY=VALUE"
    return (
        f"{override} cannot be read; brackets have to match, and a text with any of"
        f" ( ) [ ] {{ }} = # ~ goes into quotes: \"{key}='{value}'\""
    )


def _several(override: str) -> str:
    key, _, value = override.partition("=")
    return (
        f"{override} is several values; for a list give {key}=[{value}], for a text"
        f" \"{key}='{value}'\", for a sweep over them add -m"
    )


def _unknown(shown: str, value: str, valid: list[str], instead: str = "") -> str:
    group = value.rpartition(".")[0]
    inside = [name for name in valid if group and name.startswith(f"{group}.")]
    words = value.rpartition(".")[2].split("_")
    initials = "".join(word[:1] for word in words)  # lr for learning_rate
    near = [name for name in inside if len(words) > 1 and name == f"{group}.{initials}"]
    near += [found for names in (inside, valid) for found in _near(value, names)]
    if not near:  # the same last part in another group
        near = [name for name in valid if name.split(".")[-1] == value.split(".")[-1]][:1]
    hint = f"did you mean {near[0]}? " if near else ""
    others = _choices_with(value)
    if others:
        hint = f"{', '.join(others)} {'have' if len(others) > 1 else 'has'} it; "
    choices = inside or valid
    listed = (
        ", ".join(choices)
        if len(choices) <= _LISTED
        else f"one of {len(choices)} keys, shown by --cfg job"
    )
    return f"{shown} is unknown; {instead or hint}valid: {listed}"


def _choices_with(key: str) -> list[str]:
    """The choices of a group that have a key which the chosen one lacks, as `dataset=folder`."""
    group, _, name = key.partition(".")
    return [
        f"{group}={choice}"
        for choice in sorted(_choices(group))
        if name in (OmegaConf.load(CONFIGS / group / f"{choice}.yaml") or {})
    ]


def _near(value: str, names: list[str]) -> list[str]:
    return difflib.get_close_matches(value, names, n=1, cutoff=0.4)


def _choices(group: str, folder: Path = CONFIGS) -> Iterator[str]:
    return (path.stem for path in (folder / group).glob("*.yaml"))


def _keys(config_name: str, arguments: Sequence[str]) -> Iterator[str]:
    """Every dotted key of the configuration with what the arguments choose, and the groups."""
    GlobalHydra.instance().clear()
    groups, pairs = _groups(config_name), (argument.partition("=") for argument in arguments)
    chosen = [
        f"{key}={value}" for key, _, value in pairs if key in groups and value in _choices(key)
    ]
    with initialize_config_dir(str(CONFIGS), version_base=None):
        config = OmegaConf.to_container(compose(config_name, chosen), resolve=False)
    yield from _groups(config_name)
    yield from _dotted(config, "")


def _groups(config_name: str) -> set[str]:
    """The groups that a configuration chooses from."""
    return set(_defaults(config_name))


def _defaults(config_name: str) -> dict[str, str | None]:
    """What a configuration takes of each group if nobody chooses."""
    named = _listed(CONFIGS / f"{config_name}.yaml")
    return {name: choice for name, choice in named.items() if not name.startswith("override ")}


def _listed(path: Path) -> dict[str, str | None]:
    """The defaults list of a file."""
    entries = OmegaConf.load(path).get("defaults", [])
    return {str(k): v for entry in entries if OmegaConf.is_dict(entry) for k, v in entry.items()}


def _dotted(tree: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{key}.")


def _fail(message: str, of_job: bool = False) -> NoReturn:
    line = as_called(" ".join(message.split()))  # what a library said may be several
    if of_job and sweep.goes_on_without_this_job():
        raise sweep.JobFailed(line)
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


def _stop(message: str, number: int) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":  # of several processes, the first says it
        print(as_called(message), file=sys.stderr)
    sweep.stop_job(message)
    sys.exit(128 + number)
