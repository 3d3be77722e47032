"""A folder of images into one file, from a plain dict."""

from pathlib import Path
from typing import Any

from ..data.array import is_array, load_array
from ..data.image_set import parse_size
from ..data.images import decode_all, list_images
from ..data.packed import check_output, load_packed, packed_writer, write_packed
from ..settings import construct


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
    overwrite: bool = False,
) -> None:
    """Write `out` from `src`; see configs/prepare.yaml."""
    src, out = Path(src).expanduser(), Path(out).expanduser()
    check_output(out, overwrite)
    skipped: list[str] = []
    if src.suffix in (".packed", ".bin") or is_array(src):
        load = load_array if is_array(src) else load_packed
        data = load(str(src), size=size, channels=channels)
        write_packed(out, data)
        count, labelled = len(data), data.labels is not None
    else:
        size = parse_size(64 if size is None else size)
        channels = 3 if channels is None else channels
        files = list_images(src, classes)
        labelled = files.labels is not None
        with packed_writer(out, size, channels, files.class_names) as writer:
            for image, label in decode_all(files, size, channels, background, skipped, show=True):
                writer.append(image, label)
        count = len(files.names) - len(skipped)
    note = "; the labels are left out: .bin has none" if labelled and out.suffix == ".bin" else ""
    print(f"{out}: {count} images, {out.stat().st_size} bytes, {len(skipped)} skipped{note}")
