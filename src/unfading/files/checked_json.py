"""JSON objects with a checksum, read with limits on their size and depth.

An object that is written here begins with the field

    "sha256": d        d = SHA-256 over all bytes of the object, with zeros in the place of d

of 64 hexadecimal digits in a file, and of 16 in a line of a log. A reader refuses an object whose bytes do not match. An object
without the field, of an earlier version or written by hand, is accepted: whoever edits a file on purpose removes the field. The
first field of such an object must be one that the reader knows; so a bit that flips in the name "sha256" itself is found too.
"""

import json
from collections.abc import Collection, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from unfading.files.atomic import write_atomically

FIELD = "sha256"
FILE_DIGITS, LINE_DIGITS = 64, 16
# A record of 10^5 log rows has about 20 MB.
LARGEST_FILE = 256 << 20
DEEPEST = 64


def sealed(value: Mapping[str, Any], *, digits: int = LINE_DIGITS, indent: int | None = None) -> bytes:
    """The object as JSON text, with its checksum as its first field."""
    rest = {name: field for name, field in value.items() if name != FIELD}
    blank = json.dumps({FIELD: "0" * digits, **rest}, indent=indent).encode()
    return blank.replace(b"0" * digits, sha256(blank).hexdigest()[:digits].encode(), 1)


def unsealed(content: bytes, where: str, known: Collection[str], way_out: str) -> dict[str, Any]:
    """The object of a JSON text, without its checksum, after this has been compared.

    Args:
        content: the text.
        where: its name, for errors.
        known: names of fields, one of which an object without checksum begins with.
        way_out: the last sentence of an error.
    """
    value = parse(content, where, way_out)
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object; got {brief(value)}. {way_out}")
    first = next(iter(value), None)
    if FIELD in value:
        digits = value.pop(FIELD)
        if not isinstance(digits, str) or len(digits) not in (FILE_DIGITS, LINE_DIGITS) or not _matches(content, digits):
            raise ValueError(
                f"{where} was changed after it was written: its sha256 does not match. {way_out} If you changed it on purpose, "
                f"remove its field {FIELD!r}."
            )
    elif first is not None and first not in known:
        raise ValueError(f"{where} is damaged: it begins with the unknown field {brief(first)}. {way_out}")
    return value


def _matches(content: bytes, digits: str) -> bool:
    blank = content.replace(digits.encode("utf-8", "replace"), b"0" * len(digits), 1)
    return sha256(blank).hexdigest()[: len(digits)] == digits


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as a JSON file with a checksum, atomically."""
    write_atomically(path, sealed(value, digits=FILE_DIGITS, indent=1) + b"\n")


def read_json(path: Path, known: Collection[str], way_out: str) -> dict[str, Any]:
    """Read an object from a JSON file; a missing, damaged or changed one raises a ValueError of one sentence."""
    # The line break that `write_json` adds is not part of the object.
    return unsealed(read_bytes(path, LARGEST_FILE, way_out).removesuffix(b"\n"), str(path), known, way_out)


def read_bytes(path: Path, largest: int, way_out: str) -> bytes:
    """The content of a file of at most `largest` bytes; it is not read if it is larger."""
    try:
        size = path.stat().st_size
        if size > largest:
            raise ValueError(f"{path} has {size} bytes; at most {largest} are read. {way_out}")
        return path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder; expected a file. {way_out}") from None


def parse(content: bytes | str, where: str, way_out: str = "") -> Any:
    """The value of a JSON text. Duplicate names, deep nesting and what is not JSON raise a ValueError of one sentence."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError(f"{where} is nested deeper than {DEEPEST} levels. {way_out}".rstrip()) from None
    except (UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{where} is damaged: it is not JSON ({sentence(error)}). {way_out}".rstrip()) from None
    level, depth = [value], 0
    while level:
        level = [item for each in level if isinstance(each, dict | list) for item in _items(each)]
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"{where} is nested deeper than {DEEPEST} levels. {way_out}".rstrip())
    return value


def read_objects(path: Path, way_out: str) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object in each line; an error names the line."""
    objects = []
    for i, line in enumerate(read_bytes(path, LARGEST_FILE, way_out).splitlines(), 1):
        value = parse(line, f"{path}, line {i}", way_out)
        if not isinstance(value, dict):
            raise ValueError(f"{path}, line {i} must be a JSON object; got {brief(value)}. {way_out}")
        objects.append(value)
    return objects


def brief(value: object) -> str:
    """The value as Python writes it, cut after 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return "a number of more than 4300 digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def sentence(error: Exception) -> str:
    """The first line of an error, cut after 400 characters: the values in it may be of any length."""
    text = next(iter(str(error).splitlines()), type(error).__name__)
    return text if len(text) <= 400 else f"{text[:397]}..."


def _items(value: dict[str, Any] | list[Any]) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has the field {brief(twice)} twice")
    return value
