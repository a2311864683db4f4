"""Summary tables of settings, for the terminal and for the HTML page."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unfading.report import records as _records
from unfading.report.groups import Summary, TaskGroup, group_by_task
from unfading.report.records import Record

if TYPE_CHECKING:
    from rich.console import RenderableType

NOTE = (
    "valid: mean of the best validation scores; test: mean over seeds and sample standard deviation; best: over seeds; "
    "trained: runs that ended a tenth better than a guess without diverging; ms/seq.: for one test sequence."
)


def summary(records: Iterable[Mapping[str, Any]]) -> "RenderableType":
    """The table that `unfading compare` prints at its end, from records as dicts. It fits a terminal of 80 columns."""
    return terminal(group_by_task(_records.read(records)))


def terminal(tasks: Sequence[TaskGroup]) -> "RenderableType":
    """One table per task, the best validation score first."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for task in tasks:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="underline")
        # This column shrinks on a narrow terminal; labels break between words.
        table.add_column("setting", style="bold", min_width=14, overflow="fold")
        for heading in ("valid", "test", "best", "trained", "params", "seconds", "ms/seq."):
            table.add_column(heading, justify="right", no_wrap=True)
        for setting in task.settings:
            row = setting.summary
            good = row.trained == row.ended and row.unfinished == 0
            table.add_row(
                Text(row.setting),
                score(row.valid, 2),
                score(row.mean, 2) + ("" if row.spread is None else f" ±{row.spread:.1g}"),
                score(row.best, 2),
                Text(_trained(row), style="" if good else "yellow"),
                "-"
                if row.parameters is None
                else f"{row.parameters:,}"
                if row.parameters < 1e6
                else f"{row.parameters / 1e6:.2f} M",
                time(row.seconds),
                time(row.milliseconds),
            )
        parts += [Text(_title(task), style="bold"), table, ""]
        parts += [Text(f"{label}: {reason}", style="yellow") for label, reason in failures(task)]
    return Group(*parts, Text(NOTE, style="dim"))


# Columns of the page's table, with an explanation where the heading needs one.
COLUMNS = {
    "setting": "", "validation": "mean of the best validation scores", "test": "mean over seeds, sample standard deviation",
    "best test": "over seeds", "trained": "runs that ended a tenth better than a guess without diverging", "seeds": "",
    "steps": "most that a run has done", "params": "all parameters", "recurrent": "parameters without head and embedding",
    "kB": "of float32 weights", "seconds": "of training, median over seeds", "ms/seq.": "at test, median over seeds",
}  # fmt: skip


def cells(row: Summary) -> list[str]:
    """The cells of a setting in the page's table, one for each of `COLUMNS` after the first."""
    return [
        score(row.valid), score(row.mean) + ("" if row.spread is None else f" ± {spread(row.spread)}"), score(row.best),
        _trained(row), seed_list(row.seeds), f"{row.steps:,}",
        *("-" if number is None else f"{number:,}" for number in (row.parameters, row.recurrent)),
        "-" if row.kilobytes is None else f"{row.kilobytes:,.1f}", time(row.seconds), time(row.milliseconds),
    ]  # fmt: skip


def plain(task: TaskGroup) -> dict[str, Any]:
    """The summary of a task as JSON values."""
    return {
        "task": task.name,
        "measure": task.metric,
        "rising": task.higher_is_better,
        "guess": task.guess,
        "settings": [setting.summary._asdict() for setting in task.settings],
        "failures": [{"run": label, "reason": reason} for label, reason in failures(task)],
    }


# What to try next, by what went wrong.
NEXT = {
    "diverged": "Try a smaller --rate, or --retries 3.",
    "diverged incremental": "Try --cell StableIncrementalRNN, which diverges far less often, or a smaller --rate.",
    "unfinished": "The same command with --resume continues it.",
    "did not train": "Try more --steps, another --rate (0.001, 0.003 or 0.01), or `unfading diagnose --run FOLDER`.",
}


def failure(record: Record) -> str | None:
    """What went wrong with a run, a key of `NEXT`; None if nothing did, or if that is not known."""
    if record.status == "diverged":
        return "diverged incremental" if record.run["cell"].startswith(("IncrementalRNN", "SiRNN")) else "diverged"
    if record.status == "unfinished":
        return "unfinished"
    return "did not train" if record.trained is False else None


def failures(task: TaskGroup) -> list[tuple[str, str]]:
    """Runs that diverged, did not end or did not train, each with the reason and the next thing to try."""
    reasons = []
    for setting in task.settings:
        for record in setting.records:
            label = f"{setting.label}, seed {record.seed}"
            returned = f", after {record.returns} returns to good weights with half the rate" if record.returns else ""
            kind = failure(record)
            if kind is None:
                continue
            if kind == "unfinished":
                reason = f"unfinished: at step {record.steps:,}, and no record yet"
            elif kind == "did not train":
                scored = (
                    f"test {task.metric} {score(record.test)}"
                    if record.tested
                    else f"valid {task.metric} {score(record.valid)}"
                )
                reason = f"did not train: {scored}, guess {score(record.guess)}{returned}"
            else:
                reason = f"diverged: {record.reason or 'no reason given'}{returned}"
            reasons.append((label, f"{reason}. {NEXT[kind]}"))
    return reasons


def score(value: float | None, digits: int = 3) -> str:
    """A score in few characters: four decimals if it is between 0.1 and 10, else this number of digits."""
    if value is None:
        return "-"
    size = abs(value)
    return (
        f"{value:.4f}"
        if 0.1 <= size < 10
        else f"{value:.2f}"
        if 10 <= size < 1000
        else f"{value:#.{digits}g}"
        if value
        else "0"
    )


def spread(value: float) -> str:
    """A standard deviation with two digits, as a decimal number if it is not too small to be read beside a score."""
    return f"{value:.{1 - math.floor(math.log10(value))}f}" if 1e-7 < value < 1 else f"{value:.2g}"


def time(value: float | None) -> str:
    """Seconds or milliseconds with up to three digits."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def seed_list(seeds: Sequence[int]) -> str:
    """Seeds as a list, or as a range if there are more than three and they are consecutive."""
    if len(seeds) > 3 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]}-{seeds[-1]}"
    return ", ".join(map(str, seeds))


def metric_name(task: TaskGroup) -> str:
    """The name of the metric as words."""
    return (task.metric or "score").replace("_", " ")


def _title(task: TaskGroup) -> str:
    guess = "" if task.guess is None else f"; a guess scores {score(task.guess)}"
    return f"{task.name}: {metric_name(task)}, {'higher' if task.higher_is_better else 'lower'} is better{guess}"


def _trained(row: Summary) -> str:
    if row.ended == 0:
        return "running"
    return ("-" if row.trained is None else str(row.trained)) + f"/{row.ended}"
