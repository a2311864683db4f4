"""The folder of a run: the run, its log, its checkpoints and its record. One process writes it at a time.

run.json              the run
curve.jsonl           the log: one row per interval of training
last.safetensors      the checkpoint to continue from
best.safetensors      the weights with the best validation score
record.json           the result; a run with a record is finished
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from unfading.files import read_json, write_atomically, write_json
from unfading.training import checkpoint
from unfading.training.run import VERSION, Run


class RunFolder:
    """The folder `where/<run.key>`, locked by this process until it is closed.

    Args:
        where: parent folder, e.g. runs/adding.
        run: the run that is trained there.
    """

    def __init__(self, where: Path, run: Run):
        self.run = run
        self.path = where / run.key
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"{self.path} cannot be created: {error.strerror}. Name another folder.") from error
        self._lock = _lock(self.path)
        self._log: IO[str] | None = None
        try:
            self._enter()
        except BaseException:
            self.close()
            raise

    def _enter(self) -> None:
        if self._lock is not None:
            # Temporary files of a process that was killed while it wrote.
            for temporary in self.path.glob(".*.*.*"):
                temporary.unlink()
        file = self.path / "run.json"
        if not file.exists():
            write_json(file, {"version": VERSION, "run": self.run.to_json()})
        elif read_run(file) != self.run:
            raise ValueError(f"{file} describes another run than the name of its folder. Move the folder away.")

    def close(self) -> None:
        """Close the files and release the lock."""
        if self._log is not None:
            # Complete rows have been flushed; the rest did not fit on the disk.
            with suppress(OSError):
                self._log.close()
            self._log = None
        if self._lock is not None:
            self._lock.close()

    def save_record(self, record: dict[str, Any]) -> None:
        """Write the record; the run is finished."""
        write_json(self.path / "record.json", record)

    def clear(self) -> None:
        """Remove all results. The record goes first, so that a half-cleared folder is not a finished run."""
        for name in ("record.json", "last.safetensors", "best.safetensors", "curve.jsonl"):
            (self.path / name).unlink(missing_ok=True)

    def save(self, name: str, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        """Write a checkpoint, "last" or "best", after the log has reached the disk."""
        if self._log is not None:
            with self._log_errors():
                os.fsync(self._log.fileno())
        header = {"version": VERSION, "run": self.run.to_json(), **header}
        checkpoint.save(self.path / f"{name}.safetensors", tensors, header)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and header of a checkpoint, "last" or "best"; None if there is none."""
        path = self.path / f"{name}.safetensors"
        if not path.exists():
            return None
        tensors, header = checkpoint.load(path)
        _check_version(path, header)
        if header.get("run") != json.loads(json.dumps(self.run.to_json())):
            raise ValueError(f"{path} is a checkpoint of another run. Remove it, or start again (--again).")
        return tensors, header

    def log(self, row: dict[str, Any]) -> None:
        """Add a row to the log."""
        with self._log_errors():
            if self._log is None:
                self._log = open(self.path / "curve.jsonl", "a", encoding="utf-8")  # noqa: SIM115, open until close
            self._log.write(json.dumps(row) + "\n")
            self._log.flush()

    def curve(self) -> list[dict[str, Any]]:
        """All log rows so far."""
        return read_curve(self.path / "curve.jsonl")

    def cut_log(self, step: int) -> None:
        """Remove log rows after `step`: those steps are trained again."""
        rows = [row for row in self.curve() if row["step"] <= step]
        write_atomically(self.path / "curve.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

    @contextmanager
    def _log_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(f"{self.path / 'curve.jsonl'} could not be written: {error.strerror}.") from error


def finished(where: Path, run: Run) -> dict[str, Any] | None:
    """The record of a finished run, or None; its folder is not locked."""
    path = where / run.key / "record.json"
    return read_record(path) if path.exists() else None


def stopped_at(where: Path, run: Run) -> int:
    """The step of a run's last checkpoint, 0 if there is none; its folder is not locked."""
    path = where / run.key / "last.safetensors"
    if not path.exists():
        return 0
    header = checkpoint.load_header(path)
    _check_version(path, header)
    return int(header["step"])


def clear(where: Path, run: Run) -> None:
    """Remove all results of a run, unless another process is training it."""
    if (where / run.key).exists():
        folder = RunFolder(where, run)
        try:
            folder.clear()
        finally:
            folder.close()


def read_run(path: Path) -> Run:
    """The run of a run.json or a record.json."""
    content = read_json(path)
    _check_version(path, content)
    try:
        return Run.from_json(content.get("run"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_record(path: Path) -> dict[str, Any]:
    """The content of a record.json."""
    record: dict[str, Any] = read_json(path)
    _check_version(path, record)
    return record


def read_curve(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a log; the last one may be incomplete if its process was killed."""
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: a line is not JSON ({error}). Start again (--again).") from None
    if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
        raise ValueError(f"{path} is damaged: a row has no step. Start again (--again).")
    return rows


def _check_version(path: Path, content: Any) -> None:
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise ValueError(f"{path} is of version {version}; this unfading reads version {VERSION}. Train in another folder.")


def _lock(path: Path) -> IO[str] | None:
    """A lock on the folder, released when its process ends in any way; None where locks are not supported."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    file = open(path / ".lock", "w", encoding="utf-8")  # noqa: SIM115, open until close
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{path} is being written by another process. Wait for it, or name another folder.") from None
    except OSError:  # a file system without locks
        file.close()
        return None
    return file
