"""C source in, loaded library out: compiled once per machine, kept on disk, checked before it is loaded.

The folder is `$UNFADING_CACHE`, else `$XDG_CACHE_HOME/unfading`, else `~/.cache/unfading`. In it lie `<key>.c`, to be read,
and `<key>-<digest>.so`. The key is a hash of all that decides the library: source, flags, compiler, processor. The digest is
a hash of the key and of the library's bytes, and since it stands in the name, one rename publishes both.

- Loading a damaged library can kill the process, so an entry is loaded only if its bytes give its digest; else it is removed
  and made again.
- A loaded library is code that runs as you, so neither a folder nor an entry counts that another user owns or could write.
- The compiler works in a folder of its own outside the cache. Where the library cannot be stored, because the cache is
  read-only, full or not to be trusted, it is loaded from there, and serves this process. A file may go once it is loaded, so
  nothing is left to remove at exit, and a forked child has nothing of its parent's to remove.
- Processes do not wait for each other: two that miss at once both compile, and the later rename wins.
"""

import os
import re
import shutil
import stat
import tempfile
import threading
from contextlib import suppress
from ctypes import CDLL
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from unfading.fuse.c import compiler
from unfading.fuse.c.compiler import Compiler, NoCompiler

# What `_store` writes, finished or not, and nothing else; .py are the sources of kernels for GPUs.
OURS = re.compile(r"[0-9a-f]{32}(\.c|\.py|-[0-9a-f]{32}\.so)(\.\w{8}\.tmp)?")

_loaded: dict[str, CDLL] = {}
_refused: dict[str, str] = {}
_lock = threading.Lock()


def _forget_the_lock() -> None:
    """In a forked child, the thread that held the lock does not exist and would never let go of it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_the_lock)


class Description(NamedTuple):
    """What `unfading doctor` tells of the compiler and the cache."""

    compiler: str
    version: str
    flags: str
    folder: Path
    entries: int
    bytes: int
    writable: bool
    trouble: str  # why nothing can be compiled, or nothing be kept; empty where all is well


def library(source: str) -> CDLL:
    """The library made from C11 source text. A process compiles or loads each source once, and keeps what it has loaded.

    Raises:
        NoCompiler: with the reason in words. A failed compilation is not tried again in this process, unless by another
            compiler.
    """
    found = _loaded.get(source)
    if found is None:
        with _lock:
            found = _loaded.get(source)
            if found is None:
                found = _loaded[source] = _fetch(source)
    return found


def folder() -> Path:
    """Where the libraries lie. The folder may not exist yet."""
    own = os.environ.get("UNFADING_CACHE", "")
    if own:
        return Path(os.path.abspath(os.path.expanduser(own)))
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(base):
            return Path(base, "unfading")
    # A user without a home, as in many containers.
    return Path(tempfile.gettempdir(), f"unfading-{os.getuid()}")


def keep(name: str, content: bytes) -> Path | None:
    """A file with this content in the folder; None where it cannot be written there, or another user could write it."""
    place = folder()
    if _distrust(place):
        return None
    path = place / name
    with suppress(OSError):
        if _ours(path.lstat(), stat.S_IFREG) and path.read_bytes() == content:
            return path
    with suppress(OSError):
        return _store(place, name, content)
    return None


def kept(name: str) -> bytes | None:
    """What a file of the folder holds; None where there is none, or another user could have written it."""
    place = folder()
    with suppress(OSError):
        if not _distrust(place) and _ours((place / name).lstat(), stat.S_IFREG):
            return (place / name).read_bytes()
    return None


def clear() -> tuple[int, int]:
    """Remove what this module has written to the folder, and nothing else; return how many libraries, and bytes in all."""
    libraries = size = 0
    for path, bytes_ in _files(folder()):
        path.unlink(missing_ok=True)
        libraries, size = libraries + (path.suffix == ".so"), size + bytes_
    return libraries, size


def describe() -> Description:
    """The compiler and the cache as they stand. Runs the compiler."""
    program = told = flags = ""
    troubles = []
    try:
        found = compiler.find()
        program = " ".join(found.command)
        told, flags = compiler.version(found), " ".join(compiler.flags(found))
    except NoCompiler as error:
        troubles.append(str(error))
    place = folder()
    trouble = _distrust(place)
    if not trouble:
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"unfading")
        except OSError as error:
            trouble = f"{place} cannot be written: {error.strerror}"
    files = _files(place)
    return Description(
        compiler=program,
        version=told,
        flags=flags,
        folder=place,
        entries=sum(path.suffix == ".so" for path, _ in files),
        bytes=sum(size for _, size in files),
        writable=not trouble,
        trouble="; ".join([*troubles, trouble] if trouble else troubles),
    )


def _fetch(source: str) -> CDLL:
    cc = compiler.find()
    key = sha256(repr((source, compiler.FLAGS, compiler.NATIVE, cc.identity, compiler.cpu())).encode()).hexdigest()[:32]
    if key in _refused:
        raise NoCompiler(_refused[key])
    place = folder()
    trouble = _distrust(place)
    if not trouble:
        found = _stored(place, key)
        if found:
            return found
    try:
        return _made(source, cc, key, place, trouble)
    except NoCompiler as error:
        _refused[key] = str(error)
        raise


def _stored(place: Path, key: str) -> CDLL | None:
    """The entry under this key, if there is a sound one; whatever else goes by its name is removed."""
    for path in place.glob(f"{key}-*.so"):
        with suppress(OSError):
            if _ours(path.lstat(), stat.S_IFREG) and path.name == _name(key, path.read_bytes()):
                return CDLL(str(path))
        with suppress(OSError):
            path.unlink()
    return None


def _made(source: str, cc: Compiler, key: str, place: Path, trouble: str) -> CDLL:
    """Compile, store if it can be stored, load."""
    text = source.encode()
    # Inside a folder that others may write, a private folder is not private: they could put another in its place.
    scratch = _scratch([None] if trouble else [None, place], f"{key}.c", text)
    try:
        if not trouble:
            try:
                _store(place, f"{key}.c", text)
            except OSError as error:
                trouble = f"{place} cannot be written: {error.strerror}"
        made = scratch / f"{key}.so"
        compiler.build(cc, scratch / f"{key}.c", made)
        if not trouble:
            with suppress(OSError):
                # A cache on a file system without leave to execute stores, and does not load.
                return CDLL(str(_store(place, _name(key, content := made.read_bytes()), content)))
        try:
            return CDLL(str(made))
        except OSError as error:
            raise NoCompiler(f"{' '.join(cc.command)} made a library that does not load: {error}") from None
    except NoCompiler as error:
        kept = f"the source was not kept, as {trouble}" if trouble else f"the source is kept in {place / f'{key}.c'}"
        raise NoCompiler(f"{error}; {kept}") from None
    finally:
        # Not a TemporaryDirectory: a child forked meanwhile, by another thread, would remove that at its own exit.
        shutil.rmtree(scratch, ignore_errors=True)


def _scratch(parents: list[Path | None], name: str, text: bytes) -> Path:
    """A new private folder with the source in it, in the first place with room for it; None is where temporary files go."""
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


def _store(place: Path, name: str, content: bytes) -> Path:
    """Write a file that is there whole or not at all, also if the machine stops."""
    handle, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=".tmp", dir=place)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, place / name)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return place / name


def _name(key: str, content: bytes) -> str:
    return f"{key}-{sha256(key.encode() + content).hexdigest()[:32]}.so"


def _distrust(place: Path) -> str:
    """Why no library in this folder is to be loaded; empty if it may be. Makes the folder where there is none."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = place.stat()
    except OSError as error:
        return f"{place} cannot be made: {error.strerror}"
    if not _ours(info, stat.S_IFDIR):
        return f"{place} could be written by another user, whose code would then run as you; make it yours and chmod it to 700"
    return ""


def _ours(info: os.stat_result, kind: int) -> bool:
    """Whether nobody but this user (and root) could have written it."""
    return stat.S_IFMT(info.st_mode) == kind and info.st_uid == os.geteuid() and not info.st_mode & 0o022


def _files(place: Path) -> list[tuple[Path, int]]:
    """What this module has written to the folder, with sizes."""
    files = []
    for path in place.glob("*"):
        if OURS.fullmatch(path.name):
            # Another process may be clearing the folder.
            with suppress(FileNotFoundError):
                files.append((path, path.lstat().st_size))
    return files
