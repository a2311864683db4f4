"""Callbacks: what they see, how they end a run, and what is left if one fails."""

import numpy as np
import pytest
import torch

import unfading
from tests.helpers.trained import small, untimed
from unfading import TrainingEvent, train
from unfading.training.loop import train_together
from unfading.training.options import TrainOptions
from unfading.training.run_dir import last_step

QUIET = {"say": lambda text: None}


def test_a_callback_sees_every_step_every_evaluation_and_the_end():
    events = []
    # From 400 steps on, not every step has a row in the log.
    record = train(small(steps=400, valid_every=100), callbacks=[events.append], **QUIET)
    assert all(isinstance(event, TrainingEvent) for event in events)
    assert [event.step for event in events if event.kind == "step"] == list(range(1, 401))
    evaluations = {event.step: event.scores for event in events if event.kind == "evaluation"}
    assert evaluations == {row["step"]: row["valid"] for row in record["curve"] if "valid" in row}
    assert [event.kind for event in events if event.record is not None] == ["end"]
    assert events[-1].record == record
    assert events[-1].loss == record["curve"][-1]["loss"]
    assert {event.total for event in events} == {400}


def test_a_callback_does_not_change_the_result():
    plain, called = train(small(), **QUIET), train(small(), callbacks=[lambda event: None], **QUIET)
    assert untimed(called["curve"]) == untimed(plain["curve"])
    assert called["test"] == plain["test"]
    assert "stopped_by" not in called


def test_the_model_of_an_event_has_the_weights_of_its_step():
    weights = []

    def remember(event):
        if event.kind == "evaluation":
            weights.append({name: part.clone() for name, part in event.model.state_dict().items()})

    train(small(steps=16), callbacks=[remember], **QUIET)
    assert not all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def until_ten(event):
    return event.step == 10


def test_a_callback_ends_a_run_whose_record_says_so(tmp_path):
    record = train(small(), tmp_path, callbacks=[until_ten], **QUIET)
    assert (record["status"], record["steps"], record["stopped_by"]) == ("finished", 10, "callback until_ten")
    assert record["best"]["step"] == 8
    assert train(small(), tmp_path, **QUIET) == record  # it is finished


def test_a_callback_ends_only_its_own_run_of_a_pass():
    def first_seed(event):
        return event.run.seed == 0 and event.step == 5

    runs = [small(), small(seed=1)]
    records = train_together(runs, TrainOptions(callbacks=[first_seed], **QUIET), together=False)
    assert [record["steps"] for record in records] == [5, 24]
    assert ["stopped_by" in record for record in records] == [True, False]


def at_ten(event):
    if event.step == 10:
        raise KeyError("nothing")


def test_a_callback_that_raises_leaves_a_checkpoint_of_its_step(tmp_path):
    run, notes = small(), []
    with pytest.raises(
        ValueError, match=r"the callback at_ten at step 10 raised KeyError: 'nothing' \(.*test_callbacks.py, line"
    ):
        train(run, tmp_path, callbacks=[at_ten], say=notes.append)
    assert last_step(tmp_path / run.key) == 10
    assert notes == [f"The checkpoint of step 10 is in {tmp_path / run.key}; resume=True continues."]
    resumed = train(run, tmp_path, resume=True, **QUIET)
    whole = train(run, **QUIET)
    assert resumed["test"] == whole["test"]
    assert untimed(resumed["curve"]) == untimed(whole["curve"])


def test_an_error_at_the_end_is_reported_and_the_record_stays(tmp_path):
    def at_end(event):
        assert event.kind != "end", "no more"

    notes = []
    record = train(small(), tmp_path, callbacks=[at_end], say=notes.append)
    assert record["status"] == "finished"
    assert "the callback at_end raised AssertionError at the end of the run: no more" in notes[0]


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (print, "callbacks must be a list of functions"),
        (["print"], "a callback is a function, def callback.event.; got 'print'"),
        ([lambda event: "stop"], "must return True to end training, else None or False; got 'stop'"),
    ],
)
def test_what_is_no_callback_is_refused(callbacks, message):
    with pytest.raises((TypeError, ValueError), match=message):
        train(small(), callbacks=callbacks, **QUIET)


def test_fit_and_estimators_take_callbacks():
    from unfading.estimators import RecurrentRegressor

    draw = np.random.default_rng(0)
    X, y = draw.standard_normal((40, 4, 2)), draw.standard_normal(40)
    options = {"hidden": 3, "epochs": 3}
    model = unfading.fit(X, y, "GRU", task="regression", callbacks=[until_ten], backend="reference", **options)
    assert model.record["stopped_by"] == "callback until_ten"
    fitted = RecurrentRegressor("GRU", callbacks=[until_ten], settings={"backend": "reference"}, **options).fit(X, y)
    assert fitted.record_["steps"] == 10
