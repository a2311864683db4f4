"""What `unfading diagnose` examines: a model and its input, built from the names and files on the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unfading.data.arrays import read_npy
from unfading.layers.factory import ConvolutionalLayer
from unfading.layers.model import Model
from unfading.tasks.base import Batch, Task
from unfading.training import checkpoint
from unfading.training.names import build, layer_class, parse, sizes, task_class, user_object
from unfading.training.run_dir import read_run
from unfading.training.weights import trained_model


class Subject(NamedTuple):
    """The arguments of `diagnose`."""

    model: nn.Module
    x: Tensor | Batch
    loss: Callable[[Any, Batch], Tensor] | None = None


def trained_run(folder: Path, batch: int, *, allow_code: bool = False) -> Subject:
    """The best weights of a trained run, or else the last, with a validation batch of its task.

    Args:
        allow_code: the run may name a user's own cell or task, whose source is then executed.
    """
    run = read_run(folder / "run.json", allow_code=allow_code)
    files = [folder / f"{name}.safetensors" for name in ("best", "last")]
    weights = next((file for file in files if file.is_file()), None)
    if weights is None:
        raise ValueError(f"{folder} has no weights: neither best.safetensors nor last.safetensors exists. Train the run first.")
    tensors, _ = checkpoint.load(weights)
    parameters = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    model, task = trained_model(run, parameters, weights), run.make_task()
    rows = task.batch(0, batch, split="valid", seed=run.seed, device="cpu")
    # Forecasts are float64.
    return Subject(model, rows._replace(x=_as_in(model, rows.x), target=_as_in(model, rows.target)), task.loss)


def cell_on_task(cell: str, task: str, *, layers: int, hidden: int, batch: int, seed: int) -> Subject:
    """A new model of a cell, with a training batch of a task whose sequences have their full length."""
    if not cell:
        raise ValueError("--task goes with --cell: the cell is built to fit the task.")
    name, options = parse(task)
    built: Task = build("task", name, task_class(name), options)
    rnn = stack(cell, built.input_size, layers, hidden)
    model = Model(built.encoder(), rnn, built.head(rnn.output_size))
    return Subject(model, built.batch(built.full_length_from, batch, split="train", seed=seed, device="cpu"), built.loss)


def on_data(model: nn.Module, x: Tensor, target: Path | None) -> Subject:
    """A model, its input in the precision of the model, and the targets from a NumPy file."""
    x = _as_in(model, x)
    return Subject(model, x if target is None else Batch(x, _as_in(model, read_array("--target", target))))


def stack(cell: str, input_size: int, layers: int, hidden: int) -> Any:
    """A new stack of a cell: NAME,option=value."""
    name, options = parse(cell)
    kind = layer_class(name)
    return build("cell", name, kind, {**sizes(kind, input_size, hidden, layers), **options})


def reads_frames(cell: str) -> bool:
    """Whether a cell, NAME,option=value, is a convolutional one."""
    return issubclass(layer_class(parse(cell)[0]), ConvolutionalLayer)


def user_model(name: str) -> nn.Module:
    """The model that a user's function builds: my.py:build."""
    named = user_object(name)
    model = named() if callable(named) and not isinstance(named, nn.Module) else named
    if not isinstance(model, nn.Module):
        raise TypeError(f"--model {name} must give a torch.nn.Module; got {type(model).__name__}.")
    return model


def read_array(flag: str, path: Path) -> Tensor:
    """The array of a NumPy file."""
    try:
        return torch.from_numpy(read_npy(path))
    except FileNotFoundError:
        raise ValueError(f"{flag} {path}: there is no such file.") from None
    except IsADirectoryError:
        raise ValueError(f"{flag} {path} is a folder; expected a NumPy file.") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{flag} {path} is not a NumPy file of numbers ({error}). Write it with numpy.save.") from None


def _as_in(model: nn.Module, value: Tensor) -> Tensor:
    """Floating-point numbers in the precision of the model's parameters, integers as int64."""
    if not value.is_floating_point():
        return value.long()
    return value.to(next((p.dtype for p in model.parameters()), torch.float32))
