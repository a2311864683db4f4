"""The line of the user's file that an error or a refusal is about."""

import inspect
import linecache
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class SourceLine(NamedTuple):
    """A line of a file. Its text is `file:number: code`."""

    filename: str
    number: int
    code: str

    def __str__(self) -> str:
        return f"{self.filename}:{self.number}: {self.code}".removesuffix(": ")


def user_line(frames: Sequence[traceback.FrameSummary]) -> SourceLine | None:
    """The innermost line of a cell: of what this library has called, and what belongs neither to it nor to torch.

    The cells of the library count as a user's. Code without a file, as in `python -c`, has a line number and no text.
    """
    library, torch_folder = (file.rpartition("/")[0] for file in (__file__, torch.__file__))
    called, line = False, None
    for frame in frames:
        name = frame.filename
        if name.startswith(library) and not name.startswith(f"{library}/cells"):
            called = True
        elif called and not name.startswith(torch_folder) and (not name.startswith("<") or name in ("<string>", "<stdin>")):
            line = _line(name, frame.lineno or 0)
    return line


def definition_line(thing: Any) -> SourceLine | None:
    """The line where a function or a class begins, for a refusal that is not about a single line of it."""
    thing = inspect.unwrap(thing)
    try:
        return _line(inspect.getfile(thing), inspect.getsourcelines(thing)[1])
    except (OSError, TypeError):
        return None


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the name of its type where it has none."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _line(filename: str, number: int) -> SourceLine:
    return SourceLine(filename, number, linecache.getline(filename, number).strip())
