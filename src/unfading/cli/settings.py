"""Flags that `train` and `compare` share: how to train, and what is kept of it."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from unfading.errors import unknown
from unfading.training.names import parse
from unfading.training.run import Run

# Where neither steps nor epochs are said: the budget of the papers' adding problem, and a first look at a dataset.
STEPS, EPOCHS = 2000, 10


@dataclass(frozen=True)
class Settings:
    """How to train.

    Args:
        hidden: units per layer.
        layers: depth of the stack.
        optimiser: adam, amsgrad, rmsprop or sgd, with options: sgd,momentum=0.9.
        rates: factors on the rate of some parameters: eta=0.1.
        schedule: constant, step, cosine or polynomial, with options: step,every=1000,gamma=0.5.
        clip_norm: largest norm of the gradient; None for any.
        clip_value: largest entry of the gradient, with --clip-norm None.
        batch: rows of a batch.
        steps: updates; 2000 on a task without end, where nothing is said.
        epochs: passes over a dataset; 10, where nothing is said.
        truncate: let gradients reach back no further than such pieces of a sequence.
        valid_every: steps between evaluations.
        valid_batches: batches of an evaluation and of the test.
        stop_at: a validation score that is good enough: the run ends there.
        retries: how often a run that is not finite any more goes back to better weights with half the rate.
        dtype: precision; tf32, on a GPU, is float32 with quicker products.
        device: where to train.
        backend: of the layers.
    """

    hidden: int = 128
    layers: int = 1
    optimiser: str = "adam"
    rates: tuple[str, ...] = ()
    schedule: str = "constant"
    clip_norm: float | None = 1.0
    clip_value: float | None = None
    batch: int = 32
    steps: int | None = None
    epochs: int | None = None
    truncate: int | None = None
    valid_every: int | None = None
    valid_batches: int | None = None
    stop_at: float | None = None
    retries: int = 0
    dtype: Literal["float32", "float64", "tf32"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    backend: str = "auto"

    def run(self, task: str, cell: str, *, rate: float, seed: int) -> Run:
        """The run that the flags describe."""
        task_name, task_options = parse(task)
        cell_name, cell_options = parse(cell)
        optimiser, optimiser_options = parse(self.optimiser)
        schedule, schedule_options = parse(self.schedule)
        steps, epochs = self.steps, self.epochs
        made = Run(
            task=task_name,
            task_options=task_options,
            cell=cell_name,
            cell_options=cell_options,
            hidden=self.hidden,
            layers=self.layers,
            optimiser=optimiser,
            optimiser_options=optimiser_options,
            rate=rate,
            rates=_factors(self.rates),
            schedule=schedule,
            schedule_options=schedule_options,
            clip_norm=self.clip_norm,
            clip_value=self.clip_value,
            batch=self.batch,
            steps=STEPS if steps is None and epochs is None else steps,
            epochs=epochs,
            truncate=self.truncate,
            valid_every=self.valid_every,
            valid_batches=self.valid_batches,
            stop_at=self.stop_at,
            retries=self.retries,
            dtype=self.dtype,
            device=self.device,
            backend=self.backend,
            seed=seed,
        )
        if steps is None and epochs is None and made.make_task().length("train", self.batch) is not None:
            return replace(made, steps=None, epochs=EPOCHS)
        return made

    def runs(self, task: str, cells: Sequence[str], *, rates: Sequence[float], seeds: int) -> list[Run]:
        """The runs that the flags describe: every cell with every rate and seed, and with the factors that fit it."""
        first = {cell: self.run(task, cell, rate=rates[0], seed=0) for cell in dict.fromkeys(cells)}
        if self.rates:
            first = dict(zip(first, _fitting(list(first.values())), strict=True))
        return [replace(run, rate=r, seed=s) for run in first.values() for r in dict.fromkeys(rates) for s in range(seeds)]


@dataclass(frozen=True)
class Keeping:
    """What is kept, and what is shown.

    Args:
        runs: folder of all runs.
        name: of their folder in it; that of the task, where nothing is said.
        resume: go on where checkpoints are.
        again: throw away what is there and begin anew.
        save_every: seconds between checkpoints.
        quiet: show no progress.
        json: print JSON instead of text.
    """

    runs: Path = Path("runs")
    name: str | None = None
    resume: bool = False
    again: bool = False
    save_every: float = 60.0
    quiet: bool = False
    json: bool = False

    def where(self, run: Run) -> Path:
        """The folder of the runs' folders."""
        name = self.name or run.task.replace(":", "-").replace("/", "-")
        if name in (".", "..") or "/" in name:
            raise ValueError(f"--name is one folder in --runs; got {name!r}.")
        if self.resume and self.again:
            raise ValueError("--resume goes on and --again begins anew; give one of the two.")
        return self.runs / name

    def options(self) -> dict[str, Any]:
        """What the training functions take."""
        typed = shlex.join(["unfading", *sys.argv[1:]])
        return {"resume": self.resume, "again": self.again, "save_every": self.save_every, "command": typed}


def check_alone(record: Path) -> None:
    """Raise where flags were typed beside --from that say what the record says."""
    typed = [word.partition("=")[0] for word in sys.argv[1:] if word.startswith("--")]
    said = {"task", "cell", "rate", "seed", *(each.name for each in fields(Settings))}
    wrong = [flag for flag in typed if flag[2:].replace("-", "_") in said]
    if wrong:
        raise ValueError(
            f"--from {record} says what to train and how; leave the other flags out: {', '.join(dict.fromkeys(wrong))}."
        )


def _fitting(runs: Sequence[Run]) -> list[Run]:
    """Each with those of its factors that fit a parameter of its model; one that fits none of them is told."""
    names = [run.make_model().trainable for run in runs]
    fit: list[dict[str, float]] = [{} for _ in runs]
    for pattern, factor in runs[0].rates.items():
        for run, known, found in zip(runs, names, fit, strict=True):
            with suppress(ValueError):
                replace(run, rates={pattern: factor}).factors(known)
                found[pattern] = factor
        if not any(pattern in found for found in fit):
            known = sorted({name.rpartition(".")[2] for each in names for name in each})
            raise ValueError(f"--rates: {unknown('parameter of these cells', pattern, known)}")
    return [replace(run, rates=found) for run, found in zip(runs, fit, strict=True)]


def _factors(pairs: Sequence[str]) -> dict[str, float]:
    """NAME=FACTOR, several of them."""
    found = {}
    for pair in pairs:
        name, _, factor = pair.partition("=")
        try:
            found[name] = float(factor)
        except ValueError:
            raise ValueError(f"--rates takes NAME=FACTOR, e.g. eta=0.1; got {pair!r}.") from None
    return found
