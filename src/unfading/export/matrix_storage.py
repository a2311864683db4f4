"""Matrices as constant arrays of C: dense, or sparse as `cells/sparse.py` describes, whichever takes fewer bytes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfading.cells.sparse import sparse, stored_bytes
from unfading.export.arrays_of_c import SIZES, Arrays
from unfading.export.stage import Array

# The loop of a sparse product. ENTRY and SUM are the types of an entry and of a sum, FINISH writes `sum` to entry j.
SPARSE_LOOP = """\
{
  SUM sum = 0;
  int i = 0, j = 0;
  for (int k = 0; k < count; k++) {
    const int code = k & 1 ? codes[k >> 1] >> 4 : codes[k >> 1] & 15;
    for (i += code; i >= length; i -= length, sum = 0, j++)
      FINISH
    if (code < 15)
      sum += (SUM)v[i++] * *W++;
  }
  for (; j < width; sum = 0, j++)
    FINISH
}
"""


class StoredMatrix(NamedTuple):
    """The arrays of a matrix."""

    entries: str  # name of the array of its entries
    codes: str | None  # name of the array of codes; None for a dense matrix
    length: int  # number of codes
    products: int  # multiply-adds of a product with a vector
    transposed: bool = False  # whether the entries are those of its transpose

    @property
    def function(self) -> str:
        """The function of the product."""
        if self.codes is not None:
            return "sparse_product"
        return "product_transposed" if self.transposed else "product"

    @property
    def arguments(self) -> str:
        """The first arguments of that function."""
        return self.entries if self.codes is None else f"{self.entries}, {self.codes}, {self.length}"


def is_sparse(matrix: NDArray[np.floating | np.integer], kind: str) -> bool:
    """Whether a matrix takes fewer bytes in its sparse form."""
    dense, compact = stored_bytes(matrix, SIZES[kind])
    return compact < dense


def multiply_adds(matrix: NDArray[np.floating | np.integer], kind: str) -> int:
    """The multiply-adds of a product with a vector, in the form in which a matrix is stored."""
    return int(np.count_nonzero(matrix)) if is_sparse(matrix, kind) else matrix.size


def store(arrays: Arrays, name: str, matrix: NDArray[np.floating | np.integer], kind: str, *, by_column: bool) -> StoredMatrix:
    """Add the arrays of a matrix [width, length], whose products have `width` entries.

    Args:
        by_column: store a dense matrix column by column, as the float product reads it. A sparse one is stored row by row.
    """
    if not is_sparse(matrix, kind):
        dense, transposed = arrays.add_matrix(name, matrix.T if by_column else matrix, kind)
        return StoredMatrix(dense, None, 0, multiply_adds(matrix, kind), transposed)
    compact = sparse(matrix)
    entries = arrays.add(f"{name}_entries", compact.entries, kind)
    codes = arrays.add(f"{name}_codes", compact.packed, "uint8_t")
    return StoredMatrix(entries, codes, len(compact.codes), multiply_adds(matrix, kind))


def numbers_of(matrix: Array) -> float:
    """How many numbers a matrix takes in the smaller of its two forms; a code counts as half a number, as beside int8."""
    return min(stored_bytes(matrix, 1))
