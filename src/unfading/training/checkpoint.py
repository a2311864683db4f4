"""Checkpoints: one safetensors file each, with tensors by name and a JSON header in the metadata. Nothing is unpickled.

The metadata also holds `sha256`, the SHA-256 over all bytes of the file with zeros in the place of its 64 digits. It is
compared before anything else is read. Files of earlier versions have none.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unfading.files import write_atomically
from unfading.files.checked_json import FILE_DIGITS, brief, parse

# The metadata of a safetensors file maps text to text; the header is JSON under this key.
HEADER = "unfading"
CHECKSUM = "sha256"
# Bytes of the JSON text at the beginning of a file; safetensors has the same limit.
LARGEST_INDEX = 100_000_000
CHUNK = 1 << 20
AGAIN = "Remove it, or start again (--again)."
# Inside the header, which is text within the JSON, quotation marks are escaped; so this occurs once.
_MARK = f'"{CHECKSUM}":"'.encode()


def save(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write a checkpoint, atomically."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    blank = "0" * FILE_DIGITS
    content = safetensors.torch.save(on_cpu, {HEADER: json.dumps(header), CHECKSUM: blank})
    before, mark, rest = content.partition(_MARK + blank.encode())
    assert mark, "safetensors writes its metadata in another form than expected"
    write_atomically(path, b"".join([before, _MARK, sha256(content).hexdigest().encode(), rest]))


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
        if name not in tensors or tensors[name].shape != target.shape or tensors[name].dtype != target.dtype:
            raise ValueError(f"{path} has no {name} of the shape that this run needs. Start again (--again).")
    for name in tensors:
        if name.startswith("model.") and name not in targets:
            raise ValueError(f"{path} has {brief(name)}, which the model of this run does not have. Start again (--again).")
    for name, target in targets.items():
        target.copy_(tensors[name])


def verify(path: Path) -> None:
    """Raise a ValueError unless the bytes of a file match its checksum. A file of an earlier version has none, and passes."""
    try:
        with path.open("rb") as file:
            size = file.read(8)
            length = int.from_bytes(size, "little")
            if len(size) < 8 or not 2 <= length <= min(LARGEST_INDEX, path.stat().st_size - 8):
                raise ValueError(f"{path} is damaged or not a checkpoint: it is no safetensors file. {AGAIN}")
            index = file.read(length)
            digits = _checksum(path, index)
            if digits is None:
                return
            blank = index.replace(_MARK + digits.encode("utf-8", "replace"), _MARK + b"0" * FILE_DIGITS, 1)
            total = sha256(size + blank)
            while chunk := file.read(CHUNK):
                total.update(chunk)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder; expected a checkpoint.") from None
    if total.hexdigest() != digits:
        raise ValueError(f"{path} is damaged: it was changed after it was written, its sha256 does not match. {AGAIN}")


def _checksum(path: Path, index: bytes) -> str | None:
    """The checksum in the metadata of a file; None for a file of an earlier version."""
    content = parse(index, f"the index of {path}", AGAIN)
    metadata = content.get("__metadata__") if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or HEADER not in metadata:
        raise ValueError(f"{path} is not a file of unfading: its metadata has no {HEADER!r}.")
    unknown = [name for name in metadata if name not in (HEADER, CHECKSUM)]
    if unknown:
        raise ValueError(f"{path} is damaged: its metadata has the unknown field {brief(unknown[0])}. {AGAIN}")
    digits = metadata.get(CHECKSUM)
    return digits if digits is None else str(digits)


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    verify(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a checkpoint: {error}. {AGAIN}") from None


def _header(path: Path, file: Any) -> dict[str, Any]:
    text = (file.metadata() or {}).get(HEADER)
    if text is None:
        raise ValueError(f"{path} is not a file of unfading: its metadata has no {HEADER!r}.")
    header = parse(text, f"the metadata of {path}", AGAIN)
    if not isinstance(header, dict):
        raise ValueError(f"{path} is damaged: its metadata must be a JSON object; got {brief(header)}. {AGAIN}")
    return header
