"""A lock that a forked child can take, even if a thread of its parent held it at the fork."""

import os
import threading
from typing import Any


class ForkLock:
    """A reentrant lock for a `with` statement; one for the whole process, since it is never unregistered."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        # In a forked child, the thread that held the lock does not exist and would never release it.
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: Any) -> None:
        self._lock.release()
