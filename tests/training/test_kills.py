"""Kills at random moments, with a user's file that is edited meanwhile: nothing is lost, and no bit differs."""

import itertools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.trained import OWN, Process, outcome, small, train_outcome
from unfading import train

# The user's file and a module beside it. An edit changes the loss, so that a step with another version is noticed.
FILE = "from factor import FACTOR\n" + Path(OWN).read_text().replace(
    "return functional.mse_loss(prediction,", "return FACTOR * functional.mse_loss(prediction,"
)
FACTOR = "FACTOR = {}\n"
ALLOWED = {".lock", "run.json", "curve.jsonl", "last.safetensors", "best.safetensors", "record.json", "source"}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A function that writes the user's files, each time with another loss."""
    monkeypatch.chdir(tmp_path)
    versions = itertools.count(1)

    def write():
        (tmp_path / "mine.py").write_text(FILE)
        (tmp_path / "factor.py").write_text(FACTOR.format(next(versions)))

    write()
    return write


def own(**fields):
    return small(task="mine.py:Same", task_options={}, valid_every=40, cell="LSTM", cell_options={"zoneout": 0.1}, **fields)


@pytest.mark.parametrize("kills", [3, pytest.param(60, marks=pytest.mark.long)])
def test_a_run_that_is_killed_while_its_file_is_edited_has_the_results_of_its_first_source(kills, mine, tmp_path):
    moments, killed = random.Random(kills), 0
    for seed in itertools.count():
        run = own(seed=seed, steps=120)
        began = time.monotonic()
        expected = train_outcome(run, tmp_path / "whole")
        seconds = time.monotonic() - began
        train_until_killed(run, tmp_path)
        folder = tmp_path / run.key
        while killed < kills and not (folder / "record.json").exists():
            mine()
            process = Process(run, tmp_path, save_every=0.02, say=str)
            time.sleep(moments.uniform(0.0, 0.3 + seconds))
            process.process.kill()
            assert process.end() in (-signal.SIGKILL, 0)
            killed += 1
        if not (folder / "record.json").exists():
            train(own(seed=seed, steps=120), tmp_path, resume=True, say=str)
        assert outcome(folder) == expected
        assert {path.name for path in folder.iterdir()} <= ALLOWED
        if killed >= kills:
            return


def train_until_killed(run, where):
    """The first checkpoint, with the first source: a run without one starts with the present source."""
    process = Process(run, where, save_every=0.0, say=str)
    while not (where / run.key / "last.safetensors").exists():
        time.sleep(0.001)
    process.process.kill()
    process.end()


COMMAND = "import sys; sys.argv[0] = 'unfading'; from unfading.cli.main import main; main()"
FLAGS = ["--task", "mine.py:Same", "--hidden", "3", "--batch", "4", "--steps", "1500", "--valid-batches", "1"]
FLAGS += ["--save-every", "0.05", "--quiet"]
KINDS = {
    "train": ["train", *FLAGS, "--cell", "LSTM"],
    "compare": ["compare", *FLAGS, "--cells", "LSTM", "Elman", "--seeds", "2", "--processes", "2"],
}


def unfading(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.long
@pytest.mark.parametrize("kills", [10])
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_that_is_killed_while_a_file_is_edited_has_the_results_of_the_first_source(kind, kills, mine, tmp_path):
    command = KINDS[kind]
    began = time.monotonic()
    process = unfading(*command, "--runs", "whole")
    messages = process.communicate()[1]
    assert process.returncode == 0, messages
    seconds = time.monotonic() - began
    expected = {folder.name: outcome(folder) for folder in (tmp_path / "whole" / "mine.py-Same").iterdir() if folder.is_dir()}
    runs, moments = tmp_path / "runs" / "mine.py-Same", random.Random(kills)
    kill_when(unfading(*command), lambda: list(runs.glob("*/last.safetensors")))
    for _ in range(kills):
        mine()
        wait_for_workers(runs)
        process = unfading(*command, "--resume")
        time.sleep(moments.uniform(0.0, seconds))
        process.kill()
        messages = process.communicate()[1]
        assert process.returncode in (-signal.SIGKILL, 0), messages
        wait_for_workers(runs)
        if len(list(runs.glob("*/record.json"))) == len(expected):
            break  # finished: after another edit it would be another run
    wait_for_workers(runs)
    if len(list(runs.glob("*/record.json"))) < len(expected):
        process = unfading(*command, "--resume")
        messages = process.communicate()[1]
        assert process.returncode == 0, messages
    assert {folder.name: outcome(folder) for folder in runs.iterdir() if folder.is_dir()} == expected


def kill_when(process, happened):
    while not happened():
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.communicate()


def wait_for_workers(runs):
    """Workers whose parent was killed write a last checkpoint and end."""
    import fcntl

    for file in runs.glob("*/.lock"):
        with open(file, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
