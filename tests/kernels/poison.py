"""Memory that a kernel forgets to write shows."""

from types import ModuleType

import pytest
import torch


def poison_outputs(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """What these modules allocate, outputs and workspaces, starts as NaN."""

    def empty(*args, **kwargs):
        return torch.empty(*args, **kwargs).fill_(torch.nan)

    for module in modules:
        monkeypatch.setattr(module, "_empty", empty)
