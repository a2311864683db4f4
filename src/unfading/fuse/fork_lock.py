"""A lock that a forked child can take, even if a thread of its parent held it at the fork."""

import os
import threading


class ForkLock:
    """One for the whole process, since it is never unregistered.

    Attributes:
        lock: reentrant, for a `with` statement. An interruption, as by Ctrl-C, may fall between two lines of an `__enter__` or
            `__exit__` written in Python, and the lock would be held for ever. It does not fall into those of this lock.
    """

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        # In a forked child, the thread that held the lock does not exist and would never release it.
        self.lock = threading.RLock()
