"""Training on arrays, runs of objects, early stopping, and trained models: fit, load and predict."""

import copy
import pickle
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import unfading
from tests.helpers.paths import ROOT
from unfading import Run, TrainedModel, train
from unfading.cells.star import STARCell
from unfading.own_data.preparation import Preparation
from unfading.tasks import Adding
from unfading.training import weights
from unfading.training.fit import default_settings, fit

DRAW = np.random.default_rng(0)
SIGNS = DRAW.choice([-1.0, 1.0], 60)
X = SIGNS[:, None, None] + 0.3 * DRAW.standard_normal((60, 5, 2))
LABELS = np.where(SIGNS > 0, "up", "down")
NUMBERS = 1000.0 + 50.0 * SIGNS
FAST = {"hidden": 4, "epochs": 12, "batch": 8, "rate": 0.02}


def test_a_fitted_classifier_answers_with_the_labels():
    model = fit(X, LABELS, "GRU", test=0.2, **FAST)
    assert isinstance(model, TrainedModel)
    assert set(model.predict(X)) == {"up", "down"}
    assert (model.predict(X) == LABELS).mean() > 0.95
    assert model.record["test"]["accuracy"] > 0.9
    probabilities = model.predict_proba(X)
    assert np.allclose(probabilities.sum(axis=1), 1.0)
    assert (np.array(["down", "up"])[probabilities.argmax(axis=1)] == model.predict(X)).all()


def test_a_fitted_regressor_answers_in_the_units_of_the_targets():
    model = fit(X, NUMBERS, "GRU", task="regression", **{**FAST, "epochs": 40})
    assert np.abs(model.predict(X) - NUMBERS).mean() < 15
    assert fit(X, np.stack([NUMBERS, -NUMBERS], axis=1), "GRU", **FAST).predict(X).shape == (60, 2)
    with pytest.raises(ValueError, match="task regression has no classes"):
        model.predict_proba(X)


def test_the_model_of_a_fit_is_that_of_the_folder_of_its_run(tmp_path):
    inside = fit(X, LABELS, "STAR", **FAST)
    model = fit(X, LABELS, "STAR", where=tmp_path, say=lambda text: None, **FAST)
    loaded = unfading.load(tmp_path / model.run.key)
    for other in (model, loaded):
        assert np.array_equal(other.outputs(X), inside.outputs(X))
        assert other.record["best"] == inside.record["best"]
    file = weights.save(tmp_path / model.run.key, tmp_path / "w.safetensors")
    assert unfading.load(file).predict(X).tolist() == inside.predict(X).tolist()


def test_the_chosen_weights_are_those_of_the_best_evaluation(tmp_path):
    model = fit(X, LABELS, "Elman", where=tmp_path, say=lambda text: None, **{**FAST, "rate": 0.1, "epochs": 30})
    own = Preparation().make_task(X, LABELS, 0)
    batch = own.batch(0, 60, split="valid", seed=0, device="cpu")
    with torch.no_grad():
        loss = own.loss(model(batch.x)[0], batch).item()
    assert loss == pytest.approx(model.record["best"]["valid"]["loss"], rel=1e-5)
    assert loss == pytest.approx(min(row["valid"]["loss"] for row in model.record["curve"] if "valid" in row), rel=1e-5)


def test_predictions_do_not_depend_on_the_sequences_beside_them():
    model = fit([x[: 1 + i % 5] for i, x in enumerate(X)], LABELS, "STAR", **FAST)
    rows = [DRAW.standard_normal((n, 2)) for n in (3, 1, 7)]
    together = model.outputs(rows)
    for row, expected in zip(rows, together, strict=True):
        assert np.allclose(model.outputs(row[None])[0], expected, atol=1e-5)


def test_a_trained_model_is_pickled_and_copied_without_its_data():
    model = fit(X, LABELS, "STAR", **FAST)
    content = pickle.dumps(model)
    assert np.array_equal(pickle.loads(content).outputs(X), model.outputs(X))
    assert np.array_equal(copy.deepcopy(model).outputs(X), model.outputs(X))
    assert X.astype(np.float32)[0].tobytes() not in content


def test_sequences_of_other_channels_are_refused():
    model = fit(X, LABELS, "Elman", **FAST)
    with pytest.raises(ValueError, match="the model reads sequences with 2 channels; got 3"):
        model.predict(np.ones((4, 5, 3)))


def test_an_unknown_setting_is_refused_with_the_nearest_name():
    with pytest.raises(TypeError, match=r"unknown setting 'hiden'\. Did you mean 'hidden'"):
        fit(np.ones((4, 3)), ["a", "b", "a", "b"], hiden=3)


def test_without_validation_all_rows_train():
    model = fit(X, LABELS, "Elman", validation=0.0, hidden=4, epochs=2)
    assert model.run.split == "full"
    assert model.record["best"] is None
    assert model.record["test"] is None


def test_few_rows_get_more_epochs():
    few, many = (Preparation().make_task(np.repeat(X, n, axis=0), np.repeat(LABELS, n), 0) for n in (1, 20))
    assert default_settings(few)["epochs"] > default_settings(many)["epochs"] == 100
    assert default_settings(many)["batch"] == 32
    assert default_settings(few, batch=16)["batch"] == 16


# -- patience -----------------------------------------------------------------------------------------------------------------

IMPATIENT = Run(task="adding", task_options={"T": 6}, cell="Elman", hidden=4, batch=4, steps=200, valid_every=5, rate=1e-9)


def test_training_ends_when_patience_is_over(tmp_path):
    record = train(replace(IMPATIENT, patience=3), tmp_path)
    best = record["best"]["step"]
    assert record["status"] == "finished"
    assert record["steps"] == best + 15 < 200
    assert train(replace(IMPATIENT, steps=30))["steps"] == 30


def test_patience_is_no_part_of_the_key_unless_it_is_given():
    assert "patience" not in IMPATIENT.to_json()
    assert replace(IMPATIENT, patience=3).key != IMPATIENT.key
    assert IMPATIENT.on_all_rows() == replace(IMPATIENT, patience=3).on_all_rows()
    with pytest.raises(ValueError, match="patience"):
        replace(IMPATIENT, split="full", valid_every=None, patience=3)


# -- objects in the place of names --------------------------------------------------------------------------------------------


def test_objects_of_the_library_are_their_names():
    by_object = Run(task=Adding(T=9), cell=STARCell, steps=2)
    by_name = Run(task="adding", task_options={"T": 9}, cell="STAR", steps=2)
    assert by_object == by_name
    assert by_object.key == by_name.key
    assert Run(task=Adding(T=9), cell=unfading.STAR, steps=2) == by_name
    assert not by_object.objects
    with pytest.raises(ValueError, match="leave task_options out"):
        Run(task=Adding(), task_options={"T": 9}, cell="STAR", steps=2)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's module with a cell and a task."""
    (tmp_path / "mine.py").write_text(
        (ROOT / "tests" / "user" / "quiet.py").read_text()
        + """

from dataclasses import dataclass

from unfading.tasks import Adding


@dataclass(frozen=True)
class Mine(Adding):
    T: int = 6
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import mine

    yield mine
    del sys.modules["mine"]


def cell_of(module):
    return next(value for name, value in vars(module).items() if name.endswith("Cell") and value.__module__ == module.__name__)


def test_a_users_classes_train_and_are_loaded_again(own, tmp_path):
    cell = cell_of(own)
    run = Run(task=own.Mine(T=8), cell=cell, hidden=4, batch=4, steps=4, valid_every=2)
    assert (run.task, run.cell, run.task_options) == ("mine:Mine", f"mine:{cell.__name__}", {"T": 8})
    assert run.key == Run(task="mine:Mine", task_options={"T": 8}, cell=run.cell, hidden=4, batch=4, steps=4, valid_every=2).key
    record = train(run, tmp_path / "runs")
    with pytest.raises(ValueError, match=r"names a user's own code \(mine:Mine\), which load does not execute"):
        unfading.load(tmp_path / "runs" / run.key)
    for classes, sentence in (
        ({"cell": unfading.STAR}, "cell= must be a subclass of unfading.Cell; got the layer STAR"),
        ({"cell": "MyCell"}, "cell= must be a subclass of unfading.Cell; got 'MyCell'"),
        ({"cell": cell(2, 4)}, "cell= must be a subclass of unfading.Cell; got "),
        ({"task": cell}, "task= must be a subclass of unfading.Task, or a task; got "),
    ):
        with pytest.raises(TypeError, match=sentence):
            unfading.load(tmp_path / "runs" / run.key, **{"cell": cell, "task": own.Mine, **classes})
    model = unfading.load(tmp_path / "runs" / run.key, cell=cell, task=own.Mine)
    assert type(model.rnn.cells[0]) is cell
    assert model.task == own.Mine(T=8)
    assert model.record["best"] == record["best"]
    file, x = weights.save(tmp_path / "runs" / run.key, tmp_path / "w.safetensors"), np.ones((2, 8, 2))
    assert np.array_equal(unfading.load(file, cell=cell, task=own.Mine).outputs(x), model.outputs(x))
    assert np.array_equal(weights.load_with_code(tmp_path / "runs" / run.key).outputs(x), model.outputs(x))


def test_classes_of_the_library_are_not_given_to_load(tmp_path):
    run = Run(task="adding", task_options={"T": 6}, cell="Elman", hidden=4, batch=4, steps=2)
    train(run, tmp_path)
    with pytest.raises(ValueError, match="names the cell Elman of the library; leave cell= out"):
        unfading.load(tmp_path / run.key, cell=STARCell)


NOTEBOOK = """if True:
    import linecache, sys, types
    import numpy as np
    import unfading

    text = open({cell!r}).read() + '''
class Notebook({base}):
    def initial_state(self, batch):
        return super().initial_state(batch)
'''
    # As IPython does: the source of a notebook's cell is known to linecache, and to no file.
    linecache.cache["<cell 1>"] = (len(text), None, text.splitlines(keepends=True), "<cell 1>")
    exec(compile(text, "<cell 1>", "exec"), globals())
    run = unfading.Run(task="adding", task_options=dict(T=6), cell=Notebook, hidden=4, batch=4, steps=2)
    assert run.cell == "__main__:Notebook", run.cell
    unfading.train(run, "runs")
    model = unfading.load("runs/" + run.key, cell=Notebook)
    print(type(model.rnn.cells[0]).__name__)
    try:
        unfading.load("runs/" + run.key)
    except ValueError as error:
        print(error)
"""


def test_a_class_of_a_notebook_trains(tmp_path, own):
    import subprocess

    code = NOTEBOOK.format(cell=str(ROOT / "tests" / "user" / "quiet.py"), base=cell_of(own).__name__)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Notebook"
    assert "load(..., cell=Notebook)" in lines[1]


def test_a_class_inside_a_function_is_refused():
    class Inside(STARCell):
        pass

    with pytest.raises(ValueError, match="is defined inside a function or a class"):
        Run(task="adding", cell=Inside, steps=2)


def test_load_reads_a_folder_of_save_pretrained(tmp_path):
    model = unfading.fit(X, LABELS, "Elman", hidden=2, steps=2, backend="reference", say=lambda text: None)
    weights.save_model(model, tmp_path / weights.PRETRAINED)  # as save_pretrained does, with huggingface_hub
    assert np.array_equal(unfading.load(tmp_path).outputs(X), model.outputs(X))


def test_load_names_what_is_no_finished_run(tmp_path):
    with pytest.raises(ValueError, match=r"it has no record\.json"):
        unfading.load(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        unfading.load(tmp_path / "runs")
    with pytest.raises(ValueError, match="sha256= belongs to a file of weights"):
        unfading.load(tmp_path, sha256="0" * 64)
