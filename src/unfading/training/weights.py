"""Trained weights as one safetensors file: the tensors of a model, and in the metadata its card.

The card describes how the model was trained and its scores. It holds the run, from which the model is built, and

    sha256 = SHA-256 over (name, bytes) of every tensor, by name

which detects altered tensors; a checksum over the whole file, as in every checkpoint, detects an altered card too. The shapes
that the card implies are compared with those of the file before a model is built. Nothing in a file is executed: there is no
pickle, and a run that names a user's own cell or task is built with the class that the user gives.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from unfading.cells.base import Cell
from unfading.data import store
from unfading.files.checked_json import brief, sentence
from unfading.files.schema import VERSION, Card, check, check_version
from unfading.fuse.c import cache
from unfading.layers.factory import Layer
from unfading.layers.model import Model
from unfading.tasks.base import Task
from unfading.training import checkpoint
from unfading.training.names import build, place_of
from unfading.training.objects import Given
from unfading.training.run import Run
from unfading.training.run_dir import read_record, read_run, stored_code
from unfading.training.trained_model import TrainedModel
from unfading.training.user_code import UserCode

# Name of the weights in a folder of `save_pretrained`.
PRETRAINED = "model.safetensors"
# Marks a file of weights; the library's other safetensors files have no kind.
KIND = "weights"
# An option above this number, and above the number of parameters, is refused.
LARGEST_OPTION = 1_000_000
# Fields of a record that the card repeats.
FROM_RECORD = ("measure", "guess", "test", "status", "steps", "seconds", "parameters", "kilobytes", "compressed", "about")


def save(folder: Path | str, path: Path | str) -> Path:
    """Write the weights of a finished run: the best by validation, or the last if there was no validation.

    Args:
        folder: the folder of the run, runs/NAME/KEY.
        path: the file to write, NAME.safetensors.
    """
    folder, path = Path(folder), Path(path)
    record = read_record(folder / "record.json")
    weights, source = chosen_weights(folder)
    chosen = record["best"] if source.stem == "best" else None
    return _write(path, weights, {**record, "chosen": chosen})


def save_model(model: TrainedModel, path: Path) -> Path:
    """Write the weights of a trained model, with what is known about them: its record, or the card of the file it came from."""
    known: dict[str, Any] = model.card or {}
    if model.record is not None:
        known = {**model.record, "chosen": model.record["best"]}
    weights = {name: part.detach().cpu().contiguous() for name, part in model.state_dict().items()}
    return _write(path, weights, {**known, "run": model.run.to_json()})


def _write(path: Path, weights: dict[str, Tensor], known: Mapping[str, Any]) -> Path:
    """Write weights and their card, with the fields of a record or of another card."""
    card = {"version": VERSION, "kind": KIND, "run": known["run"], "chosen": known.get("chosen"), "sha256": digest(weights)}
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(path, weights, {**card, **{name: known[name] for name in FROM_RECORD if name in known}})
    return path


def load(
    path_or_url: Path | str,
    *,
    sha256: str | None = None,
    cell: type[Cell] | None = None,
    task: type[Task] | Task | None = None,
) -> TrainedModel:
    """Load a trained model, on the CPU and in evaluation mode, from a folder or from a file of weights.

    A run of your own cell or task needs its class here; code that a file names is never executed.

    Args:
        path_or_url: the folder of a run, runs/NAME/KEY, or of `save_pretrained`; or a file of weights: a path, or an https
            address, which is downloaded once into the cache folder.
        sha256: the SHA-256 of the whole file, compared before anything is read.
        cell: the class of your own cell.
        task: the class of your own task, or a task.
    """
    if "://" not in str(path_or_url) and Path(path_or_url).is_dir():
        if sha256 is not None:
            raise ValueError("sha256= belongs to a file of weights, and this is a folder. Leave it out.")
        return _load_folder(Path(path_or_url), cell, task)
    path = _local(str(path_or_url), sha256)
    if sha256 is not None and store.sha256(path) != sha256:
        raise ValueError(f"{path} does not have the sha256 {sha256[:12]}...: it is altered or incomplete. Download it again.")
    tensors, content = _read(path)
    run = _run(path, content, cell, task)
    if digest(tensors) != content.get("sha256"):
        raise ValueError(f"{path} is damaged: its tensors are not those that were saved. Download it again.")
    model = TrainedModel(trained_model(run, tensors, path), run)
    model.card = content
    return model


def load_with_code(folder: Path) -> TrainedModel:
    """Load the model of a run, and execute the source of a user's own cell and task that its folder holds."""
    run = read_run(folder / "run.json", allow_code=True)
    tensors, path = chosen_weights(folder)
    return TrainedModel(trained_model(run, tensors, path), run, read_record(folder / "record.json"))


def _load_folder(folder: Path, cell: type[Cell] | None, task: type[Task] | Task | None) -> TrainedModel:
    """The model of a run with the weights that validation chose, or the last ones; or that of `save_pretrained`."""
    if not (folder / "record.json").exists():
        if (folder / PRETRAINED).exists():
            return load(folder / PRETRAINED, cell=cell, task=task)
        if (folder / "last.safetensors").exists():
            raise ValueError(f"{folder} holds a run that has not finished. Continue it with --resume.")
        raise ValueError(
            f"{folder} is not the folder of a run, runs/NAME/KEY, nor one of save_pretrained: it has no record.json and no "
            f"{PRETRAINED}."
        )
    record = read_record(folder / "record.json")
    tensors, path = chosen_weights(folder)
    run = _described_run(folder / "record.json", record["run"], cell, task, stored_code(folder, record["run"]))
    return TrainedModel(trained_model(run, tensors, path), run, record)


def chosen_weights(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """The weights that validation chose, or the last ones, of a finished run, and their file."""
    best = folder / "best.safetensors"
    path = best if best.exists() else folder / "last.safetensors"
    tensors, _ = checkpoint.load(path)
    return {name.removeprefix("model."): part for name, part in tensors.items() if name.startswith("model.")}, path


def trained_model(run: Run, tensors: Mapping[str, Tensor], path: Path) -> Model:
    """The model of a run with the tensors of the file at `path`, which must be those of the model, no more and no fewer.

    Names and shapes are compared before the model is built: a file of a few bytes may describe a model of any size.
    """
    wrong = _misfit(run, tensors)
    if wrong is None:
        # The state of torch's generator must not change.
        with torch.random.fork_rng(devices=[]):
            model = run.make_model()
        try:
            model.load_state_dict(dict(tensors))
            return model
        except RuntimeError as error:
            wrong = str(error).splitlines()[-1].strip().rstrip(".")
    raise ValueError(f"{path} does not fit the model that it describes: {wrong}. Get another file.")


def _misfit(run: Run, tensors: Mapping[str, Tensor]) -> str | None:
    """The first difference between the model of a run and tensors in name or shape; None without one. Nothing is allocated."""
    if run.layers > len(tensors):
        return f"it has {len(tensors)} tensors for {run.layers} layers"
    elements = sum(part.numel() for part in tensors.values())
    for name, value in run.cell_options.items():
        # A number of parts, such as capacity, is not larger than the number of their parameters.
        if isinstance(value, int) and value > max(elements, LARGEST_OPTION):
            return f"it has {elements} parameters, and its option {name} is {brief(value)}"
    try:
        with torch.device("meta"):
            expected = run.make_model().state_dict()
    except ValueError as error:
        return sentence(error).rstrip(".")
    except Exception as error:
        if ":" in run.cell or ":" in run.task:
            return None  # a user's own code may not run on the meta device; the model is then compared after it is built
        return f"it describes no model that can be built ({type(error).__name__})"
    for name, part in expected.items():
        if name not in tensors:
            return f"it has no {name}"
        if tensors[name].shape != part.shape:
            return f"its {name} has shape {list(tensors[name].shape)}, and the model's has {list(part.shape)}"
        if tensors[name].dtype != part.dtype:
            return f"its {name} is {tensors[name].dtype}, and the model's is {part.dtype}"
    extra = next((name for name in tensors if name not in expected), None)
    return None if extra is None else f"it has {brief(extra)}, which the model does not have"


def card(path_or_url: Path | str) -> dict[str, Any]:
    """Read the card of a file of weights: the run, its scores, its sizes and the machine."""
    path = _local(str(path_or_url), None)
    content = _read(path)[1]
    _check_card(path, content)
    return content


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 over all tensors and their names."""
    total = hashlib.sha256()
    for name, part in sorted(tensors.items()):
        total.update(name.encode() + b"\0" + str(part.dtype).encode() + b"\0" + str(tuple(part.shape)).encode() + b"\0")
        total.update(part.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


def _local(path_or_url: str, sha256: str | None) -> Path:
    """The path of the file, after it has been downloaded if necessary."""
    if "://" not in path_or_url:
        path = Path(path_or_url)
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist. load takes the folder of a run, a .safetensors file of unfading, or an https address."
            )
        store.refuse_pickle(path, "Weights of unfading are .safetensors files.")
        return path
    if not path_or_url.startswith("https://"):
        raise ValueError(f"weights are downloaded over https only; got {path_or_url}.")
    name = Path(urlsplit(path_or_url).path).name or "weights.safetensors"
    folder = cache.folder() / "weights" / hashlib.sha256(path_or_url.encode()).hexdigest()[:12]
    return store.download(path_or_url, None if sha256 is None else f"sha256:{sha256}", name, folder)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        return checkpoint.load(path)
    except ValueError:
        raise ValueError(f"{path} is damaged, or not a safetensors file of unfading. Download it again.") from None


def _check_card(path: Path, content: dict[str, Any]) -> None:
    if content.get("kind") != KIND:
        raise ValueError(f"{path} is a checkpoint of a run, not a file of weights. Load the folder of the run.")
    check_version(content, str(path), "Get a file of this version.")
    check(Card, content, str(path), "Download it again.")


def _run(path: Path, content: dict[str, Any], cell: type[Cell] | None, task: type[Task] | Task | None) -> Run:
    _check_card(path, content)
    return _described_run(path, content["run"], cell, task, {})


def _described_run(
    path: Path,
    fields: dict[str, Any],
    cell: type[Cell] | None,
    task: type[Task] | Task | None,
    code: Mapping[str, UserCode],
) -> Run:
    """The run that a file describes, with the classes of a user that are given. Nothing that the file names is executed."""
    given: dict[str, Any] = {"task": task, "cell": cell}
    objects, sources = {}, dict(code)
    for role, value in given.items():
        name = fields[role]
        own = name.rpartition(":")[2] if ":" in name else None
        if own is None and value is not None:
            raise ValueError(f"{path} names the {role} {name} of the library; leave {role}= out.")
        if own is None:
            continue
        if value is None:
            raise ValueError(
                f"{path} names a user's own code ({name}), which load does not execute. Give the class: "
                f"load(..., {role}={own}), or allow the stored source with `unfading predict --allow-code`."
            )
        _check_class(role, value)
        objects[role] = Given(_built(value, fields["task_options"]) if role == "task" else value)
        # The source stands for the class in the key of a run, and is not executed.
        sources.setdefault(place_of(name), UserCode(place_of(name), "", {}))
    try:
        return Run.from_json(fields, sources, objects)
    except ValueError as error:
        raise ValueError(f"{path}: its card does not describe a run of this unfading: {sentence(error)}") from None


def _check_class(role: str, value: Any) -> None:
    """Raise unless this is a class of a cell, or a task or its class."""
    if role == "task":
        if not isinstance(value, Task) and not (isinstance(value, type) and issubclass(value, Task)):
            raise TypeError(f"task= must be a subclass of unfading.Task, or a task; got {brief(value)}.")
    elif isinstance(value, type) and issubclass(value, Layer):
        raise TypeError(
            f"cell= must be a subclass of unfading.Cell; got the layer {value.__name__}. Give the class of your cell, as you "
            "gave it to unfading.layer."
        )
    elif not isinstance(value, type) or not issubclass(value, Cell):
        raise TypeError(f"cell= must be a subclass of unfading.Cell; got {brief(value)}.")


def _built(task: type[Task] | Task, options: Mapping[str, Any]) -> Task:
    return build("task", task.__name__, task, options) if isinstance(task, type) else task
