"""Freed memory stays in the process: the next step does not wait for the system to clear pages."""

import ctypes
import io
import os
import resource
import subprocess
import sys
import textwrap

import pytest

from unfading.training import freed_memory, workers

BYTES = 64 * 2**20  # of a tensor: above all thresholds at which the C library begins


def share_cleared(environment=None, *, keep):
    """How much of the memory of tensors, each freed before the next is made, the system had to clear; a share."""
    program = f"""
        import resource
        import torch
        from unfading.training.freed_memory import keep_freed_memory

        torch.set_num_threads(1)
        if {keep}:
            keep_freed_memory()

        def tensor():
            torch.ones({BYTES // 4})

        for _ in range(20):  # small blocks settle between the large ones
            tensor()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            tensor()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    own = {name: value for name, value in os.environ.items() if name not in freed_memory.SETTINGS}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, env={**own, **(environment or {})}, capture_output=True, text=True, check=True)
    return int(result.stdout) * resource.getpagesize() / (20 * BYTES)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not that of GNU")
def test_a_tensor_takes_the_memory_of_the_one_before():
    assert share_cleared(keep=False) > 0.9
    assert share_cleared(keep=True) < 0.3
    # The user's own settings stand: blocks above 1 MB go back to the system.
    assert share_cleared({"MALLOC_MMAP_THRESHOLD_": str(2**20)}, keep=True) > 0.9


def test_without_the_function_nothing_happens(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    freed_memory.keep_freed_memory()


def test_a_worker_keeps_freed_memory(monkeypatch):
    called = []
    monkeypatch.setattr(workers, "keep_freed_memory", lambda: called.append(True))
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # no jobs: it ends at once
    workers.main(1)
    assert called == [True]
