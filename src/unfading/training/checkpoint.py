"""Files that are whole or not there: written beside, brought to the disk, then put in place of the old one.

A checkpoint is ONE safetensors file: tensors by name, and JSON in its metadata. Nothing is ever unpickled.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

# The one key of a file's metadata: safetensors keeps text by name, and this is JSON.
ABOUT = "unfading"


def write(path: Path, content: bytes) -> None:
    """Put `content` at `path` at once: a reader, or a process killed at any moment, finds the old file or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise OSError(f"{path} could not be written: {error.strerror or error}. What was there before is as it was.") from error


def write_json(path: Path, value: Any) -> None:
    """`value` as a JSON file, at once."""
    write(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is not there.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: no JSON ({error}).") from None


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a checkpoint."""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write(path, safetensors.torch.save(whole, {ABOUT: json.dumps(about)}))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint, on the CPU, and what is said about them."""
    with _opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        return tensors, _said(path, file)


def about(path: Path) -> dict[str, Any]:
    """What is said about the tensors of a checkpoint; they are not read."""
    with _opened(path) as file:
        return _said(path, file)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise ValueError(f"{path} is not there.") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no checkpoint: {error}. Remove it, or begin anew.") from None


def _said(path: Path, file: Any) -> dict[str, Any]:
    told = (file.metadata() or {}).get(ABOUT)
    if told is None:
        raise ValueError(f"{path} is a safetensors file of something else: its metadata has no {ABOUT!r}.")
    try:
        said: dict[str, Any] = json.loads(told)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: no JSON in its metadata ({error}). Remove it, or begin anew.") from None
    return said


def fill(places: dict[str, Tensor], tensors: dict[str, Tensor], path: Path) -> None:
    """Copy what a checkpoint holds to its places."""
    for name, place in places.items():
        if name not in tensors or tensors[name].shape != place.shape:
            raise ValueError(f"{path} lacks {name} as this run has it. Begin anew.")
        place.copy_(tensors[name])
