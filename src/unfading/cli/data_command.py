"""`unfading data list|fetch|verify`."""

import os
from json import dumps
from typing import Annotated, Any

from tyro.conf import arg

from unfading.data.datasets import DATASETS, Dataset


def list_datasets(json: bool = False, data: str | None = None) -> None:
    """List every dataset: description, home page, size, licence, checksums, and whether it is present.

    Args:
        json: Print JSON instead of a table.
        data: Data folder, in place of $UNFADING_DATA.
    """
    from unfading.data import store

    _use(data)
    if json:
        print(dumps([_entry(name, dataset) for name, dataset in DATASETS.items()], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=f"Datasets; data folder: {store.root()}", show_header=False)
    table.add_column("dataset", style="bold", no_wrap=True)
    table.add_column("description", overflow="fold")
    for name, dataset in DATASETS.items():
        lines = [
            f"{dataset.what}. {_state(name)}",
            f"{_size(dataset)}{_checksums(dataset)}. Licence: {dataset.licence}.",
            dataset.home if dataset.downloads else f"{dataset.home}\nTo be obtained by hand: {dataset.by_hand}.",
        ]
        table.add_row(name, "\n".join(lines))
    Console().print(table, highlight=False)


def fetch(name: Annotated[str, arg(metavar="NAME")], /, data: str | None = None, quiet: bool = False) -> None:
    """Download the missing files of a dataset and check them. Files that are present stay as they are.

    Args:
        name: Name of the dataset, as printed by `unfading data list`.
        data: Data folder, in place of $UNFADING_DATA.
        quiet: Show no progress bar.
    """
    from unfading.data import store

    _use(data)
    print(f"{name} is in {store.fetch(name, progress=None if quiet else _Bar(name))}")


def verify(
    names: Annotated[tuple[str, ...], arg(metavar="[NAME ...]", help_behavior_hint="")] = (), /, data: str | None = None
) -> None:
    """Compare the files of datasets with their published checksums, or else with those that the first call recorded.

    Args:
        names: Names of datasets. Without any, all datasets that are present.
        data: Data folder, in place of $UNFADING_DATA.
    """
    from unfading.data import store

    _use(data)
    problems = []
    for name in names or [name for name, dataset in DATASETS.items() if (store.root() / dataset.folder).is_dir()]:
        if names:
            store.find(name)
        findings = store.verify(name, record=True)
        states = [finding.state for finding in findings]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        print(f"{name}: {counts or 'no files'}")
        if "recorded" in states:
            print(f"{name}: no published checksum is known for the recorded files; from now on they are compared with these.")
        problems += [
            f"{name}: {finding.file} ({finding.state})" for finding in findings if finding.state in ("missing", "altered")
        ]
    if problems:
        raise ValueError(
            f"not as published: {', '.join(problems)}. Move altered files away, then run: unfading data fetch NAME"
        )


def _use(folder: str | None) -> None:
    """Set the data folder for this process and the processes it starts."""
    if folder is not None:
        os.environ["UNFADING_DATA"] = folder


def _state(name: str) -> str:
    from unfading.data import store

    if store.present(name):
        return "Present."
    return "Incomplete." if (store.root() / DATASETS[name].folder).is_dir() else "Missing."


def _size(dataset: Dataset) -> str:
    return f"{dataset.megabytes:,.1f} MB. " if dataset.megabytes else ""


def _checksums(dataset: Dataset) -> str:
    if any(dataset.files.values()):
        return "Checksum for each file"
    return "Checksum for the archive" if dataset.downloads else "No published checksum; `data verify` records one"


def _entry(name: str, dataset: Dataset) -> dict[str, Any]:
    from unfading.data import store

    return {
        "name": name,
        "what": dataset.what,
        "home": dataset.home,
        "licence": dataset.licence,
        "megabytes": dataset.megabytes,
        "folder": str(store.root() / dataset.folder),
        "found": store.present(name),
        "files": dict(dataset.files),
        "downloads": [{"urls": download.urls, "checksum": download.checksum} for download in dataset.downloads],
    }


class _Bar:
    """A progress bar of rich, with the interface that pooch expects."""

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
