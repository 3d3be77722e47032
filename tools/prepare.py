"""Put a folder of images into one file: python tools/prepare.py src=FOLDER out=FILE [size=64].

The file loads at once with dataset=packed dataset.path=FILE. See configs/prepare.yaml. Memory stays
small whatever the folder holds: an image is written as soon as it is decoded.
"""

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.entry import exit_codes, plain, run_entry
from diffusion.data.image_set import parse_size
from diffusion.data.images import decode_all, list_images
from diffusion.data.packed import check_output, load_packed, packed_writer, write_packed


def prepare(config: dict[str, Any]) -> None:
    """Write `out` from `src`; the settings are those of configs/prepare.yaml."""
    src, out = Path(config["src"]).expanduser(), Path(config["out"]).expanduser()
    size, channels = config["size"], config["channels"]
    check_output(out, config["overwrite"])
    skipped: list[str] = []
    if src.suffix in (".packed", ".bin"):
        data = load_packed(src, size, channels)
        write_packed(out, data)
        count, labelled = len(data), data.labels is not None
    else:
        size, channels = parse_size(size or 64), channels or 3
        files = list_images(src, config["classes"])
        labelled, background = files.labels is not None, config["background"]
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
        prepare(plain(config))


if __name__ == "__main__":
    run_entry(main, "prepare")
