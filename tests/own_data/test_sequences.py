"""Sequences from arrays, tables, tensors and lists are the same numbers, and what cannot be read is named."""

import numpy as np
import pytest
import torch

from unfading.own_data.sequences import content_hash, read_sequences
from unfading.own_data.targets import class_weights, read_labels, read_numbers

X = np.arange(24, dtype=np.float64).reshape(4, 3, 2)


class Table:
    """What pandas' and polars' tables have in common."""

    def __init__(self, values, columns):
        self.values, self.columns = values, columns

    def to_numpy(self):
        return self.values


@pytest.mark.parametrize(
    "form",
    [X, X.tolist(), torch.from_numpy(X), torch.from_numpy(X).requires_grad_(), list(X), [torch.from_numpy(x) for x in X]],
    ids=["array", "lists", "tensor", "gradient", "list of arrays", "list of tensors"],
)
def test_every_form_gives_the_same_sequences(form):
    sequences = read_sequences(form)
    assert sequences.x.dtype == np.float32
    assert sequences.lengths is None
    assert np.array_equal(sequences.x, X)


def test_a_table_has_one_row_per_sequence_and_one_channel():
    assert np.array_equal(read_sequences(Table(X[:, :, 0], ["a", "b", "c"])).x, X[:, :, :1])


def test_lists_of_any_lengths_are_padded_at_their_end():
    x, lengths = read_sequences([np.ones((2, 3)), np.full((4, 3), 2.0)])
    assert lengths.tolist() == [2, 4]
    assert np.array_equal(x[0], [[1] * 3] * 2 + [[0] * 3] * 2)
    assert np.array_equal(x[1], np.full((4, 3), 2))
    assert read_sequences([np.ones(2), np.ones(5)]).x.shape == (2, 5, 1)


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_tables_of_a_package_are_read(package):
    table = pytest.importorskip(package).DataFrame({"a": [1.0, 2.0], "b": [3.0, float("nan")]})
    with pytest.raises(ValueError, match=r"X has NaN at row 1, column 1 \('b'\)"):
        read_sequences(table)
    assert read_sequences(table[["a"]]).x.tolist() == [[[1.0]], [[2.0]]]


def spoilt(*place, value=np.nan):
    values = X.copy()
    values[place] = value
    return values


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (spoilt(2, 1, 0), "X has NaN at row 2, step 1, channel 0. "),
        (spoilt(2, 1, 0, value=np.inf), "X has inf, too large for float32"),
        (spoilt(slice(1, 3), 1, 0), "X has NaN at row 1, step 1, channel 0; 1 more values are not finite"),
        (Table(spoilt(3, 1)[:, :, 0], ["a", "b", "c"]), r"X has NaN at row 3, column 1 \('b'\)"),
        ([np.ones((2, 1)), np.array([[1.0], [np.nan], [2.0]])], r"X\[1\] has NaN at step 1, channel 0"),
        ([np.ones((2, 1)), np.ones((3, 2))], r"X\[1\] must be \[steps, 1\], with as many channels as X\[0\]"),
        ([np.ones((2, 1)), np.ones((0, 1))], "at least one step; got shape"),
        (np.ones(3), r"got shape \[3\]. For one sequence"),
        (np.ones((0, 3, 2)), "holds no sequence"),
        (np.array([["a", "b"]]), "X must hold real numbers"),
        (np.array([[1j, 2]]), "X must hold real numbers"),
        (1e300 * np.ones((2, 2)), "too large for float32"),
    ],
)
def test_what_cannot_be_read_is_named(given, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        read_sequences(given)


def test_a_value_that_is_no_number_is_named_with_its_column():
    class Table:
        """A table as pandas has it: a column of objects makes all values objects."""

        columns = ("a", "b")

        def __init__(self, value):
            self.value = value

        def to_numpy(self):
            return np.array([[1.0, 2.0], [3.0, self.value]], dtype=object)

    with pytest.raises(TypeError, match=r"X must hold numbers; got a value at row 1, column 'b' that is none: .*'x'"):
        read_sequences(Table("x"))
    missing = type("NAType", (), {})()
    with pytest.raises(ValueError, match=r"X has NaN at row 1, column 1 \('b'\)"):
        read_sequences(Table(missing))


def test_the_hash_covers_numbers_shape_and_dtype():
    hashes = {
        content_hash([X]),
        content_hash([X.reshape(3, 4, 2)]),
        content_hash([X.astype(np.float32)]),
        content_hash([X, None]),
        content_hash([spoilt(0, 0, 0, value=7.0)]),
    }
    assert len(hashes) == 5
    assert content_hash([X]) == content_hash([np.asfortranarray(X)])


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (["b", "a", "b"], ("a", "b")),
        ([3, 1, 3], (1, 3)),
        (np.array([True, False, True]), (False, True)),
        (torch.tensor([2, 0, 2]), (0, 2)),
        (np.array(["y", "x", "y"], dtype=object), ("x", "y")),
    ],
)
def test_labels_are_sorted_and_of_the_users_type(y, classes):
    labels = read_labels(y)
    assert labels.classes == classes
    assert [type(each) for each in labels.classes] == [type(each) for each in classes]
    assert labels.rows.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("y", "sentence"),
    [
        (np.array(["a", None], dtype=object), "no label at row 1"),
        (np.array([1.0, np.nan]), "NaN at row 1"),
        (np.array(["a", 1], dtype=object), "mixes labels of int and str"),
        (np.ones((2, 2)), "one label per row"),
    ],
)
def test_wrong_labels_are_named(y, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        read_labels(y)


def test_weights_of_classes():
    labels = read_labels(["a", "a", "a", "b"])
    assert class_weights("balanced", labels) == pytest.approx((4 / 6, 2.0))
    assert class_weights({"b": 5.0}, labels) == (1.0, 5.0)
    assert class_weights(None, labels) == ()
    with pytest.raises(ValueError, match="class_weight names 'c', which is no label of y"):
        class_weights({"c": 1.0}, labels)
    with pytest.raises(ValueError, match="class_weight must have numbers of at least 0; got -1 for 'b'"):
        class_weights({"b": -1}, labels)
    with pytest.raises(ValueError, match="class_weight must be 'balanced'"):
        class_weights("even", labels)


def test_numbers_have_a_column_per_output():
    assert read_numbers([1.0, 2.0]).shape == (2, 1)
    assert read_numbers(np.ones((2, 3))).shape == (2, 3)
    with pytest.raises(ValueError, match="y has NaN at row 1, output 2"):
        read_numbers([[1.0, 2.0, 3.0], [1.0, 2.0, np.nan]])
