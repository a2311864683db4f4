"""The settings of a run: every field with its type, its default and its description, in one place.

`Run` takes its fields from here, and the command line its flags and their help. `check_settings.py` checks their values.
Nothing here needs torch, nor pydantic, whose import would take a third of the time of `unfading train --help`.
"""

import ast
import inspect
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_type_hints

Options = dict[str, Any]

# Options of `compress`, and the only number of bits that it takes.
COMPRESSIONS = ("rank", "sparsity", "bits")
BITS = 8

# Options of a layer that a run or its task sets.
RESERVED = (
    *("batch_first", "device", "dtype", "backend", "num_layers"),
    *("hidden_size", "input_size", "hidden_channels", "in_channels"),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides the result of a run. The string below a field describes it."""

    task: str
    """Name of the task (`unfading tasks` lists them), or my.py:MyTask."""
    task_options: Options = field(default_factory=dict)
    """Options of the task, which are its fields, e.g. T."""
    cell: str
    """Name of a layer (STAR, LSTM, ...; `unfading cells list` lists them), or my.py:MyCell."""
    cell_options: Options = field(default_factory=dict)
    """Options of the cell, and of the layer (dropout, bidirectional, zoneout, ...)."""
    hidden: int = 128
    """Units per layer."""
    layers: int = 1
    """Number of stacked layers."""
    optimiser: str = "adam"
    """Optimiser: adam, amsgrad, rmsprop or sgd."""
    optimiser_options: Options = field(default_factory=dict)
    """Options of the optimiser, e.g. momentum, l2, weight_decay."""
    rate: float = 1e-3
    """Learning rate."""
    rates: dict[str, float] = field(default_factory=dict)
    """Factors on the learning rate of some parameters, by name or pattern."""
    schedule: str = "constant"
    """Learning-rate schedule: constant, step, cosine or polynomial."""
    schedule_options: Options = field(default_factory=dict)
    """Options of the schedule, e.g. floor."""
    clip_norm: float | None = 1.0
    """Largest norm of the gradient of all parameters; None does not clip it."""
    clip_value: float | None = None
    """Largest entry of the gradient; None does not clip it."""
    batch: int = 32
    """Number of sequences in a batch."""
    steps: int | None = None
    """Number of training steps. Give steps or epochs."""
    epochs: int | None = None
    """Number of passes over the training set. Give steps or epochs."""
    truncate: int | None = None
    """Cut the backward pass every N time steps; None sends gradients through the whole sequence."""
    split: Literal["train", "full"] = "train"
    """Rows to train on; "full" adds the validation rows, so that the run has no validation score."""
    valid_every: int | None = None
    """Training steps between evaluations; None for an epoch, or a twentieth of the run if the task has no epochs."""
    valid_batches: int | None = None
    """Number of batches in an evaluation and in the test; None for all, or 10 if the task has no epochs."""
    stop_at: float | None = None
    """Validation score, in the task's metric, at which training stops early."""
    patience: int | None = None
    """Number of evaluations without a better score after which training stops; None for no such limit."""
    select_by: Literal["metric", "loss"] = "metric"
    """Validation score that chooses the weights to test: the best of the task's metric, or the lowest loss."""
    compress: Options = field(default_factory=dict)
    """Compression for small devices: rank of the recurrent matrix, sparsity (share of zeros in each matrix), and bits=8."""
    retries: int = 0
    """How often a run whose loss or gradient is not finite may return to its best weights with half the rate."""
    dtype: Literal["float32", "float64", "tf32"] = "float32"
    """Precision of parameters and data; tf32 is float32 with faster, three-digit matrix products on a GPU."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to train. A GPU draws other random numbers than a CPU."""
    backend: str = "auto"
    """Backend of the layers: auto, fused, graph or reference."""
    seed: int = 0
    """Seed of weights, data and noise."""


class SettingField(NamedTuple):
    """A field of a run."""

    annotation: Any
    default: Any  # None for a field that must be given, and for one that is a dict
    description: str


def _fields() -> dict[str, SettingField]:
    """The fields of `Settings`, each described by the string below it."""
    (definition,) = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {
        line.target.id: below.value.value
        for line, below in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
    return {
        name: SettingField(annotation, getattr(Settings, name, None), str(texts[name]))
        for name, annotation in get_type_hints(Settings).items()
    }


# By name: type, default and description of each setting.
FIELDS = _fields()
# Settings that the first files of version 1 did not have. At its default such a setting is left out of JSON, so that runs keep
# their keys.
ADDED = ("select_by", "compress", "patience")
