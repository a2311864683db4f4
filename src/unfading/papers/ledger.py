"""Lines of the papers' items in files that are kept, one for each machine: what is told again replaces what was told before."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unfading import machine
from unfading.training.checkpoint import write

Line = dict[str, Any]


def file(folder: Path, device: str) -> Path:
    """Of this machine's lines: papers-nvidia-h200.jsonl."""
    return folder / f"papers-{machine.gpu_slug() if device == 'cuda' else machine.slug()}.jsonl"


def read(path: Path) -> list[Line]:
    """All lines of a file, none where there is no file."""
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: no JSON lines ({error}). Move it away.") from None


def add(path: Path, lines: Iterable[Line]) -> None:
    """Write them at the end, without those about the same, the rest as it was; the file is whole at any moment."""
    added = {_key(line): line for line in lines}
    put(path, [*(line for line in read(path) if _key(line) not in added), *added.values()])


def put(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write a file of lines."""
    write(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def _key(line: Line) -> tuple[Any, ...]:
    """What a line is about. A setting that is run again, at another rate, is another run."""
    return tuple(line.get(name) for name in ("kind", "item", "row", "budget", "key"))
