"""The storage of a queue: an SQLite file, a journal file, or a PostgreSQL server, each with a lock.

Optuna stores the trials. A decision that depends on what is stored, e.g. which trial a worker takes, is made while the lock of
the storage is held. Its owner may be killed at any moment: the kernel releases the lock of a file, and PostgreSQL releases its
advisory lock when the connection ends.

Optuna's own means were not enough for this. Its heartbeat exists for databases only, a worker that is killed between marking a
stale trial and adding its successor loses the trial, and on SQLite it takes a waiting trial by a read and a later write.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

Result = TypeVar("Result")

# Seconds for which a worker calls a storage that does not answer, e.g. a server that is started again, before it gives up.
PATIENCE = 300.0
# Key of the advisory lock in PostgreSQL: any number that other programs are unlikely to choose.
ADVISORY_LOCK = 7_046_029_254_386_353
# From a machine that has lost its power the server hears nothing. It ends such a connection, and its lock, after a minute.
SERVER_OPTIONS = (
    "-c tcp_keepalives_idle=20 -c tcp_keepalives_interval=10 -c tcp_keepalives_count=4 "
    "-c client_connection_check_interval=10000 -c idle_in_transaction_session_timeout=60000"
)
KINDS = "sqlite:///FILE, journal:FILE or postgresql://USER@HOST/DATABASE"


class Storage:
    """Where trials are stored, and the lock on it.

    Args:
        name: the address, without a password, for messages.
        trials: the trials, in Optuna's form.
        lock: excludes all other workers while it is held.
        unreachable: exceptions that say that the storage does not answer.
    """

    def __init__(
        self,
        name: str,
        trials: "BaseStorage",
        lock: Callable[[], AbstractContextManager[None]],
        unreachable: tuple[type[Exception], ...] = (),
    ):
        self.name = name
        self.trials = trials
        self.lock = lock
        self.unreachable = unreachable
        self._thread = threading.local()

    def locked(self, action: Callable[[], Result]) -> Result:
        """What the action returns, which is called while the lock is held.

        If the storage does not answer, the action is called again, so it must not mind what it has stored before.
        """

        def under_lock() -> Result:
            with self.lock():
                return action()

        return self.patiently(under_lock)

    def patiently(self, action: Callable[[], Result]) -> Result:
        """What the action returns. If the storage does not answer, it is called again for some minutes.

        An action inside another one is not repeated alone: the outer one holds the lock.
        """
        if getattr(self._thread, "inside", False):
            return action()
        self._thread.inside = True
        deadline = time.monotonic() + PATIENCE
        try:
            while True:
                try:
                    return action()
                except self.unreachable as error:
                    if time.monotonic() >= deadline:
                        raise ConnectionError(_unreachable(self.name, error)) from error
                    time.sleep(random.uniform(0.2, 2.0))
        finally:
            self._thread.inside = False


def open_storage(address: str, *, create: bool = True) -> Storage:
    """The storage at sqlite:///FILE, journal:FILE or postgresql://USER@HOST/DATABASE.

    Args:
        address: of the storage.
        create: create a file that is missing. Otherwise it raises, and nothing is written.
    """
    kind, _, rest = address.partition(":")
    if kind == "journal" and rest:
        return _journal(_present(address, Path(rest), create))
    if kind == "sqlite" and rest.startswith("///") and rest.strip("/"):
        return _sqlite(_present(address, Path(rest[3:]), create))
    if kind in ("postgresql", "postgres") and rest.startswith("//"):
        return _postgresql(f"postgresql+psycopg:{rest}")
    raise ValueError(f"a storage is {KINDS}; got {_without_password(address)!r}.")


def needed(module: str) -> Any:
    """Import a package of the extra `sweep`; if it is missing, the error names the extra."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        package = module.partition(".")[0]
        raise ValueError(
            f"a sweep needs {package}, which is not installed. Get it with: pip install 'unfading[sweep]'"
        ) from None


def _journal(path: Path) -> Storage:
    optuna = _optuna()
    _check_folder(path)
    backend = needed("unfading.training.sweep.journal").RepairedJournal(str(path))
    lock = partial(_file_lock, path)
    try:
        with lock():
            trials = optuna.storages.JournalStorage(backend)
    except (ValueError, KeyError, AssertionError, TypeError) as error:
        raise ValueError(f"{path} is not a journal of Optuna: {error}. Name another file.") from None
    return Storage(f"journal:{path}", trials, lock)


def _sqlite(path: Path) -> Storage:
    _check_folder(path)
    lock = partial(_file_lock, path)
    database = _database(f"sqlite:///{path}", f"sqlite:///{path}", lock, {"timeout": 60})
    return _storage(f"sqlite:///{path}", database, lock)


def _postgresql(url: str) -> Storage:
    needed("psycopg")
    sqlalchemy, name = needed("sqlalchemy"), _without_password(url).replace("+psycopg", "")
    options = {"options": SERVER_OPTIONS, "connect_timeout": 10}
    try:
        engine = sqlalchemy.create_engine(url, **_engine(options))
    except sqlalchemy.exc.ArgumentError:
        raise ValueError(f"a storage is {KINDS}; got {name!r}.") from None
    lock = partial(_advisory_lock, engine)
    return _storage(name, _database(url, name, lock, options), lock)


@contextmanager
def _advisory_lock(engine: Any) -> Iterator[None]:
    with engine.begin() as connection:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})")
        yield


def _database(url: str, name: str, lock: Callable[[], AbstractContextManager[None]], options: dict[str, Any]) -> Any:
    """Trials in a database, whose tables are created if they are missing."""
    optuna, sqlalchemy = _optuna(), needed("sqlalchemy")
    try:
        with lock():  # two workers would create the tables at once
            return optuna.storages.RDBStorage(url, engine_kwargs=_engine(options))
    except (sqlalchemy.exc.DBAPIError, optuna.exceptions.StorageInternalError) as error:
        raise ConnectionError(_unreachable(name, error)) from None
    except RuntimeError as error:  # tables of another version of Optuna
        raise ValueError(f"{name}: {error}") from None


def _engine(options: dict[str, Any]) -> dict[str, Any]:
    """A connection is open only while it is used, so that any number of workers that train hold none."""
    return {"poolclass": needed("sqlalchemy").pool.NullPool, "connect_args": options}


def _storage(name: str, database: Any, lock: Callable[[], AbstractContextManager[None]]) -> Storage:
    optuna, errors = _optuna(), needed("sqlalchemy").exc
    unreachable = (errors.OperationalError, errors.InterfaceError, optuna.exceptions.StorageInternalError)
    return Storage(name, optuna.storages.get_storage(database), lock, unreachable)


def _optuna() -> Any:
    optuna = needed("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _present(address: str, path: Path, create: bool) -> Path:
    """The path; raises if the file is missing and must not be created."""
    if not create and not path.exists():
        raise FileNotFoundError(f"there is no storage {address}: the file {path} does not exist. Check the address.")
    return path


def _check_folder(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"a storage needs a file name; {path} is a folder. Nearest: {path / 'sweep.db'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}. Create it first.")


def _unreachable(name: str, error: Exception) -> str:
    reason = getattr(error, "orig", None) or error.__cause__ or error
    reason = getattr(reason, "orig", None) or reason
    first = next(iter(str(reason).strip().splitlines()), type(reason).__name__)
    return f"the storage {name} cannot be used: {first.rstrip('.')}. Check the address, and that the server runs."


def _without_password(address: str) -> str:
    """The address as it may be shown."""
    scheme, mark, rest = address.partition("://")
    login, at, host = rest.rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{scheme}{mark}{user}{':***' if colon else ''}{at}{host}"


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """A lock on the file beside `path`. Threads of one process exclude each other too."""
    beside = path.with_name(f"{path.name}.lock")
    with open(beside, "a", encoding="utf-8") as file:
        wait_for_lock(file, beside)
        yield


def wait_for_lock(file: IO[Any], path: Path) -> None:
    """Lock an open file; closing it releases the lock, and so does the end of the process."""
    try:
        import fcntl
    except ImportError:  # Windows
        raise ValueError("SQLite and journal files need the file locks of Unix. Use a PostgreSQL server.") from None
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise ConnectionError(
                    f"{path} has been locked by another process for {PATIENCE:.0f} seconds. Look for a stopped worker "
                    f"(`fuser {path}` gives its number)."
                ) from None
            time.sleep(random.uniform(0.001, 0.02))
        except OSError as error:
            raise OSError(
                f"{path} cannot be locked: {os.strerror(error.errno or 0)}. This file system has no locks; use a PostgreSQL "
                "server, or a file elsewhere."
            ) from None
