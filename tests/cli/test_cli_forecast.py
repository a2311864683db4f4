"""`unfading train --data FILE --forecast` and `unfading predict`: from a file of series to the steps after its end."""

import json

import numpy as np
import pytest

from tests.helpers.command import run

DRAW = np.random.default_rng(0)
STEPS, AHEAD, SEASON = 200, 4, 12
LOAD = np.round(100 + 20 * np.sin(2 * np.pi * np.arange(STEPS) / SEASON) + DRAW.standard_normal((2, STEPS)), 3)  # of two sites
TEMPERATURE = np.round(DRAW.standard_normal((2, STEPS)), 3)
WEEKEND = (np.arange(STEPS + AHEAD) // SEASON % 7 >= 5).astype(int)
FAST = ("--cell", "GRU", "--hidden", "4", "--epochs", "3")
COLUMNS = ("--series", "site", "--target", "load", "--past-covariates", "temperature", "--future-covariates", "weekend")
FORECAST = ("--forecast", "--horizon", str(AHEAD), "--season", str(SEASON), *COLUMNS)


def write(path, ahead=AHEAD):
    lines = ["date,site,load,temperature,weekend"]
    for site, load, temperature in zip("ab", LOAD, TEMPERATURE, strict=True):
        lines += [f"2020-{t},{site},{load[t]},{temperature[t]},{WEEKEND[t]}" for t in range(STEPS)]
        lines += [f"2020-{t},{site},,,{WEEKEND[t]}" for t in range(STEPS, STEPS + ahead)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecast")
    command = ("train", "--data", str(write(folder / "load.csv")), *FORECAST, *FAST, "--runs", str(folder / "runs"))
    answer = run(*command)
    assert answer.returncode == 0, answer.stderr
    return folder, command, answer


def key_folder(folder):
    return next((folder / "runs" / "load").glob("*/record.json")).parent


def naive_errors(season):
    """Absolute errors of the naive forecasts of all windows of the last fifth of each series."""
    errors = []
    for load in LOAD:
        for first in range(STEPS - STEPS // 5, STEPS - AHEAD + 1):
            guess = [load[first - season + k % season] for k in range(AHEAD)]
            errors.append(np.abs(load[first : first + AHEAD] - guess))
    return np.stack(errors)


def test_what_was_read_is_told_with_the_flag_that_changes_it(trained):
    text = " ".join(trained[2].stderr.split())
    assert "2 series by 'site', 400 steps, one per row in the order of the file; forecast: load" in text
    assert "past covariates: temperature; future covariates: weekend; not read: date" in text
    assert "forecasting 4 steps (--horizon) from 24 (--context), season 12 (--season)" in text
    assert "74 validate (--validation 0.2), 74 test (--test 0.2), in the order of time" in text
    assert "standardised by the training part of each series (--scale series)" in text


def test_naive_forecasts_of_the_same_windows_are_beside_the_scores(trained):
    lines = [line.split() for line in trained[2].stdout.splitlines()]
    heading = lines.index(["MAE", "RMSE", "MASE"])
    assert lines[heading - 1][:5] == ["forecasts", "of", "74", "test", "windows,"]
    model, naive, seasonal = lines[heading + 1 : heading + 4]
    assert (model[0], naive[0], seasonal[:2]) == ("GRU", "naive", ["seasonal", "naive"])
    for scores, season in ((naive[1:], 1), (seasonal[2:], SEASON)):
        errors = naive_errors(season)
        assert float(scores[0]) == pytest.approx(errors.mean(), rel=1e-3)
        assert float(scores[1]) == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-3)


def test_scores_of_standardised_values_are_called_so(trained, tmp_path):
    _, command, answer = trained
    (line,) = [line for line in answer.stdout.splitlines() if "; a guess has" in line]
    assert line.endswith("(standardised values)")
    options = ("--scale", "none", "--horizon", "1", "--epochs", "1", "--runs", str(tmp_path))
    unscaled = run(*command[:3], "--forecast", *COLUMNS, *FAST[:4], *options)
    assert "; a guess has" in unscaled.stdout, unscaled.stderr
    assert "(standardised values)" not in unscaled.stdout


def test_the_trained_forecaster_is_diagnosed(trained):
    answer = run("diagnose", "--run", str(key_folder(trained[0])), "--batch", "2")
    assert answer.returncode in (0, 1), answer.stderr
    assert "loss: ForecastTask.loss" in answer.stdout


def test_the_last_line_says_how_to_load_and_to_predict(trained):
    folder, _, answer = trained
    where = key_folder(folder)
    last = answer.stdout.splitlines()[-1]
    assert last.startswith(f"load it: unfading.estimators.RecurrentForecaster.load('{where}')")
    assert f"`unfading predict {where} --data FILE`" in last


def test_predict_forecasts_what_the_loaded_forecaster_does(trained, tmp_path):
    forecaster = pytest.importorskip("unfading.estimators").RecurrentForecaster.load(key_folder(trained[0]))
    expected = forecaster.predict(
        [load[:, None] for load in LOAD],
        past_covariates=[each[:, None] for each in TEMPERATURE],
        future_covariates=[WEEKEND[:, None]] * 2,
    )
    data = ("--data", str(trained[0] / "load.csv"))
    answer = run("predict", str(key_folder(trained[0])), *data, "-o", str(tmp_path / "y.npy"))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == f"wrote {tmp_path / 'y.npy'}: 4 steps of 2 series\n"
    assert np.allclose(np.load(tmp_path / "y.npy"), np.stack(expected))
    header, *rows = run("predict", str(key_folder(trained[0])), *data).stdout.splitlines()
    assert header == "site,step,load"
    assert [row.split(",")[:2] for row in rows] == [[site, str(step)] for site in "ab" for step in (1, 2, 3, 4)]
    assert np.allclose([float(row.split(",")[2]) for row in rows], np.stack(expected).ravel())


def test_the_scores_are_those_of_the_record_and_a_record_repeats_the_run(trained, tmp_path):
    record = key_folder(trained[0]) / "record.json"
    answer = run("train", "--from", str(record), "--runs", str(tmp_path), "--json", "--quiet")
    assert answer.returncode == 0, answer.stderr
    again, first = json.loads(answer.stdout), json.loads(record.read_text())
    assert again["test"] == first["test"]
    # The record has the error of standardised values; each series has its own scale.
    spread = np.array([each[0] for each in first["run"]["task_options"]["spread"]])
    assert spread.min() * first["test"]["mae"] <= again["forecasts"]["GRU"]["mae"] <= spread.max() * first["test"]["mae"]


def test_without_a_test_part_the_validation_windows_are_scored(trained, tmp_path):
    data = ("--data", str(trained[0] / "load.csv"), "--test", "0", "--runs", str(tmp_path))
    answer = run("train", *data, *FORECAST, *FAST)
    assert answer.returncode == 0, answer.stderr
    assert "forecasts of 74 validation windows" in answer.stdout


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--horizon", "3"], "--horizon: for forecasts of series only. Add --forecast."),
        (["--forecast", "--target", "load", "--task", "regression"], "--task is for sequences with a target"),
        (["--forecast", "--target", "load", "--unscaled"], "Leave it out. Use --scale none."),
        (["--forecast", "--target", "load", "--readout", "last"], "--readout is for sequences with a target"),
        (["--forecast", "--target", "lod"], "unknown column 'lod'. Did you mean 'load'?"),
        (["--forecast", "--target", "site"], "A column of dates or text cannot be forecast."),
        (["--forecast", "--target", "load", "--series", "site", "--context", "500"], "give no window to train on"),
        (["--target", "load", "temperature"], "--target is one column, unless --forecast is given; got load temperature"),
    ],
)
def test_wrong_flags_are_one_sentence_and_leave_no_folder(trained, tmp_path, flags, sentence):
    answer = run("train", "--data", str(trained[0] / "load.csv"), *flags, "--runs", str(tmp_path / "runs"))
    assert answer.returncode == 2
    assert sentence in " ".join(answer.stderr.split())
    assert not (tmp_path / "runs").exists()


def test_forecasts_need_a_file():
    answer = run("train", "--task", "adding", "--cell", "STAR", "--forecast")
    assert answer.returncode == 2
    assert "--forecast needs the file of the series: --data FILE" in answer.stderr


def test_predict_names_what_it_cannot_do(trained, tmp_path):
    write(tmp_path / "short.csv", ahead=2)
    for arguments, sentence in (
        (("--data", str(tmp_path / "short.csv")), "has 202 steps; wanted at least 204: the 200 of the series and the 4"),
        (("--data", str(trained[0] / "load.csv"), "--probabilities"), "--probabilities is for classes"),
    ):
        answer = run("predict", str(key_folder(trained[0])), *arguments)
        assert answer.returncode == 2
        assert sentence in " ".join(answer.stderr.split())
