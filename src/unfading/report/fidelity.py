"""The page `docs/papers/fidelity.md`: published and reproduced numbers of every table and figure, from JSON lines alone.

papers-rows.jsonl        one line per row of an item: its published number, its data             (kind: row, figure)
                         one line per claim about several rows                                   (kind: order, ranking)
papers-<machine>.jsonl   one line per run of a row, per parameter count, and per drawn figure    (kind: run, count, drawn)
                         one short line per run that chose the setting of a row                  (kind: candidate)
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unfading.files.checked_json import read_objects
from unfading.report.order_verdicts import ORDER_VERDICTS, OrderOutcome, judge_order, judge_ranking
from unfading.report.summary import time
from unfading.report.verdicts import COUNTED, NOT_RUN, Line, Outcome, judge, sentence, setting

ROWS = "papers-rows.jsonl"
OVERVIEW = "fidelity.svg"
# Items of the leaderboard, which has a page of its own.
LEADERBOARD = "leaderboard/"
# Items with our own settings, whose targets are the best published numbers.
PAST_BEST = "past_best/"
# Columns of a table of rows.
COLUMNS = ["row", "published", "ours", "seeds", "trained", "parameters", "time", "verdict", "marks"]
HEAD = """# The papers, reproduced

`unfading reproduce page` writes this page from the records in `benchmarks/results/papers-*.jsonl`. Do not edit it.

Each row compares a published number with the mean over our seeds. The verdicts are:

- **held**: our mean is not below the published number by more than the tolerance, two standard errors of the test set.
- **beaten**: our mean is above the published number by more than two standard errors. They are those of our mean over
  seeds, of the test set on which we score, and of the test set on which the paper scored. One seed beats nothing.
- **missed**: neither.
- **refuted**: the paper says that the model fails, and it does not.
- *open*: a short run, of a tenth of the paper's steps, has not reached the number; or it has not trained, where the paper says
  that the model fails. More steps may change that.
- *measured*: there is no published number.

Below a table of rows stand the paper's claims about several of them: of order, of training steps and of training time. Such
a claim is **held** if a seed of the row that should be ahead is ahead in three quarters of all pairs of seeds, **refuted** if
it is in a quarter of them or fewer, and *undecided* between. Scores within the tolerance and times within a tenth are ties.
Times are those of our kernels at our number of epochs, often of many runs that shared a GPU.

A claim that a cell solves a task holds if the stated share of all seeds solves it. A claim that a model does not train
(published at chance, or as 0 for NaN) holds if at most half of the seeds end a tenth better than a guess, and is refuted
otherwise. Every seed counts; a seed that diverged counts as a guess. Published numbers have no spread and may be best runs.
Settings were chosen by validation, never by the test. `unfading reproduce run ITEM --budget paper --device cuda` trains a
row again. ± is the standard deviation over seeds. The column "marks" says:

- *short*: trained for a tenth of the paper's steps.
- *earlier setting*: measured at a setting that the row had before.
- *changed after test*: the setting, or the settings to choose from, changed after a test score of the row was known. The
  note below the table says how.
- *needs 5 seeds*: three seeds differ by more than a point, and five were not run.
- *no clean commit*: its runs come from a checkout with uncommitted changes.

"""


def read(folder: Path) -> list[dict[str, Any]]:
    """All lines of the files papers-*.jsonl, those of papers-rows.jsonl first."""
    files = sorted(folder.glob("papers-*.jsonl"), key=lambda path: (path.name != ROWS, path.name))
    lines: list[dict[str, Any]] = []
    for path in files:
        for i, line in enumerate(read_objects(path, "Remove it, or take the file from git."), 1):
            if not isinstance(line.get("kind"), str) or not isinstance(line.get("item"), str):
                raise ValueError(f"{path}, line {i} is not a line of a paper: it has no 'kind' and 'item'. Remove it.")
            lines.append(line)
    if not any(line["kind"] == "row" for line in lines):
        raise ValueError(
            f"{folder / ROWS} is missing or empty; it lists the published rows. `unfading reproduce page` writes it."
        )
    return lines


def page(lines: Sequence[Line], pictures: Collection[str] = ()) -> str:
    """The page as Markdown; `pictures` are files beside it, shown with the item they belong to (incremental-fig3.png)."""
    by_item = {item: own for item, own in lines_by_item(lines).items() if not item.startswith(LEADERBOARD)}
    papers: dict[str, list[str]] = {}
    for item in by_item:
        papers.setdefault(item.partition("/")[0], []).append(item)
    outcomes = {item: _outcomes(by_item[item]) for item in by_item}
    parts = [HEAD, _summary(papers, outcomes), _claims_summary(papers, by_item)]
    parts.append(_provenance([each for item in by_item for each in outcomes[item]]))
    if OVERVIEW in pictures:
        parts.append(f"![How far the mean over our seeds is from what is published, row by row]({OVERVIEW})\n\n")
    for paper, items in papers.items():
        parts.append(f"## {TITLES.get(paper, paper)}\n\n")
        for item in items:
            file = f"{item.replace('/', '-')}.png"
            parts.append(_item(item, by_item[item], outcomes[item], file if file in pictures else None))
    return "".join(parts).rstrip() + "\n"


TITLES = {
    "incremental": "Incremental RNN (Kag, Zhang & Saligrama 2020)",
    "star": "STAR (Turkoglu et al. 2019)",
    "nru": "NRU (Chandar et al. 2019)",
    "oscillators": "coRNN, UnICORNN and LEM (Rusch & Mishra 2021, Rusch et al. 2022)",
    "past_best": "Past the best published results, with our own settings",
}
VERDICTS = ("beaten", "held", "missed", "refuted", "open", "measured", "data not available", "not run")


def answers(lines: Sequence[Line]) -> list[tuple[Line, Outcome]]:
    """All rows with their outcomes."""
    return [answer for own in lines_by_item(lines).values() for answer in _outcomes(own)]


def lines_by_item(lines: Sequence[Line]) -> dict[str, list[Line]]:
    """The lines of each item, with the results of equal rows in other items."""
    groups: dict[str, list[Line]] = {}
    for line in [*lines, *_of_equal_rows(lines)]:
        groups.setdefault(line["item"], []).append(line)
    return groups


def _of_equal_rows(lines: Sequence[Line]) -> list[Line]:
    """Results that answer further rows: a row in a table and a point of a figure with the same settings are the same runs."""
    equal: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for line in lines:
        if line["kind"] == "row" and line["settings"]:
            equal.setdefault(tuple(line["settings"]), []).append((line["item"], line["row"]))
    others = {row: [other for other in rows if other != row] for rows in equal.values() for row in rows}
    results = [line for line in lines if line["kind"] in ("run", "candidate")]
    stored = {(line["item"], line["row"], line["budget"], line["key"]) for line in results}
    return [
        {**line, "item": item, "row": row}
        for line in results
        for item, row in others.get((line["item"], line["row"]), ())
        if (item, row, line["budget"], line["key"]) not in stored
    ]


def _outcomes(lines: Sequence[Line]) -> list[tuple[Line, Outcome]]:
    results: dict[str, list[Line]] = {}
    for line in lines:
        if line["kind"] in ("run", "count", "candidate"):
            results.setdefault(line["row"], []).append(line)
    return [(row, _outcome(row, results.get(row["row"], []))) for row in lines if row["kind"] == "row"]


def _outcome(row: Line, lines: Sequence[Line]) -> Outcome:
    """The outcome of a row, with the number of stored candidates from which its setting was chosen."""
    outcome = judge(row, [line for line in lines if line["kind"] != "candidate"], here=row["here"])
    if outcome.run is None:
        return outcome
    chosen = setting(outcome.run)
    # Several runs may judge one candidate.
    tried = {json.dumps(line["setting"], sort_keys=True) for line in lines if line.get("chosen") == chosen}
    return outcome._replace(candidates=len(tried))


def _summary(papers: Mapping[str, Sequence[str]], outcomes: Mapping[str, Sequence[tuple[Line, Outcome]]]) -> str:
    table = [["paper", *VERDICTS]]
    for paper, items in papers.items():
        verdicts = [outcome.verdict for item in items for _, outcome in outcomes[item]]
        table.append([paper, *(str(verdicts.count(verdict)) for verdict in VERDICTS)])
    return markdown_table(table, left=1) + "\nRows that stand in two tables count twice.\n\n"


def _claims_summary(papers: Mapping[str, Sequence[str]], by_item: Mapping[str, Sequence[Line]]) -> str:
    """The verdicts on claims about several rows, counted."""
    table = [["claims about several rows", *ORDER_VERDICTS]]
    for paper, items in papers.items():
        verdicts = [outcome.verdict for item in items for _, outcome in claims_about(by_item[item])]
        if verdicts:
            table.append([paper, *(str(verdicts.count(verdict)) for verdict in ORDER_VERDICTS)])
    return markdown_table(table, left=1) + "\n" if len(table) > 1 else ""


def _provenance(outcomes: Sequence[tuple[Line, Outcome]]) -> str:
    """How many of the trained rows cannot be traced to a commit, and of how many the candidates are stored."""
    trained = [(row, outcome) for row, outcome in outcomes if outcome.run is not None]
    untraced = sum(not outcome.traced for _, outcome in trained)
    chosen = [outcome for row, outcome in trained if len(row["settings"]) > 1]
    stored = sum(outcome.candidates > 0 for outcome in chosen)
    return (
        f"Of {len(trained)} trained rows {untraced} come from a checkout with uncommitted changes. Of {len(chosen)} rows whose "
        f"setting was chosen from several, the scores of the candidates are stored for {stored}.\n\n"
    )


def marks(row: Line, outcome: Outcome) -> list[str]:
    """What a reader must know about how a row was measured, in a few words each."""
    if outcome.run is None:
        return []
    each = {
        "short": outcome.budget == "short",
        "earlier setting": outcome.earlier,
        "changed after test": bool(row["changed_after_test"]),
        "needs 5 seeds": outcome.asked > max(outcome.seeds, row["seeds"]),
        "no clean commit": not outcome.traced,
    }
    return [mark for mark, holds in each.items() if holds]


def _item(item: str, lines: Sequence[Line], outcomes: Sequence[tuple[Line, Outcome]], picture: str | None) -> str:
    title = next((line["title"] for line in lines if line["kind"] in ("row", "figure")), "")
    parts = [f"### {item}\n\n{title}\n\n"]
    if picture is not None:
        parts.append(f"![{title}]({picture})\n\n")
    drawn = [line for line in lines if line["kind"] == "drawn"]
    if not outcomes and not drawn:
        parts.append(f"A figure: `unfading reproduce run {item}` makes it.\n\n")
    for line in drawn[-1:]:
        parts += [f"- {each}\n" for each in line["findings"]] + ["\n"]
    if outcomes:
        parts.append(markdown_table([COLUMNS, *(row_cells(row, outcome) for row, outcome in outcomes)], left=1))
        parts += [f"\n{machines}\n" for machines in _machines(outcomes)]
        notes = [f"- **{row['row']}**: {note}.\n" for row, outcome in outcomes if (note := _note(row, outcome))]
        parts += ["\n", *notes, "\n"]
    claims = claims_about(lines)
    if claims:
        cells = [[claim["claim"], outcome.numbers or "-", _order_verdict(outcome)] for claim, outcome in claims]
        parts += [markdown_table([["claim", "ours", "verdict"], *cells], left=2), "\n"]
    return "".join(parts)


def claims_about(lines: Sequence[Line]) -> list[tuple[Line, OrderOutcome]]:
    """The claims about several rows of one item, with their outcomes."""
    rows = {line["row"]: line for line in lines if line["kind"] == "row"}
    runs: dict[str, list[Line]] = {}
    for line in lines:
        if line["kind"] == "run":
            runs.setdefault(line["row"], []).append(line)
    judges = {"order": judge_order, "ranking": judge_ranking}
    return [(line, judges[line["kind"]](line, rows, runs)) for line in lines if line["kind"] in judges]


def _order_verdict(outcome: OrderOutcome) -> str:
    return outcome.verdict + (" (short)" if outcome.budget == "short" and outcome.verdict != NOT_RUN else "")


def _note(row: Line, outcome: Outcome) -> str:
    """The setting of a row, and how its result differs from the paper."""
    difference = sentence(row, outcome) if outcome.verdict != "not run" else ""
    setting = "" if outcome.run is None else describe(outcome.run)
    return ". ".join(part for part in (setting, difference) if part)


def row_cells(row: Line, outcome: Outcome) -> list[str]:
    """A row with its outcome, as text in COLUMNS."""
    published = "-" if row["published"] is None else number(row["published"], row["unit"])
    if row["share"] is not None:
        share = f"{'under ' if row['fails'] else ''}{row['share']:.0%}"
        published = f"{share} of seeds at most {row['published'] + row['tolerance']:.3g}"
    elif row["fails"]:
        published = {None: "does not train", 0.0: "NaN, does not train"}.get(row["published"], f"{published}, does not train")
    if row["printed"]:
        published += f" ({row['printed']})"
    ours = "-" if outcome.mean is None else number(outcome.mean, row["unit"])
    if outcome.spread is not None:
        ours += f" ± {outcome.spread:.2g}"
    if outcome.reached is not None:
        steps = "" if outcome.steps is None else f", in {outcome.steps:,.0f} steps"
        ours = f"{outcome.reached} of {outcome.asked}{steps} (mean {ours})"
    sizes = outcome.parameters
    count = "-" if sizes is None else f"{sizes['all']:,} ({sizes['recurrent']:,} recurrent)"
    seconds = "-" if outcome.seconds is None else f"{time(outcome.seconds)} s"
    counted = row["unit"] == COUNTED
    trained = f"{outcome.trained}/{outcome.seeds}" if outcome.answered and not counted else "-"
    seeds = outcome.seed_count if outcome.seeds and not counted else "-"
    return [row["row"], published, ours, seeds, trained, count, seconds, outcome.verdict, ", ".join(marks(row, outcome))]


def _machines(outcomes: Iterable[tuple[Line, Outcome]]) -> list[str]:
    names = dict.fromkeys(outcome.machine for _, outcome in outcomes if outcome.machine)
    if not names:
        return []
    return [f"Time is that of training, one seed's part where several were trained together; on {', '.join(names)}."]


def describe(run: Mapping[str, Any]) -> str:
    """The setting of a run in one line."""
    named = ("cell", "task", "optimiser", "schedule")
    cell, task, optimiser, schedule = (_named(run[name], run[f"{name}_options"]) for name in named)
    length = f"{run['epochs']} epochs" if run["epochs"] is not None else f"{run['steps']:,} steps"
    factors = "".join(f", {name}'s rate x {factor:g}" for name, factor in run["rates"].items())
    clip = f", clip {run['clip_norm']:g}" if run["clip_norm"] is not None else ""
    depth = f"{run['layers']} x " if run["layers"] > 1 else ""
    rows = ", trained on training and validation rows" if run["split"] == "full" else ""
    return (
        f"{cell}, {depth}{run['hidden']} units, on {task}, {optimiser}, rate {run['rate']:g} {schedule}{factors}{clip}, "
        f"batch {run['batch']}, {length}{rows}"
    )


def _named(name: str, options: Mapping[str, Any]) -> str:
    """The name with its options, without those that are off."""
    return " ".join([name, *(f"{option}={value}" for option, value in options.items() if value not in (0.0, False))])


def number(value: float, unit: str) -> str:
    """A number with as many digits as the papers print."""
    if unit in ("%", "perplexity", "bits"):
        return f"{value:.2f}{' %' if unit == '%' else ''}"
    return f"{value:,.1f}k" if unit == COUNTED else f"{value:.4g}"


def markdown_table(rows: Sequence[Sequence[str]], left: int) -> str:
    """A table whose first line is its head; the first `left` columns are aligned to the left, the others to the right."""
    head, *body = rows
    rule = [":---" if i < left else "---:" for i in range(len(head))]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in (head, rule, *body))
