"""The page `docs/leaderboard.md`: cells on tasks that need long memory, from the JSON lines of `report/fidelity.py` alone.

A row belongs to a task by its `place`. Rows of items under leaderboard/ have equal numbers of parameters; they are named
"TASK CELL, SIZE". Rows at authors' own settings are those of a paper's tables and figures about its own cells. Rows under
past_best/ have our own settings, and the best published number as a target.
"""

import statistics
from collections.abc import Mapping, Sequence

from unfading.report import fidelity
from unfading.report.fidelity import LEADERBOARD, PAST_BEST, markdown_table, number, row_cells
from unfading.report.verdicts import COUNTED, HIGHER_IS_BETTER, NOT_RUN, UNITS, Line, Outcome, measurement

# What the page calls the place of a row.
TASKS = {
    "permuted mnist": "permuted MNIST",
    "pixel mnist": "pixel MNIST",
    "noisy cifar": "noisy CIFAR",
    "har2": "HAR-2",
    "adding 1000": "adding 1,000",
    "adding 10000": "adding 10,000",
    "copying 200": "copying 200",
}
# The cells that each paper is about.
OWN_CELLS = {
    "incremental": ("IncrementalRNN", "StableIncrementalRNN"),
    "nru": ("NRU",),
    "oscillators": ("CoRNN", "UnICORNN", "LEM"),
    "star": ("STAR",),
}
EPOCHS_SHOWN = 10  # of an authors' log
HEAD = """# Leaderboard

`unfading leaderboard page` writes this page from the records in `benchmarks/results/papers-*.jsonl`. Do not edit it.

Tasks that need long memory, and cells of the library: first the best of each task, then our own settings against the best
published numbers, cells at equal numbers of parameters and equal terms, and cells at their authors' own settings. Numbers are
means over seeds ± their standard deviation, in per cent correct, or as an error on adding (mean squared) and copying (cross
entropy). Settings were chosen by validation scores. "changed after test" means that settings, or the candidates among which
validation chose, were changed after a test score was known. Which row is best is read from test scores, as on every
leaderboard: the best of many rows is a little too good. "Our best" is that of any cell in our tables, also of a baseline. An
empty cell of a table was not trained. "short" marks a run of a tenth of the steps, "3 seeds" one with fewer than asked.

```sh
unfading leaderboard list
# Train what is missing: a task and some cells, on a GPU
unfading leaderboard run --tasks permuted_mnist --cells LEM CoRNN --device cuda --processes 6 -o benchmarks/results
unfading leaderboard page
```

"""
PAST = """## Past the best published

Stacks of our choice with no more parameters than the network that has the published number: `unfading reproduce run
past_best/targets`. On pixel MNIST that is coRNN; LEM has 99.50 % with half of its parameters. Training images are distorted at
random except where a row says "undistorted", training windows of HAR-2 are rotated and change their speed, and the training
sequences of GRU on noisy CIFAR begin short and grow. The published networks did without. Settings were chosen by validation
scores of short runs, on HAR-2 by those of folds of people, except where a row says otherwise. A target that is not reached
stays here with our best result.

"""
EQUAL = """## Equal parameters

All cells have about the same number of parameters in the recurrent stack and the same terms: Adam, batch 128, clipped at norm
1, cosine decay, one of three learning rates by validation, five seeds. Training is short: 10 epochs on images, 30 on HAR-2,
5,000 steps on adding and 10,000 on copying. Options of cells are at their defaults, except those that depend on the length of
a sequence (`src/unfading/papers/leaderboard/tables.py`). The best of a column is bold.

"""
OWN = """## Authors' own settings

Rows of the papers about their own cells. `unfading reproduce run ITEM` trains them; [Results, row by row](papers/fidelity.md)
has their settings and explains verdicts and marks. The noise of noisy CIFAR is one draw for all images in the rows of
coRNN, UnICORNN and LEM, and new for each image in the others. Papers have their own permutations and validation rows. Rows
named "ours" are the stable form of the incremental RNN; beside them stands what is published for the paper's cell.

"""
LOGS = """## At equal epochs

The authors of coRNN, UnICORNN and LEM released the validation accuracy of one run after each epoch. Ours is the mean over our
seeds, on other validation rows, in per cent.

"""

Answer = tuple[Line, Outcome]


def page(lines: Sequence[Line]) -> str:
    """The page as Markdown."""
    answers = [(row, outcome) for row, outcome in fidelity.answers(lines) if row["place"] in TASKS and row["unit"] != COUNTED]
    equal = [answer for answer in answers if answer[0]["item"].startswith(LEADERBOARD)]
    own = _distinct([answer for answer in answers if _is_own(answer[0])])
    past = [answer for answer in answers if answer[0]["item"].startswith(PAST_BEST)]
    parts = [HEAD, _best(answers, own), *([PAST, _rows(past)] if past else []), EQUAL, *_equal(equal), OWN]
    for place, task in TASKS.items():
        rows = sorted((answer for answer in own if answer[0]["place"] == place), key=_rank)
        if rows:
            parts.append(f"### {task}\n\n{_rows(rows)}")
    logs = _logs(lines)
    return "".join([*parts, *([LOGS, *logs] if logs else [])]).rstrip() + "\n"


def _is_own(row: Line) -> bool:
    """Whether a row of a paper's table or figure is about its own cell and has a published number, not that of a failure."""
    paper, _, name = row["item"].partition("/")
    published = name.startswith(("table", "fig")) or paper == "oscillators"  # others are studies of ours
    return published and row["cell"] in OWN_CELLS.get(paper, ()) and row["published"] is not None and not row["fails"]


def _distinct(answers: Sequence[Answer]) -> list[Answer]:
    """The first of the rows that stand in several tables with the same settings."""
    first: dict[tuple[str, ...], Answer] = {}
    for row, outcome in answers:
        first.setdefault((row["place"], *row["settings"]), (row, outcome))
    return list(first.values())


def _rank(answer: Answer) -> tuple[bool, float]:
    """Better rows first, those without a result last."""
    row, outcome = answer
    if outcome.mean is None:
        return True, 0.0
    return False, -outcome.mean if row["unit"] in HIGHER_IS_BETTER else outcome.mean


def _rows(answers: Sequence[Answer]) -> str:
    """Rows as a table, with the item of each."""
    table = [["item", *fidelity.COLUMNS], *([row["item"], *row_cells(row, outcome)] for row, outcome in answers)]
    return markdown_table(table, left=2) + "\n"


def _best(answers: Sequence[Answer], own: Sequence[Answer]) -> str:
    """For each task the best published number, our best with any cell, and what is missing."""
    table = [["task", "best published", "source", "our best", "row", "gap"]]
    for place, task in TASKS.items():
        rows = [row for row, _ in own if row["place"] == place]
        results = sorted((answer for answer in answers if answer[0]["place"] == place), key=_rank)
        published, source = "", ""
        best = None
        if rows:
            sign = -1 if rows[0]["unit"] in HIGHER_IS_BETTER else 1
            best = min(rows, key=lambda row: sign * row["published"])
            published, source = _published(best), f"{best['cell']} ({best['item']})"
        ours, name, missing = "", "", NOT_RUN
        if results and results[0][1].mean is not None:
            row, outcome = results[0]
            ours, name, missing = _result(row, outcome), row["row"], _missing(best, outcome)
        table.append([task, published, source, ours, name, missing])
    return markdown_table(table, left=1) + "\n"


def _published(row: Line) -> str:
    return "solved" if row["share"] is not None else number(row["published"], row["unit"])


def _missing(best: Line | None, outcome: Outcome) -> str:
    """What our best result lacks to the best published number."""
    if best is None or outcome.mean is None:
        return ""
    if best["share"] is not None:
        return "" if outcome.mean <= best["published"] + best["tolerance"] else "not solved"
    gap = best["published"] - outcome.mean
    return f"{gap:.2f} points" if gap > 0 else ""


def _result(row: Line, outcome: Outcome) -> str:
    """A result as text, with marks; empty if there is none."""
    if outcome.mean is None:
        return ""
    text = number(outcome.mean, row["unit"])
    if outcome.spread is not None:
        text += f" ± {outcome.spread:.2g}"
    marks = ["short"] * (outcome.budget == "short")
    if outcome.seeds < row["seeds"]:
        marks.append(f"{outcome.seeds} seed{'s' * (outcome.seeds > 1)}")
    marks += ["changed after test"] * bool(row["changed_after_test"])
    return f"{text} ({', '.join(marks)})" if marks else text


def _equal(answers: Sequence[Answer]) -> list[str]:
    """A table of cells by tasks for each number of parameters."""
    sizes: dict[str, dict[str, dict[str, Answer]]] = {}
    for row, outcome in answers:
        size = row["row"].rpartition(", ")[2]
        sizes.setdefault(size, {}).setdefault(row["cell"], {})[row["place"]] = (row, outcome)
    parts = []
    for size, cells in sizes.items():
        places = [place for place in TASKS if any(place in entries for entries in cells.values())]
        best = {place: min((e[place] for e in cells.values() if place in e), key=_rank)[0]["row"] for place in places}
        table = [["cell", *(TASKS[place] for place in places)]]
        for cell, entries in cells.items():
            table.append([cell, *(_entry(entries.get(place), best[place]) for place in places)])
        parts.append(f"### About {size} parameters\n\n{markdown_table(table, left=1)}\n")
    return parts


def _entry(answer: Answer | None, best: str) -> str:
    text = "" if answer is None else _result(*answer)
    return f"**{text}**" if text and answer is not None and answer[0]["row"] == best else text


def _logs(lines: Sequence[Line]) -> list[str]:
    """The authors' validation scores beside ours, for each row with a log that was trained."""
    parts = []
    for own in fidelity.lines_by_item(lines).values():
        for row in (line for line in own if line["kind"] == "row" and line["log"]):
            runs = measurement(row, [line for line in own if line["kind"] == "run" and line["row"] == row["row"]])
            scores = [_by_epoch(row["unit"], run) for run in runs]
            epochs = [epoch for epoch in row["log"] if scores and all(int(epoch) in each for each in scores)]
            shown = _spread(epochs)
            if shown:
                ours = [statistics.fmean(each[int(epoch)] for each in scores) for epoch in shown]
                table = [
                    ["epoch", *shown],
                    ["authors", *(f"{row['log'][epoch]:.2f}" for epoch in shown)],
                    [f"ours, {len(runs)} seed{'s' * (len(runs) > 1)}", *(f"{score:.2f}" for score in ours)],
                ]
                parts.append(f"### {row['row']}\n\n{markdown_table(table, left=1)}\n")
    return parts


def _by_epoch(unit: str, run: Line) -> Mapping[int, float]:
    """Validation scores of a run by epoch, of which each ends with one."""
    scores = [log_row["valid"][run["measure"]] for log_row in run["curve"] if "valid" in log_row]
    return {epoch: UNITS[unit](score) for epoch, score in enumerate(scores, 1)}


def _spread(epochs: Sequence[str]) -> list[str]:
    """At most EPOCHS_SHOWN epochs, evenly from the first to the last."""
    if len(epochs) <= EPOCHS_SHOWN:
        return list(epochs)
    places = {round(i * (len(epochs) - 1) / (EPOCHS_SHOWN - 1)) for i in range(EPOCHS_SHOWN)}
    return [epochs[place] for place in sorted(places)]
