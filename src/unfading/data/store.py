"""The data folder: find datasets, verify their checksums, download them.

The data folder is `$UNFADING_DATA`, or `~/.cache/unfading/data` by default. Each dataset keeps its publisher's own layout.
No file there is ever deleted or overwritten, nothing is unpickled, and an archive is unpacked into its own folder only.

Files whose publisher's checksum is known are compared before they are read. For the others `verify` records the checksums that
it meets first, in `<data folder>/.checksums/<dataset>.json`, and compares with these later: trust on first use.
"""

import errno
import hashlib
import os
import shutil
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from unfading.data.datasets import DATASETS, Dataset, Download
from unfading.errors import unknown
from unfading.files import read_json, write_atomically, write_json
from unfading.files.checked_json import brief

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NO_ARCHIVE = "{} is neither a tar nor a zip archive, or is cut short. Fetch it again."
# An archive is unpacked to at most this multiple of its size, or to this many bytes.
LARGEST_RATIO, SMALL = 200, 10_000_000
# Seconds after which a temporary folder that no process has locked is a remnant.
REMNANT_SECONDS = 60.0
PICKLED = "{} is a pickle: reading it would run whatever code is in it, so it is not read. {}"

# Largest file whose bytes are hashed for the record of a run, which takes a second at most.
HASHED = 1 << 28


def root() -> Path:
    """The path of the data folder, whether or not it exists."""
    return Path(os.environ.get("UNFADING_DATA") or "~/.cache/unfading/data").expanduser()


def known(name: str) -> Dataset:
    """The table entry of a dataset."""
    if name not in DATASETS:
        raise ValueError(unknown("dataset", name, DATASETS))
    return DATASETS[name]


def find(name: str) -> Path:
    """The folder of a dataset. Raises FileNotFoundError, with instructions, if a file is missing."""
    dataset = known(name)
    folder = _folder(dataset)
    if not folder.is_dir():
        if dataset.pickled and (root() / dataset.pickled).exists():
            raise ValueError(PICKLED.format(root() / dataset.pickled, f"Take the other form: {_way(name)}"))
        raise FileNotFoundError(f"dataset {name!r} is not in {root()}: no folder {dataset.folder!r} there. {_elsewhere(name)}")
    missing = [file for file in dataset.files if not (folder / file).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise FileNotFoundError(f"dataset {name!r} is incomplete: {folder / missing[0]} is missing{more}. {_elsewhere(name)}")
    return folder


def present(name: str) -> bool:
    """True if the dataset is complete in the data folder."""
    try:
        find(name)
    except (FileNotFoundError, ValueError):
        return False
    return True


def path(name: str, file: str) -> Path:
    """The path of a dataset's file, after checking that it exists and matches its checksum, if one is pinned."""
    target, wanted = find(name) / file, known(name).files.get(file)
    if not target.is_file():
        raise FileNotFoundError(f"dataset {name!r} is incomplete: {target} is missing. {_elsewhere(name)}")
    if wanted is not None and sha256(target) != wanted:
        raise ValueError(_altered(target, wanted))
    return target


class FileCheck(NamedTuple):
    """The result of verifying one file."""

    file: str
    # present: it exists and no checksum is known; recorded: its checksum was recorded now
    state: Literal["sound", "present", "recorded", "missing", "altered"]


def verify(name: str, *, record: bool = False) -> list[FileCheck]:
    """Check the files of a dataset against their checksums. Returns [] if the folder does not exist.

    Args:
        name: of the dataset.
        record: record the checksums of files whose publisher's checksum is not known, to compare them from now on.
    """
    dataset = known(name)
    folder = _folder(dataset)
    if not folder.is_dir():
        return []
    recorded = _recorded(name)
    files = dict(dataset.files)
    if record and not files:  # the table does not list the files of this dataset
        files = dict.fromkeys(str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())
    files |= {file: None for file in recorded if file not in files}
    checks = [_check(folder / file, file, wanted or recorded.get(file), record) for file, wanted in files.items()]
    new = {check.file: sha256(folder / check.file) for check in checks if check.state == "recorded"}
    if new:
        path = root() / ".checksums" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"files": {**recorded, **new}})
    return checks


def _check(path: Path, file: str, wanted: str | None, record: bool) -> FileCheck:
    if not path.is_file():
        return FileCheck(file, "missing")
    if wanted is None:
        return FileCheck(file, "recorded" if record else "present")
    return FileCheck(file, "sound" if sha256(path) == wanted else "altered")


def _recorded(name: str) -> dict[str, str]:
    """The checksums that were recorded for a dataset."""
    path = root() / ".checksums" / f"{name}.json"
    if not path.exists():
        return {}
    way_out = "Remove it; `unfading data verify` writes it again."
    files = read_json(path, {"files"}, way_out).get("files")
    if not isinstance(files, dict) or not all(isinstance(value, str) for value in files.values()):
        raise ValueError(f"{path} must map files to checksums. {way_out}")
    return files


def hashes(name: str) -> dict[str, str]:
    """The SHA-256 of every file of the table that is in the data folder; of a file above 256 MB its size in its place."""
    folder = _folder(known(name))
    files = {file: folder / file for file in known(name).files if (folder / file).is_file()}
    sizes = {file: path.stat().st_size for file, path in files.items()}
    return {file: sha256(path) if sizes[file] <= HASHED else f"{sizes[file]} bytes" for file, path in files.items()}


def sha256(file: Path) -> str:
    """The checksum of a file, computed again only if its size or modification time changed."""
    status = file.stat()
    return _sha256(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _sha256(file: Path, size: int, changed: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def refuse_pickle(file: Path, way_out: str) -> None:
    """Raise ValueError if the name or the first bytes of a file are those of a pickle."""
    with file.open("rb") as stream:
        head = stream.read(9)
    # A safetensors file begins with a length in eight bytes, the first of which may be 0x80 too, and then a brace.
    begins_as_pickle = head[:1] == b"\x80" and head[8:] != b"{"
    if begins_as_pickle or file.suffix in (".pkl", ".pickle", ".p"):
        raise ValueError(PICKLED.format(file, way_out))


def fetch(name: str, *, progress: Any = None) -> Path:
    """Download the missing files of a dataset, verify them and move them into place. Existing files are not touched.

    Args:
        progress: an object with `total`, `update(n)`, `reset()` and `close()`, such as a tqdm bar, updated during downloads.
    """
    dataset = known(name)
    folder = root() / dataset.folder
    altered = [check.file for check in verify(name) if check.state == "altered"]
    if altered:
        raise ValueError(_altered(folder / altered[0], dataset.files[altered[0]]))
    if present(name):
        return find(name)
    if not dataset.downloads:
        raise ValueError(f"dataset {name!r} has to be got by hand: {dataset.by_hand}. Home: {dataset.home}")
    for download in dataset.downloads:
        if download.inside is None and (folder / download.name).is_file():
            continue
        root().mkdir(parents=True, exist_ok=True)
        # On the same file system as the target, so that each move is atomic.
        with _scratch(root()) as scratch:
            source = scratch / "download"
            fetched = _retrieve(download, source, progress)
            if download.inside is not None:
                unpack(fetched, scratch / "unpacked")
                source = scratch / "unpacked" / download.inside
            for file, checksum in dataset.files.items():
                if checksum is not None and (source / file).is_file() and sha256(source / file) != checksum:
                    raise ValueError(f"{download.name} holds another {file} than the published one; nothing was changed.")
            _place(source, folder)
    return find(name)


def download(url: str, checksum: str | None, name: str, folder: Path) -> Path:
    """Download one file into `folder`, unless it is already there.

    Without a checksum, that of the first download is recorded beside the file and compared later: trust on first use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, note = folder / name, folder / f"{name}.sha256"
    if checksum is not None and path.is_file() and f"sha256:{sha256(path)}" == checksum:
        return path
    if checksum is None and path.is_file():
        recorded = note.read_text(encoding="ascii", errors="replace").strip() if note.is_file() else None
        if recorded is not None and recorded != sha256(path):
            raise ValueError(f"{path} was changed since it was downloaded from {url}. Remove it, and it is downloaded again.")
        return path
    with _scratch(folder) as scratch:
        file = _retrieve(Download((url,), checksum or "", name), scratch, None)
        write_atomically(note, f"{sha256(file)}\n".encode())
        os.replace(file, path)
    return path


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A temporary folder in `parent`, removed at the end. Those of processes that were killed are removed too."""
    for remnant in parent.glob(".fetching-*"):
        with suppress(OSError):
            if time.time() - remnant.stat().st_mtime > REMNANT_SECONDS and not _in_use(remnant):
                shutil.rmtree(remnant)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".fetching-") as name, open(Path(name) / ".lock", "w") as lock:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (Path(name) / "content").mkdir()
        yield Path(name) / "content"


def _in_use(folder: Path) -> bool:
    """Whether another process holds the lock of a temporary folder."""
    if fcntl is None or not (folder / ".lock").exists():
        return False
    with open(folder / ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar or zip archive of plain files and folders. Archives with links or paths outside `folder` are refused."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                for entry in zipped.infolist():
                    # The upper half of the attributes is the Unix mode, where 0o120000 marks a link.
                    _refuse(archive, entry.filename, link=entry.external_attr >> 16 & 0o170000 == 0o120000)
                _check_size(archive, sum(entry.file_size for entry in zipped.infolist()))
                zipped.extractall(folder)
        else:
            # As a stream: a header that promises a long name does not claim its memory before it is read.
            with tarfile.open(archive, "r|*") as tarred:
                total = 0
                for member in tarred:
                    _refuse(archive, member.name, link=not (member.isfile() or member.isdir()))
                    total += member.size
                    _check_size(archive, total)
            with tarfile.open(archive, "r|*") as tarred:
                tarred.extractall(folder, filter="data")
    except _Refused:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
            raise
        raise ValueError(NO_ARCHIVE.format(archive)) from None
    except Exception:  # damaged bytes raise errors of many kinds: of the archive, of its compression, of struct, of names
        raise ValueError(NO_ARCHIVE.format(archive)) from None


class _Refused(ValueError):
    """An archive that could do harm."""


def _check_size(archive: Path, total: int) -> None:
    """Raise for an archive that unpacks to a multiple of its size, which no dataset does."""
    size = archive.stat().st_size
    if total > max(LARGEST_RATIO * size, SMALL):
        raise _Refused(f"{archive} has {size} bytes and would unpack to {total}. It was not unpacked; do not trust it.")


def _refuse(archive: Path, name: str, *, link: bool) -> None:
    inside = PurePosixPath(name.replace("\\", "/"))
    if inside.is_absolute() or ".." in inside.parts or ":" in name:
        raise _Refused(f"{archive} wants to write {brief(name)}, outside its own folder. It was not unpacked; do not trust it.")
    if link:
        raise _Refused(f"{archive} holds {brief(name)}, which is a link or a device. It was not unpacked; do not trust it.")


def _retrieve(download: Download, folder: Path, progress: Any) -> Path:
    """Download a file into `folder`, trying each URL in turn, and verify its checksum."""
    try:
        import pooch
    except ImportError:
        raise ValueError("fetching needs pooch, which is not installed. Get it with: pip install 'unfading[data]'") from None
    pooch.get_logger().setLevel("WARNING")
    reasons = []
    for url in download.urls:
        try:
            downloader = pooch.HTTPDownloader(progressbar=progress or False)
            return Path(pooch.retrieve(url, download.checksum or None, download.name, folder, downloader=downloader))
        except (OSError, ValueError) as error:
            # pooch raises ValueError for a checksum, requests an OSError for the rest.
            reasons.append(f"{url} ({'another checksum' if isinstance(error, ValueError) else type(error).__name__})")
    raise ConnectionError(f"could not get {download.name}; nothing was changed. Tried {', '.join(reasons)}.")


def _place(source: Path, folder: Path) -> None:
    """Move every file below `source` to the same place below `folder`, atomically, without overwriting."""
    if not source.is_dir():
        raise ValueError(
            f"the archive has no folder {source.name!r}: its publisher has changed it. Unpack it by hand into {folder}."
        )
    for file in sorted(source.rglob("*")):
        target = folder / file.relative_to(source)
        if file.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)


def _folder(dataset: Dataset) -> Path:
    """The expected folder: in the data folder or, if absent there, in an installed package that ships the same files."""
    own = root() / dataset.folder
    package = None if dataset.package is None or own.is_dir() else find_spec(dataset.package[0])
    if dataset.package is None or package is None or package.origin is None:
        return own
    return Path(package.origin).parent / dataset.package[1]


def _way(name: str) -> str:
    dataset = known(name)
    return f"unfading data fetch {name}" if dataset.downloads else f"{dataset.by_hand} ({dataset.home})"


def _elsewhere(name: str) -> str:
    return f"Set UNFADING_DATA to the folder that has it, or get it: {_way(name)}"


def _altered(file: Path, wanted: str | None) -> str:
    return (
        f"{file} is altered or cut short: its sha256 is {sha256(file)[:12]}..., that of the published file is "
        f"{(wanted or '')[:12]}... Move it away and get it again."
    )
