"""Trained weights as one file: the tensors of a model, and in the metadata its card - what was trained, how, and its scores.

The file is safetensors, never a pickle. The card holds the run, from which the model is built again, and

    sha256 = SHA-256 over (name, bytes) of every tensor, by name

so that a file whose tensors were altered is told from one that is whole. Nothing in a file is executed: a run that names a
user's own cell or task, which would have to be imported, is refused.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from unfading.data import store
from unfading.fuse.c import cache
from unfading.layers.model import Model
from unfading.training import checkpoint
from unfading.training.run import VERSION, Run
from unfading.training.run_dir import read_record

# What marks a file of weights among the library's other safetensors files.
KIND = "weights"
# Of a record, what a card tells.
TOLD = ("measure", "guess", "test", "status", "steps", "seconds", "parameters", "kilobytes", "about")


def save(folder: Path | str, path: Path | str) -> Path:
    """Write the weights of a run that is done: the best by validation, or the last where nothing was chosen.

    Args:
        folder: of the run, runs/NAME/KEY.
        path: of the file, NAME.safetensors.
    """
    folder, path = Path(folder), Path(path)
    record = read_record(folder / "record.json")
    best = folder / "best.safetensors"
    tensors, _ = checkpoint.load(best if best.exists() else folder / "last.safetensors")
    weights = {name.removeprefix("model."): part for name, part in tensors.items() if name.startswith("model.")}
    chosen = record["best"] if best.exists() else None
    card = {"version": VERSION, "kind": KIND, "run": record["run"], "chosen": chosen, "sha256": digest(weights)}
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(path, weights, {**card, **{name: record[name] for name in TOLD}})
    return path


def load(path_or_url: Path | str, *, sha256: str | None = None) -> Model:
    """The model of a file of weights, on the CPU and in evaluation mode.

    Args:
        path_or_url: a file, or an https address, whose file is kept in the cache folder.
        sha256: of the whole file, to be compared before anything is read.
    """
    path = _local(str(path_or_url), sha256)
    if sha256 is not None and store.sha256(path) != sha256:
        raise ValueError(f"{path} has another sha256 than {sha256[:12]}...: it is altered or cut short. Get it again.")
    tensors, told = _read(path)
    run = _run(path, told)
    if digest(tensors) != told.get("sha256"):
        raise ValueError(f"{path} is damaged: its tensors are not those that were saved. Get it again.")
    # Built without data: a model's start would be drawn for nothing, and torch's generator stays as it was.
    with torch.random.fork_rng(devices=[]):
        model = run.make_model()
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        said = str(error).splitlines()[-1].strip()
        raise ValueError(f"{path} does not fit the model that its card describes: {said} Get another file.") from None
    return model.eval()


def card(path_or_url: Path | str) -> dict[str, Any]:
    """What a file of weights says of itself: the run, its scores, its sizes, on what it was trained."""
    path = _local(str(path_or_url), None)
    told = _read(path)[1]
    _run(path, told)
    return told


def digest(tensors: Mapping[str, Tensor]) -> str:
    """One number for all tensors and their names."""
    found = hashlib.sha256()
    for name, part in sorted(tensors.items()):
        found.update(name.encode() + b"\0" + str(part.dtype).encode() + b"\0" + str(tuple(part.shape)).encode() + b"\0")
        found.update(part.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _local(place: str, sha256: str | None) -> Path:
    """The file; an address is downloaded once."""
    if "://" not in place:
        path = Path(place)
        if not path.is_file():
            raise ValueError(f"{path} is not there. load takes a .safetensors file of unfading, or an https address of one.")
        store.refuse_pickle(path, "Weights of unfading are .safetensors files.")
        return path
    if not place.startswith("https://"):
        raise ValueError(f"weights are fetched over https alone; got {place}.")
    name = Path(urlsplit(place).path).name or "weights.safetensors"
    folder = cache.folder() / "weights" / hashlib.sha256(place.encode()).hexdigest()[:12]
    return store.download(place, None if sha256 is None else f"sha256:{sha256}", name, folder)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        return checkpoint.load(path)
    except ValueError:
        raise ValueError(f"{path} is damaged, or no safetensors file of unfading. Get it again.") from None


def _run(path: Path, told: Mapping[str, Any]) -> Run:
    if told.get("kind") != KIND:
        raise ValueError(f"{path} is no file of weights but a checkpoint of a run: resume the run, or save its weights first.")
    if told.get("version") != VERSION:
        raise ValueError(f"{path} is of version {told.get('version')}; this unfading reads version {VERSION}.")
    fields = told.get("run")
    named = [str(fields.get(name)) for name in ("task", "cell")] if isinstance(fields, dict) else []
    if any(":" in name for name in named):
        raise ValueError(f"{path} names code of a user's own ({', '.join(named)}), which is not run. Build the model yourself.")
    try:
        return Run.from_json(fields)
    except ValueError as error:
        raise ValueError(f"{path}: its card describes no run of this unfading: {error}") from None
