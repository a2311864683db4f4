"""Many runs: in processes, in one pass, stopped, resumed, with some that fail; and which rate is chosen."""

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

from unfading import Run, compare, train, workers
from unfading import compare as _function
from unfading.compare import chosen, shape
from unfading.folder import Folder
from unfading.training import Training

FAULTY = Path(__file__).parent / "user" / "faulty_tasks.py"
SMALL = Run(task="adding", task_options={"T": 6}, cell="Elman", hidden=4, batch=3, steps=12, valid_batches=1)
assert callable(_function)
module = sys.modules["unfading.compare"]


def silent(sentence):
    """Nobody listens."""


def told(record):
    """What two trainings of one run must agree in."""
    curve = [{name: value for name, value in line.items() if name != "seconds"} for line in record["curve"]]
    return record["key"], record["status"], record["best"], record["test"], curve


def test_processes_give_what_one_process_gives(tmp_path):
    runs = [replace(SMALL, cell=cell, seed=seed) for cell in ("Elman", "STAR") for seed in (0, 1)]
    heard = []
    apart = compare(runs, tmp_path / "apart", listen=heard.append, say=silent)
    alone = [train(run) for run in runs]
    assert [told(record) for record in apart] == [told(record) for record in alone]
    assert {moment.run.key for moment in heard} == {run.key for run in runs}
    assert all(1 <= moment.step <= moment.total == 12 for moment in heard)


def test_a_run_that_is_done_is_not_trained_again(tmp_path, monkeypatch):
    runs = [replace(SMALL, seed=seed) for seed in (0, 1)]
    before = compare(runs, tmp_path, processes=1, say=silent)
    monkeypatch.setattr(Training, "go", lambda self, asked: pytest.fail("it was trained again"))
    sentences = []
    assert compare(runs, tmp_path, say=sentences.append) == before
    assert sentences == ["2 of 2 runs are done already."]


def test_equal_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two of these runs are the same"):
        compare([SMALL, replace(SMALL)], tmp_path)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    bad = replace(SMALL, task=f"{FAULTY}:Raising")
    deadly = [replace(SMALL, task=f"{FAULTY}:Deadly", seed=seed) for seed in (0, 1)]
    good = [replace(SMALL, seed=seed) for seed in (0, 1)]
    with pytest.raises(ValueError, match="2 of 5 runs failed") as caught:
        compare([bad, *deadly, *good], tmp_path, say=silent)
    assert "Elman, seed 0: the sensor was unplugged" in str(caught.value)
    assert "Elman, seed 0: its process ended with signal 9" in str(caught.value)
    for run in (deadly[1], *good):
        assert (tmp_path / run.key / "record.json").exists()


def test_a_worker_that_cannot_start_is_told_once_for_each_run_and_no_broken_pipe_flies(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "START", "raise SystemExit(3)")
    news = queue.Queue()
    worker = workers._Worker(0, news)
    worker.process.wait()
    worker.send({"run": SMALL.to_json()})
    assert news.get(timeout=10) == (0, None)
    worker.stop()
    runs = [replace(SMALL, cell=cell, seed=seed) for cell in ("Elman", "STAR") for seed in (0, 1, 2)]
    with pytest.raises(ValueError, match="6 of 6 runs failed") as caught:
        compare(runs, tmp_path, say=silent)
    told = [f"{cell}, seeds 0, 1, 2: its process ended with code 3" for cell in ("Elman", "STAR")]
    assert str(caught.value).endswith(f"failed: {'; '.join(told)}")


def test_lines_that_others_write_to_a_workers_output_go_to_stderr(tmp_path, monkeypatch, capfd):
    lines = ["hello from elsewhere", "3", '{"key": 1}', '{"done": true}']
    program = f"import sys; sys.stdin.readline(); sys.stdout.buffer.write(bytes([255, 10])); print({chr(10).join(lines)!r})"
    monkeypatch.setattr(workers, "START", program)
    workers.train_apart([SMALL], tmp_path, processes=1, listen=None, options={})
    assert capfd.readouterr().err.split("\n")[1:4] == lines[:3]


def test_a_worker_can_import_what_its_parent_can_and_may_be_greeted_on_its_output(tmp_path, monkeypatch, capfd):
    elsewhere, site = tmp_path / "elsewhere", tmp_path / "site"
    elsewhere.mkdir(), site.mkdir()
    (elsewhere / "leaky_elsewhere.py").write_text("from unfading import ElmanCell\n\n\nclass LeakyCell(ElmanCell):\n    pass\n")
    (site / "sitecustomize.py").write_text("print('hello from sitecustomize', flush=True)\nprint('and', end='', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(elsewhere)
    runs = [replace(SMALL, cell="leaky_elsewhere:LeakyCell", seed=seed) for seed in (0, 1)]
    assert [record["status"] for record in compare(runs, tmp_path / "runs", say=silent)] == ["finished"] * 2
    assert capfd.readouterr().err.count("hello from sitecustomize") == 2


@pytest.mark.parametrize("signals", [0, 1], ids=["its parent has gone", "and it was signalled itself"])
def test_a_worker_comes_to_its_checkpoint_when_nobody_hears_it_any_more(tmp_path, monkeypatch, signals):
    whole = Training._one_step

    def slow(self, running):
        time.sleep(0.3)
        whole(self, running)

    def lines():
        yield json.dumps({"run": LONG.to_json(), "where": str(tmp_path)}) + "\n"
        waiting_for((tmp_path / LONG.key / "run.json").exists)
        time.sleep(0.5)
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.03)

    monkeypatch.setattr(Training, "_one_step", slow)
    monkeypatch.setattr(sys, "stdin", lines())
    nobody, told = os.pipe()
    os.close(nobody)
    before, threads = signal.getsignal(signal.SIGTERM), set(threading.enumerate())
    try:
        with pytest.raises(SystemExit) as ended:
            workers.main(told)
    finally:
        # Its thread may still have a signal to send.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for thread in set(threading.enumerate()) - threads:
            thread.join()
        signal.signal(signal.SIGTERM, before)
        os.close(told)
    assert ended.value.code == 128 + signal.SIGTERM
    assert module.stopped_at(tmp_path, LONG) > 0


LONG = replace(SMALL, steps=100_000)
PROGRAM = f"""if True:
    import dataclasses, sys
    from unfading import compare
    from unfading.run import Run
    from unfading.stopping import Stopped
    run = Run.from_json({LONG.to_json()!r})
    try:
        compare([run, dataclasses.replace(run, seed=1)], sys.argv[1])
    except Stopped as stopped:
        sys.exit(128 + stopped.signal)
"""


def waiting_for(condition, seconds=60):
    """Until it holds; a process takes a while to begin or to end."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)],
    ids=lambda number: number.name,
)
def test_workers_stop_with_their_parent_and_with_a_checkpoint(tmp_path, number):
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)])
    runs = [LONG, replace(LONG, seed=1)]
    curves = [tmp_path / run.key / "curve.jsonl" for run in runs]
    waiting_for(lambda: all(curve.exists() and curve.stat().st_size for curve in curves))
    process.send_signal(number)
    assert process.wait(60) == (-number if number == signal.SIGKILL else 128 + number)

    def free(run):
        try:
            Folder(tmp_path, run).close()
        except ValueError:
            return False
        return True

    waiting_for(lambda: all(free(run) for run in runs))
    for run in runs:
        folder = Folder(tmp_path, run)
        assert folder.load("last")[1]["step"] > 0
        folder.close()


def test_runs_of_one_shape_differ_in_what_a_row_can_hold():
    same = [{"seed": 5}, {"rate": 0.5}, {"rates": {"U": 0.1}}, {"schedule": "cosine"}, {"clip_norm": 3.0}, {"steps": 99}]
    same += [{"retries": 2}, {"stop_at": 0.1}, {"clip_norm": None, "clip_value": 1.0}]
    other = [{"hidden": 5}, {"cell": "STAR"}, {"optimiser": "sgd"}, {"batch": 4}, {"task_options": {"T": 8}}, {"layers": 2}]
    assert {shape(replace(SMALL, **change)) for change in same} == {shape(SMALL)}
    assert all(shape(replace(SMALL, **change)) != shape(SMALL) for change in other)


def test_passes_hold_runs_of_one_shape_at_one_step_and_no_more_than_asked(tmp_path):
    runs = [replace(SMALL, seed=seed) for seed in range(5)] + [replace(SMALL, hidden=5)]
    fleets = module._fleets(runs, tmp_path, 4)
    assert fleets == [runs[:4], runs[4:5], runs[5:]]


def test_a_pass_that_does_not_fit_is_halved(tmp_path, monkeypatch):
    trained = []

    def scarce(runs, where, **options):
        if len(runs) > 2:
            raise torch.OutOfMemoryError
        trained.append((runs, options["resume"]))

    monkeypatch.setattr(module, "train_together", scarce)
    runs, sentences = [replace(SMALL, seed=seed) for seed in range(5)], []
    module._train_fleet(runs, tmp_path, None, sentences.append, {"resume": False})
    assert [run for part, _ in trained for run in part] == runs
    assert all(resumed for _, resumed in trained)
    assert len(sentences) == 2
    monkeypatch.setattr(module, "train_together", lambda *a, **o: (_ for _ in ()).throw(torch.OutOfMemoryError))
    with pytest.raises(ValueError, match="Elman with batch 3 does not fit the memory of the GPU"):
        module._train_fleet(runs[:1], tmp_path, None, sentences.append, {})


def test_beginning_anew_returns_nothing_old_though_a_pass_does_not_fit(tmp_path, monkeypatch):
    runs = [replace(SMALL, device="cuda", seed=seed) for seed in (0, 1)]
    for run in runs:
        folder = Folder(tmp_path, run)
        folder.save_record({"version": 1, "status": "old"})
        folder.close()
        (folder.path / "last.safetensors").write_bytes(b"damaged")

    def scarce(runs, where, **options):
        if len(runs) > 1:
            raise torch.OutOfMemoryError
        assert "again" not in options
        folder = Folder(where, runs[0])
        assert folder.record() is None
        assert folder.load("last") is None
        folder.save_record({"version": 1, "status": "new"})
        folder.close()

    monkeypatch.setattr(module, "train_together", scarce)
    assert [record["status"] for record in compare(runs, tmp_path, again=True, say=silent)] == ["new", "new"]


def test_nothing_is_cleared_that_another_process_writes(tmp_path):
    before = train(SMALL, tmp_path)
    folder = Folder(tmp_path, SMALL)
    with pytest.raises(ValueError, match="is being written by another process"):
        compare([SMALL], tmp_path, again=True, say=silent)
    assert folder.record() == before
    folder.close()


def test_half_done_runs_are_refused_before_any_is_trained(tmp_path, monkeypatch):
    folder = Folder(tmp_path, SMALL)
    folder.save("last", {"w": torch.zeros(2)}, {"step": 7})
    folder.close()
    # The metadata are enough: a step is known without reading weights.
    monkeypatch.setattr("unfading.checkpoint.load", lambda path: pytest.fail("the weights were read"))
    assert module.stopped_at(tmp_path, SMALL) == 7
    monkeypatch.setattr(module, "train_apart", lambda *a, **o: pytest.fail("a run was trained"))
    with pytest.raises(ValueError, match=rf"1 of 2 runs stopped on their way, .*{SMALL.key} at step 7: resume \(--resume\)"):
        compare([replace(SMALL, seed=1), SMALL], tmp_path, say=silent)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cell": "STAR", "cell_options": {"max_lag": 1}}, "cell STAR: max_lag must be at least 2; got 1"),
        ({"rates": {"W_z": 0.1}}, "rates: unknown parameter 'W_z'"),
    ],
)
def test_settings_that_cannot_be_trained_are_told_before_any_is(tmp_path, monkeypatch, change, sentence):
    before = train(SMALL, tmp_path)
    monkeypatch.setattr(module, "train_apart", lambda *a, **o: pytest.fail("a run was trained"))
    with pytest.raises(ValueError) as caught:
        compare([SMALL, *(replace(SMALL, seed=seed, **change) for seed in (0, 1))], tmp_path, again=True, say=silent)
    assert str(caught.value).startswith(sentence)
    assert module.finished(tmp_path, SMALL) == before  # not thrown away yet


def test_several_passes_are_told_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_train_fleet", lambda *arguments: None)
    monkeypatch.setattr(module, "_check", lambda runs: None)
    monkeypatch.setattr(module, "finished", lambda where, run, seen=[]: seen.append(run.key) or ({} if len(seen) > 4 else None))
    runs = [replace(SMALL, device="cuda", seed=seed) for seed in range(3)] + [replace(SMALL, device="cuda", hidden=5)]
    sentences = []
    compare(runs, tmp_path, together=2, say=sentences.append)
    assert sentences == ["4 runs of 2 shapes in 3 passes, each of one shape, from one step and with at most 2 runs: 2, 1, 1."]


def test_a_file_system_without_locks_is_written_without_one(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def flock(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert train(SMALL, tmp_path)["status"] == "finished"


def made_record(rate, seed, valid, status="finished", test=0.5, *, rising=False):
    run = replace(SMALL, rate=rate, seed=seed)
    best = None if valid is None else {"step": 3, "valid": {"loss": 9.0, "mse": valid}}
    test = {"loss": 9.0, "mse": test}
    return {"run": run.to_json(), "status": status, "best": best, "measure": "mse", "rising": rising, "test": test}


def test_the_rate_is_chosen_by_divergence_then_validation_and_never_by_test():
    good = [made_record(0.1, 0, 0.3, test=0.9), made_record(0.1, 1, 0.5, test=0.9)]
    worse = [made_record(0.2, 0, 0.4, test=0.0), made_record(0.2, 1, 0.5, test=0.0)]
    unstable = [made_record(0.3, 0, 0.01), made_record(0.3, 1, 0.01, "diverged")]
    nothing = [made_record(0.4, 0, None), made_record(0.4, 1, 0.01)]
    assert chosen([*worse, *unstable, *nothing, *good]) == good
    rising = [{**record, "rising": True} for record in [*good, *worse]]
    assert chosen(rising) == rising[2:]
