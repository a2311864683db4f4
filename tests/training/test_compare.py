"""`compare`: runs in processes and in passes, starting again, refusals, and the choice of the learning rate."""

import sys
from dataclasses import replace

import pytest
import torch

from unfading import Run, compare, train
from unfading import compare as _function
from unfading.training.compare import chosen, shape
from unfading.training.loop import Training
from unfading.training.options import TrainOptions
from unfading.training.run_dir import RunFolder, finished

SMALL = Run(task="adding", task_options={"T": 6}, cell="Elman", hidden=4, batch=3, steps=12, valid_batches=1)
assert callable(_function)
module = sys.modules["unfading.training.compare"]
training = sys.modules["unfading.training.loop"]


def silent(message):
    """Ignore messages."""


def comparable(record):
    """The parts of a record that must not depend on where a run is trained."""
    curve = [{name: value for name, value in row.items() if name != "seconds"} for row in record["curve"]]
    return record["key"], record["status"], record["best"], record["test"], curve


def test_worker_processes_give_the_same_results_as_one_process(tmp_path):
    runs = [replace(SMALL, cell=cell, seed=seed) for cell in ("Elman", "STAR") for seed in (0, 1)]
    updates = []
    apart = compare(runs, tmp_path / "apart", listen=updates.append, say=silent)
    alone = [train(run) for run in runs]
    assert [comparable(record) for record in apart] == [comparable(record) for record in alone]
    assert {update.run.key for update in updates} == {run.key for run in runs}
    assert all(1 <= update.step <= update.total == 12 for update in updates)


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch):
    runs = [replace(SMALL, seed=seed) for seed in (0, 1)]
    before = compare(runs, tmp_path, processes=1, say=silent)
    monkeypatch.setattr(Training, "go", lambda self, asked: pytest.fail("it was trained again"))
    messages = []
    assert compare(runs, tmp_path, say=messages.append) == before
    assert messages == ["2 of 2 runs are already finished."]


def test_equal_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two of these runs are the same"):
        compare([SMALL, replace(SMALL)], tmp_path)


def test_runs_of_one_shape_differ_only_in_seed_rates_and_limits():
    same = [{"seed": 5}, {"rate": 0.5}, {"rates": {"U": 0.1}}, {"schedule": "cosine"}, {"clip_norm": 3.0}, {"steps": 99}]
    same += [{"retries": 2}, {"stop_at": 0.1}, {"select_by": "loss"}, {"clip_norm": None, "clip_value": 1.0}]
    other = [{"hidden": 5}, {"cell": "STAR"}, {"optimiser": "sgd"}, {"batch": 4}, {"task_options": {"T": 8}}, {"layers": 2}]
    assert {shape(replace(SMALL, **change)) for change in same} == {shape(SMALL)}
    assert all(shape(replace(SMALL, **change)) != shape(SMALL) for change in other)


def test_a_pass_holds_runs_of_one_shape_at_one_step_up_to_the_maximum(tmp_path):
    runs = [replace(SMALL, seed=seed) for seed in range(5)] + [replace(SMALL, hidden=5)]
    fleets = module._passes(runs, tmp_path, 4)
    assert fleets == [runs[:4], runs[4:5], runs[5:]]


def test_a_pass_that_does_not_fit_in_memory_is_halved(tmp_path, monkeypatch):
    trained = []

    def scarce(runs, options):
        if len(runs) > 2:
            raise torch.OutOfMemoryError
        trained.append((runs, options.resume))

    monkeypatch.setattr(training, "train_together", scarce)
    runs, messages = [replace(SMALL, seed=seed) for seed in range(5)], []
    module.train_pass(runs, TrainOptions(tmp_path, say=messages.append))
    assert [run for part, _ in trained for run in part] == runs
    assert all(resumed for _, resumed in trained)
    assert len(messages) == 2
    monkeypatch.setattr(training, "train_together", lambda *a, **o: (_ for _ in ()).throw(torch.OutOfMemoryError))
    with pytest.raises(ValueError, match="Elman with batch 3 does not fit in the memory of the GPU"):
        module.train_pass(runs[:1], TrainOptions(tmp_path, say=messages.append))


def test_starting_again_returns_no_old_record_even_if_a_pass_does_not_fit(tmp_path, monkeypatch):
    runs, record = [replace(SMALL, device="cuda", seed=seed) for seed in (0, 1)], train(replace(SMALL, steps=1))
    for run in runs:
        folder = RunFolder(tmp_path, run)
        folder.save_record({**record, "reason": "old", "run": folder.run.to_json()})
        folder.close()
        (folder.path / "last.safetensors").write_bytes(b"damaged")

    def scarce(runs, options):
        if len(runs) > 1:
            raise torch.OutOfMemoryError
        assert not options.again
        folder = RunFolder(options.folder, runs[0])
        assert finished(options.folder, runs[0]) is None
        assert folder.load("last") is None
        folder.save_record({**record, "reason": "new", "run": folder.run.to_json()})
        folder.close()

    monkeypatch.setattr(training, "train_together", scarce)
    assert [each["reason"] for each in compare(runs, tmp_path, again=True, say=silent)] == ["new", "new"]


def test_a_folder_that_another_process_writes_is_not_cleared(tmp_path):
    before = train(SMALL, tmp_path)
    folder = RunFolder(tmp_path, SMALL)
    with pytest.raises(ValueError, match="is being written by another process"):
        compare([SMALL], tmp_path, again=True, say=silent)
    assert finished(tmp_path, SMALL) == before
    folder.close()


def test_stopped_runs_are_refused_before_any_run_is_trained(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path, SMALL)
    progress = {"seconds": 0.0, "time": 0, "best": None, "least": None, "loss": None, "reached": False}
    folder.save("last", {"w": torch.zeros(2)}, {"step": 7, **progress})
    folder.close()
    # The step is read from the header, without reading the weights.
    monkeypatch.setattr("unfading.training.checkpoint.load", lambda path: pytest.fail("the weights were read"))
    assert module.stopped_at(tmp_path, SMALL) == 7
    monkeypatch.setattr(module, "train_apart", lambda *a, **o: pytest.fail("a run was trained"))
    with pytest.raises(
        ValueError, match=rf"1 of 2 runs stopped before their end, .*{SMALL.key} at step 7\. Continue them with resume"
    ):
        compare([replace(SMALL, seed=1), SMALL], tmp_path, say=silent)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"cell": "STAR", "cell_options": {"max_lag": 1}}, "cell STAR: max_lag must be at least 2; got 1"),
        ({"rates": {"W_z": 0.1}}, "rates: unknown parameter 'W_z'"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused_before_any_run_is_trained(tmp_path, monkeypatch, change, sentence):
    before = train(SMALL, tmp_path)
    monkeypatch.setattr(module, "train_apart", lambda *a, **o: pytest.fail("a run was trained"))
    with pytest.raises(ValueError) as caught:
        compare([SMALL, *(replace(SMALL, seed=seed, **change) for seed in (0, 1))], tmp_path, again=True, say=silent)
    assert str(caught.value).startswith(sentence)
    assert module.finished(tmp_path, SMALL) == before  # not discarded yet


def test_several_passes_are_announced_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "train_pass", lambda *arguments: None)
    monkeypatch.setattr(module, "_check", lambda runs: None)
    monkeypatch.setattr(
        module, "finished", lambda where, run, calls=[]: calls.append(run.key) or ({} if len(calls) > 4 else None)
    )
    runs = [replace(SMALL, device="cuda", seed=seed) for seed in range(3)] + [replace(SMALL, device="cuda", hidden=5)]
    messages = []
    compare(runs, tmp_path, together=2, say=messages.append)
    assert messages == ["4 runs of 2 shapes in 3 passes, each of one shape, from one step and with at most 2 runs: 2, 1, 1."]


@pytest.mark.parametrize(("processes", "apart"), [(None, False), (1, False), (3, True)])
def test_passes_share_a_gpu_in_processes_if_asked(tmp_path, monkeypatch, processes, apart):
    runs = [replace(SMALL, device="cuda", seed=seed) for seed in range(3)] + [replace(SMALL, device="cuda", hidden=5)]
    done, in_this_process, in_workers = set(), [], []

    def end(jobs, trained):
        trained += jobs
        done.update(run.key for job in jobs for run in job)

    monkeypatch.setattr(module, "_check", lambda runs: None)
    monkeypatch.setattr(module, "finished", lambda where, run: {} if run.key in done else None)
    monkeypatch.setattr(module, "train_pass", lambda job, *rest: end([job], in_this_process))
    monkeypatch.setattr(module, "train_apart", lambda jobs, *rest, **options: end(jobs, in_workers))
    compare(runs, tmp_path, processes=processes, say=silent)
    assert (in_workers if apart else in_this_process) == [runs[:3], runs[3:]]
    assert (in_this_process if apart else in_workers) == []


def test_training_works_on_a_file_system_without_locks(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def flock(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert train(SMALL, tmp_path)["status"] == "finished"


def make_record(rate, seed, valid, status="finished", test=0.5, *, rising=False):
    run = replace(SMALL, rate=rate, seed=seed)
    best = None if valid is None else {"step": 3, "valid": {"loss": 9.0, "mse": valid}}
    test = {"loss": 9.0, "mse": test}
    return {"run": run.to_json(), "status": status, "best": best, "measure": "mse", "rising": rising, "test": test}


def test_the_rate_is_chosen_by_divergence_then_by_validation_and_never_by_the_test():
    good = [make_record(0.1, 0, 0.3, test=0.9), make_record(0.1, 1, 0.5, test=0.9)]
    worse = [make_record(0.2, 0, 0.4, test=0.0), make_record(0.2, 1, 0.5, test=0.0)]
    unstable = [make_record(0.3, 0, 0.01), make_record(0.3, 1, 0.01, "diverged")]
    nothing = [make_record(0.4, 0, None), make_record(0.4, 1, 0.01)]
    assert chosen([*worse, *unstable, *nothing, *good]) == good
    rising = [{**record, "rising": True} for record in [*good, *worse]]
    assert chosen(rising) == rising[2:]
