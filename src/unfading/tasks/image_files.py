"""Readers of image files: MNIST's gzipped idx, CIFAR-10's binary batches, scikit-learn's digits."""

import io
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unfading.data import store
from unfading.data.arrays import gunzip
from unfading.files.checked_json import sentence
from unfading.tasks.resident import Part

UNSIGNED_BYTE = 0x08
LARGEST = 1 << 28  # bytes that are unpacked; MNIST's largest file has 47 million


def read_idx(file: Path) -> Tensor:
    """Read a gzipped idx file of bytes: two zeros, type, number of axes, each axis in four bytes, then the entries."""
    try:
        raw = gunzip(file, LARGEST)
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}. Move it away and get it again.") from None
    axes = raw[3] if len(raw) > 3 else 0
    if raw[:3] != bytes([0, 0, UNSIGNED_BYTE]) or len(raw) < 4 + 4 * axes:
        raise ValueError(
            f"{file} should begin as idx of bytes, 00 00 08; got {raw[:4].hex(' ')}. Move it away and get it again."
        )
    shape = [int.from_bytes(raw[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(axes)]
    entries = np.frombuffer(raw, np.uint8, offset=4 + 4 * axes)
    if len(entries) != prod(shape):
        raise ValueError(f"{file} says {shape}, {prod(shape)} bytes; got {len(entries)}. Move it away and get it again.")
    return torch.from_numpy(entries.reshape(shape).copy())


def mnist(part: Part) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 28, 28] and labels int64 [N]."""
    name = {"train": "train", "test": "t10k"}[part]
    images = read_idx(store.path("mnist", f"{name}-images-idx3-ubyte.gz"))
    file = store.path("mnist", f"{name}-labels-idx1-ubyte.gz")
    return images, labels(read_idx(file), file, classes=10, rows=len(images))


def cifar10(part: Part) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, 32, 32], red, green and blue, and labels int64 [N]."""
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] if part == "train" else ["test_batch.bin"]
    files = [store.path("cifar10", name) for name in names]
    parts = [read_cifar(file) for file in files]
    return torch.cat([images for images, _ in parts]), torch.cat([classes for _, classes in parts])


def read_cifar(file: Path) -> tuple[Tensor, Tensor]:
    """Read a binary batch: for each image one byte for its label, then 1,024 bytes each of red, green and blue."""
    raw = np.fromfile(file, np.uint8)
    if len(raw) == 0 or len(raw) % 3073:
        raise ValueError(f"{file} should have 3,073 bytes an image; got {len(raw)} bytes. Move it away and get it again.")
    table = torch.from_numpy(raw).view(-1, 3073)
    return table[:, 1:].reshape(-1, 3, 32, 32), labels(table[:, 0], file, classes=10, rows=len(table))


def digits() -> tuple[Tensor, Tensor]:
    """Images uint8 [1797, 8, 8] with entries 0 .. 16, and labels int64 [1797]."""
    return read_digits(store.path("digits", "digits.csv.gz"))


def read_digits(file: Path) -> tuple[Tensor, Tensor]:
    """Read a gzipped table: for each image 64 numbers from 0 to 16, then its label."""
    try:
        rows = np.loadtxt(io.BytesIO(gunzip(file, LARGEST)), delimiter=",", dtype=np.float64, ndmin=2)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{file} is damaged: {sentence(error).rstrip('.')}. Move it away and get it again.") from None
    if rows.shape[1] != 65 or not len(rows) or not ((rows >= 0) & (rows <= 16) & (rows == rows.round())).all():
        raise ValueError(f"{file} should have 65 numbers from 0 to 16 in a line. Move it away and get it again.")
    table = torch.from_numpy(rows.astype(np.uint8))
    return table[:, :64].reshape(-1, 8, 8), labels(table[:, 64], file, classes=10, rows=len(table))


def labels(values: Tensor, file: Path, *, classes: int, rows: int) -> Tensor:
    """Labels as int64, after checking that there is one per row and that each is a class."""
    if values.shape != (rows,) or not rows:
        raise ValueError(f"{file} should have a label for each of {rows} rows; got {list(values.shape)}. Get both files again.")
    if int(values.max()) >= classes:
        raise ValueError(
            f"{file} should have labels 0 .. {classes - 1}; got {int(values.max())}. Move it away and get it again."
        )
    return values.long()
