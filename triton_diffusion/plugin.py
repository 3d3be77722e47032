"""The user's own file or module, which registers networks and data sets when it is imported."""

import importlib
import importlib.util
import sys
from pathlib import Path

from diffusion.errors import ConfigError
from diffusion.settings import shown


def import_plugin(named: object) -> None:
    """Import a .py file or a module; None: nothing. It is never taken from a checkpoint: whoever
    is sent one does not run its code. ConfigError: it cannot be imported, and why."""
    if named is None:
        return
    if not isinstance(named, str) or not named:
        raise ConfigError(f"plugin={shown(named)} is wrong; expected a .py file or a module")
    try:
        if named.endswith(".py"):
            _import_file(Path(named).expanduser())
        else:
            importlib.import_module(named)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"plugin={named}: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> None:
    """As a module that is called as the file is; what lies beside the file can be imported."""
    if not path.is_file():
        raise ConfigError(f"plugin={path} does not exist")
    known = sys.modules.get(path.stem)
    if known is not None:
        if Path(getattr(known, "__file__", None) or "").resolve() != path.resolve():
            raise ConfigError(f"plugin={path}: there is a module {path.stem} already; rename it")
        return
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
