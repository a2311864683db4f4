"""Ctrl-C, SIGTERM and time limits during training: noticed at once, obeyed after the present step."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(Exception):
    """Training was asked to stop and has stopped. Everything is in the checkpoints."""

    def __init__(self, signal: int, step: int | None):
        super().__init__("stopped" if step is None else f"stopped at step {step}")
        self.signal = signal
        self.step = step


_noted = False
_deadline = math.inf  # of the time limit, on the monotonic clock


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Inside the block, training stops after `seconds` as on SIGTERM: it writes checkpoints and raises `Stopped`."""
    global _deadline
    before, _deadline = _deadline, min(_deadline, time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline = before


def late() -> bool:
    """Whether the time limit is over, so that no further training begins."""
    return time.monotonic() >= _deadline


def noted() -> bool:
    """Whether the present training, or else the last one, was asked to stop."""
    return _noted


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], int | None]]:
    """Inside the block, the first SIGINT or SIGTERM is noted and a second one acts at once.

    Yields a function that returns the number of the noted signal, SIGTERM after the time limit, or else None.
    """
    global _noted
    asked: int | None = None
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield lambda: signal.SIGTERM if time.monotonic() >= _deadline else None
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
        yield lambda: signal.SIGTERM if asked is None and time.monotonic() >= _deadline else asked
    finally:
        restore()
