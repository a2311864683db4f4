"""The folder of a run: the run, its log, its checkpoints and its record. One process writes it at a time.

run.json              the run
curve.jsonl           the log: one row per interval of training
last.safetensors      the checkpoint to continue from
best.safetensors      the weights with the best validation score
record.json           the result; a run with a record is finished
source/               the source of a user's own task and cell, which is what runs, in every process and after a resume

Every file carries a checksum: the JSON files and each line of the log as their first field (files/checked_json.py), checkpoints
in their metadata. Whoever reads a file compares it.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from unfading.files import read_json, write_atomically, write_json
from unfading.files.checked_json import FIELD, brief, sealed, sentence
from unfading.files.run_log import read_log
from unfading.files.schema import VERSION, CheckpointHeader, LastHeader, RecordFile, RunFile, check, check_version, fields
from unfading.training import checkpoint
from unfading.training.names import place_of
from unfading.training.run import Run
from unfading.training.user_code import UserCode, read_code

# Settings that may name a user's class.
ROLES = ("task", "cell")
OTHER_FOLDER = "Train in another folder."
AGAIN = "Start again (--again)."
REMOVE = "Remove it; the next training of the run writes it again."


class FolderInUse(ValueError):
    """Another process holds the lock of a run's folder."""


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
        self._log: IO[bytes] | None = None
        self._rows: list[dict[str, Any]] = []  # all rows of the log
        try:
            self._enter()
        except BaseException:
            self.close()
            raise

    def _enter(self) -> None:
        if self._lock is not None:
            # Temporary files of a process that was killed while it wrote.
            for temporary in self.path.rglob(".*.*.*"):
                temporary.unlink()
        # Before run.json: a folder that has one has its source too.
        for place, folder in _source_folders(self.path, self.run.to_json()).items():
            if not self.run.code[place].installed:
                self.run.code[place].write(folder)
        file = self.path / "run.json"
        if not file.exists():
            write_json(file, {"version": VERSION, "run": self.run.to_json(), "sources": self.run.sources})
        _check_run(file, read_run_file(file)["run"], self.run)

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
        with self._log_errors():
            self._sync_log()
        write_json(self.path / "record.json", record)

    def clear(self) -> None:
        """Remove all results. The record goes first, so that a half-cleared folder is not a finished run."""
        for name in ("record.json", "last.safetensors", "best.safetensors", "curve.jsonl"):
            (self.path / name).unlink(missing_ok=True)
        self._rows = []

    def save(self, name: str, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        """Write a checkpoint, "last" or "best", after the log has reached the disk."""
        with self._log_errors():
            self._sync_log()
        header = {"version": VERSION, "run": self.run.to_json(), **header}
        checkpoint.save(self.path / f"{name}.safetensors", tensors, header)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and header of a checkpoint, "last" or "best"; None if there is none."""
        path = self.path / f"{name}.safetensors"
        if not path.exists():
            return None
        tensors, header = checkpoint.load(path)
        _check_header(path, header)
        if header.get("run") != self.run.to_json():
            raise ValueError(f"{path} is a checkpoint of another run. Remove it, or start again (--again).")
        return tensors, header

    def log(self, row: dict[str, Any]) -> None:
        """Add a row to the log."""
        line = sealed(row)
        with self._log_errors():
            if self._log is None:
                self._log = open(self.path / "curve.jsonl", "ab")  # noqa: SIM115, open until close
            self._log.write(line + b"\n")
            self._log.flush()
        row = json.loads(line)
        row.pop(FIELD)
        self._rows.append(row)

    def curve(self) -> list[dict[str, Any]]:
        """All log rows so far, even if the file has been removed meanwhile."""
        return list(self._rows)

    def cut_log(self, step: int) -> None:
        """Take the log rows of the file up to `step`, and remove the others: those steps are trained again."""
        self._rows = [row for row in read_curve(self.path / "curve.jsonl") if row["step"] <= step]
        self._write_log()

    def _sync_log(self) -> None:
        """Let the log reach the disk. A file that was removed or cut meanwhile is written again."""
        if self._log is None:
            return
        try:
            own, there = os.fstat(self._log.fileno()), os.stat(self.path / "curve.jsonl")
            complete = os.path.samestat(own, there) and there.st_size == self._log.tell()
        except FileNotFoundError:
            complete = False
        if complete:
            os.fsync(self._log.fileno())
        else:
            self._log.close()
            self._log = None
            self._write_log()

    def _write_log(self) -> None:
        write_atomically(self.path / "curve.jsonl", b"".join(sealed(row) + b"\n" for row in self._rows))

    @contextmanager
    def _log_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(f"{self.path / 'curve.jsonl'} could not be written: {error.strerror}.") from error


def finished(where: Path, run: Run) -> dict[str, Any] | None:
    """The record of a finished run, or None; its folder is not locked.

    A record of another run, and any file of the run that is not as it was written, raise a ValueError.
    """
    path = where / run.key / "record.json"
    if not path.exists():
        return None
    verify(path.parent)
    record = read_record(path)
    _check_run(path, record.get("run"), run)
    return record


def stopped_at(where: Path, run: Run) -> int:
    """The step of a run's last checkpoint, 0 if there is none; its folder is not locked."""
    return last_step(where / run.key)


def last_step(folder: Path) -> int:
    """The step of the last checkpoint in the folder of a run, 0 if there is none."""
    path = folder / "last.safetensors"
    if not path.exists():
        return 0
    header = checkpoint.load_header(path)
    _check_header(path, header)
    return int(header["step"])


def verify(folder: Path) -> None:
    """Raise a ValueError, with the name of the file, unless every file of a run is as it was written. No code is executed."""
    if (folder / "run.json").exists():
        content = read_run_file(folder / "run.json")
        code = stored_code(folder, content["run"])
        for name, digest in content.get("sources", {}).items():
            if place_of(name) in code and code[place_of(name)].digest != digest:
                raise ValueError(f"{folder / 'source'} was changed after it was written: the source of {name} differs. {AGAIN}")
    if (folder / "record.json").exists():
        read_record(folder / "record.json")
    read_curve(folder / "curve.jsonl")
    for name in ("last", "best"):
        if (folder / f"{name}.safetensors").exists():
            checkpoint.verify(folder / f"{name}.safetensors")


def clear(where: Path, run: Run) -> None:
    """Remove all results of a run, unless another process is training it."""
    if (where / run.key).exists():
        folder = RunFolder(where, run)
        try:
            folder.clear()
        finally:
            folder.close()


def read_run(path: Path, *, allow_code: bool = False) -> Run:
    """The run of a run.json or a record.json.

    Args:
        allow_code: the run may name a user's own task or cell, whose source is then executed: that in the folder of the run,
            or else the present file of that name.
    """
    content = read_run_file(path)
    for place, folder in _source_folders(path.parent, content["run"]).items():
        if not allow_code:
            raise ValueError(
                f"{path} names code of a user, and {folder if folder.is_dir() else place} would be executed. If you trust it, "
                "allow it with --allow-code."
            )
    try:
        run = Run.from_json(content["run"], stored_code(path.parent, content["run"]))
    except ValueError as error:
        raise ValueError(f"{path}: {sentence(error)}") from None
    _check_sources(path, content, run)
    return run


def read_run_file(path: Path) -> dict[str, Any]:
    """The content of a run.json or a record.json. Nothing that it names is imported."""
    return _read(path, RunFile)


def stored_code(folder: Path, settings: Mapping[str, Any]) -> dict[str, UserCode]:
    """The source of a user's classes that the folder of a run holds, by file or module. Nothing is executed."""
    folders = _source_folders(folder, settings)
    names = {place_of(str(settings.get(role))): str(settings.get(role)) for role in ROLES}
    return {place: read_code(names[place], path) for place, path in folders.items() if path.is_dir()}


def _source_folders(folder: Path, settings: Mapping[str, Any]) -> dict[str, Path]:
    """Where the folder of a run stores the source of a user's classes, by their file or module."""
    places = {place_of(str(settings.get(role))): folder / "source" / role for role in ROLES}
    return {place: path for place, path in places.items() if place}


def _check_run(path: Path, settings: Any, run: Run) -> None:
    """Raise unless a file holds the settings of this run."""
    wanted = run.to_json()
    if settings == wanted:
        return
    other = settings if isinstance(settings, dict) else {}
    name = next((name for name in wanted if other.get(name) != wanted[name]), "run")
    raise ValueError(
        f"{path} describes another run than the name of its folder: {name} is {brief(other.get(name))}, not "
        f"{wanted.get(name)!r}. Move the folder away."
    )


def _check_sources(path: Path, content: Mapping[str, Any], run: Run) -> None:
    """Raise if the source of a user's class is not that of the file; files of earlier versions may not name it."""
    about = content.get("about")
    sources = content.get("sources") or (about.get("sources") if isinstance(about, dict) else None) or {}
    for name, digest in run.sources.items():
        if sources.get(name, digest) != digest:
            raise ValueError(
                f"{path} was written with another source of {name} than that in {run.code[place_of(name)].folder}. Get the "
                "source back, or train the present one by its name."
            )


def read_record(path: Path) -> dict[str, Any]:
    """The content of a record.json."""
    return _read(path, RecordFile)


def read_curve(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a log; the last one may be incomplete if its process was killed."""
    return read_log(path, AGAIN)


def _read(path: Path, kind: Any) -> dict[str, Any]:
    way_out = REMOVE if path.name == "run.json" else AGAIN
    content = read_json(path, fields(RecordFile), way_out)
    check_version(content, str(path), OTHER_FOLDER)
    check(kind, content, str(path), way_out)
    return content


def _check_header(path: Path, header: dict[str, Any]) -> None:
    check_version(header, str(path), OTHER_FOLDER)
    check(LastHeader if path.stem == "last" else CheckpointHeader, header, str(path), AGAIN)


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
        raise FolderInUse(f"{path} is being written by another process. Wait for it, or name another folder.") from None
    except OSError:  # a file system without locks
        file.close()
        return None
    return file
