"""The verbs of `unfading data`: list, fetch, verify. Flags and positional arguments come from the signatures."""

import os
from json import dumps
from typing import Any

from unfading.data import store as shelf
from unfading.data.datasets import DATASETS, Dataset


def list_datasets(json: bool = False, data: str | None = None) -> None:
    """List every dataset: what it is, home, size, licence, checksums, and where it was found.

    Args:
        json: print JSON instead of a table.
        data: the data folder, instead of $UNFADING_DATA.
    """
    _use(data)
    if json:
        print(dumps([_entry(name, dataset) for name, dataset in DATASETS.items()], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=f"Datasets, looked for in {shelf.root()}", show_header=False)
    table.add_column("dataset", style="bold", no_wrap=True)
    table.add_column("about", overflow="fold")
    for name, dataset in DATASETS.items():
        lines = [
            f"{dataset.what}. {_state(name)}",
            f"{_size(dataset)}{_checked(dataset)}. Licence: {dataset.licence}.",
            dataset.home if dataset.downloads else f"{dataset.home}\nBy hand: {dataset.by_hand}.",
        ]
        table.add_row(name, "\n".join(lines))
    Console().print(table, highlight=False)


def fetch(name: str, /, data: str | None = None, quiet: bool = False) -> None:
    """Download what is missing of a dataset, and check it; what is there stays as it is.

    Args:
        name: of the dataset, as in `unfading data list`.
        data: the data folder, instead of $UNFADING_DATA.
        quiet: no progress bar.
    """
    _use(data)
    print(f"{name} is in {shelf.fetch(name, progress=None if quiet else _Bar(name))}")


def verify(names: tuple[str, ...] = (), /, data: str | None = None) -> None:
    """Check the files of the datasets named, or of all that are there, against their checksums.

    Args:
        names: of datasets; none for all that are there.
        data: the data folder, instead of $UNFADING_DATA.
    """
    _use(data)
    wrong = []
    for name in names or [name for name, dataset in DATASETS.items() if (shelf.root() / dataset.folder).is_dir()]:
        if names:
            shelf.find(name)
        findings = shelf.verify(name)
        states = [finding.state for finding in findings]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        print(f"{name}: {counts or 'there; no checksum is pinned for its files'}")
        bad = [f"{finding.file} ({finding.state})" for finding in findings if finding.state in ("missing", "altered")]
        wrong += [f"{name}: {file}" for file in bad]
    if wrong:
        raise ValueError(f"not as published: {', '.join(wrong)}. Move altered files away, then: unfading data fetch NAME")


def _use(folder: str | None) -> None:
    """One folder for this process and those it starts."""
    if folder is not None:
        os.environ["UNFADING_DATA"] = folder


def _state(name: str) -> str:
    if shelf.present(name):
        return "Found."
    return "Not whole." if (shelf.root() / DATASETS[name].folder).is_dir() else "Not here."


def _size(dataset: Dataset) -> str:
    return f"{dataset.megabytes:,.1f} MB. " if dataset.megabytes else ""


def _checked(dataset: Dataset) -> str:
    if any(dataset.files.values()):
        return "A checksum for each file"
    return "A checksum for the archive" if dataset.downloads else "No checksum known"


def _entry(name: str, dataset: Dataset) -> dict[str, Any]:
    return {
        "name": name,
        "what": dataset.what,
        "home": dataset.home,
        "licence": dataset.licence,
        "megabytes": dataset.megabytes,
        "folder": str(shelf.root() / dataset.folder),
        "found": shelf.present(name),
        "files": dict(dataset.files),
        "downloads": [{"urls": download.urls, "checksum": download.checksum} for download in dataset.downloads],
    }


class _Bar:
    """What pooch tells of a download, shown as a bar of rich."""

    total = 0

    def __init__(self, name: str):
        self.name = name
        self.done = 0
        self.bar: Any = None

    def update(self, amount: int) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        if self.bar is None:
            columns = (TextColumn(self.name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns)
            self.task = self.bar.add_task(self.name, total=self.total)
            self.bar.start()
        self.done = min(self.done + amount, self.total)
        self.bar.update(self.task, completed=self.done)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        self.bar.stop()
        self.bar = None
