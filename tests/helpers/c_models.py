"""Exported C models, compiled with the system's compiler and run from Python."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
import torch

STRICT = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-ffreestanding"]
COMPILER = shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
FEATURES, HIDDEN = 3, 5


class CModel:
    """A folder of `unfading.export.c` as a library; `push` runs one step of one row."""

    def __init__(self, folder, source, *, integer=False):
        library = folder / "model.so"
        command = [COMPILER, *STRICT, "-O1", "-fPIC", "-shared", "-o", library, folder / "model.c"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        self.library = ctypes.CDLL(str(library))
        self.state = ctypes.create_string_buffer(source.state)
        self.entry = np.int16 if integer else np.float32

    def run(self, samples, outputs):
        """The outputs [T, n] of samples [T, I] of one sequence."""
        self.library.model_reset(self.state)
        results = np.empty((len(samples), outputs), self.entry)
        for sample, result in zip(np.ascontiguousarray(samples, self.entry), results, strict=True):
            self.library.model_push(self.state, sample.ctypes.data_as(ctypes.c_void_p), result.ctypes.data_as(ctypes.c_void_p))
        return results


def samples(T, *, rows=1, features=FEATURES, seed=0):
    """Random samples [T, rows, features]."""
    return torch.randn(T, rows, features, generator=torch.Generator().manual_seed(seed))


def distance(got, want):
    """The largest distance of a row from what is wanted, relative to the largest norm; of zeros, the distance."""
    got, want = (np.asarray(part, np.float64) for part in (got, want))
    return (np.linalg.norm(got - want, axis=-1).max() / (np.linalg.norm(want, axis=-1).max() or 1.0)).item()
