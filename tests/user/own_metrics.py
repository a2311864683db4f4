"""Metrics of a user: one that works, and faulty ones."""

import numpy as np


def share_of_first(prediction, target):
    """How often the first class is predicted."""
    return np.mean(prediction.argmax(axis=1) == 0)


def two_numbers(prediction, target):
    return prediction[0, :2]


def failing(prediction, target):
    raise KeyError("nothing")
