"""Ctrl-C, SIGTERM and the end of a time limit, while a run is trained: noticed now, obeyed after the step."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(Exception):
    """A run was asked to stop, and has: all it did is in its checkpoint."""

    def __init__(self, signal: int, step: int | None):
        super().__init__("stopped" if step is None else f"stopped at step {step}")
        self.signal = signal
        self.step = step


_noted = False
_end = math.inf  # of the time limit, on the monotonic clock


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Inside the block training stops when the time is over, as on SIGTERM: with checkpoints, and `Stopped` is raised."""
    global _end
    before, _end = _end, min(_end, time.monotonic() + seconds)
    try:
        yield
    finally:
        _end = before


def stop_if_late() -> None:
    """Raise where the time is over: nothing more is begun."""
    if time.monotonic() >= _end:
        raise Stopped(signal.SIGTERM, None)


def noted() -> bool:
    """Whether the training of this moment, or else the last one, was asked to stop."""
    return _noted


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], int | None]]:
    """Inside the block the first SIGINT or SIGTERM is noted, for the function that this gives; a second one acts at once."""
    global _noted
    asked: int | None = None
    if threading.current_thread() is not threading.main_thread():
        yield lambda: signal.SIGTERM if time.monotonic() >= _end else None
        return
    _noted = False

    def note(number: int, frame: Any) -> None:
        global _noted
        nonlocal asked
        asked = number
        _noted = True
        restore()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: signal.SIGTERM if asked is None and time.monotonic() >= _end else asked
    finally:
        restore()
