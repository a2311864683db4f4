"""The progress display."""

import sys
import time
from dataclasses import replace
from io import StringIO
from types import ModuleType

import pytest
from rich.console import Console

from tests.helpers.trained import small
from unfading import Run, train
from unfading.training.options import ProgressUpdate
from unfading.training.progress import Display

RUNS = [
    Run(task="adding", cell=cell, hidden=4, steps=50, rate=rate, seed=seed)
    for cell, rate in (("STAR", 0.1), ("STAR", 0.2), ("LSTM", 0.1))
    for seed in (0, 1)
]


def drawn(*, terminal):
    file = StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, color_system=None)
    return file, console


def test_a_bar_shows_name_steps_speed_loss_score_and_remaining_time():
    file, console = drawn(terminal=True)
    with Display(RUNS, console) as display:
        display.listen(ProgressUpdate(RUNS[3], 10, 50, 2.0, 0.123456, {"loss": 9.0, "mse": 0.25}))
        display.listen(ProgressUpdate(RUNS[3], 20, 50, 4.0, 0.111, None))
        display.progress.refresh()
    screen = file.getvalue()
    for words in ("STAR rate=0.2 seed 1", "20/50", "5/s", "loss 0.111", "valid mse 0.25"):
        assert words in screen, words
    assert screen.count("seed") == screen.count("STAR rate=0.2 seed 1")  # the others have not started


@pytest.mark.parametrize(
    ("valid", "words"), [({"loss": 0.5}, "valid loss 0.5"), ({"mse": 0.25, "loss": 0.5}, "valid mse 0.25")]
)
def test_the_score_is_the_tasks_metric_or_the_loss_if_there_is_no_other(valid, words):
    file, console = drawn(terminal=False)
    with Display(RUNS, console) as display:
        display.listen(ProgressUpdate(RUNS[4], 10, 50, 2.0, 0.5, valid))
        display.listen(ProgressUpdate(RUNS[4], 50, 50, 2.0, 0.5, None, "finished"))
    assert file.getvalue() == f"LSTM seed 0: finished after 50 steps {words}\n"


def test_the_screen_is_updated_at_most_four_times_a_second():
    file, console = drawn(terminal=True)
    with Display(RUNS, console) as display:
        began = time.monotonic()
        while time.monotonic() - began < 1.2:
            display.listen(ProgressUpdate(RUNS[0], 1 + int(10 * time.monotonic()) % 9, 50, 2.0, 0.5, None))
    frames = file.getvalue().count("STAR rate=0.1 seed 0")
    # One update at the start and one at the end beside the timed ones; a slow machine draws fewer.
    assert 1 <= frames <= 4 * 1.2 + 3


@pytest.mark.parametrize("status", ["finished", "diverged"])
def test_without_a_terminal_each_finished_run_is_one_line(status):
    file, console = drawn(terminal=False)
    with Display(RUNS, console) as display:
        display.listen(ProgressUpdate(RUNS[4], 10, 50, 2.0, 0.5, {"loss": 9.0, "mse": None}))
        display.listen(ProgressUpdate(RUNS[4], 30, 50, 2.0, 0.5, None, status))
        display.say("something else")
    assert file.getvalue() == f"LSTM seed 0: {status} after 30 steps valid mse not finite\nsomething else\n"


def test_with_many_runs_the_bars_of_finished_ones_disappear():
    many = [replace(RUNS[0], seed=seed) for seed in range(13)]
    for runs, stays in ((many, False), (many[:12], True)):
        _, console = drawn(terminal=True)
        with Display(runs, console) as display:
            display.listen(ProgressUpdate(runs[0], 50, 50, 2.0, 0.5, None, "finished"))
            assert [task.visible for task in display.progress.tasks] == [stays]


class NotebookCell:
    """Stands for IPython.display: the contents that the output of a cell has had."""

    def __init__(self):
        self.contents = []

    def display(self, content, *, raw, display_id):
        assert raw
        assert display_id
        self.contents.append(content)
        return self

    def update(self, content, *, raw):
        assert raw
        self.contents.append(content)


def test_a_notebook_shows_the_bars_in_one_output_that_is_replaced(monkeypatch):
    cell = NotebookCell()
    module = ModuleType("IPython.display")
    module.display = cell.display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    console = Console(file=StringIO(), force_jupyter=True)
    with Display(RUNS, console, ["f1"]) as display:
        for step in range(1, 51):
            status = "finished" if step == 50 else None
            display.listen(ProgressUpdate(RUNS[0], step, 50, 2.0, 0.5, {"mse": 0.25, "f1": 0.75}, status))
    last = cell.contents[-1]
    for words in ("STAR rate=0.1 seed 0", "50/50", "loss 0.5", "valid mse 0.25, f1 0.75"):
        assert words in last["text/plain"], words
        assert words in last["text/html"], words
    assert len(cell.contents) < 10  # not once per update


def test_training_shows_bars_where_they_are_asked_for(capsys):
    run = small()
    train(run, progress=True)
    assert "STAR seed 0: finished after 24 steps valid mse" in capsys.readouterr().err
    train(run)
    assert capsys.readouterr().err == ""
