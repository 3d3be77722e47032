"""Memory that a kernel forgets to write shows."""

import pytest
import torch


def poison_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What launchers allocate, outputs and workspaces, starts as NaN; whole numbers as the
    largest."""
    allocate = torch.Tensor.new_empty

    def new_empty(*args, **kwargs):
        out = allocate(*args, **kwargs)
        if out.is_floating_point():
            return out.fill_(torch.nan)
        return out.fill_(True if out.dtype == torch.bool else torch.iinfo(out.dtype).max)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
