"""Metrics that a user asks for: right over all rows, in the record and on the page, and without effect on training."""

import json

import numpy as np
import pytest
import torch
import vl_convert

import unfading
from tests.helpers.paths import ROOT
from tests.helpers.trained import changed, small
from unfading import Run, compare, metrics, train
from unfading.report import metric_tables, page, records
from unfading.report.figures import confusion_figure
from unfading.report.groups import group_by_task
from unfading.training.evaluate import evaluate
from unfading.training.fleet import Fleet
from unfading.training.options import TrainOptions
from unfading.training.user_metrics import read_metrics

DRAW = np.random.default_rng(0)
ROWS = DRAW.integers(0, 3, 60)
X = ROWS[:, None, None] + 0.8 * DRAW.standard_normal((60, 5, 2))
LABELS = np.array(["down", "flat", "up"])[ROWS]
FAST = {"hidden": 4, "epochs": 4, "batch": 8, "rate": 0.02, "backend": "reference"}
OWN_METRICS = ROOT / "tests" / "user" / "own_metrics.py"
QUIET = {"say": lambda text: None}


def share_of_up(prediction, target):
    return float((prediction.argmax(axis=1) == 2).mean())


def of_rows(model, X, labels):
    """Metrics of these rows, from the answers of the model, as scikit-learn's users compute them."""
    answers = model.predict(X)
    return metrics.f1(answers, labels), metrics.confusion_matrix(answers, labels).tolist()


def test_the_metrics_of_a_fit_are_those_of_its_predictions():
    asked = ["accuracy", "f1", "confusion_matrix", share_of_up]
    model = unfading.fit(X, LABELS, "GRU", test=0.4, metrics=asked, **FAST)
    record = model.record
    held = unfading.own_data.preparation.Preparation(test=0.4).make_task(X, LABELS, 0).data.test
    tested, true = held.sequences.x, np.array(["down", "flat", "up"])[held.target]
    f1, counts = of_rows(model, tested, true)
    assert record["metrics"] == ["accuracy", "f1", "share_of_up"]
    assert record["test"]["f1"] == pytest.approx(f1)
    assert record["test"]["share_of_up"] == pytest.approx((model.predict(tested) == "up").mean())
    assert record["confusion_matrix"] == {"split": "test", "classes": ["down", "flat", "up"], "counts": counts}
    assert all({"f1", "share_of_up"} <= row["valid"].keys() for row in record["curve"] if "valid" in row)


def test_without_test_rows_the_matrix_is_that_of_validation():
    model = unfading.fit(X, LABELS, "GRU", metrics=["confusion_matrix"], **FAST)
    matrix = model.record["confusion_matrix"]
    assert matrix["split"] == "valid"
    counts = np.array(matrix["counts"])
    assert counts.sum() == 12
    assert np.trace(counts) / 12 == pytest.approx(model.record["best"]["valid"]["accuracy"])


# Over equal batches the task's mean over batches is the mean over rows; masks of batches are not equal.
@pytest.mark.parametrize(("task", "batches"), [("adding", 3), ("copying", 3), ("random_labels", 3), ("variable_copying", 1)])
def test_a_metric_over_all_rows_is_that_of_the_task_where_the_task_has_it(task, batches):
    run = small(task=task, task_options={"T": 6}, valid_batches=batches)
    model = run.make_model()

    def over_all(prediction, target):
        prediction, target = torch.as_tensor(prediction), torch.as_tensor(target)
        if target.is_floating_point():
            return torch.nn.functional.mse_loss(prediction.reshape(target.shape), target)
        return torch.nn.functional.cross_entropy(prediction, target)

    [scores] = evaluate(Fleet([model], run.make_task(), together=False), run, "valid", read_metrics([over_all])).models
    assert scores["over_all"] == pytest.approx(scores[run.make_task().metric], rel=1e-5)


def test_metrics_change_neither_the_key_nor_the_training(tmp_path):
    run = small()
    plain = train(run, **QUIET)
    asked = train(run, metrics=["mae", "rmse"], **QUIET)
    assert run.key == small().key
    assert asked["test"].pop("mae") > 0
    assert asked["test"].pop("rmse") == pytest.approx(plain["test"]["mse"] ** 0.5, rel=1e-6)
    assert asked["test"] == plain["test"]
    losses = [[row["loss"] for row in record["curve"]] for record in (plain, asked)]
    assert losses[0] == losses[1]
    assert "metrics" not in plain


def test_a_finished_run_gets_the_metrics_that_it_lacks(tmp_path):
    run, notes = small(), []
    first = train(run, tmp_path, metrics=["mae"], **QUIET)
    second = train(run, tmp_path, metrics=["mae", "rmse"], say=notes.append)
    assert notes == ["STAR seed 0: finished before; rmse computed from its stored weights."]
    assert second["metrics"] == ["mae", "rmse"]
    assert second["test"] == {**first["test"], "rmse": second["test"]["rmse"]}
    fresh = train(run, metrics=["rmse"], **QUIET)
    for split in (lambda record: record["test"], lambda record: record["best"]["valid"]):
        assert split(second)["rmse"] == pytest.approx(split(fresh)["rmse"], rel=1e-6)
    assert train(run, tmp_path, metrics=["rmse"], say=notes.append) == second
    assert len(notes) == 1


def test_other_processes_get_the_names_of_metrics_and_no_functions(tmp_path):
    sent = json.loads(json.dumps(TrainOptions(tmp_path, metrics=["mae", f"{OWN_METRICS}:share_of_first"]).to_json()))
    received = TrainOptions.from_json(sent, listen=print, say=print)
    assert received.user_metrics.names == ("mae", "share_of_first")
    with pytest.raises(ValueError, match="other processes cannot call"):
        compare([small(), small(seed=1)], tmp_path, processes=2, metrics=[share_of_up], **QUIET)


def test_models_of_one_pass_have_their_own_metrics():
    run = small()
    models = [changed(run, seed=seed).make_model() for seed in (0, 1)]
    asked = read_metrics(["mae"])
    alone = [evaluate(Fleet([model], run.make_task(), together=False), run, "valid", asked).models[0] for model in models]
    pair = evaluate(Fleet(models, run.make_task(), together=True), run, "valid", asked).models
    assert [scores["mae"] for scores in pair] == pytest.approx([scores["mae"] for scores in alone], rel=1e-5)
    assert alone[0]["mae"] != alone[1]["mae"]


def test_a_function_of_a_file_is_named_by_it(tmp_path):
    run = small(task="copying", task_options={"T": 3})
    record = train(run, metrics=[f"{OWN_METRICS}:share_of_first"], **QUIET)
    assert 0 <= record["test"]["share_of_first"] <= 1


CLASSES = {"task": "copying", "task_options": {"T": 3}}


@pytest.mark.parametrize(
    ("fields", "asked", "message"),
    [
        ({}, ["f2"], "unknown metric 'f2'.* my.py:function"),
        ({}, "f1", 'metrics must be a list of names and functions, e.g. ."f1".'),
        ({}, ["mae", "mae"], "the metric mae is given twice"),
        ({}, [lambda prediction, target: 0.0], "a function with a name"),
        ({}, [type("f1", (), {})], "cannot be named f1"),
        ({}, ["f1"], "the metric f1 compares classes, and Adding has none. Use mae, rmse."),
        ({}, ["mase"], "which Adding does not compute. Use mae"),
        (CLASSES, ["rmse"], "the metric rmse compares numbers, and Copying has classes"),
        (CLASSES, [f"{OWN_METRICS}:two_numbers"], "must return one number; got ndarray of shape .2."),
        (CLASSES, [f"{OWN_METRICS}:failing"], r"the metric failing raised KeyError: 'nothing' \(.*own_metrics.py, line 16\)"),
    ],
)
def test_a_metric_that_cannot_be_computed_is_refused_before_training(tmp_path, fields, asked, message):
    with pytest.raises((TypeError, ValueError), match=message):
        train(small(**fields), tmp_path, metrics=asked, **QUIET)
    assert not list(tmp_path.iterdir())


def test_the_page_shows_the_metrics_and_the_matrices(monkeypatch):
    # Seconds of work, for code that draws in a browser.
    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda vl_version: "")
    fitted = [unfading.fit(X, LABELS, cell, metrics=["f1", "confusion_matrix"], **FAST).record for cell in ("GRU", "Elman")]
    text = page.build(records.read(fitted))
    assert "Further metrics" in text
    for record in fitted:
        assert f"<td>{record['best']['valid']['f1']:.4f}</td>" in text
    [task] = group_by_task(records.read(fitted))
    data = confusion_figure.figures(task)["confusion"]["datasets"]
    for setting, rows in zip(task.settings, (data["matrix0"], data["matrix1"]), strict=True):
        assert [row["count"] for row in rows] == np.ravel(setting.records[0].confusion["counts"]).tolist()
    [plain] = group_by_task(records.read([{**fitted[0], "metrics": []}]))
    assert metric_tables.terminal(plain) is None


def test_an_estimator_takes_metrics():
    from unfading.estimators import RecurrentClassifier

    model = RecurrentClassifier("GRU", hidden=4, epochs=2, settings={"backend": "reference"}, metrics=["f1"]).fit(X, LABELS)
    assert 0 <= model.record_["best"]["valid"]["f1"] <= 1


def test_a_run_of_all_rows_has_the_metrics_of_its_test():
    record = train(Run.from_json(small(split="full", steps=4).to_json()), metrics=["mae"], **QUIET)
    assert record["test"]["mae"] > 0
