"""The folder of a run: what it is, its curve, its checkpoints and its record. One process writes it at a time.

run.json              the run
curve.jsonl           a line for each stretch of training
last.safetensors      where to go on
best.safetensors      the weights that did best on validation
record.json           how it ended; a run that has one is done
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


class Folder:
    """`where/<key of the run>`, held by this process until it is closed.

    Args:
        where: e.g. runs/adding.
        run: what is trained there.
    """

    def __init__(self, where: Path, run: Run):
        self.run = run
        self.path = where / run.key
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"{self.path} cannot be made: {error.strerror}. Name another folder.") from error
        self._lock = _locked(self.path)
        self._curve: IO[str] | None = None
        try:
            self._enter()
        except BaseException:
            self.close()
            raise

    def _enter(self) -> None:
        if self._lock is not None:
            # What a process that was killed had not put in place yet.
            for left in self.path.glob(".*.*.*"):
                left.unlink()
        told = self.path / "run.json"
        if not told.exists():
            write_json(told, {"version": VERSION, "run": self.run.to_json()})
        elif read_run(told) != self.run:
            raise ValueError(f"{told} describes another run than its folder's name says. Move the folder away.")

    def close(self) -> None:
        """Let others write."""
        if self._curve is not None:
            # Whole lines have been flushed; what is left did not fit the disk.
            with suppress(OSError):
                self._curve.close()
            self._curve = None
        if self._lock is not None:
            self._lock.close()

    def save_record(self, record: dict[str, Any]) -> None:
        """The run is done."""
        write_json(self.path / "record.json", record)

    def clear(self) -> None:
        """Begin anew. The record goes first: a folder that was left half cleared is no finished run."""
        for name in ("record.json", "last.safetensors", "best.safetensors", "curve.jsonl"):
            (self.path / name).unlink(missing_ok=True)

    def save(self, name: str, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        """A checkpoint, "last" or "best"; the curve reaches the disk before it."""
        if self._curve is not None:
            with self._writing_the_curve():
                os.fsync(self._curve.fileno())
        about = {"version": VERSION, "run": self.run.to_json(), **about}
        checkpoint.save(self.path / f"{name}.safetensors", tensors, about)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """A checkpoint of this run; None where there is none."""
        path = self.path / f"{name}.safetensors"
        if not path.exists():
            return None
        tensors, about = checkpoint.load(path)
        _check_version(path, about)
        if about.get("run") != json.loads(json.dumps(self.run.to_json())):
            raise ValueError(f"{path} is a checkpoint of another run. Remove it, or begin anew.")
        return tensors, about

    def add(self, line: dict[str, Any]) -> None:
        """A line of the curve."""
        with self._writing_the_curve():
            if self._curve is None:
                self._curve = open(self.path / "curve.jsonl", "a", encoding="utf-8")  # noqa: SIM115, kept open until close
            self._curve.write(json.dumps(line) + "\n")
            self._curve.flush()

    def curve(self) -> list[dict[str, Any]]:
        """The lines so far."""
        return read_curve(self.path / "curve.jsonl")

    def cut(self, step: int) -> None:
        """Leave of the curve what had been written when `step` steps were done: the rest is trained again."""
        lines = [line for line in self.curve() if line["step"] <= step]
        write_atomically(self.path / "curve.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())

    @contextmanager
    def _writing_the_curve(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(f"{self.path / 'curve.jsonl'} could not be written: {error.strerror}.") from error


def finished(where: Path, run: Run) -> dict[str, Any] | None:
    """The record of a run that is done, without holding its folder."""
    path = where / run.key / "record.json"
    return read_record(path) if path.exists() else None


def stopped_at(where: Path, run: Run) -> int:
    """The step of its last checkpoint, 0 where there is none; without holding its folder."""
    path = where / run.key / "last.safetensors"
    if not path.exists():
        return 0
    about = checkpoint.load_header(path)
    _check_version(path, about)
    return int(about["step"])


def clear(where: Path, run: Run) -> None:
    """Throw away what is there of a run, unless another process is at it."""
    if (where / run.key).exists():
        folder = Folder(where, run)
        try:
            folder.clear()
        finally:
            folder.close()


def read_run(path: Path) -> Run:
    """The run of a run.json or a record.json."""
    told = read_json(path)
    _check_version(path, told)
    try:
        return Run.from_json(told.get("run"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_record(path: Path) -> dict[str, Any]:
    """A record.json."""
    told: dict[str, Any] = read_json(path)
    _check_version(path, told)
    return told


def read_curve(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a curve; the last may have been cut off by the end of its process."""
    if not path.exists():
        return []
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: no JSON lines ({error}). Begin anew.") from None
    if not all(isinstance(line, dict) and isinstance(line.get("step"), int) for line in lines):
        raise ValueError(f"{path} is damaged: a line without a step. Begin anew.")
    return lines


def _check_version(path: Path, told: Any) -> None:
    version = told.get("version") if isinstance(told, dict) else None
    if version != VERSION:
        raise ValueError(f"{path} is of version {version}; this unfading reads version {VERSION}. Train in another folder.")


def _locked(path: Path) -> IO[str] | None:
    """A lock on the folder that goes with the process that holds it, however that ends; None where there are no locks."""
    try:
        import fcntl
    except ImportError:  # Windows has none
        return None
    file = open(path / ".lock", "w", encoding="utf-8")  # noqa: SIM115, held until close
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValueError(f"{path} is being written by another process. Wait for it, or name another folder.") from None
    except OSError:  # a file system without locks
        file.close()
        return None
    return file
