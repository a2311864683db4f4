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
        return f"{self.filename}:{self.number}: {self.code}"


def user_line(frames: Sequence[traceback.FrameSummary]) -> SourceLine | None:
    """The innermost line that belongs neither to torch nor to the compiler."""
    compiler = __file__.rpartition("/")[0] + "/fuse"
    torch_folder = torch.__file__.rpartition("/")[0]
    for frame in reversed(frames):
        if not frame.filename.startswith((compiler, torch_folder, "<")):
            return _line(frame.filename, frame.lineno or 0)
    return None


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
