"""One page from records: what was run, the best setting in words, curves, table, settings, failures, machine.

The page is one file that needs no network: Vega is in it once, the figures are drawn by the reader's browser. Equal records
make equal bytes, so a page can be kept under version control. All text of a record is escaped, in HTML and in scripts.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from unfading.files import write_atomically
from unfading.report import html as sheet
from unfading.report import summary as tables
from unfading.report.figures import charts as _figures
from unfading.report.figures import watch_figures
from unfading.report.groups import Task, shown, tasks, varying
from unfading.report.records import Record
from unfading.report.summary import score

CAPTIONS = {
    "curves": "Validation over steps",
    "loss": "Training loss over steps",
    "test": "Test score: a dot a seed, a bar at the mean",
    "seconds": "Time: a dot a seed, a bar at the median",
    "gradients": "Gradient of each layer's parameters over training",
    "through_time": "Gradient of the loss at the top layer's state, from the first step of the sequence to the last",
}
Charts = dict[str, dict[str, _figures.Spec]]


def build(records: Sequence[Record]) -> str:
    """The page as text."""
    found = tasks(records)
    return _page(found, _charts(found))


def write(records: Sequence[Record], output: Path, *, png: bool = False) -> list[Path]:
    """Write the page, and with `png` its figures beside it as NAME-curves.png and so on; the paths written, page first.

    Each file appears whole or not at all.
    """
    sheet.check(output)
    found = tasks(records)
    charts = _charts(found)
    files = {output: _page(found, charts).encode()}
    if png:
        for name, picture in _pictures(charts):
            files[output.with_name(f"{output.stem}-{name}.png")] = picture
    for path, content in files.items():
        write_atomically(path, content)
    return list(files)


def _charts(found: Sequence[Task]) -> Charts:
    return {task.name: {**_figures.figures(task), **watch_figures.figures(task)} for task in found}


def _pictures(charts: Charts) -> Iterable[tuple[str, bytes]]:
    taken: list[str] = []
    for task, group in charts.items():
        name = re.sub(r"[^A-Za-z0-9._]+", "-", task).strip("-.") or "task"
        taken.append(name)
        if taken.count(name) > 1:
            name = f"{name}-{taken.count(name)}"
        for kind, chart in group.items():
            yield (kind if len(charts) == 1 else f"{name}-{kind}"), _figures.png(chart)


def _page(found: Sequence[Task], charts: Charts) -> str:
    records = [record for task in found for record in task.records]
    title = f"{_list([task.name for task in found])}: {_count(len(records), 'run')}"
    specs: list[_figures.Spec] = []
    body = [f"<h1>{escape(title)}</h1>", f"<p class='dim'>{escape(_dates(records))}</p>"]
    for task in found:
        body += ["<section>", f"<h2>{escape(task.name)}</h2>", f"<p>{_words(task)}</p>", "<div class='figures'>"]
        for kind, chart in charts[task.name].items():
            specs.append(chart)
            body.append(sheet.figure(CAPTIONS[kind], len(specs)))
        body += ["</div>", *_below(task), "</section>"]
    body += ["<section>", "<h2>How it was made</h2>", *_about(records), "</section>"]
    return sheet.html(title, body, specs)


def _words(task: Task) -> str:
    """What was run and which setting is best, as a paragraph of HTML."""
    records, rows, name = task.records, [setting.summary for setting in task.settings], escape(tables.metric_name(task))
    best, many = rows[0], len(rows) > 1
    seeds = sorted({record.seed for record in records})
    states = [record.status for record in records]
    cells = escape(_list(list(dict.fromkeys(str(record.run["cell"]) for record in records))))
    said = [
        f"{_count(len(rows), 'setting')} of {cells}, {'seeds' if len(seeds) > 1 else 'seed'} {tables.count(seeds)}, "
        f"up to {max(row.steps for row in rows):,} steps: {_count(len(records), 'run')}, "
        + _list([f"{states.count(state)} {state}" for state in ("finished", "diverged", "unfinished") if state in states])
        + "."
    ]
    if best.valid is None and best.mean is None:
        return f"{said[0]} None has a score yet."
    if many and best.valid is not None:
        said.append(f"Of these <b>{escape(best.setting)}</b> has the best mean validation {name}, {score(best.valid)}.")
    elif many:
        said.append(f"None was validated; <b>{escape(best.setting)}</b> has the best test {name}.")
    if best.mean is not None:
        over = "" if best.spread is None else f" ± {tables.spread(best.spread)} over seeds"
        guess = "" if task.guess is None else f", where a guess without memory scores {score(task.guess)}"
        better = "higher" if task.higher_is_better else "lower"
        said.append(f"Its test {name} is {score(best.mean)}{over}{guess} ({better} is better).")
    if best.trained is not None:
        said.append(f"{best.trained} of its {_count(best.ended, 'run')} trained.")
    return " ".join(said)


def _below(task: Task) -> list[str]:
    parts = ["<h3>Settings, best validation first</h3>", f"<div class='wide'>{tables.html(task)}</div>"]
    failed = tables.failures(task)
    if failed:
        lines = "".join(f"<li><b>{escape(label)}</b> <span class='bad'>{escape(said)}</span></li>" for label, said in failed)
        parts += ["<h3>What went wrong</h3>", f"<ul>{lines}</ul>"]
    runs = [record.run for record in task.records]
    names = [name for name in varying(runs) if name not in ("cell", "seed")]
    equal = {name: value for name, value in shown(runs[0]).items() if name not in (*varying(runs), "cell", "seed")}
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in equal.items())
    head = "".join(
        f"<th>{escape(name)}</th>" for name in ("cell", *names, "seed", "status", "steps", "validation", "test", "folder")
    )
    lines = ""
    for record in task.records:
        own = shown(record.run)
        cells = [own.get(name, "-") for name in names]
        cells += [str(record.seed), record.status, f"{record.steps:,}", score(record.valid), score(record.test)]
        folder = (
            f"<td class='words'><code>{escape(record.where.removesuffix('record.json').rstrip('/') or record.key)}</code></td>"
        )
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines += f"<tr><th scope='row'>{escape(str(record.run['cell']))}</th>{row}{folder}</tr>"
    table = f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
    return [*parts, f"<details><summary>Every run</summary>{table}<h3>Equal in all runs</h3><dl>{terms}</dl></details>"]


def _about(records: Sequence[Record]) -> list[str]:
    """Machine, versions, commit, dates and commands; once where they are equal."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.about is not None:
            same = {name: record.about.get(name) for name in ("machine", "versions", "commit")}
            groups.setdefault(json.dumps(same, sort_keys=True), []).append(record)
    parts = []
    for group in groups.values():
        about = group[0].about or {}
        terms = {"runs": str(len(group)), "machine": _pairs(about.get("machine")), "versions": _pairs(about.get("versions"))}
        terms |= {"commit": str(about.get("commit") or "unknown"), "date": _dates(group)}
        commands = sorted({str(record.about["command"]) for record in group if record.about and record.about.get("command")})
        lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in terms.items())
        said = "<br>".join(f"<code>{escape(command)}</code>" for command in commands)
        parts.append(f"<dl>{lines}<dt>command</dt><dd>{said or 'unknown'}</dd></dl>")
    note = f"A run trained when it did not diverge and its test score is a tenth better than a guess. {tables.NOTE}"
    return [*parts, f"<p class='dim'>{escape(note)}</p>"]


def _pairs(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "unknown" if value is None else str(value)
    return ", ".join(f"{name} {inner}" for name, inner in value.items() if inner is not None)


def _dates(records: Iterable[Record]) -> str:
    dates = sorted({str(record.about["date"])[:10] for record in records if record.about and record.about.get("date")})
    return "" if not dates else dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _list(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
