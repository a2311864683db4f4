"""Windows of series: what they read and what they do not, their scales, masks and split, and the naive forecasts."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from unfading import Run
from unfading.own_data.forecast_preparation import ForecastPreparation
from unfading.own_data.forecast_task import HorizonSteps
from unfading.own_data.joined_series import JoinedSeries, WindowSizes, naive_forecasts
from unfading.own_data.time_series import read_time_series
from unfading.tasks.resident import CPU

DRAW = np.random.default_rng(0)
SERIES = [50.0 + 9.0 * DRAW.standard_normal((60, 2)), -3.0 + DRAW.standard_normal((45, 2))]
PAST = [DRAW.standard_normal((len(each), 1)) for each in SERIES]
FUTURE = [7.0 + 2.0 * DRAW.standard_normal((len(each) + 5, 3)) for each in SERIES]
OPTIONS = {"context": 8, "horizon": 4, "missing": "mask"}
SCALES = pytest.mark.parametrize("scale", ["series", "window", "none"])


def task(series=SERIES, past=PAST, future=FUTURE, **options):
    preparation = ForecastPreparation(**{**OPTIONS, **options})
    return preparation.make_task(read_time_series(series, "series", "mask"), past, future)


def windows(own, split):
    """All windows of a split in their order."""
    return own.present(own.part_on("test" if split == "test" else "train", CPU).take(own.rows(split)), lambda: None)


def origins(own, split):
    return own.part_on("test" if split == "test" else "train", CPU).x[own.rows(split)].numpy()


# -- the split ----------------------------------------------------------------------------------------------------------------


def test_no_target_is_in_two_parts_and_parts_follow_in_time():
    own = task(test=0.2)
    ends = own.data.series.starts
    for i in range(2):
        steps = {}
        for split in ("train", "valid", "test"):
            first = origins(own, split)
            first = first[(first >= ends[i]) & (first < ends[i + 1])]
            assert len(first)
            steps[split] = {int(o) + k for o in first for k in range(4)}
            # No window reads or forecasts another series.
            assert min(first) - 8 >= ends[i]
            assert max(first) + 4 <= ends[i + 1]
        assert max(steps["train"]) < min(steps["valid"])
        assert max(steps["valid"]) < min(steps["test"])


def test_every_window_that_fits_is_there():
    own = task(SERIES[0], None, None, validation=0.25)  # 60 steps, of which the last 15 validate
    assert origins(own, "train").tolist() == list(range(8, 45 - 4 + 1))
    assert origins(own, "valid").tolist() == list(range(45, 60 - 4 + 1))


def test_a_series_too_short_for_a_validation_part_trains():
    short = DRAW.standard_normal((14, 2))
    own = task([SERIES[0], short], None, None)
    series = own.data.series.series_of(origins(own, "valid"))
    assert set(series) == {0}
    assert 1 in own.data.series.series_of(origins(own, "train"))


# -- no leakage ---------------------------------------------------------------------------------------------------------------


@SCALES
def test_values_from_the_origin_on_are_in_no_input(scale):
    own = task(scale=scale, validation=0.0)
    series = own.data.series
    at = torch.tensor([30])
    before = own.window(own.scaled(series), at)
    changed = series._replace(values=series.values.copy())
    changed.values[30:] = 1e6
    after = own.window(own.scaled(changed), at)
    assert torch.equal(before.x, after.x)
    assert not torch.equal(before.target, after.target)
    # Nothing but masks, zeros and what is known in advance is read of the steps ahead.
    assert not before.x[8:, :, :6].any()


@SCALES
def test_the_validation_part_changes_no_training_window(scale):
    own = task(scale=scale)
    changed, known = [each.copy() for each in SERIES], [each.copy() for each in FUTURE]
    for part, covariates in zip(changed, known, strict=True):
        part[-len(part) // 5 :] += 100.0
        covariates[len(part) - len(part) // 5 :] += 100.0
    other = task(changed, future=known, scale=scale)
    ours, theirs = windows(own, "train"), windows(other, "train")
    assert torch.equal(ours.x, theirs.x)
    assert torch.equal(ours.target, theirs.target)
    assert not torch.equal(windows(own, "valid").target, windows(other, "valid").target)


# -- scales -------------------------------------------------------------------------------------------------------------------


@SCALES
def test_the_scale_inverts(scale):
    own = task(scale=scale)
    at = own.data.origins
    window = own.window(own.scaled(own.data.series), torch.from_numpy(at))
    back = own.unscaled(window.target, own.data.series.series_of(at), window)
    np.testing.assert_allclose(back, own.data.series.targets(at, own.sizes), rtol=1e-12, atol=1e-12)
    if scale == "series":
        assert window.target.std() == pytest.approx(1.0, rel=0.3)


def test_the_scale_of_a_series_is_that_of_its_training_part():
    own = task()
    for i, length in enumerate((48, 36)):
        both = np.hstack([SERIES[i], PAST[i]])[:length]
        assert own.mean[i] == pytest.approx(both.mean(axis=0).tolist(), rel=1e-12)
        assert own.spread[i] == pytest.approx(both.std(axis=0).tolist(), rel=1e-12)
    known = np.concatenate([FUTURE[0][:48], FUTURE[1][:36]])
    assert own.future_mean == pytest.approx(known.mean(axis=0).tolist(), rel=1e-12)


def test_a_window_is_scaled_by_what_it_reads():
    own = task(scale="window", past=None, future=None)
    window = own.window(own.scaled(own.data.series), torch.tensor([20, 33]))
    assert torch.allclose(window.x[:8, :, :2].mean(dim=0), torch.zeros(2, 2, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(window.x[:8, :, :2].std(dim=0, correction=0), torch.ones(2, 2, dtype=torch.float64), rtol=1e-12)


def test_constant_series_have_a_scale():
    for scale in ("series", "window"):
        batch = windows(task(np.full(40, 1e6), None, None, scale=scale), "train")
        assert batch.x[:8, :, 0].abs().max() == 0
        assert torch.isfinite(batch.target).all()


# -- masks --------------------------------------------------------------------------------------------------------------------


@SCALES
def test_values_under_the_mask_have_no_influence_and_do_not_count(scale):
    values = [each.copy() for each in SERIES]
    values[0][10:14, 0] = np.nan
    own = task(values, scale=scale)
    batch = windows(own, "train")
    assert torch.isfinite(batch.x).all()
    at = origins(own, "train").tolist()
    row = at.index(12)  # which reads steps 4 to 11
    assert batch.x[6:8, row, 0].tolist() == [0.0, 0.0]
    assert batch.x[:, row, 3].tolist() == [1.0] * 6 + [0.0] * 6
    assert batch.mask[:, row].tolist() == [[False, True], [False, True], [True, True], [True, True]]
    # A prediction under the mask changes neither the loss nor its gradient.
    prediction = torch.randn(batch.target.shape, dtype=torch.float64, requires_grad=True)
    loss = own.loss(prediction, batch)
    (gradient,) = torch.autograd.grad(loss, prediction)
    assert not gradient[~batch.mask].any()
    assert gradient[batch.mask].all()
    other = torch.where(batch.mask, prediction, 1e6)
    assert own.loss(other, batch) == loss
    assert own.metrics(other, batch)["mae"] == own.metrics(prediction, batch)["mae"]
    assert own.weight(batch) == int(batch.mask.sum())


def test_windows_without_a_value_to_read_or_to_forecast_are_left_out():
    values = SERIES[0].copy()
    values[10:25, 1] = np.nan  # no window reads a value of this channel from origins 18 to 25
    values[40:50] = np.nan
    own = task(values, None, None, validation=0.0)
    at = origins(own, "train")
    assert not set(range(18, 26)) & set(at)
    assert {17, 26} <= set(at)
    assert not set(range(40, 47)) & set(at)  # nothing to forecast
    assert not set(range(48, 51)) & set(at)  # nothing to read
    assert {39, 47, 51} <= set(at)


# -- the task -----------------------------------------------------------------------------------------------------------------


def test_the_guess_is_the_seasonal_naive_forecast():
    own = task(np.array(SERIES[0][:, 0]), None, None, season=4, test=0.2)
    errors = []
    for o in range(48, 60 - 4 + 1):
        errors += [abs(SERIES[0][o + k, 0] - SERIES[0][o + k - 4, 0]) / own.spread[0][0] for k in range(4)]
    assert own.guess == pytest.approx(np.mean(errors), rel=1e-12)
    batch = windows(own, "test")
    naive = torch.stack([batch.x[4 + k, :, 0] for k in range(4)]).unsqueeze(-1)
    assert own.metrics(naive, batch)["mae"].item() == pytest.approx(own.guess, rel=1e-12)


def test_a_run_of_series_is_json_and_its_key_covers_the_data():
    run = Run(task=task(), cell="GRU", hidden=4, epochs=1, backend="reference")
    again = Run.from_json(json.loads(json.dumps(run.to_json())))
    assert again == run
    assert again.key == run.key
    x = torch.randn(12, 3, 9)
    assert torch.equal(again.make_model()(x)[0], run.make_model()(x)[0])
    assert replace(run, seed=1).total() == run.total()
    with pytest.raises(ValueError, match="were arrays in memory"):
        again.total()
    changed = [each.copy() for each in FUTURE]
    changed[1][3, 2] += 1e-6
    assert replace(run, task=task(future=changed), task_options={}).key != run.key


def test_the_head_reads_the_last_steps_of_each_row():
    head = HorizonSteps(3, 2, 4)
    output = torch.randn(9, 2, 3)
    assert torch.equal(head(output), head.answer(output[-4:]))
    rows = head(output, torch.tensor([9, 6]))
    assert torch.allclose(rows[:, 0], head.answer(output[5:9, 0]))
    assert torch.allclose(rows[:, 1], head.answer(output[2:6, 1]))


# -- naive forecasts ----------------------------------------------------------------------------------------------------------


def test_seasonal_naive_equals_a_hand_computation():
    series = np.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [7.0]])
    at = np.array([3, 7])
    assert naive_forecasts(series, at, 5, 3)[..., 0].tolist() == [[1, 2, 3, 1, 2], [5, 6, 7, 5, 6]]
    assert naive_forecasts(series, at, 2, 1)[..., 0].tolist() == [[3, 3], [7, 7]]
    # Missing: an earlier season, and else the last known value.
    series[[4, 6]] = np.nan
    assert naive_forecasts(series, np.array([7]), 4, 3)[..., 0].tolist() == [[2, 6, 4, 2]]
    assert naive_forecasts(series, np.array([7]), 2, 1)[..., 0].tolist() == [[6, 6]]
    series[0] = np.nan
    assert naive_forecasts(series, np.array([3]), 3, 3)[..., 0].tolist() == [[3, 2, 3]]


def test_naive_forecasts_read_the_past_alone():
    series = DRAW.standard_normal((40, 2))
    series[DRAW.random((40, 2)) < 0.2] = np.nan
    changed = series.copy()
    changed[20:] = 1e6
    for season in (1, 3, 7):
        ours, theirs = (naive_forecasts(each, np.array([20]), 9, season) for each in (series, changed))
        assert np.array_equal(ours, theirs, equal_nan=True)


def test_naive_forecasts_of_joined_series_are_those_of_each():
    joined = JoinedSeries.join(SERIES, [np.empty((len(each), 0)) for each in SERIES])
    sizes = WindowSizes(8, 4, 2)
    both = joined.naive(np.array([30, 60 + 20, 40]), sizes, 5)
    assert np.array_equal(both[[0, 2]], naive_forecasts(SERIES[0], np.array([30, 40]), 4, 5))
    assert np.array_equal(both[[1]], naive_forecasts(SERIES[1], np.array([20]), 4, 5))


# -- refusals -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("series", "past", "future", "options", "sentence"),
    [
        (SERIES, PAST[:1], None, {}, "past_covariates are of 1 series; got 2 series"),
        (SERIES, [PAST[0][:5], PAST[1]], None, {}, r"past_covariates\[0\] has 5 steps, and its series 60"),
        (SERIES[0], None, FUTURE[0][:59], {}, "future_covariates has 59 steps; wanted at least 60"),
        (SERIES[0], None, np.full((60, 1), np.nan), {}, "future_covariates has NaN at row 0, column 0"),
        (SERIES[0][:9], None, None, {}, "no window to train on: a window takes 12 steps"),
        (SERIES[0][:14], None, None, {}, "too short for validation=0.2"),
        (SERIES[0], None, None, {"validation": 0.6, "test": 0.5}, "leave no step to train on"),
        (SERIES[0], None, None, {"scale": "log"}, "unknown scale 'log'"),
        (SERIES[0], None, None, {"horizon": 0}, "horizon must be at least 1"),
        (SERIES[0], None, None, {"context": 0}, "context must be at least 1"),
        (SERIES[0], None, None, {"season": 0}, "season must be at least 1"),
    ],
)
def test_wrong_series_are_named(series, past, future, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        task(series, past, future, **options)


@pytest.mark.parametrize(
    ("values", "missing", "sentence"),
    [
        ([1.0, np.nan, 2.0], "refuse", "series has NaN at row 1. .*missing='mask'"),
        (np.array([[1.0, 2.0], [3.0, np.nan]]), "refuse", "series has NaN at row 1, column 1"),
        ([np.ones(3), np.array([1.0, np.nan])], "refuse", r"series\[1\] has NaN at row 1"),
        (np.array([[1.0, np.inf]]), "mask", "at row 0, column 1"),
        ([np.ones((3, 2)), np.ones(3)], "mask", r"series\[1\] has 1 channels, and series\[0\] has 2"),
        ([], "mask", "series is an empty list"),
        (np.ones((2, 2, 2, 2)), "mask", "must be .steps. or .steps, channels."),
        ([1.0], "drop", "unknown option of missing 'drop'"),
    ],
)
def test_wrong_values_are_named(values, missing, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_time_series(values, "series", missing)


def test_text_is_refused():
    with pytest.raises(TypeError, match="series must hold"):
        read_time_series(np.array(["a", "b"]))
