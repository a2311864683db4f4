"""The forecaster: forms of series, forecasts, backtests and scikit-learn's contract as far as series allow it."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, TimeSeriesSplit
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

import unfading
from unfading.estimators import RecurrentForecaster
from unfading.metrics import mae, mase, naive_error, rmse

DRAW = np.random.default_rng(0)
TIME = np.arange(160)
WAVE = 100.0 + 10.0 * np.sin(2 * np.pi * TIME / 8) + DRAW.standard_normal(160)
TABLE = np.stack([WAVE, -3.0 * WAVE + 5.0], axis=1)
FAST = {"cell": "GRU", "hidden": 8, "epochs": 3, "rate": 0.03, "batch": 8, "horizon": 4, "context": 8, "season": 8}
FAST["settings"] = {"backend": "reference"}  # nothing has to be compiled
EXACT = {**FAST, "hidden": 3, "epochs": 1, "batch": 32, "settings": {"dtype": "float64", "backend": "reference"}}


@pytest.fixture(scope="module")
def model():
    return RecurrentForecaster(**{**FAST, "epochs": 12}).fit(WAVE[:120])


@pytest.fixture(scope="module")
def table_model():
    return RecurrentForecaster(**EXACT).fit([TABLE[:100], TABLE[:70]])


# -- forecasts ----------------------------------------------------------------------------------------------------------------


def test_a_forecaster_learns_a_season_and_answers_in_its_units(model):
    scores = model.backtest(WAVE).scores
    assert scores["GRU"]["mae"] < 0.5 * scores["naive"]["mae"]
    assert model.predict().shape == (4,)
    assert np.abs(model.predict() - WAVE[120:124]).max() < 8.0


def test_the_future_changes_no_forecast(model):
    changed = WAVE.copy()
    changed[140:] = 1e5
    ours, theirs = (model.backtest(each, start=132) for each in (WAVE, changed))
    until = ours.first_step <= 140
    assert until.sum() == 3
    assert np.array_equal(ours.forecasts["GRU"][until], theirs.forecasts["GRU"][until])
    assert np.array_equal(ours.forecasts["seasonal naive"][until], theirs.forecasts["seasonal naive"][until])
    assert not np.array_equal(ours.forecasts["GRU"][~until], theirs.forecasts["GRU"][~until])


def test_a_forecast_reads_the_context_and_nothing_before_it(model):
    changed = WAVE[:120].copy()
    changed[: 120 - 8] = -1e4
    assert np.array_equal(model.predict(changed), model.predict(WAVE[:120]))
    changed[120 - 8] += 1.0
    assert not np.array_equal(model.predict(changed), model.predict(WAVE[:120]))


def test_backtest_forecasts_are_those_of_predict(table_model):
    result = table_model.backtest([TABLE, TABLE[:100]], stride=7)
    assert len(result.target) == 9 + 4
    for i in (0, 5, 10):
        end = result.first_step[i]
        series = result.window_series[i]
        alone = table_model.predict([TABLE[:end], TABLE[:end]])[series]
        np.testing.assert_allclose(result.forecasts["GRU"][i], alone, rtol=1e-12)


@pytest.mark.parametrize("scale", ["window", "none"])
def test_forecasts_of_many_series_equal_those_one_by_one(scale):
    series = [TABLE[:70], TABLE[20:63], TABLE[40:140]]
    model = RecurrentForecaster(**EXACT, scale=scale).fit(series)
    for each, forecast in zip(series, model.predict(), strict=True):
        np.testing.assert_allclose(model.predict(each), forecast, rtol=1e-12)


def test_each_series_keeps_its_scale(table_model):
    forecasts = table_model.predict()
    swapped = table_model.predict([TABLE[:70], TABLE[:100]])
    assert not np.allclose(swapped[1], forecasts[0], rtol=1e-6)  # the same values, by the scale of the other series


FORMS = [
    (lambda x: x, "numpy"),
    (lambda x: torch.from_numpy(x), "torch"),
    (lambda x: x[:, :].astype(np.float64).copy(order="F"), "fortran"),
]


@pytest.mark.parametrize("form", [form for form, _ in FORMS], ids=[name for _, name in FORMS])
def test_every_form_of_a_table_gives_the_same_forecast(form):
    expected = RecurrentForecaster(**EXACT).fit(TABLE[:80]).predict()
    assert expected.shape == (4, 2)
    assert np.array_equal(RecurrentForecaster(**EXACT).fit(form(TABLE[:80])).predict(), expected)


def test_tables_of_pandas_are_read_and_columns_named():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(TABLE[:80], columns=["load", "price"])
    expected = RecurrentForecaster(**EXACT).fit(TABLE[:80]).predict()
    assert np.array_equal(RecurrentForecaster(**EXACT).fit(frame).predict(), expected)
    assert RecurrentForecaster(**EXACT).fit(frame["load"]).predict().shape == (4,)
    frame.iloc[7, 1] = np.nan
    with pytest.raises(ValueError, match=r"series has NaN at row 7, column 1 \('price'\)"):
        RecurrentForecaster(**EXACT).fit(frame)


def test_tables_of_polars_are_read():
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"load": TABLE[:80, 0], "price": TABLE[:80, 1]})
    expected = RecurrentForecaster(**EXACT).fit(TABLE[:80]).predict()
    assert np.array_equal(RecurrentForecaster(**EXACT).fit(frame).predict(), expected)


def test_lists_give_lists_and_vectors_vectors():
    vectors = RecurrentForecaster(**EXACT).fit([WAVE[:60], WAVE[:50].tolist()]).predict()
    assert [each.shape for each in vectors] == [(4,), (4,)]
    stacked = RecurrentForecaster(**EXACT).fit(np.stack([TABLE[:60], TABLE[60:120]])).predict()
    assert [each.shape for each in stacked] == [(4, 2), (4, 2)]
    assert RecurrentForecaster(**EXACT).fit(WAVE[:60].tolist()).predict().shape == (4,)


# -- covariates and missing values --------------------------------------------------------------------------------------------


def test_what_is_known_in_advance_is_used():
    shocks = (DRAW.random(400) < 0.3).astype(float)
    series = 20.0 * shocks + 0.1 * DRAW.standard_normal(400)
    options = {**FAST, "season": 1, "epochs": 12, "batch": 32}
    model = RecurrentForecaster(**options).fit(series[:340], future_covariates=shocks[:340])
    scores = model.backtest(series, future_covariates=shocks).scores
    assert scores["GRU"]["mae"] < 0.2 * scores["naive"]["mae"]
    ahead = model.predict(future_covariates=shocks[:344])
    assert np.abs(ahead - series[340:344]).max() < 5.0
    turned = shocks[:344].copy()
    turned[342] = 1 - turned[342]
    assert np.abs(model.predict(future_covariates=turned) - ahead)[2] > 10.0


def test_covariates_of_the_past_are_read_up_to_the_origin():
    past = DRAW.standard_normal((100, 2))
    model = RecurrentForecaster(**EXACT).fit(WAVE[:80], past_covariates=past[:80])
    forecast = model.predict()
    assert np.array_equal(model.predict(WAVE[:80], past_covariates=past[:80]), forecast)
    changed = past[:80].copy()
    changed[79] += 1.0
    assert not np.array_equal(model.predict(WAVE[:80], past_covariates=changed), forecast)
    with pytest.raises(ValueError, match="fitted with 2 past_covariates; got 0"):
        model.predict(WAVE[:80])


def test_future_covariates_of_fit_serve_predict_if_they_reach_far_enough():
    known = np.cos(TIME / 3)
    model = RecurrentForecaster(**EXACT).fit(WAVE[:80], future_covariates=known[:84])
    assert np.array_equal(model.predict(), model.predict(future_covariates=known[:84]))
    short = RecurrentForecaster(**EXACT).fit(WAVE[:80], future_covariates=known[:83])
    with pytest.raises(ValueError, match="has 83 steps; wanted at least 84: the 80 of the series and the 4 that are forecast"):
        short.predict()


def test_missing_values_are_masked_where_that_is_allowed():
    holes = WAVE[:120].copy()
    holes[DRAW.random(120) < 0.2] = np.nan
    with pytest.raises(ValueError, match=r"series has NaN at row .*missing='mask'"):
        RecurrentForecaster(**FAST).fit(holes)
    model = RecurrentForecaster(**{**FAST, "epochs": 12}, missing="mask").fit(holes)
    scores = model.backtest().scores
    assert all(np.isfinite(list(each.values())).all() for each in scores.values())
    assert scores["GRU"]["mae"] < scores["naive"]["mae"]
    empty = WAVE[:120].copy()
    empty[-8:] = np.nan
    with pytest.raises(ValueError, match="series has no known value in column 0 in its last 8 steps"):
        model.predict(empty)


# -- backtests ----------------------------------------------------------------------------------------------------------------


def test_scores_are_the_metrics_over_all_windows(model):
    result = model.backtest(WAVE)
    assert result.first_step.tolist() == list(range(120, 157, 4))
    target = np.stack([WAVE[o : o + 4] for o in result.first_step])[..., None]
    seasonal = np.stack([WAVE[o - 8 : o - 4] for o in result.first_step])[..., None]
    scale = naive_error(WAVE[:120], 8)
    assert np.array_equal(result.forecasts["seasonal naive"], seasonal)
    for name, forecast in result.forecasts.items():
        expected = {"mae": mae(forecast, target), "rmse": rmse(forecast, target), "mase": mase(forecast, target, scale)}
        assert result.scores[name] == pytest.approx(expected, rel=1e-12)
    assert model.score(WAVE) == pytest.approx(-result.scores["GRU"]["mase"], rel=1e-12)


def test_a_backtest_does_not_score_what_was_trained_on(model):
    assert model.backtest(WAVE).first_step.min() == 120
    assert model.backtest().first_step.min() == 96  # the last fifth of 120 steps validates
    assert model.backtest(WAVE + 1.0).first_step.min() == 8  # another series
    assert model.backtest(WAVE, start=130).first_step.min() == 130
    with pytest.raises(ValueError, match="have no window to forecast from step 120 on"):
        model.backtest(WAVE[:122])


def test_a_backtest_without_a_validation_part_needs_a_series():
    model = RecurrentForecaster(**EXACT, validation=0.0).fit(WAVE[:60])
    with pytest.raises(ValueError, match="no validation part"):
        model.backtest()


def test_without_a_season_there_is_one_naive_rule_and_mase_may_be_undefined():
    model = RecurrentForecaster(**{**EXACT, "season": 1}).fit(np.ones(60))
    result = model.backtest()
    assert list(result.scores) == ["GRU", "naive"]
    assert result.scores["naive"]["mae"] == 0.0
    assert np.isnan(result.scores["GRU"]["mase"])
    with pytest.raises(ValueError, match="MASE is not defined"):
        model.score(np.ones(70))


def test_a_backtest_prints_and_saves(model, tmp_path):
    result = model.backtest(WAVE)
    lines = str(result).splitlines()
    assert lines[0].split() == ["MAE", "RMSE", "MASE"]
    assert [re.split(r"\s{2,}", line)[0] for line in lines[1:]] == ["GRU", "naive", "seasonal naive"]
    with pytest.raises(ValueError, match=r"as .html, .png or .svg"):
        result.save(tmp_path / "backtest.pdf")
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    picture = result.save(tmp_path / "backtest.svg").read_text()
    assert picture.startswith("<svg")
    assert all(f">{name}<" in picture for name in ("actual", "GRU", "naive", "seasonal naive"))


@pytest.mark.long
def test_the_page_of_a_backtest_has_every_score(model, tmp_path):
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    result = model.backtest(WAVE)
    page = result.save(tmp_path / "backtest.html").read_text()
    for name, scores in result.scores.items():
        assert f"{name} {scores['mase']:.4g}" in page
        assert f"<td>{scores['mae']:.4g}</td>" in page
    assert result.save(tmp_path / "backtest.png").read_bytes().startswith(b"\x89PNG")


# -- scikit-learn and runs ----------------------------------------------------------------------------------------------------

# Checks of scikit-learn's that cannot hold, because the rows of a table are steps of one series, with the reason.
NOT_HELD = {
    "check_fit_score_takes_y": "it scores the training series, of which every step was trained on",
    "check_pipeline_consistency": "it scores the training series, of which every step was trained on",
    "check_methods_sample_order_invariance": "rows are steps in time, whose order matters",
    "check_methods_subset_invariance": "rows are steps in time, and a forecast reads several",
    "check_fit1d": "one dimension is a series",
    "check_fit2d_predict1d": "one dimension is a series",
    "check_fit2d_1sample": "the message is about steps, and the check wants the word sample",
    "check_estimators_empty_data_messages": "the message is about steps and channels, and the check wants the word feature",
    "check_n_features_in_after_fitting": "the message is about channels, and the check wants the word features",
    "check_complex_data": "complex numbers are a TypeError here, as for all arrays of the library",
}


def a_forecaster():
    return RecurrentForecaster("Elman", hidden=2, epochs=1, validation=0.0, context=4, settings={"backend": "reference"})


@pytest.mark.long
@parametrize_with_checks([a_forecaster()], expected_failed_checks=lambda estimator: NOT_HELD)
@pytest.mark.filterwarnings("ignore")
def test_the_contract_of_scikit_learn_is_kept_as_far_as_series_allow(estimator, check):
    check(estimator)


QUICK = {
    "check_dict_unchanged",
    "check_estimator_cloneable",
    "check_estimators_nan_inf",
    "check_get_params_invariance",
    "check_n_features_in",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_set_params",
}


@pytest.mark.filterwarnings("ignore")
def test_the_quick_part_of_the_contract_is_kept():
    checks = [pair for pair in estimator_checks_generator(a_forecaster()) if pair[1].func.__name__ in QUICK]
    assert {check.func.__name__ for _, check in checks} == QUICK
    for estimator, check in checks:
        check(estimator)


def test_clones_and_pickles_forecast_the_same(model):
    params = model.get_params()
    assert clone(model).get_params() == params
    assert RecurrentForecaster(**params).get_params() == params
    again = clone(model).fit(WAVE[:120])
    assert np.array_equal(again.predict(), model.predict())
    assert np.array_equal(pickle.loads(pickle.dumps(model)).predict(), model.predict())
    assert np.array_equal(copy.deepcopy(model).predict(), model.predict())


def test_a_search_over_splits_in_time():
    search = GridSearchCV(
        RecurrentForecaster(**{**EXACT, "season": 1}), {"hidden": [2, 4]}, cv=TimeSeriesSplit(2, test_size=40)
    ).fit(WAVE)
    assert search.best_params_["hidden"] in (2, 4)
    assert np.isfinite(search.best_score_)
    assert search.predict(WAVE).shape == (4,)


def test_a_run_is_stored_and_is_not_trained_again(tmp_path):
    first = RecurrentForecaster(**EXACT).fit(WAVE[:80], where=tmp_path)
    assert first.record_["measure"] == "mae"
    assert first.record_["guess"] > 0
    stored = tmp_path / first.model_.run.key / "record.json"
    before = stored.read_bytes()
    again = RecurrentForecaster(**EXACT).fit(WAVE[:80], where=tmp_path)
    assert stored.read_bytes() == before
    assert np.array_equal(again.predict(), first.predict())


def test_a_stored_run_forecasts_series_that_are_given(tmp_path):
    first = RecurrentForecaster(**EXACT, missing="mask").fit(TABLE[:80], past_covariates=WAVE[:80], where=tmp_path)
    folder = tmp_path / first.model_.run.key
    again = RecurrentForecaster.load(folder, missing="mask")
    given = {"series": TABLE[:90], "past_covariates": WAVE[:90]}
    assert np.array_equal(again.predict(**given), first.predict(**given))
    assert again.backtest(**given, start=80).scores == first.backtest(**given).scores
    for name in ("horizon", "context", "season", "scale", "missing", "hidden", "cell"):
        assert again.get_params()[name] == first.get_params()[name]
    with pytest.raises(ValueError, match="does not hold its training series"):
        again.predict()
    with pytest.raises(ValueError, match=r"RecurrentForecaster\.load"):
        unfading.load(folder).predict(TABLE[None])
    other = unfading.fit(TABLE[:40, None], np.arange(40) % 2, "Elman", hidden=2, steps=2, where=tmp_path, backend="reference")
    with pytest.raises(ValueError, match="a run of the task classification"):
        RecurrentForecaster.load(tmp_path / other.run.key)


def test_wrong_calls_are_named(table_model):
    with pytest.raises(ValueError, match="fitted on series with 2 channels; got 1"):
        table_model.predict([WAVE, WAVE])
    with pytest.raises(ValueError, match="fitted on 2 series, each with its own scale; got 1"):
        table_model.predict(TABLE)
    with pytest.raises(ValueError, match=r"series\[1\] has 5 steps; a forecast reads the last 8"):
        table_model.predict([TABLE, TABLE[:5]])
    with pytest.raises(ValueError, match="past_covariates belong to a series that is given"):
        table_model.predict(past_covariates=TABLE)
    with pytest.raises(ValueError, match="stride must be at least 1"):
        table_model.backtest(stride=0)
