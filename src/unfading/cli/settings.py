"""Flags that `train` and `compare` share: how to train, and what is kept of it."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from unfading.errors import unknown
from unfading.training.names import parse
from unfading.training.run import Run
from unfading.training.settings import FIELDS

# Where neither steps nor epochs are given: the budget of the papers' adding problem, and a first impression of a dataset.
STEPS, EPOCHS = 2000, 10

# Settings that are no flag of their own: those that each verb takes in its own way, options, which are typed behind the name
# that they belong to, and the split, which --final decides.
NOT_FLAGS = {
    "task",
    "cell",
    "rate",
    "seed",
    "split",
    *(name for name in FIELDS if name.endswith("_options")),
}
# What the help of a flag says beside the description of its setting.
MORE = {
    "optimiser": "Options follow the name: sgd,momentum=0.9.",
    "schedule": "Options follow the name: step,every=1000,gamma=0.5.",
    "rates": "Written eta=0.1.",
    "steps": f"Default: {STEPS} if the task has no epochs.",
    "epochs": f"Default: {EPOCHS} if the task has epochs.",
}


class TrainingFlags:
    """How to train: a flag for each setting of a run."""

    def run(self, task: str, cell: str, *, rate: float, seed: int) -> Run:
        """The run that the flags describe."""
        values = {**asdict(self), "task": task, "cell": cell}  # type: ignore[call-overload]
        values["rates"] = _factors(values["rates"])
        for name in ("task", "cell", "optimiser", "schedule"):
            values[name], values[f"{name}_options"] = parse(values[name])
        length_given = values["steps"] is not None or values["epochs"] is not None
        if not length_given:
            values["steps"] = STEPS
        run = Run(**values, rate=rate, seed=seed)
        if not length_given and run.make_task().length("train", run.batch) is not None:
            return replace(run, steps=None, epochs=EPOCHS)
        return run

    def runs(self, task: str, cells: Sequence[str], *, rates: Sequence[float], seeds: int) -> list[Run]:
        """The runs that the flags describe: every cell with every rate and seed, and with the factors that fit it."""
        first = {cell: self.run(task, cell, rate=rates[0], seed=0) for cell in dict.fromkeys(cells)}
        if any(run.rates for run in first.values()):
            first = dict(zip(first, _fitting(list(first.values())), strict=True))
        return [replace(run, rate=r, seed=s) for run in first.values() for r in dict.fromkeys(rates) for s in range(seeds)]


def _flags() -> Any:
    """The flags as a dataclass, which is what tyro reads."""
    flags: list[Any] = []
    for name, each in FIELDS.items():
        if name not in NOT_FLAGS:
            help = " ".join(filter(None, [each.description, MORE.get(name)]))
            kind, default = (tuple[str, ...], ()) if name == "rates" else (each.annotation, each.default)
            flags.append((name, Annotated[kind, arg(help=help)], field(default=default)))
    about = {"__doc__": TrainingFlags.__doc__}
    return make_dataclass("TrainingFlags", flags, bases=(TrainingFlags,), frozen=True, namespace=about)


FLAGS = _flags()


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
    said = {"task", "cell", "rate", "seed", *FIELDS}
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
