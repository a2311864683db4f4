"""A run: everything that decides its result, as one frozen value of JSON fields."""

import hashlib
import inspect
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

import torch

from unfading import catalogue
from unfading.backends.choose import check_backend
from unfading.errors import unknown
from unfading.files.schema import VERSION
from unfading.layers.factory import Layer, layer
from unfading.layers.model import Model
from unfading.tasks.base import Task
from unfading.training import check_task
from unfading.training.check_settings import check
from unfading.training.learning_rate import SCHEDULES, LearningRateSchedule
from unfading.training.names import build, check_options, layer_class, place_of, sizes, task_class
from unfading.training.objects import Given, named_objects
from unfading.training.optimise import OPTIMISERS, Optimiser
from unfading.training.settings import ADDED, FIELDS, Settings
from unfading.training.user_code import UserCode, read_code


@dataclass(frozen=True, kw_only=True)
class Run(Settings):
    """What to train, on which task, and how. Two runs with equal fields give equal results on one machine.

    The files of a user's own task and cell are read when the run is created. They do not change with the files on disk.
    """

    # Source of a user's own task and cell, by file or module; what is left out is read now.
    code: Mapping[str, UserCode] = field(default_factory=dict, repr=False)
    # A task or a cell class that was given as an object, which its name and source alone would not give back.
    objects: Mapping[str, Given] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = named_objects(self.task, self.task_options, self.cell, self.code, self.objects)
        for name, value in given._asdict().items():
            object.__setattr__(self, name, value)
        settings = check({name: getattr(self, name) for name in FIELDS})
        for name in FIELDS:
            object.__setattr__(self, name, getattr(settings, name))
        if not isinstance(self.code, Mapping):
            raise TypeError(f"code must be a dict of sources by file; got {self.code!r} ({type(self.code).__name__}).")
        # One file that defines both the task and the cell is read once.
        places = {place_of(name): name for name in (self.task, self.cell) if place_of(name)}
        code = {place: self.code.get(place) or read_code(name) for place, name in places.items()}
        object.__setattr__(self, "code", code)
        check_backend(self.backend)
        self.make_task(), self.make_optimiser(), self.make_schedule()
        check_options("cell", self.cell, self._layer_class(), self.cell_options)
        self._check_rank()

    @property
    def key(self) -> str:
        """The name of the run's folder: twelve hexadecimal digits, a hash of all fields and of the files of user classes."""
        return self.key_with(self.code)

    def key_with(self, code: Mapping[str, UserCode]) -> str:
        """The key that the run would have with another source of the user's classes. Nothing is executed."""
        sources = {name: code[place_of(name)].digest for name in (self.task, self.cell) if place_of(name)}
        text = json.dumps({"version": VERSION, **self.to_json(), **sources}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def sources(self) -> dict[str, str]:
        """The SHA-256 of the source of a user's own task and cell, which decides the result too."""
        return {name: self.code[place_of(name)].digest for name in (self.task, self.cell) if place_of(name)}

    def make_task(self) -> Task:
        """Build the task."""
        if "task" in self.objects:
            task: Task = self.objects["task"].value
            return task
        return build("task", self.task, task_class(self.task, self.code.get(place_of(self.task))), self.task_options)

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
        kind = self._layer_class()
        of_layer = sizes(kind, check_task.input_size(task), self.hidden, self.layers)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            rank = {name: value for name, value in self.compress.items() if name == "rank"}
            options = {**of_layer, **self.cell_options, **rank, "backend": self.backend, "dtype": dtype}
            rnn = build("cell", self.cell, kind, options)
            encoder, head = check_task.module(task, "encoder"), check_task.module(task, "head", rnn.output_size)
            model = Model(encoder, rnn, head).to(dtype)
        return model

    def _check_rank(self) -> None:
        """Raise if compress gives a rank that the cell cannot have: it is an option of the cell."""
        if "rank" not in self.compress:
            return
        if "rank" in self.cell_options:
            raise ValueError(
                f"the rank is given twice: {self.compress['rank']} in compress and {self.cell_options['rank']!r} in "
                "cell_options. Leave one out."
            )
        if "rank" not in inspect.signature(self._layer_class()).parameters:
            cells = (*catalogue.cells(), *catalogue.convolutional_cells())
            known = [each.__name__.removesuffix("Cell") for each in cells if "rank" in inspect.signature(each).parameters]
            raise ValueError(
                f"compress: {self.cell} has no low-rank form; got rank={self.compress['rank']}. Leave rank out, or use a cell "
                f"with an option rank: {', '.join(known)}, or one of your own."
            )

    def _layer_class(self) -> type[Layer]:
        if "cell" in self.objects:
            return layer(self.objects["cell"].value)
        return layer_class(self.cell, self.code.get(place_of(self.cell)))

    def total(self) -> int:
        """Number of steps of the run."""
        if self.steps is not None:
            return self.steps
        length = check_task.length(self.make_task(), self.split, self.batch)
        if length is None:
            raise ValueError(f"task {self.task} generates its data and has no epochs; got epochs={self.epochs}. Set steps.")
        assert self.epochs is not None
        return self.epochs * length

    def on_all_rows(self) -> "Run":
        """The run on training and validation rows together, after its settings have been chosen. It has no evaluations."""
        return replace(self, split="full", valid_every=None, stop_at=None, patience=None, select_by="metric")

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
        """The settings as JSON values. The code of a user's classes is not among them."""
        left_out = {name for name in ADDED if getattr(self, name) in (FIELDS[name].default, {})}
        return {name: deepcopy(getattr(self, name)) for name in FIELDS if name not in left_out}

    @classmethod
    def from_json(
        cls, values: Any, code: Mapping[str, UserCode] | None = None, objects: Mapping[str, Given] | None = None
    ) -> "Run":
        """The run with these settings, each of which is checked.

        Args:
            code: the source of a user's own task and cell, by file or module. What is left out is read now.
            objects: the task ("task") and the class of the cell ("cell") that the names of the settings stand for.
        """
        if not isinstance(values, dict):
            raise ValueError(f"a run is a JSON object of its fields; got {values!r}.")
        try:
            check(values)  # finds unknown and missing fields too
            return cls(**values, code=code or {}, objects=objects or {})
        except TypeError as error:
            raise ValueError(str(error)) from None


_ARGUMENTS = {name: each.description for name, each in FIELDS.items()}
Run.__doc__ = f"{inspect.cleandoc(Run.__doc__ or '')}\n\nArgs:\n" + "\n".join(f"    {n}: {t}" for n, t in _ARGUMENTS.items())
