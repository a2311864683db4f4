"""Metrics equal their definition, for arrays and tensors, with and without a mask."""

import math

import numpy as np
import pytest
import torch

from unfading.metrics import mae, mase, naive_error, rmse

PREDICTION = np.array([[1.0, 2.0], [3.0, 4.0]])
TARGET = np.array([[1.5, 2.0], [1.0, 8.0]])  # errors 0.5, 0, 2, 4
FORMS = pytest.mark.parametrize("form", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])


@FORMS
def test_metrics_equal_their_definition(form):
    prediction, target = form(PREDICTION), form(TARGET)
    assert float(mae(prediction, target)) == pytest.approx(6.5 / 4, rel=1e-15)
    assert float(rmse(prediction, target)) == pytest.approx(math.sqrt(20.25 / 4), rel=1e-15)
    # One scale per channel.
    scale = form(np.array([0.5, 2.0]))
    assert float(mase(prediction, target, scale)) == pytest.approx((1 + 0 + 4 + 2) / 4, rel=1e-15)


@FORMS
def test_targets_outside_the_mask_do_not_count_and_may_be_nan(form):
    target = TARGET.copy()
    target[1, 1] = np.nan
    prediction, target, mask = form(PREDICTION), form(target), form(~np.isnan(target))
    assert float(mae(prediction, target, mask)) == pytest.approx(2.5 / 3, rel=1e-15)
    assert float(rmse(prediction, target, mask)) == pytest.approx(math.sqrt(4.25 / 3), rel=1e-15)
    assert float(mase(prediction, target, 2.0, mask)) == pytest.approx(1.25 / 3, rel=1e-15)
    assert math.isnan(float(mae(prediction, target)))


def test_gradients_pass_and_do_not_see_masked_targets():
    prediction = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    target = torch.tensor([0.0, 4.0, torch.nan])
    for metric in (mae, rmse, lambda p, y, m: mase(p, y, 2.0, m)):
        (gradient,) = torch.autograd.grad(metric(prediction, target, ~target.isnan()), prediction)
        assert gradient[2] == 0
        assert gradient[0] > 0 > gradient[1]


def test_the_scale_of_mase_is_the_error_of_the_seasonal_naive_forecast():
    series = [1.0, 5.0, 2.0, 7.0, 3.0]
    assert naive_error(series) == pytest.approx((4 + 3 + 5 + 4) / 4, rel=1e-15)
    assert naive_error(series, season=2) == pytest.approx((1 + 2 + 1) / 3, rel=1e-15)
    assert naive_error(torch.tensor(series), season=2) == naive_error(series, season=2)
    table = np.stack([series, np.multiply(series, 3)], axis=1)
    np.testing.assert_allclose(naive_error(table, 2), [naive_error(series, 2), 3 * naive_error(series, 2)], rtol=1e-15)


def test_missing_values_leave_the_scale_of_mase_to_the_other_pairs():
    assert naive_error([1.0, np.nan, 2.0, 7.0, 3.0]) == pytest.approx((5 + 4) / 2, rel=1e-15)


@FORMS
def test_shapes_that_differ_are_refused(form):
    with pytest.raises(ValueError, match=r"must have one shape; got \[2, 2\] and \[2\]"):
        mae(form(PREDICTION), form(TARGET[0]))


@pytest.mark.parametrize("series", [[2.0, 2.0, 2.0], [np.nan, 1.0, np.nan]])
def test_a_scale_of_zero_is_refused(series):
    with pytest.raises(ValueError, match="season=1 is not defined"):
        naive_error(series)


def test_a_series_shorter_than_its_season_is_refused():
    with pytest.raises(ValueError, match="needs a training series of more than 12 steps; got 3"):
        naive_error([1.0, 2.0, 4.0], season=12)
