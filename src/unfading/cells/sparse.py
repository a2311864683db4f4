"""Sparse matrices, as exported models store them: the entries that are not zero, and in four bits each how far apart they are.

The entries are taken row by row. A code from 0 to 14 skips so many zeros and stands before an entry; 15 skips fifteen zeros and
has no entry. Two codes fit in a byte, the first in its lower half. Zeros behind the last entry have no code.

    0 0 5 0 7   ->   entries 5 7,  codes 2 1,  bytes 0x12
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SKIP = 15  # the code without an entry


class SparseMatrix(NamedTuple):
    """The entries of a matrix that are not zero, and their codes."""

    entries: NDArray[Any]
    codes: NDArray[np.int64]  # 0 to 15 each

    @property
    def packed(self) -> NDArray[np.int64]:
        """The codes as bytes, two in each."""
        codes = np.append(self.codes, np.zeros(len(self.codes) % 2, np.int64)).reshape(-1, 2)
        return codes[:, 0] | codes[:, 1] << 4


def sparse(matrix: NDArray[Any]) -> SparseMatrix:
    """A matrix as its nonzeros, row by row."""
    flat = matrix.reshape(-1)
    places = np.flatnonzero(flat)
    zeros = np.diff(places, prepend=-1) - 1
    skips = zeros // SKIP
    codes = np.full(len(places) + int(skips.sum()), SKIP, np.int64)
    codes[np.cumsum(skips + 1) - 1] = zeros % SKIP
    return SparseMatrix(flat[places], codes)


def stored_bytes(matrix: NDArray[Any], entry: int) -> tuple[int, int]:
    """The bytes of a matrix with `entry` bytes for each of its entries: dense, and sparse."""
    compact = sparse(matrix)
    return entry * matrix.size, entry * len(compact.entries) + -(-len(compact.codes) // 2)
