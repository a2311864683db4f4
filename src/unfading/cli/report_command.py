"""The verb `unfading report`: a page from the records of runs."""

from json import dumps
from pathlib import Path
from typing import Annotated, Any

from unfading.report import groups as settings
from unfading.report import page, records
from unfading.report import summary as tables


def _short(flag: str) -> Any:
    from tyro.conf import arg

    return arg(aliases=[flag])


# The annotation in quotes is read when the command line is: `import unfading` shall not import tyro.
def report(
    runs: tuple[Path, ...],
    /,
    output: "Annotated[Path, _short('-o')]" = Path("report.html"),
    png: bool = False,
    json: bool = False,
) -> None:
    """Make one HTML page from the records of runs: curves, table, settings, failures. It works offline.

    Args:
        runs: folders of runs, looked through at any depth, or record.json files.
        output: the page to write.
        png: write each figure beside the page too, as NAME-curves.png and so on.
        json: print the summary as JSON instead of a table.
    """
    found = records.load(runs)
    written = page.write(found, output, png=png)
    by_task = settings.tasks(found)
    if json:
        print(dumps({"files": [str(path) for path in written], "tasks": [tables.plain(task) for task in by_task]}, indent=2))
        return
    from rich.console import Console

    Console().print(tables.terminal(by_task), highlight=False)
    print(f"wrote {', '.join(str(path) for path in written)}")
