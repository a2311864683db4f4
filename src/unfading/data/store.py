"""The data folder: find datasets, verify their checksums, download them.

The data folder is `$UNFADING_DATA`, or `~/.cache/unfading/data` by default. Each dataset keeps its publisher's own layout.
No file there is ever deleted or overwritten, nothing is unpickled, and an archive is unpacked into its own folder only.
"""

import hashlib
import os
import tarfile
import tempfile
import zipfile
import zlib
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from unfading.data.datasets import DATASETS, Dataset, Download
from unfading.errors import unknown

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
    state: Literal["sound", "present", "missing", "altered"]  # present: it exists, but no checksum is pinned


def verify(name: str) -> list[FileCheck]:
    """Check every file that the table lists against its checksum. Returns [] if the folder does not exist."""
    dataset = known(name)
    folder = _folder(dataset)
    if not folder.is_dir():
        return []
    checks = []
    for file, wanted in dataset.files.items():
        state: Literal["sound", "present", "missing", "altered"] = "sound"
        if not (folder / file).is_file():
            state = "missing"
        elif wanted is None:
            state = "present"
        elif sha256(folder / file) != wanted:
            state = "altered"
        checks.append(FileCheck(file, state))
    return checks


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
        with tempfile.TemporaryDirectory(dir=root(), prefix=".fetching-") as scratch:
            fetched = _retrieve(download, Path(scratch) / "download", progress)
            if download.inside is not None:
                unpack(fetched, Path(scratch) / "unpacked")
            _place(
                Path(scratch) / "download" if download.inside is None else Path(scratch) / "unpacked" / download.inside, folder
            )
    return find(name)


def download(url: str, checksum: str | None, name: str, folder: Path) -> Path:
    """Download one file into `folder`, unless it is already there with the right checksum."""
    folder.mkdir(parents=True, exist_ok=True)
    return _retrieve(Download((url,), checksum or "", name), folder, None)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar or zip archive of plain files and folders. Archives with links or paths outside `folder` are refused."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                for entry in zipped.infolist():
                    # The upper half of the attributes is the Unix mode, where 0o120000 marks a link.
                    _refuse(archive, entry.filename, link=entry.external_attr >> 16 & 0o170000 == 0o120000)
                zipped.extractall(folder)
        else:
            with tarfile.open(archive) as tarred:
                for member in tarred.getmembers():
                    _refuse(archive, member.name, link=not (member.isfile() or member.isdir()))
                tarred.extractall(folder, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError):
        raise ValueError(f"{archive} is neither a tar nor a zip archive, or is cut short. Fetch it again.") from None


def _refuse(archive: Path, name: str, *, link: bool) -> None:
    inside = PurePosixPath(name.replace("\\", "/"))
    if inside.is_absolute() or ".." in inside.parts or ":" in name:
        raise ValueError(f"{archive} wants to write {name!r}, outside its own folder. It was not unpacked; do not trust it.")
    if link:
        raise ValueError(f"{archive} holds {name!r}, which is a link or a device. It was not unpacked; do not trust it.")


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
