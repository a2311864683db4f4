"""Worker processes: failures, signals and the end of the parent lose no run."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unfading import Run, compare
from unfading.training import workers
from unfading.training.loop import train_together
from unfading.training.options import TrainOptions
from unfading.training.run_dir import RunFolder, stopped_at
from unfading.training.stepper import Stepper

FAULTY = Path(__file__).parent.parent / "user" / "faulty_tasks.py"
# The reference loop: a process that compiles imports torch's own compiler, too, which takes as long as torch.
SMALL = Run(
    task="adding", task_options={"T": 6}, cell="Elman", hidden=4, batch=3, steps=12, valid_batches=1, backend="reference"
)


def silent(message):
    """Ignore messages."""


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    bad = replace(SMALL, task=f"{FAULTY}:Raising")
    deadly = [replace(SMALL, task=f"{FAULTY}:Deadly", seed=seed) for seed in (0, 1)]
    good = [replace(SMALL, seed=seed) for seed in (0, 1)]
    with pytest.raises(ValueError, match="2 of 5 runs failed") as caught:
        compare([bad, *deadly, *good], tmp_path, say=silent)
    assert "Elman, seed 0: Raising.batch raised ValueError: the sensor was unplugged (" in str(caught.value)
    assert "Elman, seed 0: its process ended with signal 9" in str(caught.value)
    for run in (deadly[1], *good):
        assert (tmp_path / run.key / "record.json").exists()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_worker_trains_runs_in_one_pass_and_reports_each(tmp_path, processes):
    jobs = [[replace(SMALL, seed=seed) for seed in (3, 4, 5)], [replace(SMALL, hidden=5)]]
    updates = []
    workers.train_apart(jobs, TrainOptions(tmp_path, processes=processes, listen=updates.append, say=silent))
    for job in jobs:
        for run, record in zip(job, train_together(job), strict=True):
            saved = json.loads((tmp_path / run.key / "record.json").read_text())
            assert saved["together"] == len(job)
            assert saved["test"] == record["test"]
            ends = [update for update in updates if update.run == run and update.status is not None]
            assert [(end.step, end.status) for end in ends] == [(12, "finished")]
            steps = [update.loss for update in updates if update.run == run and update.step == 12]
            assert record["curve"][-1]["loss"] in steps


def test_finished_runs_of_a_failed_job_have_not_failed(tmp_path, monkeypatch):
    done, lost = SMALL, replace(SMALL, seed=1)
    train_together([done], TrainOptions(tmp_path))
    monkeypatch.setattr(workers, "START", "raise SystemExit(3)")
    with pytest.raises(ValueError, match="1 of 2 runs failed: Elman, seed 1: its process ended with code 3"):
        workers.train_apart([[done, lost]], TrainOptions(tmp_path, processes=1, say=silent))


def test_a_gpu_error_ends_the_process_and_not_the_following_jobs(tmp_path, monkeypatch):
    """A worker whose GPU has failed cannot train any more: it ends without a message, and another takes the next job."""

    called = threading.Event()

    def lines():
        yield json.dumps({"runs": [SMALL.to_json()], "options": TrainOptions(tmp_path).to_json()}) + "\n"
        called.wait(10)

    def broken(*arguments):
        called.set()
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(sys.modules["unfading.training.loop"], "train_pass", broken)
    reader, writer = os.pipe()
    with pytest.raises(SystemExit, match="illegal memory access"):
        run_worker(lines(), writer, monkeypatch)
    assert os.read(reader, 100) == b""
    os.close(reader)


def test_messages_of_a_worker_reach_the_user(tmp_path, monkeypatch):
    lines = [{"say": "it is going on with less"}, {"done": True}]
    program = f"import sys; sys.stdin.readline(); print({chr(10).join(map(json.dumps, lines))!r})"
    monkeypatch.setattr(workers, "START", program)
    messages = []
    workers.train_apart([[SMALL]], TrainOptions(tmp_path, processes=1, say=messages.append))
    assert messages == ["it is going on with less"]


def test_a_worker_that_cannot_start_fails_each_run_once_without_a_broken_pipe(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "START", "raise SystemExit(3)")
    messages = queue.Queue()
    worker = workers._Worker(0, messages)
    worker.process.wait()
    worker.send({"runs": [SMALL.to_json()]})
    assert messages.get(timeout=10) == (0, None)
    worker.stop()
    runs = [replace(SMALL, cell=cell, seed=seed) for cell in ("Elman", "STAR") for seed in (0, 1, 2)]
    with pytest.raises(ValueError, match="6 of 6 runs failed") as caught:
        compare(runs, tmp_path, say=silent)
    expected = [f"{cell}, seeds 0, 1, 2: its process ended with code 3" for cell in ("Elman", "STAR")]
    assert str(caught.value).endswith(f"failed: {'; '.join(expected)}")


def test_other_output_of_a_worker_goes_to_stderr(tmp_path, monkeypatch, capfd):
    lines = ["hello from elsewhere", "3", '{"key": 1}', '{"done": true}']
    program = f"import sys; sys.stdin.readline(); sys.stdout.buffer.write(bytes([255, 10])); print({chr(10).join(lines)!r})"
    monkeypatch.setattr(workers, "START", program)
    workers.train_apart([[SMALL]], TrainOptions(tmp_path, processes=1, say=silent))
    assert capfd.readouterr().err.split("\n")[1:4] == lines[:3]


def test_a_worker_imports_what_its_parent_can_and_ignores_output_of_sitecustomize(tmp_path, monkeypatch, capfd):
    elsewhere, site = tmp_path / "elsewhere", tmp_path / "site"
    elsewhere.mkdir(), site.mkdir()
    (elsewhere / "leaky_elsewhere.py").write_text("from unfading import ElmanCell\n\n\nclass LeakyCell(ElmanCell):\n    pass\n")
    (site / "sitecustomize.py").write_text("print('hello from sitecustomize', flush=True)\nprint('and', end='', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(elsewhere)
    runs = [replace(SMALL, cell="leaky_elsewhere:LeakyCell", seed=seed) for seed in (0, 1)]
    assert [record["status"] for record in compare(runs, tmp_path / "runs", say=silent)] == ["finished"] * 2
    assert capfd.readouterr().err.count("hello from sitecustomize") == 2


def run_worker(lines, writer, monkeypatch):
    """Run a worker in this process, with the lines that it reads and the descriptor that it writes to."""
    monkeypatch.setattr(sys, "stdin", lines)
    before, threads = signal.getsignal(signal.SIGTERM), set(threading.enumerate())
    try:
        workers.main(writer)
    finally:
        # Its thread may still send a signal.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for thread in set(threading.enumerate()) - threads:
            thread.join()
        signal.signal(signal.SIGTERM, before)
        os.close(writer)


def test_a_run_that_a_worker_cannot_build_is_reported_with_the_reason(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    answers = []

    def lines():
        yield (
            json.dumps({"runs": [{**SMALL.to_json(), "cell": "nowhere:Cell"}], "options": TrainOptions(tmp_path).to_json()})
            + "\n"
        )
        answers.append(json.loads(os.read(reader, 10_000)))
        time.sleep(0.1)  # until it waits for the next job

    run_worker(lines(), writer, monkeypatch)
    os.close(reader)
    assert answers[0]["error"].startswith("'nowhere:Cell' names a module that cannot be imported")


@pytest.mark.parametrize("signals", [0, 1], ids=["its parent has ended", "and it was signalled as well"])
def test_a_worker_whose_parent_has_ended_writes_its_checkpoint(tmp_path, monkeypatch, signals):
    take = Stepper.take

    def slow(self, running):
        time.sleep(0.3)
        take(self, running)

    def lines():
        yield json.dumps({"runs": [LONG.to_json()], "options": TrainOptions(tmp_path).to_json()}) + "\n"
        wait_for((tmp_path / LONG.key / "run.json").exists)
        time.sleep(0.5)
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.03)

    monkeypatch.setattr(Stepper, "take", slow)
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(SystemExit) as ended:
        run_worker(lines(), writer, monkeypatch)
    assert ended.value.code == 128 + signal.SIGTERM
    assert stopped_at(tmp_path, LONG) > 0


LONG = replace(SMALL, steps=100_000)
PROGRAM = f"""if True:
    import dataclasses, sys
    from unfading import compare
    from unfading.training.run import Run
    from unfading.training.stopping import Stopped
    run = Run.from_json({LONG.to_json()!r})
    try:
        compare([run, dataclasses.replace(run, seed=1)], sys.argv[1])
    except Stopped as stopped:
        sys.exit(128 + stopped.signal)
"""


def wait_for(condition, seconds=60):
    """Wait until the condition holds; a process takes a while to start or to end."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGKILL, signal.SIGTERM))],
    ids=lambda number: number.name,
)
def test_workers_stop_with_their_parent_and_write_checkpoints(tmp_path, number):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)])
    runs = [LONG, replace(LONG, seed=1)]
    curves = [tmp_path / run.key / "curve.jsonl" for run in runs]
    wait_for(lambda: all(curve.exists() and curve.stat().st_size for curve in curves))
    process.send_signal(number)
    assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)

    def free(run):
        try:
            RunFolder(tmp_path, run).close()
        except ValueError:
            return False
        return True

    wait_for(lambda: all(free(run) for run in runs))
    for run in runs:
        folder = RunFolder(tmp_path, run)
        assert folder.load("last")[1]["step"] > 0
        folder.close()
