"""Memory that a kernel forgets to write shows."""

from types import ModuleType

import pytest
import torch


def poison_outputs(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """What these modules allocate, outputs and workspaces, starts as NaN; bytes as the largest."""

    def empty(*args, **kwargs):
        out = torch.empty(*args, **kwargs)
        return out.fill_(255 if out.dtype == torch.uint8 else torch.nan)

    for module in modules:
        monkeypatch.setattr(module, "_empty", empty)
