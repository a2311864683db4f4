"""Verdicts on claims of order: that some rows of an item score better, learn in fewer steps or train in less time than others.

Let x be the value of a seed of a row that is claimed to be ahead, y that of a seed of a row claimed to be behind, and f the
claimed factor (1 for a claim of order alone). Values are test scores, training steps until the task is solved (infinite if it
is not), or seconds of training; the sign of scores is such that lower is better. x is ahead of y if

    f x <= y                 (steps and seconds with a factor above 1)
    x < y - tie              (f = 1)

The tie is the larger tolerance of the rows for scores (two standard errors of the test set), nothing for steps, and a tenth of
y for seconds, since runs share a machine. Two runs that do not solve their task are equal.

With P the share of all pairs of seeds in which x is ahead, ties counted half, a pair of rows is

    held        P >= 3/4
    refuted     P <= 1/4
    undecided   else

A claim is held if all its pairs of rows are, refuted if one is, and not run if a row has no runs. A claim with a bound is that
a seed stays within it, and is judged by the share of seeds. Only runs of one budget are compared, and times only if they were
measured on one machine.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from unfading.report.verdicts import (
    HELD,
    HIGHER_IS_BETTER,
    NOT_RUN,
    REFUTED,
    Line,
    diverged,
    machine_of,
    measurement,
    paper_score,
    solved_at,
)

UNDECIDED = "undecided"
ORDER_VERDICTS = (HELD, REFUTED, UNDECIDED, NOT_RUN)
MOST, FEW = 0.75, 0.25
SAME_TIME = 0.1


class OrderOutcome(NamedTuple):
    """The result of a claim of order."""

    verdict: str
    numbers: str  # our numbers, in words
    budget: str = ""


class Seeds(NamedTuple):
    """What the seeds of a row reached; `values` are such that lower is better."""

    row: Line
    runs: Sequence[Line]
    values: Sequence[float]


Read = Callable[[Line, Line], float]  # the value of a run of a row


def _score(row: Line, line: Line) -> float:
    return (-1.0 if row["unit"] in HIGHER_IS_BETTER else 1.0) * paper_score(row["unit"], line)


def _steps(row: Line, line: Line) -> float:
    """Steps until the error was at most the tolerance; infinite if it never was, or if the run diverged later."""
    step = None if diverged(line) else solved_at(row["tolerance"], line)
    return math.inf if step is None else float(step)


def _seconds(row: Line, line: Line) -> float:
    return float(line["seconds"])


READ: Mapping[str, Read] = {"score": _score, "steps": _steps, "seconds": _seconds}


def judge_order(order: Line, rows: Mapping[str, Line], lines: Mapping[str, Sequence[Line]]) -> OrderOutcome:
    """The outcome of a claim from the rows of its item and the lines of their runs, both by the name of the row."""
    seeds = {name: _seeds(rows[name], lines.get(name, ()), order["by"]) for name in (*order["first"], *order["then"])}
    present = {name: each for name, each in seeds.items() if each.runs}
    ahead, behind = ([present[name] for name in order[place] if name in present] for place in ("first", "then"))
    shares = [
        _share_ahead(first, then, order["by"], order["factor"])
        for first in ahead
        for then in behind
        if _comparable(first, then, order["by"])
    ]
    if order["bound"] is not None:
        shares += [_share_within(first, order["bound"], order["by"]) for first in ahead]
    pairs = len(order["first"]) * (len(order["then"]) + (order["bound"] is not None))
    numbers = ", ".join(_number(name, each, order["by"]) for name, each in present.items())
    budget = next((each.runs[0]["budget"] for each in present.values()), "")
    return OrderOutcome(_verdict(shares, pairs), numbers, budget)


def _verdict(shares: Sequence[float], pairs: int) -> str:
    if any(share <= FEW for share in shares):
        return REFUTED
    if len(shares) < pairs:
        return NOT_RUN
    return HELD if all(share >= MOST for share in shares) else UNDECIDED


def judge_ranking(ranking: Line, rows: Mapping[str, Line], lines: Mapping[str, Sequence[Line]]) -> OrderOutcome:
    """How often each cell is best, and among the best two, over the tasks in which all cells were run.

    A cell is behind another on a task if that one is ahead in three quarters of all pairs of seeds, by steps where errors are
    compared (and by score where neither solves the task), else by score. The best cells are behind none, the best two behind
    one at most. The claim is that no cell is best, or among the best two, more often than the leader.
    """
    counts: dict[str, list[int]] = {cell: [0, 0] for cell in ranking["published"]}
    complete = 0
    for cells in ranking["tasks"].values():
        runs = {cell: measurement(rows[name], lines.get(name, ())) for cell, name in cells.items()}
        if not all(runs.values()) or len({each[0]["budget"] for each in runs.values()}) > 1:
            continue
        complete += 1
        for cell, name in cells.items():
            ahead = sum(
                _ahead_on_task(rows[cells[other]], runs[other], rows[name], runs[cell]) for other in cells if other != cell
            )
            counts[cell][0] += ahead == 0
            counts[cell][1] += ahead <= 1
    tasks = len(ranking["tasks"])
    if not complete:
        return OrderOutcome(NOT_RUN, "")
    text = [f"{cell} {_both(count)} (published {_both(ranking['published'][cell])})" for cell, count in counts.items()]
    leads = all(counts[ranking["leader"]][place] >= each[place] for each in counts.values() for place in (0, 1))
    verdict = NOT_RUN if complete < tasks else HELD if leads else REFUTED
    return OrderOutcome(verdict, f"{complete} of {tasks} tasks; best and among the best two: {', '.join(text)}")


def _both(counts: Sequence[int]) -> str:
    best, two = counts
    return f"{best} and {two}"


def _ahead_on_task(row: Line, runs: Sequence[Line], other_row: Line, others: Sequence[Line]) -> bool:
    """Whether the cell with `runs` is ahead of the one with `others`."""
    x, y = ([_key(each, line) for line in group] for each, group in ((row, runs), (other_row, others)))
    tie = max(row["tolerance"], other_row["tolerance"])
    pairs = [_point(a, b, tie) for a in x for b in y]
    return sum(pairs) / len(pairs) >= MOST


def _key(row: Line, line: Line) -> tuple[float, float]:
    """Steps (0 where these do not count) and score, both such that lower is better."""
    return (_steps(row, line) if row["unit"] == "error" else 0.0), _score(row, line)


def _point(x: tuple[float, float], y: tuple[float, float], tie: float) -> float:
    if x[0] != y[0]:
        return float(x[0] < y[0])
    if math.isfinite(x[0]) and x[0] > 0:  # solved in the same number of steps
        return 0.5
    return 0.5 if abs(x[1] - y[1]) <= tie else float(x[1] < y[1])


def _seeds(row: Line, lines: Sequence[Line], by: str) -> Seeds:
    runs = measurement(row, lines)
    return Seeds(row, runs, [READ[by](row, line) for line in runs])


def _comparable(first: Seeds, then: Seeds, by: str) -> bool:
    one, other = first.runs[0], then.runs[0]
    return one["budget"] == other["budget"] and (by != "seconds" or machine_of(one) == machine_of(other))


def _share_ahead(first: Seeds, then: Seeds, by: str, factor: float) -> float:
    """The share of pairs in which the first row is ahead, ties counted half."""
    tolerance = max(first.row["tolerance"], then.row["tolerance"])

    def point(a: float, b: float) -> float:
        if math.isinf(a) and math.isinf(b):  # neither solved its task
            return 0.5
        if factor != 1.0:
            return float(factor * a <= b)
        tie = {"score": tolerance, "steps": 0.0, "seconds": SAME_TIME * b}[by]
        return 0.5 if abs(a - b) <= tie else float(a < b)

    points = [point(a, b) for a in first.values for b in then.values]
    return sum(points) / len(points)


def _share_within(seeds: Seeds, bound: float, by: str) -> float:
    """The share of seeds that reach the bound: at most so many steps or seconds, or a score that is at least as good."""
    limit = -bound if by == "score" and seeds.row["unit"] in HIGHER_IS_BETTER else bound
    return sum(value <= limit for value in seeds.values) / len(seeds.values)


def _number(name: str, seeds: Seeds, by: str) -> str:
    count = f"{len(seeds.values)} {'seed' if len(seeds.values) == 1 else 'seeds'}"
    if by == "score":
        mean, unit = abs(statistics.fmean(seeds.values)), seeds.row["unit"]
        text = f"{mean:.3g}" if unit == "error" else f"{mean:.2f}{' %' if unit == '%' else ''}"
        return f"{name}: {text} ({count})"
    median = statistics.median(seeds.values)
    unit = "steps" if by == "steps" else "s"
    text = f"{median:,.0f} {unit}" if math.isfinite(median) else "not solved"
    return f"{name}: {text} ({count})"
