"""Checkpoints: one safetensors file each, with tensors by name and a JSON header in the metadata. Nothing is unpickled."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unfading.files import write_atomically

# The metadata of a safetensors file maps text to text; the header is JSON under this key.
HEADER = "unfading"


def save(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write a checkpoint, atomically."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, safetensors.torch.save(on_cpu, {HEADER: json.dumps(header)}))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint: its tensors, on the CPU, and its header."""
    with _open(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        return tensors, _header(path, file)


def load_header(path: Path) -> dict[str, Any]:
    """Read the header of a checkpoint, without its tensors."""
    with _open(path) as file:
        return _header(path, file)


def restore(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy the tensors of the checkpoint at `path` into `targets`, by name."""
    for name, target in targets.items():
        if name not in tensors or tensors[name].shape != target.shape:
            raise ValueError(f"{path} has no {name} of the shape that this run needs. Start again (--again).")
        target.copy_(tensors[name])


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a checkpoint: {error}. Remove it, or start again (--again).") from None


def _header(path: Path, file: Any) -> dict[str, Any]:
    text = (file.metadata() or {}).get(HEADER)
    if text is None:
        raise ValueError(f"{path} is not a file of unfading: its metadata has no {HEADER!r}.")
    try:
        header: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is damaged: its metadata is not JSON ({error}). Remove it, or start again (--again)."
        ) from None
    return header
