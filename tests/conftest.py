"""One thread (two are far slower on small matrices here), one seed per test; datasets, made or real."""

import os
import shutil
import sys
from collections import defaultdict
from zlib import crc32

# Read when Triton is imported, which torch may do; `make gpu-test` says 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from tests.helpers import made_data, made_files
from tests.helpers.paths import QUICK_CC, REAL_DATA
from unfading.data import store
from unfading.data.datasets import DATASETS

torch.set_num_threads(1)


def pytest_configure(config):
    """`make test` compiles kernels without optimisation, in a fifth of the time, but for `tests/fuse`."""
    if config.option.markexpr == "not long" and shutil.which("cc"):
        os.environ.setdefault("CC", str(QUICK_CC))


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items):
    """Of a test marked `sample(n)`, mark all cases as long but n. Each test has its own, and the same ones in every run."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("long"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for items_of_test in cases.values():
        items_of_test.sort(key=lambda item: crc32(item.nodeid.encode()))
        (number,) = items_of_test[0].get_closest_marker("sample").args
        for item in items_of_test[number:]:
            item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def made_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    made_data.lay_out(folder)
    return folder


@pytest.fixture
def made(made_folder, monkeypatch):
    """The data folder holds small datasets made at random."""
    monkeypatch.setenv("UNFADING_DATA", str(made_folder))
    for name in made_data.WRITERS:
        monkeypatch.setitem(DATASETS, name, made_data.unpinned(name))
    made_files.shrink(monkeypatch)
    return made_folder


@pytest.fixture
def real(monkeypatch):
    """A function that makes sure of a published dataset, and skips where it is absent."""
    if REAL_DATA is not None:
        monkeypatch.setenv("UNFADING_DATA", REAL_DATA)

    def need(name):
        if not store.present(name):
            pytest.skip(f"dataset {name} is not in UNFADING_DATA")

    return need


@pytest.fixture
def judging(tmp_path, monkeypatch, capsys):
    """Exit code and words of bars.py over some rows."""
    monkeypatch.setenv("COLUMNS", "200")
    from tests.helpers.benchmarks import script, written

    bars = script("bars")

    def judge(rows):
        path = written(tmp_path / "rows.jsonl", rows)
        monkeypatch.setattr(sys, "argv", ["bars.py", str(path)])
        return bars.main(), capsys.readouterr().out

    return judge
