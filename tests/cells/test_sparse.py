"""Sparse storage: the codes give back the matrix, and the bytes are counted as they are."""

import numpy as np
import pytest

from unfading.cells.sparse import SKIP, sparse, stored_bytes


def restored(packed, count, entries, shape):
    """The matrix, decoded step by step as the C code does."""
    matrix, at, values = np.zeros(shape, entries.dtype).reshape(-1), 0, iter(entries)
    for k in range(count):
        code = int(packed[k // 2]) >> (4 if k % 2 else 0) & 15
        at += code
        if code < SKIP:
            matrix[at] = next(values)
            at += 1
    assert next(values, None) is None
    return matrix.reshape(shape)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.5, 0.9, 1.0])
def test_codes_give_back_the_matrix(share):
    random = np.random.default_rng(0)
    for shape in ((1, 1), (3, 5), (7, 40), (40, 7), (2, 200)):
        matrix = random.integers(1, 128, shape) * (random.random(shape) < share) * random.choice([-1, 1], shape)
        compact = sparse(matrix)
        assert np.array_equal(restored(compact.packed, len(compact.codes), compact.entries, shape), matrix)
        assert compact.packed.max(initial=0) <= 255
        assert stored_bytes(matrix, 1) == (matrix.size, len(compact.entries) + len(compact.packed))
        assert stored_bytes(matrix, 4) == (4 * matrix.size, 4 * len(compact.entries) + len(compact.packed))


@pytest.mark.parametrize("zeros", [0, 1, 14, 15, 16, 29, 30, 31, 45, 300])
def test_every_gap(zeros):
    matrix = np.zeros((1, zeros + 3), np.int64)
    matrix[0, [0, zeros + 1]] = 5, 7
    compact = sparse(matrix)
    assert len(compact.codes) == 2 + zeros // SKIP
    assert np.array_equal(restored(compact.packed, len(compact.codes), compact.entries, matrix.shape), matrix)
