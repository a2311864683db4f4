"""Where in the user's files a refusal belongs."""

import inspect
import linecache
import traceback
from collections.abc import Sequence
from typing import Any

import torch


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def where(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line that is neither torch's nor the compiler's own."""
    own = __file__.rpartition("/")[0] + "/fuse"
    torchs = torch.__file__.rpartition("/")[0]
    for frame in reversed(frames):
        if not frame.filename.startswith((own, torchs, "<")):
            return _line(frame.filename, frame.lineno or 0)
    return ""


def defined(thing: Any) -> str:
    """The line where a step or a class begins, for a refusal that is of no one line in it."""
    thing = inspect.unwrap(thing)
    try:
        return _line(inspect.getfile(thing), inspect.getsourcelines(thing)[1])
    except (OSError, TypeError):
        return ""


def _line(filename: str, number: int) -> str:
    return f" ({filename}:{number}: {linecache.getline(filename, number).strip()})"
