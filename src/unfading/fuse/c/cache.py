"""Compile C source into a library and load it. Libraries are stored on disk, one per machine, and checked before loading.

The folder is `$UNFADING_CACHE`, else `$XDG_CACHE_HOME/unfading`, else `~/.cache/unfading`. It contains `<key>.c`, for readers,
and `<key>-<digest>.so`. The key is a hash of everything that decides the library: source, flags, compiler, processor. The
digest is a hash of the key and of the library's bytes. Since it is part of the name, one rename publishes both.

- Loading a damaged library can kill the process, so an entry is loaded only if its bytes match its digest; otherwise it is
  removed and compiled again.
- A loaded library is code that runs with the user's rights, so a folder or an entry that another user owns or could write is
  not used.
- The compiler works in a temporary folder outside the cache. Where the library cannot be stored, because the cache is
  read-only, full or not trusted, it is loaded from that folder, for this process only. The file can be removed once it is
  loaded, so nothing is left to remove at exit, and a forked child has nothing of its parent's to remove.
- Processes do not wait for each other: if two need the same library at once, both compile, and the later rename wins.
- The folder holds at most `$UNFADING_CACHE_MB` megabytes of these files, 512 by default. When a new library exceeds this, the
  files that were not used for the longest time are removed. A process that has loaded a removed library goes on with it; one
  that is about to load it compiles it again.
"""

import os
import re
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from ctypes import CDLL
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from unfading.fuse.c import compiler
from unfading.fuse.c.compiler import Compiler, NoCompiler
from unfading.fuse.fork_lock import ForkLock

# The files that `_store` writes, finished or not. The .py files are the sources of kernels for GPUs.
OURS = re.compile(r"[0-9a-f]{32}(\.c|\.py|-[0-9a-f]{32}\.so)(\.\w{8}\.tmp)?")

# Megabytes (10^6 bytes) that the folder may hold, unless $UNFADING_CACHE_MB is set; a kernel and its source take about 0.05.
LIMIT_MB = 512.0
# After a removal the folder holds this share of the limit, so that the next libraries need no removal.
SHARE_AFTER_REMOVAL = 0.9
# Seconds after which an unfinished file is a remnant of a process that was killed.
REMNANT_SECONDS = 3600.0

_loaded: dict[str, CDLL] = {}
_refused: dict[str, str] = {}
_lock = ForkLock()


class Description(NamedTuple):
    """The compiler and the cache, for `unfading doctor`."""

    compiler: str
    version: str
    flags: str
    folder: Path
    entries: int
    bytes: int
    writable: bool
    trouble: str  # why nothing can be compiled, or nothing stored; empty without trouble
    limit: int  # bytes that the folder may hold


def library(source: str) -> CDLL:
    """The library compiled from C11 source text. A process compiles or loads each source once.

    Raises:
        NoCompiler: with the reason. A failed compilation is tried again in this process only with another compiler.
    """
    loaded = _loaded.get(source)
    if loaded is None:
        with _lock.lock:
            loaded = _loaded.get(source)
            if loaded is None:
                loaded = _loaded[source] = _fetch(source)
    return loaded


def folder() -> Path:
    """The folder of the libraries. It may not exist yet."""
    own = os.environ.get("UNFADING_CACHE", "")
    if own:
        return Path(os.path.abspath(os.path.expanduser(own)))
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(base):
            return Path(base, "unfading")
    # The user has no home folder, as in many containers.
    return Path(tempfile.gettempdir(), f"unfading-{os.getuid()}")


def write_file(name: str, content: bytes) -> Path | None:
    """A file with this content in the folder; None where it cannot be written, or another user could write it."""
    parent = folder()
    if _distrust(parent):
        return None
    path = parent / name
    with suppress(OSError):
        if _ours(path.lstat(), stat.S_IFREG) and path.read_bytes() == content:
            _mark_as_used(path)
            return path
    with suppress(OSError):
        return _store(parent, name, content)
    return None


def read_file(name: str) -> bytes | None:
    """The content of a file in the folder; None where there is none, or another user could have written it."""
    parent = folder()
    with suppress(OSError):
        if not _distrust(parent) and _ours((parent / name).lstat(), stat.S_IFREG):
            return (parent / name).read_bytes()
    return None


def clear() -> tuple[int, int]:
    """Remove the files that this module has written, and no others; return the number of libraries and the bytes of all."""
    libraries = size = 0
    for path, info in _files(folder()):
        path.unlink(missing_ok=True)
        libraries, size = libraries + (path.suffix == ".so"), size + info.st_size
    return libraries, size


def limit() -> int:
    """The number of bytes that the folder may hold."""
    allowed = "number of megabytes, 0 or more"
    return int(compiler.from_environment("UNFADING_CACHE_MB", LIMIT_MB, lambda number: 0 <= number <= 1e9, allowed) * 1e6)


def describe() -> Description:
    """The present compiler and cache. Runs the compiler."""
    program = version = flags = ""
    troubles = []
    try:
        cc = compiler.find()
        program = " ".join(cc.command)
        version, flags = compiler.version(cc), " ".join(compiler.flags(cc))
    except NoCompiler as error:
        troubles.append(str(error))
    most = 0
    try:
        most = limit()
    except NoCompiler as error:
        troubles.append(str(error))
    parent = folder()
    trouble = _distrust(parent)
    if not trouble:
        try:
            with tempfile.TemporaryFile(dir=parent) as file:
                file.write(b"unfading")
        except OSError as error:
            trouble = f"{parent} cannot be written: {error.strerror}"
    files = _files(parent)
    return Description(
        compiler=program,
        version=version,
        flags=flags,
        folder=parent,
        entries=sum(path.suffix == ".so" for path, _ in files),
        bytes=sum(info.st_size for _, info in files),
        writable=not trouble,
        trouble="; ".join([*troubles, trouble] if trouble else troubles),
        limit=most,
    )


def _fetch(source: str) -> CDLL:
    cc = compiler.find()
    key = sha256(repr((source, compiler.FLAGS, compiler.NATIVE, cc.identity, compiler.cpu())).encode()).hexdigest()[:32]
    if key in _refused:
        raise NoCompiler(_refused[key])
    parent = folder()
    trouble = _distrust(parent)
    if not trouble:
        stored = _stored(parent, key)
        if stored:
            return stored
    try:
        return _compile(source, cc, key, parent, trouble)
    except NoCompiler as error:
        _refused[key] = str(error)
        raise


def _stored(parent: Path, key: str) -> CDLL | None:
    """The intact entry with this key, if there is one; damaged ones are removed."""
    for path in parent.glob(f"{key}-*.so"):
        with suppress(OSError):
            if _ours(path.lstat(), stat.S_IFREG) and path.name == _name(key, path.read_bytes()):
                library = CDLL(str(path))
                _mark_as_used(path)
                return library
        with suppress(OSError):
            path.unlink()
    return None


def _compile(source: str, cc: Compiler, key: str, parent: Path, trouble: str) -> CDLL:
    """Compile, store if possible, load."""
    text, most = source.encode(), limit()
    # Inside a folder that others may write, a private folder is not private: they could replace it.
    scratch = _scratch([None] if trouble else [None, parent], f"{key}.c", text)
    try:
        if not trouble:
            try:
                _store(parent, f"{key}.c", text)
            except OSError as error:
                trouble = f"{parent} cannot be written: {error.strerror}"
        output = scratch / f"{key}.so"
        compiler.build(cc, scratch / f"{key}.c", output)
        if not trouble:
            with suppress(OSError):
                # On a file system without execute permission the cache can store a library, but not load it.
                library = CDLL(str(_store(parent, _name(key, content := output.read_bytes()), content)))
                _remove_oldest(parent, most)
                return library
        try:
            return CDLL(str(output))
        except OSError as error:
            raise NoCompiler(f"{' '.join(cc.command)} made a library that does not load: {error}") from None
    except NoCompiler as error:
        note = f"the source was not stored, since {trouble}" if trouble else f"the source is stored in {parent / f'{key}.c'}"
        raise NoCompiler(f"{error}; {note}") from None
    finally:
        # Not a TemporaryDirectory: a child that another thread forks meanwhile would remove it at its own exit.
        shutil.rmtree(scratch, ignore_errors=True)


def _scratch(parents: list[Path | None], name: str, text: bytes) -> Path:
    """A new private folder with the source in it, in the first parent with room; None stands for the temporary folder."""
    reasons = []
    for parent in parents:
        scratch = None
        try:
            scratch = Path(tempfile.mkdtemp(prefix="unfading-", dir=parent))
            (scratch / name).write_bytes(text)
            return scratch
        except OSError as error:
            reasons.append(str(error))
            if scratch:
                shutil.rmtree(scratch, ignore_errors=True)
    raise NoCompiler(f"there is nowhere to compile: {' | '.join(reasons)}; set UNFADING_CACHE or TMPDIR to a writable folder")


def _store(parent: Path, name: str, content: bytes) -> Path:
    """Write a file whole or not at all, also if the machine stops.

    Not `files.write_atomically`: mkstemp gives a mode that `_ours` accepts, whatever the umask, and names that two
    threads of one process do not share.
    """
    handle, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, parent / name)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return parent / name


def _name(key: str, content: bytes) -> str:
    return f"{key}-{sha256(key.encode() + content).hexdigest()[:32]}.so"


def _distrust(parent: Path) -> str:
    """The reason why no library of this folder may be loaded; empty if they may be. Creates the folder if needed."""
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = parent.stat()
    except OSError as error:
        return f"{parent} cannot be made: {error.strerror}"
    if not _ours(info, stat.S_IFDIR):
        return f"{parent} could be written by another user, whose code would then run as you; make it yours and chmod it to 700"
    return ""


def _ours(info: os.stat_result, kind: int) -> bool:
    """Whether nobody but this user (and root) could have written it."""
    return stat.S_IFMT(info.st_mode) == kind and info.st_uid == os.geteuid() and not info.st_mode & 0o022


def _mark_as_used(path: Path) -> None:
    """Set the modification time, by which the oldest files are found; not where the folder is read-only."""
    with suppress(OSError):
        os.utime(path)


def _remove_oldest(parent: Path, most: int) -> None:
    """Remove the files that were not used for the longest time until the folder holds less than `most` bytes, and remnants.

    A kernel and its source go together. Other processes may do the same at the same time.
    """
    entries: dict[str, list[tuple[Path, os.stat_result]]] = {}
    now = time.time()
    for path, info in _files(parent):
        if path.suffix != ".tmp":
            entries.setdefault(path.name[:32], []).append((path, info))
        elif now - info.st_mtime > REMNANT_SECONDS:
            with suppress(OSError):
                path.unlink()
    total = sum(info.st_size for files in entries.values() for _, info in files)
    if total <= most:
        return
    for files in sorted(entries.values(), key=lambda files: max(info.st_mtime_ns for _, info in files)):
        for path, info in files:
            with suppress(OSError):
                path.unlink(missing_ok=True)
                total -= info.st_size
        if total <= SHARE_AFTER_REMOVAL * most:
            return


def _files(parent: Path) -> list[tuple[Path, os.stat_result]]:
    """The files that this module has written to the folder, with their sizes and times."""
    files = []
    for path in parent.glob("*"):
        if OURS.fullmatch(path.name):
            # Another process may be clearing the folder.
            with suppress(FileNotFoundError):
                files.append((path, path.lstat()))
    return files
