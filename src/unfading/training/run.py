"""A run: everything that decides its result, as one frozen value of JSON fields."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatch
from typing import Any, ClassVar, Literal

import torch

from unfading.backends.choose import check_backend
from unfading.errors import check_count, check_number, check_positive, unknown
from unfading.layers.model import Model
from unfading.tasks.base import Task
from unfading.training.learning_rate import SCHEDULES, Schedule
from unfading.training.names import check_options, layer_class, made, source, task_class
from unfading.training.optimise import OPTIMISERS, Optimiser

# Of the form of a run and of what is written of it; a folder of another version is refused.
VERSION = 1

Options = dict[str, Any]

# Fields that name something, and those in which 1 and 1.0 are the same.
NAMES = ("task", "cell", "optimiser", "schedule", "backend")
REAL = ("rate", "rates", "clip_norm", "clip_value", "stop_at")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained on what, and how. Two runs with equal fields give equal results on one machine.

    Args:
        task: its name (`unfading tasks`), or my.py:MyTask.
        task_options: its fields.
        cell: name of a layer (STAR, LSTM, ...), or my.py:MyCell.
        cell_options: the cell's own options, and the layer's (dropout, bidirectional, zoneout, ...).
        hidden: units per layer.
        layers: depth of the stack.
        optimiser: adam, amsgrad, rmsprop or sgd.
        optimiser_options: its settings, e.g. momentum, l2, weight_decay.
        rate: of learning.
        rates: factors on it for some parameters, by name or pattern: {"eta": 0.1}.
        schedule: how the rate goes over the run: constant, step, cosine or polynomial.
        schedule_options: its settings, e.g. floor.
        clip_norm: largest norm of the gradient of all parameters; None for any.
        clip_value: largest entry of the gradient; None for any.
        batch: rows of a batch.
        steps: updates of the parameters; or else
        epochs: passes over the training set.
        truncate: cut the graph every so many steps of time; None lets gradients through the whole sequence.
        split: what is trained on; "full" takes the validation rows too, and then nothing can be selected by them.
        valid_every: steps between evaluations; None for an epoch, or a twentieth of the run on an endless task.
        valid_batches: batches of an evaluation, and of the test; None for all, or 10 on an endless task.
        stop_at: a validation score, in the task's measure, that is good enough: the run ends there.
        retries: how often a run whose loss or gradient is not finite goes back to the weights of its best stretch with half
            the rate; after that it ends.
        dtype: of parameters and data; tf32 is float32 with products made in tf32, right to three digits: compiled loops take
            less than half the time on a GPU.
        device: where it runs; a GPU draws other random numbers than a CPU.
        backend: of the layers.
        seed: of weights, data and noise.
    """

    task: str
    task_options: Options = field(default_factory=dict)
    cell: str
    cell_options: Options = field(default_factory=dict)
    hidden: int = 128
    layers: int = 1
    optimiser: str = "adam"
    optimiser_options: Options = field(default_factory=dict)
    rate: float = 1e-3
    rates: dict[str, float] = field(default_factory=dict)
    schedule: str = "constant"
    schedule_options: Options = field(default_factory=dict)
    clip_norm: float | None = 1.0
    clip_value: float | None = None
    batch: int = 32
    steps: int | None = None
    epochs: int | None = None
    truncate: int | None = None
    split: Literal["train", "full"] = "train"
    valid_every: int | None = None
    valid_batches: int | None = None
    stop_at: float | None = None
    retries: int = 0
    dtype: Literal["float32", "float64", "tf32"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    backend: str = "auto"
    seed: int = 0

    # For pydantic: a file with an unknown field, or a number in quotes, is no run.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}

    def __post_init__(self) -> None:
        self._settle()
        for name in ("hidden", "layers", "batch"):
            check_count(name, getattr(self, name))
        for name in ("steps", "epochs", "truncate", "valid_every", "valid_batches"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_count("retries", self.retries, least=0)
        check_positive("rate", self.rate)
        for name in ("clip_norm", "clip_value"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for pattern, factor in self.rates.items():
            check_number(f"rates[{pattern!r}]", factor)
            if factor < 0:
                raise ValueError(f"rates[{pattern!r}] must be at least 0, which holds the parameter; got {factor}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an int; got {self.seed!r} ({type(self.seed).__name__}).")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must have 64 bits at most; got {self.seed}.")
        _check_one_of("split", self.split, ("train", "full"))
        _check_one_of("dtype", self.dtype, ("float32", "float64", "tf32"))
        _check_one_of("device", self.device, ("cpu", "cuda"))
        if self.dtype == "tf32" and self.device == "cpu":
            raise ValueError('dtype="tf32" is for device="cuda"; a CPU makes no products in it. Take "float32".')
        check_backend(self.backend)
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"a run takes steps or epochs, one of the two; got steps={self.steps} and epochs={self.epochs}.")
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError(
                f"a run clips by norm or by value; got clip_norm={self.clip_norm} and clip_value={self.clip_value}. "
                "Set one to None."
            )
        if self.stop_at is not None:
            check_number("stop_at", self.stop_at)
        for name in ("valid_every", "stop_at"):
            if self.split == "full" and getattr(self, name) is not None:
                raise ValueError(
                    'split="full" trains on the validation rows, so nothing is evaluated on the way; got '
                    f"{name}={getattr(self, name)}. Leave it out."
                )
        if self.truncate is not None and self.cell_options.get("bidirectional"):
            raise ValueError(
                f"truncate={self.truncate} carries the state forward, and a bidirectional layer reads backward too. Drop one."
            )
        self.make_task(), self.make_optimiser(), self.make_schedule()
        for reserved in ("batch_first", "device", "dtype", "backend", "num_layers", "hidden_size", "input_size"):
            if reserved in self.cell_options:
                raise ValueError(f"cell_options cannot hold {reserved!r}: a run says it itself, or the task does.")
        check_options("cell", self.cell, layer_class(self.cell), self.cell_options)

    def _settle(self) -> None:
        """Hold the fields in the one form in which JSON gives them back, and in dicts of our own: equal runs have one key."""
        for each in fields(self):
            value = getattr(self, each.name)
            kind = dict if each.name == "rates" or each.name.endswith("_options") else str
            if (kind is dict or each.name in NAMES) and not isinstance(value, kind):
                raise TypeError(f"{each.name} must be a {kind.__name__}; got {value!r} ({type(value).__name__}).")
            try:
                value = json.loads(json.dumps(value, allow_nan=False), parse_int=float if each.name in REAL else int)
            except (TypeError, ValueError):
                raise ValueError(f"{each.name} must be of JSON values, its numbers finite; got {value!r}.") from None
            object.__setattr__(self, each.name, value)

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that stand for all the fields, and for what is in a user's files: the folder's name."""
        text = json.dumps({"version": VERSION, **asdict(self), **self.sources}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def sources(self) -> dict[str, str]:
        """For a user's own task or cell, the SHA-256 of the file it stands in: that decides the result too."""
        return {name: digest for name in (self.task, self.cell) if (digest := source(name)) is not None}

    def make_task(self) -> Task:
        """The task, with its options."""
        return made("task", self.task, task_class(self.task), self.task_options)

    def make_optimiser(self) -> Optimiser:
        """The rule of a step."""
        if self.optimiser not in OPTIMISERS:
            raise ValueError(unknown("optimiser", self.optimiser, OPTIMISERS))
        return made("optimiser", self.optimiser, OPTIMISERS[self.optimiser], self.optimiser_options)

    def make_schedule(self) -> Schedule:
        """How the rate goes."""
        if self.schedule not in SCHEDULES:
            raise ValueError(unknown("schedule", self.schedule, SCHEDULES))
        return made("schedule", self.schedule, SCHEDULES[self.schedule], self.schedule_options)

    def make_model(self) -> Model:
        """The model as it is before the first step: its weights depend on the seed alone, and it is made on the CPU."""
        task, dtype = self.make_task(), torch.float64 if self.dtype == "float64" else torch.float32
        sizes = {"input_size": task.input_size, "hidden_size": self.hidden, "num_layers": self.layers}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            kind = layer_class(self.cell)
            rnn = made("cell", self.cell, kind, {**sizes, **self.cell_options, "backend": self.backend, "dtype": dtype})
            model = Model(task.encoder(), rnn, task.head(rnn.output_size)).to(dtype)
        return model

    def total(self) -> int:
        """Steps of the whole run."""
        if self.steps is not None:
            return self.steps
        length = self.make_task().length(self.split, self.batch)
        if length is None:
            raise ValueError(f"task {self.task} draws without end and has no epochs; got epochs={self.epochs}. Set steps.")
        assert self.epochs is not None
        return self.epochs * length

    def on_all_rows(self) -> "Run":
        """The run on training and validation rows together, when settings have been chosen; nothing is evaluated on the way."""
        return replace(self, split="full", valid_every=None, stop_at=None)

    def factors(self, names: list[str]) -> dict[str, float]:
        """The factor on the rate for each parameter; a pattern that fits none is told."""
        found = dict.fromkeys(names, 1.0)
        for pattern, factor in self.rates.items():
            fitting = [name for name in names if fnmatch(name, pattern) or fnmatch(name.rpartition(".")[2], pattern)]
            if not fitting:
                raise ValueError(f"rates: {unknown('parameter', pattern, {name.rpartition('.')[2] for name in names})}")
            found.update(dict.fromkeys(fitting, factor))
        return found

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "Run":
        """The run with these fields, after every one has been checked."""
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(cls).validate_json(json.dumps(values))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            if first["type"] == "unexpected_keyword_argument":
                raise ValueError(unknown("field of a run", where, [each.name for each in fields(cls)])) from None
            told = first["msg"].removeprefix("Value error, ")
            raise ValueError(f"{where}: {told}" if where else told) from None


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(unknown(name, value, known))
