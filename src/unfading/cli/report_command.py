"""`unfading report`: one HTML page from the records of runs."""

from json import dumps
from pathlib import Path
from typing import Annotated

from tyro.conf import arg


def report(
    runs: Annotated[tuple[Path, ...], arg(metavar="PATH ...")],
    /,
    output: Annotated[Path, arg(aliases=["-o"])] = Path("report.html"),
    png: bool = False,
    json: bool = False,
) -> None:
    """Write one HTML page from the records of runs: curves, table, settings, failures. The page works offline.

    Args:
        runs: Folders of runs, searched at any depth, or record.json files.
        output: HTML file to write.
        png: Also write each figure beside the page as PNG (NAME-curves.png, ...).
        json: Print the summary as JSON instead of a table.
    """
    from unfading.report import groups, page, records, summary

    loaded = records.load(runs)
    files = page.write(loaded, output, png=png)
    tasks = groups.group_by_task(loaded)
    if json:
        print(dumps({"files": [str(path) for path in files], "tasks": [summary.plain(task) for task in tasks]}, indent=2))
        return
    from rich.console import Console

    Console().print(summary.terminal(tasks), highlight=False)
    print(f"wrote {', '.join(map(str, files))}")
