"""Every test here plans its cells anew, and runs kernels as users have them.

`make test` compiles the kernels of the other folders without optimisation (`tests/conftest.py`).
"""

import os
from unittest import mock

import pytest

from tests.helpers.paths import QUICK_CC
from unfading.fuse import plan
from unfading.fuse.c import cache, kernel
from unfading.fuse.equal_cells import EqualCells
from unfading.fuse.frames import convolver, frame_kernels, pixels


def forget_kernels():
    for kernels in (cache._loaded, plan._c_kernels):
        kernels.clear()
    for function in (kernel.products, frame_kernels.frame_kernels, convolver._functions, pixels._compiled):
        function.cache_clear()


@pytest.fixture(scope="package", autouse=True)
def _optimised_kernels():
    if os.environ.get("CC") != str(QUICK_CC):
        yield
        return
    forget_kernels()
    with mock.patch.dict(os.environ):
        del os.environ["CC"]
        yield
    forget_kernels()


@pytest.fixture(autouse=True)
def _nothing_shared(monkeypatch):
    """Plans and what is known about projections, also where an equal cell was planned before (`fuse/equal_cells.py`)."""
    monkeypatch.setattr(EqualCells, "find", lambda self, contents: [])
