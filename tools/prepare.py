"""Put a folder of images into one file: python tools/prepare.py src=FOLDER out=FILE [size=64].

The file loads at once with dataset=packed dataset.path=FILE. See configs/prepare.yaml. Memory stays
small whatever the folder holds: an image is written as soon as it is decoded.
"""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.entry import exit_codes, plain, run_entry
from diffusion.data.image_set import parse_size
from diffusion.data.images import decode_all, list_images
from diffusion.data.packed import check_output, load_packed, packed_writer, write_packed
from diffusion.settings import construct


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
    if src.suffix in (".packed", ".bin"):
        data = load_packed(src, size, channels)
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


@hydra.main(version_base=None, config_path="../configs", config_name="prepare")
def main(config: DictConfig) -> None:
    """Hydra's side of the door."""
    with exit_codes():
        construct(prepare, plain(config), "")


if __name__ == "__main__":
    run_entry(main, "prepare")
