"""Resuming: a run that was stopped or killed and resumed has the same results, bit for bit, as one that never stopped."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.helpers.trained import KINDS, OWN, Process, files, fleet, outcome, small, stopped_after, tensors, train_outcome
from unfading import Run, train
from unfading.training import checkpoint
from unfading.training import loop as training
from unfading.training.loop import train_together
from unfading.training.options import TrainOptions
from unfading.training.run_dir import RunFolder


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
@pytest.mark.sample(6)
def test_a_stopped_run_resumes_bit_for_bit(fields, tmp_path, monkeypatch):
    run = small(**fields)
    expected = train_outcome(run, tmp_path / "whole")
    # Neither at an evaluation nor at the end of a log interval of two steps.
    for steps in (3, 4):
        stopped = stopped_after(steps, monkeypatch, lambda: train(run, tmp_path, resume=True))
        assert stopped.signal == signal.SIGTERM
        assert not (tmp_path / run.key / "record.json").exists()
    train(run, tmp_path, resume=True)
    assert outcome(tmp_path / run.key) == expected


def test_a_run_on_a_text_resumes_with_its_carried_state(made, tmp_path, monkeypatch):
    fields = {"task": "ptb_characters", "task_options": {"steps": 7, "embedding": 3}, "cell": "LSTM", "hidden": 3, "batch": 4}
    run = Run(**fields, steps=14, valid_every=6, backend="reference")
    expected = train_outcome(run, tmp_path / "whole")
    stopped_after(5, monkeypatch, lambda: train(run, tmp_path))
    assert any(name.startswith("state.") for name in tensors(tmp_path / run.key))
    stopped_after(4, monkeypatch, lambda: train(run, tmp_path, resume=True))
    train(run, tmp_path, resume=True)
    assert outcome(tmp_path / run.key) == expected


def test_a_run_on_distorted_images_resumes_with_the_same_distortions(made, tmp_path, monkeypatch):
    distortions = {"shift": 1.0, "rotate": 20.0, "zoom": 0.1, "flip": True}
    schedule = {"schedule": "cosine", "schedule_options": {"warmup": 0.5}}
    run = small(task="digits", task_options=distortions, steps=8, valid_every=4, **schedule)
    expected = train_outcome(run, tmp_path / "whole")
    stopped_after(3, monkeypatch, lambda: train(run, tmp_path))
    train(run, tmp_path, resume=True)
    assert outcome(tmp_path / run.key) == expected
    plain = train_outcome(small(task="digits", task_options={}, steps=8, valid_every=4, **schedule), tmp_path / "plain")
    assert plain["curve"] != expected["curve"]


def test_a_resumed_run_is_tested_with_the_best_weights_from_before_the_stop(tmp_path, monkeypatch):
    run = small(task=f"{OWN}:Worsens", task_options={}, valid_every=4)
    expected = train_outcome(run, tmp_path / "whole")
    stopped_after(6, monkeypatch, lambda: train(run, tmp_path))
    train(run, tmp_path, resume=True)
    assert expected["best"] != expected["last"]
    assert outcome(tmp_path / run.key) == expected


def test_a_process_that_dies_before_it_writes_the_record_loses_nothing(tmp_path, monkeypatch):
    run = small()
    expected = train_outcome(run, tmp_path / "whole")

    def die(folder, record):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save_record", die)
        with pytest.raises(KeyboardInterrupt):
            train(run, tmp_path)
    train(run, tmp_path, resume=True)
    assert outcome(tmp_path / run.key) == expected


@pytest.mark.parametrize("name", ["best", "last"])
def test_a_process_that_dies_between_its_two_checkpoints_loses_nothing(name, tmp_path, monkeypatch):
    run = small(valid_every=4, rate=0.001)
    expected = train_outcome(run, tmp_path / "whole")
    save, saves = RunFolder.save, []

    def die(folder, what, *arguments):
        save(folder, what, *arguments)
        saves.append(what)
        if saves.count(name) == 3 and what == name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", die)
        with pytest.raises(KeyboardInterrupt):
            train(run, tmp_path)
    train(run, tmp_path, resume=True)
    assert outcome(tmp_path / run.key) == expected


@pytest.mark.parametrize("line", ["", '{"step": 5, "lo', '{"step": 24, "loss": 0.1, "rate": 1, "seconds": 1}\n'])
@pytest.mark.sample(1)
def test_log_rows_after_the_checkpoint_are_removed(line, tmp_path, monkeypatch):
    run = small()
    expected = train_outcome(run, tmp_path / "whole")
    stopped_after(5, monkeypatch, lambda: train(run, tmp_path))
    curve = tmp_path / run.key / "curve.jsonl"
    curve.write_text(curve.read_text() + line)
    train(run, tmp_path, resume=True)
    assert outcome(tmp_path / run.key) == expected


def test_a_checkpoint_is_overwritten_only_if_asked(tmp_path, monkeypatch):
    run = small()
    expected = train_outcome(run, tmp_path / "whole")
    stopped_after(5, monkeypatch, lambda: train(run, tmp_path))
    before = files(tmp_path / run.key)
    with pytest.raises(
        ValueError, match=r"holds a run that stopped at step 5 of 24\. Continue it with resume \(--resume\), or start again"
    ):
        train(run, tmp_path)
    assert files(tmp_path / run.key) == before
    train(run, tmp_path, again=True)
    assert outcome(tmp_path / run.key) == expected


def test_a_finished_run_is_returned_and_not_trained(tmp_path, monkeypatch):
    run = small()
    first = train(run, tmp_path)
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "go", lambda *arguments: pytest.fail("trained again"))
        assert train(run, tmp_path) == first
        assert train(run, tmp_path, resume=True) == first
    assert files(tmp_path) == before
    again = train(run, tmp_path, again=True)
    assert again["test"] == first["test"]
    assert again["about"]["date"] >= first["about"]["date"]


def test_another_run_has_another_folder(tmp_path):
    for seed in (0, 1):
        train(small(seed=seed, steps=2), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {small(seed=seed, steps=2).key for seed in (0, 1)}


def test_checkpoints_are_written_every_save_every_seconds(tmp_path, monkeypatch):
    saves, save = [], RunFolder.save
    monkeypatch.setattr(
        RunFolder, "save", lambda folder, name, *arguments: (saves.append(name), save(folder, name, *arguments))
    )
    train(small(valid_every=24), tmp_path / "often", save_every=0.0)
    assert saves.count("last") == 24
    saves.clear()
    train(small(valid_every=24), tmp_path / "seldom", save_every=1e9)
    assert saves.count("last") == 1


def test_a_stopped_fleet_resumes(tmp_path, monkeypatch):
    runs = [small(steps=steps, seed=seed, dtype="float64") for seed, steps in enumerate((10, 24, 17))]
    expected = fleet(runs, tmp_path / "whole")
    stopped_after(13, monkeypatch, lambda: train_together(runs, TrainOptions(tmp_path)))
    # One run has finished and has its record, the others have their checkpoints.
    assert [(tmp_path / run.key / "record.json").exists() for run in runs] == [True, False, False]
    got = fleet(runs, tmp_path, resume=True)
    for (a, record), (b, other) in zip(got, expected, strict=True):
        # Two models and not three: a batched product may sum in another order.
        assert all(torch.allclose(a[name], b[name], rtol=1e-9, atol=1e-12) for name in b)
        assert record["steps"] == other["steps"]


def test_a_fleet_with_noise_and_carried_state_resumes(tmp_path, monkeypatch):
    fields = {**KINDS["carried with noise"], "dtype": "float64"}
    runs = [small(seed=seed, **fields) for seed in range(2)]
    expected = fleet(runs, tmp_path / "whole")
    stopped_after(8, monkeypatch, lambda: train_together(runs, TrainOptions(tmp_path)))
    for (a, _), (b, _) in zip(fleet(runs, tmp_path, resume=True), expected, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in b)


def test_runs_of_a_fleet_must_be_at_one_step(tmp_path, monkeypatch):
    runs = [small(seed=seed) for seed in range(2)]
    stopped_after(5, monkeypatch, lambda: train(runs[0], tmp_path))
    with pytest.raises(ValueError, match=r"must be at one step; these are at \[0, 5\]. Resume them separately"):
        train_together(runs, TrainOptions(tmp_path, resume=True))


# A run of a second or two that writes checkpoints all the time.
SECONDS = small(steps=300, task_options={"T": 4}, valid_every=40, cell="LSTM", cell_options={"zoneout": 0.1})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The results of that run, and the seconds it takes."""
    began = time.monotonic()
    expected = train_outcome(SECONDS, tmp_path_factory.mktemp("whole"), save_every=0.02)
    return expected, time.monotonic() - began


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.sample(1)
def test_a_signal_stops_training_after_the_step_with_a_checkpoint(number, whole, tmp_path):
    process = Process(SECONDS, tmp_path)
    time.sleep(whole[1] / 3)
    os.kill(process.process.pid, number)
    signalled, step = process.receive()
    assert process.end() == 3
    assert signalled == number
    assert 0 < step < 300
    folder = tmp_path / SECONDS.key
    assert not (folder / "record.json").exists()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".lock"]
    train(SECONDS, tmp_path, resume=True)
    assert outcome(folder) == whole[0]


# A compiler that takes its time, so that a signal arrives while it compiles.
SLOW_COMPILER = """#!/bin/sh
case "$*" in *-shared*) [ -e compiling ] || { touch compiling; sleep 2; };; esac
exec cc "$@"
"""


def test_ctrl_c_during_the_first_compilation_does_not_reach_the_compiler(tmp_path):
    """The signal goes to the whole group of processes, as in a terminal. The first step runs compiled, as all others do."""
    run = Run(task="adding", task_options={"T": 6}, cell="STAR", hidden=3, batch=4, steps=30, valid_batches=1)
    expected = train_outcome(run, tmp_path / "whole")
    (tmp_path / "cc").write_text(SLOW_COMPILER)
    (tmp_path / "cc").chmod(0o755)
    program = """if True:
        import signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv[0] = "unfading"
        from unfading.cli.main import main
        main()"""
    flags = [
        "--task",
        "adding,T=6",
        "--cell",
        "STAR",
        "--hidden",
        "3",
        "--batch",
        "4",
        "--steps",
        "30",
        "--valid-batches",
        "1",
        "--no-recipe",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", program, "train", *flags],
        cwd=tmp_path,
        env={**os.environ, "CC": str(tmp_path / "cc"), "UNFADING_CACHE": str(tmp_path / "cache")},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not (tmp_path / "compiling").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, messages = process.communicate(timeout=120)
    assert process.returncode == 130, messages
    assert "stopped at step 1;" in messages
    folder = tmp_path / "runs" / "adding" / run.key
    header = checkpoint.load_header(folder / "last.safetensors")
    assert [(each["backend"], each["reason"]) for each in header["backends"]] == [("fused", None)]
    train(run, tmp_path / "runs" / "adding", resume=True)
    assert outcome(folder) == expected


def test_a_second_signal_acts_at_once(tmp_path):
    run = small(task=f"{OWN}:Slow", task_options={"at": 5})
    process = Process(run, tmp_path)
    while not (tmp_path / run.key / "slow").exists():
        time.sleep(0.01)
    began = time.monotonic()
    os.kill(process.process.pid, signal.SIGINT)
    # Two signals that arrive before the first is handled count as one; a busy machine needs time.
    time.sleep(1.0)
    assert process.process.is_alive()
    os.kill(process.process.pid, signal.SIGINT)
    # KeyboardInterrupt at once, and not at the end of a step of a minute.
    assert process.end() == 1
    assert time.monotonic() - began < 20


def test_signal_handlers_are_restored_after_training():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(small(steps=1))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_killed_at_random_moments_has_the_results_of_one_that_is_not(kills, whole, tmp_path):
    expected, seconds = whole
    moments = random.Random(kills)
    killed = 0
    folder = tmp_path / SECONDS.key
    while killed < kills and not (folder / "record.json").exists():
        process = Process(SECONDS, tmp_path, save_every=0.02)
        time.sleep(moments.uniform(0.0, 1.5 * seconds / kills))
        os.kill(process.process.pid, signal.SIGKILL)
        assert process.end() in (-signal.SIGKILL, 0)
        killed += 1
    assert killed >= kills / 2
    train(SECONDS, tmp_path, resume=True)
    assert outcome(folder) == expected
    # Temporary files of killed processes do not accumulate.
    assert {path.name for path in folder.iterdir()} <= {
        ".lock",
        "run.json",
        "curve.jsonl",
        "last.safetensors",
        "best.safetensors",
        "record.json",
    }
