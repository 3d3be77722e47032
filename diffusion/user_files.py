"""Python files of the user's. A plugin registers networks and data sets when it is imported. No
file is ever named by a checkpoint: whoever is sent one does not run its code. PyTorch is not
imported here, whose threads are chosen first."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from .errors import ConfigError
from .settings import shown


def import_plugin(named: object) -> None:
    """Import a .py file or a module; None: nothing. ConfigError: it cannot be imported, and why."""
    if named is None:
        return
    if not isinstance(named, str) or not named:
        raise ConfigError(f"plugin={shown(named)} is wrong; expected a .py file or a module")
    try:
        if named.endswith(".py"):
            import_file(Path(named), f"plugin={named}")
        else:
            importlib.import_module(named)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(f"plugin={named}: {type(error).__name__}: {error}") from error


def import_file(path: Path, setting: str) -> ModuleType:
    """As a module that is called as the file is; what lies beside the file can be imported.
    ConfigError, of this setting: there is no such file, or another module of that name."""
    path = path.expanduser()
    if not path.is_file():
        raise ConfigError(f"{setting}: {path} does not exist")
    known = sys.modules.get(path.stem)
    if known is not None:
        if Path(getattr(known, "__file__", None) or "").resolve() != path.resolve():
            raise ConfigError(f"{setting}: there is a module {path.stem} already; rename the file")
        return known
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
    return module
