"""A user's task with one fault ends with one sentence that names the method to blame, at its first batch or at a later one."""

import re
from pathlib import Path

import pytest

from tests.helpers.trained import small
from tests.user import broken_tasks as broken
from unfading import train
from unfading.errors import TaskError

USER = Path(broken.__file__)
KINDS = ["numbers to classes", "numbers to regression", "tokens to classes"]


def applies(kind, fault):
    if fault in broken.NUMBERS:
        return kind.startswith("numbers")
    if fault in broken.TOKENS:
        return kind.startswith("tokens")
    if fault in broken.REGRESSION:
        return kind.endswith("regression")
    return fault not in broken.LABELS or kind.endswith("classes")


def method(fault):
    """The method that a sentence about this fault must name."""
    for faults, name in (
        (broken.TOKENS, "(batch|encoder)"),
        (broken.FIELDS, "batch"),
        (broken.LOSSES, "loss"),
        (broken.METRICS, "metrics"),
        (broken.HEADS, "head"),
        (broken.ENCODERS, "encoder"),
    ):
        if fault in faults:
            return name
    return "input_size" if fault.startswith("input size") else fault.split()[0]


# Faults of a batch, of a loss or of metrics, which may begin at any batch of any split; and those of the whole task.
LATER = {**broken.FIELDS, **broken.LOSSES, **broken.METRICS}
WHOLE = [*broken.HEADS, *broken.ENCODERS, *broken.OTHERS]
FIRST = [(kind, fault, 0, "train") for kind in KINDS for fault in [*LATER, *WHOLE] if applies(kind, fault)]
# Faults that do no harm: in training nothing reads the metrics, and an evaluation needs no gradient.
HARMLESS = {
    "train": {*broken.METRICS},
    "valid": {"loss detached", "loss constant", "loss of other weights"},
    "test": {"loss detached", "loss constant", "loss of other weights"},
}
# Faults that only the first batch shows: later ones are not checked.
UNCHECKED = {
    *("mask of floats", "mask of another shape", "target of another shape", "loss of other weights", "loss an integer"),
    *("loss of one entry", "metric not named", "x on another device", "x inf"),
}
PLACES = ((3, "train"), (0, "valid"), (2, "valid"), (0, "test"), (1, "test"))
REST = [
    (kind, fault, at, split)
    for kind in KINDS
    for fault in LATER
    for at, split in PLACES
    if applies(kind, fault) and fault not in HARMLESS[split] and ((at, split) == (0, "valid") or fault not in UNCHECKED)
]


def broken_run(kind, fault, at, split, **fields):
    options = {"kind": kind, "fault": fault, "at": at, "split": split}
    return small(task=f"{USER}:Broken", task_options=options, steps=9, valid_every=3, valid_batches=3, **fields)


def check(kind, fault, at, split, folder):
    with pytest.raises(ValueError) as caught:
        train(broken_run(kind, fault, at, split), folder)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    assert len(sentence) < 500
    assert isinstance(caught.value, TaskError), sentence
    assert re.search(rf"Broken\.{method(fault)}\b", sentence)
    if fault in LATER:
        assert f"split {split!r}, batch {at}" in sentence
    return sentence


# Each fault once; with the other kinds of tasks only in the long tests.
ONCE = list({fault: (kind, fault, at, split) for kind, fault, at, split in reversed(FIRST)}.values())
OTHER_KINDS = [pytest.param(*case, marks=pytest.mark.long) for case in FIRST if case not in ONCE]


@pytest.mark.parametrize(("kind", "fault", "at", "split"), ONCE + OTHER_KINDS, ids=lambda value: str(value).replace(" ", "_"))
@pytest.mark.sample(30)
def test_a_fault_is_named_at_the_first_batch(kind, fault, at, split, tmp_path):
    check(kind, fault, at, split, tmp_path)
    assert list(tmp_path.iterdir()) == []


SAMPLE = [case for i, case in enumerate(REST) if i % 15 == 0]


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: "-".join(map(str, case)).replace(" ", "_"))
@pytest.mark.sample(16)
def test_a_fault_is_named_at_a_later_batch(case, tmp_path):
    check(*case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", REST, ids=lambda case: "-".join(map(str, case)).replace(" ", "_"))
def test_every_fault_is_named_at_every_place(case, tmp_path):
    check(*case, tmp_path)


def test_the_family_is_large():
    assert len(FIRST) + len(broken.CELLS) >= 136


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tasks_without_a_fault_are_trained(kind):
    record = train(broken_run(kind, "", 0, "train"))
    assert record["status"] == "finished"
    assert record["test"]["score"] is not None


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("fault", broken.CELLS)
@pytest.mark.sample(8)
def test_a_fault_of_a_cell_is_one_sentence(fault, backend, tmp_path):
    with pytest.raises((ValueError, TypeError)) as caught:
        train(small(cell=f"{USER}:BrokenCell", cell_options={"fault": fault}, steps=3, backend=backend), tmp_path)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert "BrokenCell" in sentence
    assert list(tmp_path.iterdir()) == []


SENTENCES = {
    (
        "numbers to classes",
        "label too large",
    ): "Broken.batch returned the label 3 at row 1, and the head has 3 outputs: labels must "
    "lie in 0..2 (split 'train', batch 0).",
    (
        "tokens to classes",
        "token negative",
    ): "Broken.batch returned the token -1 at step 2, row 1, and the encoder has 7 symbols: "
    "tokens must lie in 0..6 (split 'train', batch 0).",
    (
        "numbers to classes",
        "x nan",
    ): "the data are not finite: Broken.batch returned x with nan at step 2, row 1, feature 0 (split "
    "'train', batch 0). Remove or replace such values.",
    (
        "numbers to regression",
        "target inf",
    ): "the data are not finite: Broken.batch returned a target with -inf at row 1, column 0 "
    "(split 'train', batch 0). Remove or replace such values.",
    ("numbers to classes", "length negative"): "Broken.batch returned the length -2 for row 2; lengths must lie in 1..5 (split "
    "'train', batch 0).",
}


@pytest.mark.parametrize(("kind", "fault"), SENTENCES)
def test_the_sentence_says_where(kind, fault, tmp_path):
    assert check(kind, fault, 0, "train", tmp_path) == SENTENCES[kind, fault]
