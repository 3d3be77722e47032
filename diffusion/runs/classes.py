"""Classes of what is drawn, by their names or numbers."""

from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, counted
from ..formats.trained import Trained


def choose_labels(label: Any, n: int, trained: Trained) -> Tensor | None:
    """Of n images the class, by name or number, or all in turn; None if the network has none.
    ConfigError: there is no such class."""
    num_classes = trained.model.num_classes
    device = next(trained.model.parameters()).device
    if num_classes is None:
        if label is not None:
            raise ConfigError(f"label={label}, but the model has no classes; leave it out")
        return None
    if label is None:
        return torch.arange(n, device=device) % num_classes
    return torch.full((n,), class_number("label", label, trained), device=device)


def class_number(key: str, label: Any, trained: Trained) -> int:
    """Of a class by its name or number. ConfigError: there is none."""
    num_classes = trained.model.num_classes
    if num_classes is None:
        raise ConfigError(f"{key}={label}, but the model has no classes; leave it out")
    names = trained.class_names or ()
    if str(label) in names:
        label = names.index(str(label))
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < num_classes:
        valid = ", ".join(names) if names else f"0 to {num_classes - 1}"
        classes = counted(num_classes, "classes")
        raise ConfigError(f"{key}={label} is unknown; the model has {classes}: {valid}")
    return label
