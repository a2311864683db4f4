"""Small datasets, made at random and written in their publishers' layouts, so that tasks run where no dataset is."""

import dataclasses
import gzip

import numpy as np

from tests.helpers import made_files
from unfading.data.datasets import DATASETS

# Rows of the training and of the test files: neither divides by anything.
ROWS = {"train": 53, "test": 17}


def idx(array):
    """Bytes of an idx file."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.tobytes()


def write_mnist(folder, random):
    folder.mkdir(parents=True)
    for name, rows in (("train", ROWS["train"]), ("t10k", ROWS["test"])):
        images = random.randint(0, 256, (rows, 28, 28)).astype(np.uint8)
        labels = random.randint(0, 10, rows).astype(np.uint8)
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))


def write_cifar10(folder, random):
    folder.mkdir(parents=True)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        table = random.randint(0, 256, (ROWS["test"], 3073)).astype(np.uint8)
        table[:, 0] %= 10
        table.tofile(folder / f"{name}.bin")


def write_digits(folder, random):
    folder.mkdir(parents=True)
    table = np.concatenate([random.randint(0, 17, (ROWS["train"], 64)), random.randint(0, 10, (ROWS["train"], 1))], axis=1)
    with gzip.open(folder / "digits.csv.gz", "wt") as file:
        np.savetxt(file, table, fmt="%d", delimiter=",")


WRITERS = {"mnist": write_mnist, "cifar10": write_cifar10, "digits": write_digits, **made_files.WRITERS}


def lay_out(root, seed=0):
    """Write every dataset below `root`."""
    for name, write in WRITERS.items():
        write(root / DATASETS[name].folder, np.random.RandomState(seed))


def unpinned(name):
    """The dataset's entry without checksums, which made files cannot have."""
    return dataclasses.replace(DATASETS[name], files=dict.fromkeys(DATASETS[name].files))
