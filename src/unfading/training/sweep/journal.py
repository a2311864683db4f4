"""A journal file that survives the death of a process that writes it."""

import os
from pathlib import Path
from typing import Any

from optuna.storages.journal import JournalFileBackend

from unfading.training.sweep.storage import wait_for_lock


class RepairedJournal(JournalFileBackend):
    """Optuna's journal in a file, with a lock that the kernel releases, and without the incomplete line of a killed writer.

    Optuna's own lock is a file, which a killed process leaves behind; others wait for half a minute and then remove it.

    Args:
        file_path: the journal.
    """

    def __init__(self, file_path: str):
        super().__init__(file_path, lock_obj=_NoLock())  # type: ignore[arg-type]  # its class is private
        self._path = Path(file_path)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write operations at the end of the journal."""
        with open(self._path, "rb+") as file:
            wait_for_lock(file, self._path)
            size = file.seek(0, os.SEEK_END)
            complete = _complete_size(file, size)
            if complete < size:
                file.truncate(complete)
                os.fsync(file.fileno())
            super().append_logs(logs)


class _NoLock:
    """In the place of Optuna's lock."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _complete_size(file: Any, size: int) -> int:
    """The number of bytes up to the end of the last complete line."""
    end = size
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
