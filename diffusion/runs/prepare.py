"""Images, arrays or latents into one file, from a plain dict."""

import hashlib
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..data.array import is_array, load_array
from ..data.images import Decoder, ImageFiles, enlarged_note, list_images, skipped_note
from ..data.packed import check_output, load_packed
from ..data.parts import unfinished, write_parts
from ..data.preparing import DecodedImages, EncodedImages, StoredSamples
from ..data.shards import list_shards
from ..data.values import LAYOUTS
from ..errors import ConfigError, counted
from ..runtime.distributed import choose_device
from ..runtime.progress import Progress
from ..settings import construct

_MOST_WORKERS = 256


def prepare_as_configured(config: dict[str, Any]) -> None:
    """The configuration; see configs/prepare.yaml."""
    construct(prepare, config, "")


def prepare(
    src: str,
    out: str,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    classes: bool = True,
    background: str = "white",
    column: str = "image",
    label: str | None = None,
    split: str = "train",
    subset: str | None = None,
    key: str | None = None,
    layout: str | None = None,
    encode: str | None = None,
    device: str = "auto",
    workers: int = 1,
    overwrite: bool = False,
) -> None:
    """Write `out` from `src`; see configs/prepare.yaml. Killed at any time and called again, it
    goes on with what was written."""
    source_path, path = Path(src).expanduser(), Path(out).expanduser()
    check_output(path, overwrite)
    if not 1 <= workers <= _MOST_WORKERS:
        raise ConfigError(f"workers={workers}; expected 1 to {_MOST_WORKERS} processes")
    if layout not in (None, *LAYOUTS):
        raise ConfigError(f"layout={layout} is unknown; choose one of {', '.join(LAYOUTS)} or null")
    choose_device(device)
    settings = {
        "src": os.path.expanduser(src),
        "size": size,
        "channels": channels,
        "classes": classes,
        "background": background,
        "column": column,
        "label": label,
        "split": split,
        "subset": subset,
        "key": key,
        "layout": layout,
        "encode": encode,
        "device": device,
    }
    source, files = _source(**settings)
    for remark in () if files is None else files.notes:
        print(f"note: {remark}", file=sys.stderr)
    plan = _plan(settings, source, files)
    begun = unfinished(path)
    with _helpers(workers - 1, str(path), settings):
        try:
            count, what = len(source), source_path.name
            with Progress(count, unit="img", what=what, leave=False) as progress:
                remarks = write_parts(path, source, plan, progress.reach)
        except KeyboardInterrupt:
            left = unfinished(path)
            if left is not None:
                print(
                    f"{path}: {left[0]} of {left[1]} parts are written; the same command continues",
                    file=sys.stderr,
                )
            raise
    skipped = [name for found in remarks for name in found.get("skipped", [])]
    smaller = [tuple(had) for found in remarks for had in found.get("smaller", [])]
    if skipped and files is not None:
        print(f"note: {skipped_note(files, skipped)}", file=sys.stderr)
    if smaller:
        said = enlarged_note(smaller, len(source) - len(skipped), source.image_size)
        print(f"note: {said}", file=sys.stderr)
    labelled = source.labels is not None and path.suffix == ".bin"
    note = "; the labels are left out: .bin has none" if labelled else ""
    if begun and begun[0]:
        note = f"; {begun[0]} of {begun[1]} parts were there already{note}"
    count, size = len(source) - len(skipped), path.stat().st_size
    print(f"{path}: {counted(count, 'images')}, {size} bytes, {len(skipped)} skipped{note}")


def _source(
    src: str,
    size: int | tuple[int, int] | None,
    channels: int | None,
    classes: bool,
    background: str,
    column: str,
    label: str | None,
    split: str,
    subset: str | None,
    key: str | None,
    layout: str | None,
    encode: str | None,
    device: str,
) -> tuple[DecodedImages | EncodedImages | StoredSamples, ImageFiles | None]:
    """What is written, and the files that are decoded for it."""
    path = Path(src)
    if path.suffix in (".packed", ".bin") or is_array(path):
        if encode is not None:
            raise ConfigError(f"encode={encode} is for images; {src} is no folder of them, no .zip")
        options = {"size": size, "channels": channels}
        if not is_array(path):
            return StoredSamples(load_packed(src, **options)), None
        options |= {"key": key, "labels": label if classes else None, "layout": layout}
        try:
            return StoredSamples(load_array(src, **options)), None
        except ConfigError as error:  # which names the settings of training
            said = str(error).replace("dataset.labels", "label")
            raise ConfigError(re.sub(r"\bdataset\.(key|layout|size)", r"\1", said)) from None
    columns = {"column": column, "label": label, "split": split, "subset": subset}
    files = list_shards(src, classes=classes, **columns) or list_images(src, classes)
    images = DecodedImages(Decoder(files, size, 3 if channels is None else channels, background))
    if encode is None:
        return images, files
    return EncodedImages(images, encode, choose_device(device)), files


def _plan(settings: dict[str, Any], source: Any, files: ImageFiles | None) -> dict[str, Any]:
    """All that decides about the samples: who goes on with a file has the same."""
    content = hashlib.sha256()
    if files is not None:
        for name in files.names:
            content.update(f"{name}\0".encode(errors="surrogateescape"))
    content.update(f"{source.labels}".encode())
    path = Path(settings["src"])
    stat = path.stat() if path.is_file() else None
    return {
        **{key: value for key, value in settings.items() if key != "device"},
        "src": os.path.realpath(path) if path.exists() else settings["src"],
        "bytes": stat and [stat.st_size, stat.st_mtime_ns],
        "content": content.hexdigest(),
        "shape": list(source.shape),
        "values": source.values.state(),
    }


# --- further processes ----------------------------------------------------------------------------


@contextmanager
def _helpers(count: int, out: str, settings: dict[str, Any]) -> Iterator[None]:
    """Processes that write parts as well, as long as this block lasts."""
    spawn = multiprocessing.get_context("spawn")  # a fork does not take PyTorch's threads along
    helpers = [spawn.Process(target=_help, args=(out, settings), daemon=True) for _ in range(count)]
    for helper in helpers:
        helper.start()
    try:
        yield
    finally:
        for helper in helpers:
            helper.terminate()
            helper.join()


def _help(out: str, settings: dict[str, Any]) -> None:
    """What is wrong with the data the process that was called finds as well, and says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def progress(done: int) -> None:
        if parent is not None and not parent.is_alive():  # it was killed
            os._exit(1)

    try:
        source, files = _source(**settings)
        write_parts(Path(out), source, _plan(settings, source, files), progress)
    except (ConfigError, OSError):
        pass
