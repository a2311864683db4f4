"""The log of a run, curve.jsonl: one JSON object with a checksum per line, appended during training."""

from pathlib import Path
from typing import Any

from unfading.files.checked_json import FIELD, LARGEST_FILE, read_bytes, unsealed
from unfading.files.schema import LogLine, check, fields


def read_log(path: Path, way_out: str) -> list[dict[str, Any]]:
    """The complete rows of a log, none if the file does not exist; the last one may be incomplete if its process was killed."""
    if not path.exists():
        return []
    *lines, rest = read_bytes(path, LARGEST_FILE, way_out).split(b"\n")
    rows = []
    for i, line in enumerate(lines, 1):
        where = f"{path}, line {i}"
        row = unsealed(line, where, fields(LogLine), way_out)
        check(LogLine, row, where, way_out)
        rows.append(row)
    # A killed process leaves the beginning of a row, and no row with something else than a line break behind it.
    if _is_row(rest[:-1]):
        raise ValueError(f"{path} is damaged: its last line does not end with a line break. {way_out}")
    return rows


def _is_row(line: bytes) -> bool:
    try:
        return FIELD.encode() in line and bool(unsealed(line, "", fields(LogLine), ""))
    except ValueError:
        return False
