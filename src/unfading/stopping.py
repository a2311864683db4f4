"""Ctrl-C and SIGTERM, while a run is trained: noticed now, obeyed after the step."""

import signal
import threading
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


def noted() -> bool:
    """Whether the training of this moment, or else the last one, was asked to stop."""
    return _noted


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], int | None]]:
    """Inside the block the first SIGINT or SIGTERM is noted, for the function that this gives; a second one acts at once."""
    global _noted
    asked: int | None = None
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
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
        yield lambda: asked
    finally:
        restore()
