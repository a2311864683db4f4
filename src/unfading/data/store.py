"""Where datasets lie, whether they are whole, and how to get them.

The data folder is `$UNFADING_DATA`, else `~/.cache/unfading/data`; in it each dataset lies in its publisher's own layout.
Nothing there is ever deleted or overwritten, nothing is unpickled, and an archive is unpacked into its own folder only.
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


def root() -> Path:
    """The data folder, whether it is there or not."""
    return Path(os.environ.get("UNFADING_DATA") or "~/.cache/unfading/data").expanduser()


def known(name: str) -> Dataset:
    """What is known of a dataset."""
    if name not in DATASETS:
        raise ValueError(unknown("dataset", name, DATASETS))
    return DATASETS[name]


def find(name: str) -> Path:
    """The folder of a dataset, all of whose files are there; FileNotFoundError, with the way to get them, if not."""
    dataset = known(name)
    folder = _folder(dataset)
    if not folder.is_dir():
        if dataset.pickled and (root() / dataset.pickled).exists():
            raise ValueError(PICKLED.format(root() / dataset.pickled, f"Take the other form: {_way(name)}"))
        raise FileNotFoundError(f"dataset {name!r} is not in {root()}: no folder {dataset.folder!r} there. {_elsewhere(name)}")
    missing = [file for file in dataset.files if not (folder / file).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise FileNotFoundError(f"dataset {name!r} is not whole: {folder / missing[0]} is missing{more}. {_elsewhere(name)}")
    return folder


def present(name: str) -> bool:
    """Whether `find` would find it."""
    try:
        find(name)
    except (FileNotFoundError, ValueError):
        return False
    return True


def path(name: str, file: str) -> Path:
    """A file of a dataset, present and, where a checksum is pinned, unaltered."""
    found, wanted = find(name) / file, known(name).files.get(file)
    if not found.is_file():
        raise FileNotFoundError(f"dataset {name!r} is not whole: {found} is missing. {_elsewhere(name)}")
    if wanted is not None and sha256(found) != wanted:
        raise ValueError(_altered(found, wanted))
    return found


class Finding(NamedTuple):
    """What `verify` says of a file."""

    file: str
    state: Literal["sound", "present", "missing", "altered"]  # present: there, but no checksum is pinned


def verify(name: str) -> list[Finding]:
    """Every file of a dataset that the table names, checked against its checksum; [] where the folder is not there."""
    dataset = known(name)
    folder = _folder(dataset)
    if not folder.is_dir():
        return []
    findings = []
    for file, wanted in dataset.files.items():
        state: Literal["sound", "present", "missing", "altered"] = "sound"
        if not (folder / file).is_file():
            state = "missing"
        elif wanted is None:
            state = "present"
        elif sha256(folder / file) != wanted:
            state = "altered"
        findings.append(Finding(file, state))
    return findings


def sha256(file: Path) -> str:
    """The checksum of a file, computed once per process and state of the file."""
    status = file.stat()
    return _sha256(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _sha256(file: Path, size: int, changed: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def refuse_pickle(file: Path, way_out: str) -> None:
    """Raise if a file is a pickle, by its name or its first bytes."""
    with file.open("rb") as stream:
        begins_as_pickle = stream.read(2)[:1] == b"\x80"
    if begins_as_pickle or file.suffix in (".pkl", ".pickle", ".p"):
        raise ValueError(PICKLED.format(file, way_out))


def fetch(name: str, *, progress: Any = None) -> Path:
    """Download what is missing of a dataset, check it, and put it in place whole. Files that are there stay as they are.

    Args:
        progress: an object with `total`, `update(n)`, `reset()` and `close()`, such as a tqdm bar, told of every download.
    """
    dataset = known(name)
    folder = root() / dataset.folder
    altered = [finding.file for finding in verify(name) if finding.state == "altered"]
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
        # Beside the final place, so that a move is one step of the file system.
        with tempfile.TemporaryDirectory(dir=root(), prefix=".fetching-") as scratch:
            fetched = _retrieve(download, Path(scratch) / "download", progress)
            if download.inside is not None:
                unpack(fetched, Path(scratch) / "unpacked")
            _place(
                Path(scratch) / "download" if download.inside is None else Path(scratch) / "unpacked" / download.inside, folder
            )
    return find(name)


def download(url: str, checksum: str | None, name: str, folder: Path) -> Path:
    """One file from the network, in `folder`; one that is there already is not fetched again, unless its checksum differs."""
    folder.mkdir(parents=True, exist_ok=True)
    return _retrieve(Download((url,), checksum or "", name), folder, None)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar or zip archive of plain files and folders; refuse one that reaches outside `folder`, or holds links."""
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
    """The file, downloaded into `folder`, with the right checksum."""
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
    """Move every file below `source` to its place below `folder`, each in one step, none over another."""
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
    """Where its files should be: in the data folder or, if it is not there, in the installed package that has them too."""
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
