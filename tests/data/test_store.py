"""Datasets: found, verified, fetched whole or not at all, unpacked within bounds, never unpickled, never overwritten."""

import dataclasses
import hashlib
import http.server
import io
import pickle
import sys
import tarfile
import threading
import zipfile

import pytest

from unfading.data import store
from unfading.data.datasets import DATASETS, Dataset, Download

A, C = b"first file\n" * 99, b"third file\n" * 9


def digest(content):
    return hashlib.sha256(content).hexdigest()


def tar(*members):
    """A tar.gz of (name, content); content None is a link out of it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content or b""))
    return buffer.getvalue()


ARCHIVE = tar(("top/data/a.txt", A), ("top/data/deep/c.txt", C), ("top/readme", b"not wanted"))


class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        content = self.server.files.get(self.path)
        self.server.asked.append(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        # A connection that breaks: the file is announced whole and sent in part.
        self.wfile.write(content[:50] if self.path.startswith("/broken") else content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        running.files = {"/a.txt": A, "/archive.tgz": ARCHIVE, "/wrong.txt": A + b"!", "/broken.txt": A}
        running.asked = []
        running.url = f"http://127.0.0.1:{running.server_port}"
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("UNFADING_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def known(monkeypatch):
    """A function that puts a dataset `made` in the table."""

    def put(**fields):
        standard = {"what": "made", "home": "http://home", "licence": "none", "megabytes": 0.1, "folder": "made/here"}
        monkeypatch.setitem(DATASETS, "made", Dataset(**{**standard, **fields}))

    return put


def plain(server, *paths, checksum=None):
    urls = tuple(f"{server.url}{path}" for path in paths)
    return Download(urls, checksum or f"sha256:{digest(A)}", "a.txt")


def everything(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()) if folder.exists() else []


def test_a_file_is_fetched_and_put_in_place(server, known, root):
    known(files={"a.txt": digest(A)}, downloads=(plain(server, "/a.txt"),))
    assert store.fetch("made") == root / "made" / "here"
    assert (root / "made" / "here" / "a.txt").read_bytes() == A
    assert everything(root) == ["made/here/a.txt"]
    store.fetch("made")
    assert server.asked == ["/a.txt"]


def test_of_an_archive_the_wanted_folder_is_put_in_place(server, known, root):
    download = Download((f"{server.url}/archive.tgz",), f"sha256:{digest(ARCHIVE)}", "archive.tgz", inside="top/data")
    known(files={"a.txt": digest(A), "deep/c.txt": digest(C)}, downloads=(download,))
    store.fetch("made")
    assert everything(root) == ["made/here/a.txt", "made/here/deep/c.txt"]
    assert [finding.state for finding in store.verify("made")] == ["sound", "sound"]


@pytest.mark.parametrize("path", ["/wrong.txt", "/broken.txt", "/not-there.txt"])
def test_a_download_that_fails_leaves_no_file(server, known, root, path):
    known(files={"a.txt": digest(A)}, downloads=(plain(server, path),))
    with pytest.raises(ConnectionError, match=r"could not get a.txt; nothing was changed. Tried http.*") as caught:
        store.fetch("made")
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)
    assert everything(root) == []
    assert not store.present("made")


def test_the_next_address_is_tried(server, known, root):
    known(files={"a.txt": digest(A)}, downloads=(plain(server, "/not-there.txt", "/wrong.txt", "/a.txt"),))
    store.fetch("made")
    assert (root / "made" / "here" / "a.txt").read_bytes() == A


def test_what_is_there_is_never_overwritten(server, known, root):
    known(files={"a.txt": digest(A), "b.txt": None}, downloads=(plain(server, "/a.txt"),))
    mine = root / "made" / "here" / "a.txt"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"a.txt is altered or cut short: its sha256 is .*Move it away and get it again"):
        store.fetch("made")
    assert mine.read_bytes() == b"mine"
    assert server.asked == []


def test_a_file_of_mine_without_a_checksum_is_kept(server, known, root):
    download = Download((f"{server.url}/archive.tgz",), f"sha256:{digest(ARCHIVE)}", "archive.tgz", inside="top/data")
    known(files={"a.txt": None, "deep/c.txt": None}, downloads=(download,))
    mine = root / "made" / "here" / "a.txt"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    store.fetch("made")
    assert mine.read_bytes() == b"mine"
    assert (root / "made" / "here" / "deep" / "c.txt").read_bytes() == C


def test_a_progress_bar_is_told(server, known):
    class Bar:
        total = 0

        def __init__(self):
            self.done = 0

        def update(self, amount):
            self.done += amount

        def reset(self):
            self.done = 0

        def close(self):
            self.closed = True

    bar = Bar()
    known(files={"a.txt": digest(A)}, downloads=(plain(server, "/a.txt"),))
    store.fetch("made", progress=bar)
    assert bar.done == bar.total == len(A)
    assert bar.closed


def test_fetching_without_pooch_names_the_extra(server, known, monkeypatch):
    known(files={"a.txt": digest(A)}, downloads=(plain(server, "/a.txt"),))
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ValueError, match=r"pip install 'unfading\[data\]'"):
        store.fetch("made")


def test_a_dataset_without_downloads_says_how_by_hand(known):
    known(by_hand="ask its owner")
    with pytest.raises(ValueError, match=r"has to be got by hand: ask its owner. Home: http://home"):
        store.fetch("made")


@pytest.mark.parametrize("name", ["../evil", "/evil", "good/../../evil", "c:evil"])
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_that_reaches_outside_is_refused(tmp_path, name, kind):
    file = tmp_path / "archive"
    if kind == "tar":
        file.write_bytes(tar(("fine", A), (name, C)))
    else:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("fine", A)
            archive.writestr(name, C)
    with pytest.raises(ValueError, match=r"outside its own folder. It was not unpacked"):
        store.unpack(file, tmp_path / "into")
    assert everything(tmp_path) == ["archive"]


def test_links_in_archives_are_refused(tmp_path):
    (tmp_path / "tar").write_bytes(tar(("fine", A), ("link", None)))
    link = zipfile.ZipInfo("link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    for file in ("tar", "zip"):
        with pytest.raises(ValueError, match="'link', which is a link or a device"):
            store.unpack(tmp_path / file, tmp_path / "into")


def test_archives_of_both_kinds_are_unpacked(tmp_path):
    (tmp_path / "tar").write_bytes(ARCHIVE)
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("top/data/a.txt", A)
    store.unpack(tmp_path / "tar", tmp_path / "one")
    store.unpack(tmp_path / "zip", tmp_path / "two")
    assert (tmp_path / "one" / "top" / "data" / "a.txt").read_bytes() == A
    assert (tmp_path / "two" / "top" / "data" / "a.txt").read_bytes() == A


def test_what_is_no_archive_or_half_of_one_is_refused(tmp_path):
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("a.txt", A)
    damaged = zipped.getvalue().replace(A[:50], b"?" * 50)
    for content in (b"something else", b"", ARCHIVE[:60], ARCHIVE[:-20], zipped.getvalue()[:90], damaged):
        (tmp_path / "archive").write_bytes(content)
        with pytest.raises(ValueError, match="neither a tar nor a zip archive, or is cut short"):
            store.unpack(tmp_path / "archive", tmp_path / "into")


def test_a_missing_dataset_is_named_with_the_way_to_get_it(root):
    with pytest.raises(FileNotFoundError, match=r"dataset 'mnist' is not in .*no folder 'MNIST/raw' there.*data fetch mnist"):
        store.find("mnist")
    with pytest.raises(FileNotFoundError, match=r"'yelp' is not in .*accept the terms at its home"):
        store.find("yelp")
    (root / "MNIST" / "raw").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte.gz is missing and 3 more. Set UNFADING_DATA"):
        store.find("mnist")
    with pytest.raises(ValueError, match=r"unknown dataset 'nmist'. Did you mean 'mnist'"):
        store.find("nmist")


def test_altered_and_missing_files_are_told_apart(known, root):
    known(files={"a": digest(A), "b": digest(A), "c": None, "d": None})
    assert store.verify("made") == []
    folder = root / "made" / "here"
    folder.mkdir(parents=True)
    for name, content in (("a", A), ("b", A[:-1]), ("c", C)):
        (folder / name).write_bytes(content)
    assert [finding.state for finding in store.verify("made")] == ["sound", "altered", "present", "missing"]
    known(files={"a": digest(A), "b": digest(A)})
    assert store.path("made", "a").read_bytes() == A
    with pytest.raises(ValueError, match="b is altered or cut short"):
        store.path("made", "b")
    # Mended on the spot, it is looked at again.
    (folder / "b").write_bytes(A)
    assert store.path("made", "b").read_bytes() == A


def test_checksums_that_nobody_published_are_recorded_and_compared_later(known, root):
    known(files={"a": None, "b": digest(A)})
    folder = root / "made" / "here"
    folder.mkdir(parents=True)
    for name in ("a", "b"):
        (folder / name).write_bytes(A)
    states = [[check.state for check in store.verify("made", record=record)] for record in (False, True, True, False)]
    assert states == [["present", "sound"], ["recorded", "sound"], ["sound", "sound"], ["sound", "sound"]]
    (folder / "a").write_bytes(A[:-1] + b"?")
    assert [check.state for check in store.verify("made")] == ["altered", "sound"]
    # A dataset whose files the table does not list.
    known(folder="other")
    (root / "other" / "deep").mkdir(parents=True)
    (root / "other" / "deep" / "c").write_bytes(C)
    (root / ".checksums" / "made.json").unlink()
    assert store.verify("made") == []
    assert store.verify("made", record=True) == [store.FileCheck("deep/c", "recorded")]
    (root / "other" / "deep" / "c").unlink()
    assert store.verify("made") == [store.FileCheck("deep/c", "missing")]
    (root / ".checksums" / "made.json").write_text("[")
    with pytest.raises(ValueError, match=r"made.json is damaged: .* Remove it"):
        store.verify("made")


def test_what_a_killed_fetch_left_is_removed_and_what_another_process_uses_is_not(server, known, root):
    import fcntl
    import os
    import time

    known(files={"a.txt": digest(A)}, downloads=(plain(server, "/a.txt"),))
    past = time.time() - 10 * store.REMNANT_SECONDS
    for name in ("dead", "used", "young"):
        (root / f".fetching-{name}").mkdir(parents=True)
        (root / f".fetching-{name}" / ".lock").write_bytes(b"")
        (root / f".fetching-{name}" / "part").write_bytes(A)
        if name != "young":
            os.utime(root / f".fetching-{name}", (past, past))
    with open(root / ".fetching-used" / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store.fetch("made")
    assert sorted(path.name for path in root.iterdir()) == [".fetching-used", ".fetching-young", "made"]


def test_an_archive_with_another_file_than_the_published_one_is_refused(server, known, root):
    download = Download((f"{server.url}/archive.tgz",), f"sha256:{digest(ARCHIVE)}", "archive.tgz", inside="top/data")
    known(files={"a.txt": digest(A + b"!")}, downloads=(download,))
    with pytest.raises(ValueError, match=r"archive.tgz holds another a.txt than the published one; nothing was changed"):
        store.fetch("made")
    assert everything(root) == []


def test_a_download_without_a_checksum_is_compared_with_its_first_one(server, tmp_path):
    url = f"{server.url}/a.txt"
    path = store.download(url, None, "a.txt", tmp_path / "w")
    assert path.read_bytes() == A
    assert everything(tmp_path / "w") == ["a.txt", "a.txt.sha256"]
    assert store.download(url, None, "a.txt", tmp_path / "w") == path
    assert server.asked == ["/a.txt"]
    path.write_bytes(A[:-1] + b"?")
    with pytest.raises(ValueError, match=r"a.txt was changed since it was downloaded from http.* Remove it"):
        store.download(url, None, "a.txt", tmp_path / "w")
    assert store.download(url, f"sha256:{digest(A)}", "a.txt", tmp_path / "w").read_bytes() == A


def test_an_archive_that_unpacks_to_a_multiple_of_its_size_is_refused(tmp_path):
    (tmp_path / "tar").write_bytes(tar(("zeros", bytes(50_000_000))))
    with zipfile.ZipFile(tmp_path / "zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(50_000_000))
    for file in ("tar", "zip"):
        with pytest.raises(ValueError, match=r"and would unpack to 50000000\. It was not unpacked"):
            store.unpack(tmp_path / file, tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_the_pickled_form_of_cifar_is_refused_with_the_reason(root):
    (root / "cifar-10-batches-py").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"is a pickle: reading it would run whatever code is in it.*data fetch cifar10"):
        store.find("cifar10")


def test_a_pickle_is_known_by_its_name_or_its_first_byte(tmp_path):
    named, hidden, fine = tmp_path / "a.pkl", tmp_path / "b.npz", tmp_path / "c.txt"
    named.write_bytes(b"anything")
    hidden.write_bytes(pickle.dumps([1, 2]))
    fine.write_bytes(A)
    for file in (named, hidden):
        with pytest.raises(ValueError, match=r"is a pickle: .* so it is not read. Convert it."):
            store.refuse_pickle(file, "Convert it.")
    store.refuse_pickle(fine, "Convert it.")
    # A safetensors file may begin with the same byte.
    fine.write_bytes((0x0280).to_bytes(8, "little") + b'{"a": 1}')
    store.refuse_pickle(fine, "Convert it.")


def test_the_data_folder_is_the_setting_or_in_the_home(monkeypatch, root):
    assert store.root() == root
    monkeypatch.setenv("UNFADING_DATA", "~/sets")
    assert store.root().is_absolute()
    monkeypatch.delenv("UNFADING_DATA")
    assert store.root().parts[-3:] == (".cache", "unfading", "data")


@pytest.mark.parametrize("name", DATASETS)
def test_the_table_is_whole(name):
    dataset = DATASETS[name]
    assert dataset.home.startswith("http")
    assert dataset.licence
    assert dataset.what
    assert bool(dataset.downloads) != bool(dataset.by_hand)
    for download in dataset.downloads:
        kind, checksum = download.checksum.split(":")
        assert len(checksum) == {"sha256": 64, "md5": 32}[kind]
        assert download.urls
        assert all(url.startswith("https://") for url in download.urls)
    for checksum in dataset.files.values():
        assert checksum is None or len(checksum) == 64


@pytest.mark.parametrize("name", DATASETS)
def test_published_files_are_sound(name, real):
    real(name)
    findings = store.verify(name)
    assert {finding.state for finding in findings} <= {"sound", "present"}
    assert len(findings) == len(DATASETS[name].files)


def test_a_package_that_has_the_files_serves_too(known, root):
    known(files={"errors.py": None}, package=("unfading", "."))
    assert store.path("made", "errors.py").is_file()
    known(files={"errors.py": None}, package=("no_such_package", "."))
    with pytest.raises(FileNotFoundError):
        store.find("made")
    known(files={"a.txt": None}, package=("unfading", "."))
    (root / "made" / "here").mkdir(parents=True)
    (root / "made" / "here" / "a.txt").write_bytes(A)
    assert store.find("made") == root / "made" / "here"


def test_entries_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DATASETS["mnist"].folder = "elsewhere"
