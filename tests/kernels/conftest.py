"""Every test of a kernel has poisoned outputs."""

import pytest

from .poison import poison_outputs


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """An element that no program writes cannot pass."""
    poison_outputs(monkeypatch)
