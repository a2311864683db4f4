"""Every test here plans its cells anew, also where an equal one was planned before (`fuse/equal_cells.py`)."""

import pytest

from unfading.fuse.equal_cells import EqualCells


@pytest.fixture(autouse=True)
def _nothing_shared(monkeypatch):
    monkeypatch.setattr(EqualCells, "find", lambda self, contents: [])
