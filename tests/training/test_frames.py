"""Training over frames: runs of convolutional cells, their records, and what does not fit together."""

import json
import math

import pytest

import unfading
from tests.helpers.command import run as command
from tests.helpers.trained import small, stopped_after, train_outcome
from tests.user import frames
from unfading import train
from unfading.errors import TaskError
from unfading.training.check_task import _output_entries

USER = frames.__file__

FRAMES = {"task": "moving_mnist_direction", "task_options": {"T": 3, "size": 5, "digit_size": 4}, "cell": "ConvSTAR"}
pytestmark = pytest.mark.usefixtures("made")


def test_a_run_over_frames_counts_its_parameters():
    record = train(small(**FRAMES, hidden=4, layers=2, steps=4, valid_every=2))
    kernels = 9 * ((2 * 1 + 4) * 4 + (2 * 4 + 4) * 4)
    recurrent = kernels + 2 * 2 * 4
    assert record["parameters"] == {"all": recurrent + 5 * 8, "recurrent": recurrent}
    assert record["status"] == "finished"
    assert record["guess"] == 1 / 8
    assert all(math.isfinite(value) for value in record["test"].values())
    assert all(row["loss"] > 0 for row in record["curve"])


@pytest.mark.parametrize("cell", ["ConvLSTM", "ConvForgetLSTM", "ConvGRU"])
@pytest.mark.sample(1)
def test_every_convolutional_cell_trains_on_frames(cell):
    run = small(**{**FRAMES, "task": "moving_mnist", "cell": cell}, layers=2, steps=12, rate=0.05, valid_every=4)
    record = train(run)
    losses = [row["loss"] for row in record["curve"]]
    assert losses[-1] < losses[0]


def test_a_resumed_run_over_frames_is_the_uninterrupted_one(tmp_path, monkeypatch):
    run = small(**FRAMES, steps=10, valid_every=4)
    stopped_after(6, monkeypatch, lambda: train(run, tmp_path / "parts"))
    assert train_outcome(run, tmp_path / "parts", resume=True) == train_outcome(run, tmp_path / "whole")


def test_frames_and_vectors_are_not_mixed():
    with pytest.raises(TaskError, match=r"x of shape \[3, 4, 1, 5, 5\].* reads \[T, 4, 1\].* read by convolutional cells, e.g"):
        train(small(**{**FRAMES, "cell": "STAR"}))
    with pytest.raises(
        TaskError, match=r"x of shape \[6, 4, 2\].* reads \[T, 4, 2, height, width\].*ConvSTAR reads frames; cells"
    ):
        train(small(cell="ConvSTAR"))
    with pytest.raises(ValueError, match="needs frames of at least 7 x 7; got 5 x 5"):
        train(small(**FRAMES, cell_options={"kernel_size": 7, "padding": 0}))


def test_a_number_in_a_frame_that_is_not_finite_is_named_by_its_pixel():
    run = small(task=f"{USER}:BrighterHalf", task_options={"broken": True}, cell="ConvSTAR")
    with pytest.raises(TaskError, match="x with nan at step 1, row 0, feature 1, pixel row 2, pixel column 5"):
        train(run)


def test_the_outputs_of_all_layers_are_counted_with_their_frames():
    """By this number a batch that does not fit in memory is refused before the first step."""
    dense, frames = unfading.STAR(2, 3, num_layers=2, bidirectional=True), unfading.ConvSTAR(2, 3, num_layers=2)
    assert _output_entries(dense, ()) == 4 * 3
    assert _output_entries(frames, (8, 6)) == 2 * 3 * 8 * 6
    shrinking = unfading.ConvSTAR(2, 3, num_layers=3, stride=2, bidirectional=True)
    assert _output_entries(shrinking, (8, 6)) == 2 * 3 * (4 * 3 + 2 * 2 + 1 * 1)


def test_the_command_line_trains_a_convolutional_cell(tmp_path):
    answer = command(
        *("train", "--task", f"{USER}:BrighterHalf", "--cell", "ConvSTAR,kernel_size=[1,3]", "--hidden", "2"),
        *("--layers", "2", "--steps", "2", "--batch", "2", "--no-recipe", "--runs", str(tmp_path)),
    )
    assert answer.returncode == 0, answer.stderr
    (record,) = tmp_path.rglob("record.json")
    assert json.loads(record.read_text())["run"]["cell_options"] == {"kernel_size": [1, 3]}
