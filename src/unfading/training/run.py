"""A run: everything that decides its result, as one frozen value of JSON fields."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatch
from typing import Any

import torch

from unfading.backends.choose import check_backend
from unfading.errors import unknown
from unfading.layers.model import Model
from unfading.tasks.base import Task
from unfading.training.learning_rate import SCHEDULES, LearningRateSchedule
from unfading.training.names import build, check_options, layer_class, source, task_class
from unfading.training.optimise import OPTIMISERS, Optimiser
from unfading.training.settings import FIELDS, Settings, check

# Version of the fields of a run and of the files written for it; a folder of another version is refused.
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Run(Settings):
    """What to train, on which task, and how. Two runs with equal fields give equal results on one machine."""

    def __post_init__(self) -> None:
        settings = check({each.name: getattr(self, each.name) for each in fields(self)})
        for each in fields(self):
            object.__setattr__(self, each.name, getattr(settings, each.name))
        check_backend(self.backend)
        self.make_task(), self.make_optimiser(), self.make_schedule()
        check_options("cell", self.cell, layer_class(self.cell), self.cell_options)

    @property
    def key(self) -> str:
        """The name of the run's folder: twelve hexadecimal digits, a hash of all fields and of the files of user classes."""
        text = json.dumps({"version": VERSION, **asdict(self), **self.sources}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def sources(self) -> dict[str, str]:
        """The SHA-256 of the files of a user's own task and cell, which decide the result too."""
        return {name: digest for name in (self.task, self.cell) if (digest := source(name)) is not None}

    def make_task(self) -> Task:
        """Build the task."""
        return build("task", self.task, task_class(self.task), self.task_options)

    def make_optimiser(self) -> Optimiser:
        """Build the optimiser."""
        if self.optimiser not in OPTIMISERS:
            raise ValueError(unknown("optimiser", self.optimiser, OPTIMISERS))
        return build("optimiser", self.optimiser, OPTIMISERS[self.optimiser], self.optimiser_options)

    def make_schedule(self) -> LearningRateSchedule:
        """Build the learning-rate schedule."""
        if self.schedule not in SCHEDULES:
            raise ValueError(unknown("schedule", self.schedule, SCHEDULES))
        return build("schedule", self.schedule, SCHEDULES[self.schedule], self.schedule_options)

    def make_model(self) -> Model:
        """Build the model with its initial weights, which depend only on the seed. It is built on the CPU."""
        task, dtype = self.make_task(), torch.float64 if self.dtype == "float64" else torch.float32
        sizes = {"input_size": task.input_size, "hidden_size": self.hidden, "num_layers": self.layers}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            kind = layer_class(self.cell)
            rnn = build("cell", self.cell, kind, {**sizes, **self.cell_options, "backend": self.backend, "dtype": dtype})
            model = Model(task.encoder(), rnn, task.head(rnn.output_size)).to(dtype)
        return model

    def total(self) -> int:
        """Number of steps of the run."""
        if self.steps is not None:
            return self.steps
        length = self.make_task().length(self.split, self.batch)
        if length is None:
            raise ValueError(f"task {self.task} generates its data and has no epochs; got epochs={self.epochs}. Set steps.")
        assert self.epochs is not None
        return self.epochs * length

    def on_all_rows(self) -> "Run":
        """The run on training and validation rows together, after its settings have been chosen. It has no evaluations."""
        return replace(self, split="full", valid_every=None, stop_at=None)

    def factors(self, names: list[str]) -> dict[str, float]:
        """The factor on the learning rate of each parameter. A pattern that matches no parameter raises a ValueError."""
        factors = dict.fromkeys(names, 1.0)
        for pattern, factor in self.rates.items():
            matching = [name for name in names if fnmatch(name, pattern) or fnmatch(name.rpartition(".")[2], pattern)]
            if not matching:
                raise ValueError(f"rates: {unknown('parameter', pattern, {name.rpartition('.')[2] for name in names})}")
            factors.update(dict.fromkeys(matching, factor))
        return factors

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "Run":
        """The run with these fields, each of which is checked."""
        if not isinstance(values, dict):
            raise ValueError(f"a run is a JSON object of its fields; got {values!r}.")
        try:
            check(values)  # finds unknown and missing fields too
            return cls(**values)
        except TypeError as error:
            raise ValueError(str(error)) from None


Run.__doc__ = f"{Run.__doc__}\n\nArgs:\n" + "\n".join(f"    {name}: {each.description}" for name, each in FIELDS.items())
