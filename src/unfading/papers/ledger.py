"""Results ledger: one JSONL file per machine. A new line replaces the earlier one with the same key."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unfading import machine
from unfading.files import write_atomically
from unfading.files.checked_json import read_objects

Line = dict[str, Any]
# The fields that identify a result. Another setting of the same row has another run key, hence a line of its own.
KEY = ("kind", "item", "row", "budget", "key")


def file(folder: Path, device: str) -> Path:
    """The ledger of this machine, e.g. papers-nvidia-h200.jsonl."""
    return folder / f"papers-{machine.gpu_slug() if device == 'cuda' else machine.slug()}.jsonl"


def read(path: Path) -> list[Line]:
    """All lines of a ledger; none if the file does not exist."""
    if not path.exists():
        return []
    lines = read_objects(path, "Move the file away.")
    for i, line in enumerate(lines, 1):
        for name in KEY:
            if not isinstance(line.get(name), str | int | float | None):
                raise ValueError(f"{path}, line {i}: {name!r} must be text or a number. Move the file away.")
    return lines


def add(path: Path, lines: Iterable[Line]) -> None:
    """Append lines and drop earlier ones with the same key. The file is replaced atomically."""
    added = {_key(line): line for line in lines}
    write(path, [*(line for line in read(path) if _key(line) not in added), *added.values()])


def write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file by these lines."""
    write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def _key(line: Line) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in KEY)
