"""Helpers of the training tests: small runs, the results in a run's folder, and a run in its own process."""

import dataclasses
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from unfading import Run
from unfading.training import checkpoint
from unfading.training import loop as training
from unfading.training.loop import train_together
from unfading.training.options import TrainOptions
from unfading.training.run_dir import read_curve, read_record
from unfading.training.stopping import Stopped
from unfading.training.train import train

OWN = Path(__file__).parent.parent / "user" / "own_tasks.py"


def small(**fields):
    """A short run of the adding problem."""
    wanted = {"task": "adding", "task_options": {"T": 6}, "cell": "STAR", "hidden": 3, "batch": 4, "rate": 0.01}
    # For six steps of three units the reference loop is as fast, and needs no compilation.
    wanted |= {"backend": "reference", "valid_batches": 1} | ({} if "epochs" in fields else {"steps": 24})
    wanted |= {} if fields.get("split") == "full" else {"valid_every": 8}
    return Run(**{**wanted, **fields})


def changed(run, **fields):
    return dataclasses.replace(run, **fields)


def tensors(folder, name="last"):
    """The tensors of a checkpoint, by name."""
    return checkpoint.load(folder / f"{name}.safetensors")[0]


def weights(folder, name="last"):
    """The tensors of the model in a checkpoint, by name."""
    return {key: part for key, part in tensors(folder, name).items() if key.startswith("model.")}


def untimed(curve):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in curve]


def outcome(folder):
    """All results in the folder of a run except for times: tensors as bytes, the rest as JSON."""
    record, curve = read_record(folder / "record.json"), read_curve(folder / "curve.jsonl")
    assert record["curve"] == curve
    results = {name: record[name] for name in ("status", "reason", "steps", "returns", "best", "test")}
    results["curve"] = untimed(curve)
    for name in ("last", "best"):
        if (folder / f"{name}.safetensors").exists():
            parts, about = checkpoint.load(folder / f"{name}.safetensors")
            results[name] = {key: value for key, value in about.items() if key != "seconds"}
            results |= {(name, key): (str(part.dtype), part.shape, part.numpy().tobytes()) for key, part in parts.items()}
    return results


def train_outcome(run, where, **keywords):
    """Train a run without a stop; its outcome."""
    train(run, where, **keywords)
    return outcome(where / run.key)


def fleet(runs, where, together=True, **options):
    """For each run of a fleet, its last weights and its record."""
    records = train_together(runs, TrainOptions(where, **options), together=together)
    return [(weights(where / run.key), record) for run, record in zip(runs, records, strict=True)]


def files(folder):
    """Every file below a folder, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Processes are forked from one that has already imported the library: a fresh one takes seconds to start.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.helpers.trained"])


def _train_there(fields, where, keywords, pipe):
    torch.set_num_threads(1)
    os.chdir(where)
    # Background jobs of a shell ignore SIGINT, and their children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pipe.send("going")
    try:
        train(Run(**fields), where, resume=True, **keywords)
    except Stopped as stopped:
        pipe.send((stopped.signal, stopped.step))
        raise SystemExit(3) from None
    pipe.send("done")


class Process:
    """A run that is trained or resumed in its own process."""

    def __init__(self, run, where, **keywords):
        self._pipe, pipe = _processes.Pipe(duplex=False)
        arguments = (run.to_json(), where, keywords, pipe)
        self.process = _processes.Process(target=_train_there, args=arguments)
        self.process.start()
        pipe.close()
        self.receive()

    def receive(self):
        """Wait for its next message."""
        assert self._pipe.poll(60)
        return self._pipe.recv()

    def end(self):
        """Wait for its end; its exit status."""
        self.process.join(60)
        code = self.process.exitcode
        self.process.close()
        self._pipe.close()
        return code


# All that a checkpoint must hold: optimisers, carried state, noise, returns to better weights, schedules, early stopping.
KINDS = {
    "plain": {},
    "fused": {"backend": "auto"},
    "amsgrad": {"optimiser": "amsgrad"},
    "rmsprop": {"optimiser": "rmsprop", "optimiser_options": {"momentum": 0.5}},
    "sgd": {"optimiser": "sgd", "optimiser_options": {"momentum": 0.9, "nesterov": True}},
    "decay": {"optimiser_options": {"weight_decay": 0.1, "l2": 0.1}},
    "schedule": {"schedule": "polynomial", "rates": {"W_h": 0.1}},
    "noise": {"layers": 2, "cell_options": {"dropout": 0.3, "zoneout": 0.2, "recurrent_dropout": 0.2}},
    "carried": {"task": "copying", "task_options": {"T": 3, "items": 2, "keep": 5}},
    "carried in time": {
        "task": "copying",
        "task_options": {"T": 3, "items": 2, "keep": 7},
        "cell": "IncrementalRNN",
        "cell_options": {"steps": 40},
    },
    "carried with noise": {
        "task": "copying",
        "task_options": {"T": 3, "items": 2, "keep": 5},
        "cell_options": {"zoneout": 0.3},
        "cell": "LSTM",
        "layers": 2,
    },
    "truncated": {"truncate": 2},
    "returns": {"task": f"{OWN}:Breaks", "task_options": {"at": 9, "times": 3}, "retries": 5, "rate": 0.05},
    "diverges": {"task": f"{OWN}:Breaks", "task_options": {"at": 15}, "retries": 1},
    "buffers": {"cell": "UnitaryRNN"},
    "full": {"split": "full"},
    "float64": {"dtype": "float64"},
    "compressed": {"compress": {"sparsity": 0.5, "bits": 8}},
    "enough": {"stop_at": 0.3, "valid_every": 2, "rate": 0.02},
    "log rows of two steps": {"steps": 410, "task_options": {"T": 2}, "valid_every": 150},
}


def stopped_after(steps, monkeypatch, call):
    """Run `call`, and ask it to stop after so many steps, as a signal does."""
    answers = iter([None] * (steps - 1))
    go = training.Training.go
    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "go", lambda self, asked: go(self, lambda: next(answers, signal.SIGTERM)))
        with pytest.raises(Stopped) as caught:
            call()
    return caught.value


# Another value of each field.
OTHER = {
    "task": "denoising",
    "task_options": {"T": 12},
    "cell": "LSTM",
    "cell_options": {"shift": 1.0},
    "hidden": 5,
    "layers": 2,
    "optimiser": "sgd",
    "optimiser_options": {"l2": 0.1},
    "rate": 0.02,
    "rates": {"W_h": 0.1},
    "schedule": "cosine",
    "schedule_options": {"floor": 0.5},
    "clip_norm": 0.1,
    "clip_value": 0.1,
    "batch": 5,
    "steps": 30,
    "epochs": 2,
    "truncate": 2,
    "split": "full",
    "valid_every": 5,
    "valid_batches": 2,
    "stop_at": 0.1,
    "patience": 3,
    "select_by": "loss",
    "compress": {"sparsity": 0.5},
    "retries": 1,
    "dtype": "float64",
    "device": "cuda",
    "backend": "auto",
    "seed": 1,
}
# Other fields that a value needs.
WITH = {
    "task": {"task_options": {"T": 12}},
    "schedule_options": {"schedule": "cosine"},
    "clip_value": {"clip_norm": None},
    "epochs": {"steps": None},
    "split": {"valid_every": None},
    "patience": {"valid_every": 1, "rate": 0.5},  # so that some evaluation is no better than the one before
}
