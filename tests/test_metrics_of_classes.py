"""Metrics of classes: accuracy, F1 and confusion matrix, against scikit-learn and by hand."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics

from unfading import metrics

DRAW = np.random.default_rng(0)
TARGET = DRAW.integers(0, 4, (6, 9))
SCORES = DRAW.standard_normal((6, 9, 5))  # of a fifth class, too, which is no target
PREDICTED = SCORES.argmax(axis=-1)


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor])
@pytest.mark.parametrize("prediction", [PREDICTED, SCORES], ids=["classes", "scores"])
def test_metrics_of_classes_are_those_of_scikit_learn(prediction, convert):
    arguments = convert(prediction), convert(TARGET)
    true, predicted = TARGET.ravel(), PREDICTED.ravel()
    assert metrics.accuracy(*arguments) == pytest.approx(sklearn_metrics.accuracy_score(true, predicted))
    assert metrics.f1(*arguments) == pytest.approx(sklearn_metrics.f1_score(true, predicted, average="macro"))
    expected = sklearn_metrics.confusion_matrix(true, predicted, labels=range(5))
    assert np.array_equal(metrics.confusion_matrix(*arguments), expected)


def test_a_class_that_nobody_names_does_not_count_in_f1():
    scores = np.eye(3)[[0, 0, 1, 1]]
    assert metrics.f1(scores, np.array([0, 0, 1, 1])) == 1.0


def test_labels_may_be_words():
    prediction, target = np.array(["up", "up", "down"]), np.array(["up", "down", "down"])
    assert metrics.confusion_matrix(prediction, target).tolist() == [[1, 1], [0, 1]]
    assert metrics.accuracy(prediction, target) == pytest.approx(2 / 3)


def test_masked_targets_do_not_count():
    mask = DRAW.random(TARGET.shape) < 0.5
    for function in (metrics.accuracy, metrics.f1):
        assert function(SCORES, TARGET, mask) == pytest.approx(function(SCORES[mask], TARGET[mask]))
    outside = np.where(mask, TARGET, -1)  # e.g. padding
    assert metrics.confusion_matrix(SCORES, outside, mask).sum() == mask.sum()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SCORES, TARGET[:3]), "prediction must have the shape of the target, .3, 9."),
        ((SCORES, TARGET + 2), r"targets must be whole numbers in 0\.\.4"),
        ((SCORES, TARGET, TARGET < 0), "there is no target that counts"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, message):
    for function in (metrics.accuracy, metrics.f1, metrics.confusion_matrix):
        with pytest.raises(ValueError, match=message):
            function(*arguments)
