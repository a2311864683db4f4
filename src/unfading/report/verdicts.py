"""Verdicts: whether our runs hold, beat, miss or refute what a paper publishes.

With m the mean over seeds, s their standard deviation, n their number, p the published number and d its tolerance (two standard
errors of the test set), all in the paper's unit, and if higher is better,

    beaten   m - p > 2 sqrt(s^2 / n + (d / 2)^2 + (d / 2)^2)
    held     m >= p - d, and not beaten
    missed   else

Under the root are the error of our mean over seeds, that of the test set on which we score, and that of the test set on which
the published number was scored. The second does not shrink with n: all seeds are tested on the same rows. A single seed has no
s and beats nothing. If lower is better the signs are reversed.

A claim about a share of seeds (an error of at most p + d, "solved") is held if that share of all seeds of the row reaches it.
Finished seeds alone would be a biased sample, since a run that solves its task may end before the others. A claim of failure is
that a model does not train (a score of chance, or NaN) or, with a share, that fewer seeds than this solve the task:

    held      at most half of the seeds train; with a share, less than that share of the seeds solves the task
    refuted   else

A run at the budget short, a tenth of the paper's steps, can show that a model trains, not that more steps would be in vain:

    open      missed, or a claim of failure that is held by seeds that did not diverge, at the budget short

A seed trains if it ends a tenth better than a guess (`trained`), and one that diverges does not, so one lucky seed of three
refutes nothing. A number of parameters is held within its tolerance on either side. No seed is left out: one that ended without
a score counts as a guess, and as not solved. Lines are dicts of JSON values.

Three seeds in per cent that differ by more than a point are too few for a claim about their mean; such a row needs five
(`seeds_needed`).
"""

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Line = Mapping[str, Any]

# From our score to the paper's unit.
UNITS = {"%": lambda score: 100 * score, "perplexity": lambda score: math.exp(min(score, 700.0))}
HIGHER_IS_BETTER = ("%",)
COUNTED = "thousand parameters"
NOT_RUN, NO_DATA, MEASURED, OPEN = "not run", "data not available", "measured", "open"
HELD, BEATEN, MISSED, REFUTED = "held", "beaten", "missed", "refuted"
# A row that asks for FEW_SEEDS needs MORE_SEEDS if they differ by more than WIDE points.
FEW_SEEDS, MORE_SEEDS, WIDE = 3, 5, 1.0
# The budgets whose runs are judged, the preferred one first.
BUDGETS = ("paper", "short")


class Outcome(NamedTuple):
    """The result of a row. Numbers are in the paper's unit; None if there are none."""

    verdict: str
    mean: float | None = None
    spread: float | None = None
    seeds: int = 0
    asked: int = 0  # seeds that the row asks for
    trained: int = 0  # seeds that ended a tenth better than a guess
    diverged: int = 0  # seeds whose training ended in a loss that is not finite
    reached: int | None = None  # seeds within the tolerance, for a claim about a share
    steps: float | None = None  # until validation was within the tolerance, median over the seeds that got there
    parameters: Mapping[str, int] | None = None
    seconds: float | None = None  # of training, median; one seed's share if many were trained together
    machine: str = ""
    budget: str = ""
    run: Mapping[str, Any] | None = None
    earlier: bool = False  # measured at a setting that the row had before
    traced: bool = True  # every run comes from a commit, without uncommitted changes
    candidates: int = 0  # stored settings from which validation chose

    @property
    def seed_count(self) -> str:
        """The number of seeds, e.g. "3 of 5" if some were not run."""
        return f"{self.seeds} of {self.asked}" if self.seeds < self.asked else f"{self.seeds}"

    @property
    def answered(self) -> bool:
        """Whether there is a result."""
        return self.verdict not in (NOT_RUN, NO_DATA)


def judge(row: Line, lines: Sequence[Line], *, here: bool = True) -> Outcome:
    """The outcome of a row from the lines of its runs; `here` says whether its data are present."""
    if row["unit"] == COUNTED:
        return _counted(row, lines)
    now = row["settings"]
    runs = measurement(row, lines)
    if not runs:
        return Outcome(NOT_RUN if here else NO_DATA)
    scores = [paper_score(row["unit"], line) for line in runs]
    mean = statistics.fmean(scores)
    spread = statistics.stdev(scores) if len(scores) > 1 else None
    enough = row["published"] is None or row["fails"]
    needed = row["seeds"] if enough else seeds_needed(row["seeds"], row["unit"], scores)
    asked = max(len(scores), needed if runs[0]["budget"] == "paper" else 1)
    reached, steps = None, None
    if row["share"] is not None:
        bound = row["published"] + row["tolerance"]
        reached = sum(score <= bound and not diverged(line) for score, line in zip(scores, runs, strict=True))
        firsts = [first for line in runs if (first := to_reach(row, line)) is not None]
        steps = statistics.median(firsts) if firsts else None
    if row["fails"]:
        failed = sum(map(trained, runs)) <= 0.5 * len(runs) if reached is None else reached < row["share"] * len(runs)
        verdict = HELD if failed else REFUTED
    elif row["published"] is None:
        verdict = MEASURED
    elif reached is not None:
        verdict = HELD if reached >= row["share"] * asked else MISSED
    else:
        verdict = _verdict(row, mean, spread, len(scores))
    unsuccessful = verdict == MISSED or (verdict == HELD and row["fails"] and not all(map(diverged, runs)))
    if runs[0]["budget"] == "short" and unsuccessful:
        verdict = OPEN
    return Outcome(
        verdict=verdict,
        mean=mean,
        spread=spread,
        seeds=len(scores),
        asked=asked,
        trained=sum(map(trained, runs)),
        diverged=sum(map(diverged, runs)),
        reached=reached,
        steps=steps,
        parameters=runs[0]["parameters"],
        seconds=statistics.median(line["seconds"] for line in runs),
        machine=machine_of(runs[0]),
        budget=runs[0]["budget"],
        run=runs[0]["run"],
        earlier=runs[0]["budget"] == "paper" and bool(now) and setting(runs[0]["run"]) not in now,
        traced=all(map(_traced, runs)),
    )


def seeds_needed(seeds: int, unit: str, scores: Sequence[float]) -> int:
    """The number of seeds of a row that asks for `seeds`, given the scores of those that were run, seed 0 first."""
    first = scores[:FEW_SEEDS]
    wide = len(first) == FEW_SEEDS and max(first) - min(first) > WIDE
    return MORE_SEEDS if seeds == FEW_SEEDS and unit == "%" and wide else seeds


def measurement(row: Line, lines: Sequence[Line]) -> list[Line]:
    """The runs to judge: those of one budget, machine and setting, each seed once.

    A higher budget is preferred, then a setting that the row has now, then the larger number of seeds.
    """
    groups: dict[tuple[Any, ...], dict[int, Line]] = {}
    for line in lines:
        if line["budget"] in BUDGETS:
            run = {name: value for name, value in line["run"].items() if name != "seed"}
            group = (line["budget"], machine_of(line), repr(sorted(run.items(), key=str)))
            groups.setdefault(group, {})[line["run"]["seed"]] = line
    if not groups:
        return []

    def rank(numbered: tuple[int, tuple[Any, ...]]) -> tuple[Any, ...]:
        place, group = numbered
        run = next(iter(groups[group].values()))["run"]
        # Of equals the last, which was measured later.
        return -BUDGETS.index(group[0]), setting(run) in row["settings"], len(groups[group]), place

    best = max(enumerate(groups), key=rank)[1]
    return [line for _, line in sorted(groups[best].items())]


def setting(run: Mapping[str, Any]) -> str:
    """A hash of twelve digits of all fields of a run except its seed and where it ran."""
    fields = {name: value for name, value in run.items() if name not in ("seed", "device", "dtype", "backend")}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def paper_score(unit: str, line: Line) -> float:
    """The test score of a run in the paper's unit; that of a guess if it has none."""
    score = (line["test"] or {}).get(line["measure"])
    return float(UNITS.get(unit, float)(line["guess"] if score is None else score))


def trained(line: Line) -> bool:
    """Whether a run ended a tenth better than a guess."""
    score, guess = (line["test"] or {}).get(line["measure"]), line["guess"]
    if diverged(line) or score is None or guess is None:
        return False
    return bool(score >= guess + 0.1 * (1 - guess) if line["rising"] else score <= 0.9 * guess)


def to_reach(row: Line, line: Line) -> int | None:
    """Steps until the validation score was within the tolerance of the published number."""
    return solved_at(row["published"] + row["tolerance"], line)


def solved_at(bound: float, line: Line) -> int | None:
    """Steps until the validation error was at most the bound; None if it never was."""
    for log_row in line["curve"]:
        score = (log_row.get("valid") or {}).get(line["measure"])
        if score is not None and score <= bound:
            return int(log_row["step"])
    return None


def sentence(row: Line, outcome: Outcome) -> str:
    """How the result differs from the paper: by how much, at which budget, and the known reasons."""
    parts = [difference] if (difference := _difference(row, outcome)) else []
    if outcome.verdict == NO_DATA:
        parts.append(f"needs {row['dataset']}")
    if outcome.earlier:
        parts.append("measured at a setting that the row had before")
    if outcome.budget == "short":
        parts.append("at a tenth of the paper's steps")
    if outcome.seeds < outcome.asked:
        parts.append(f"{outcome.asked - outcome.seeds} of {outcome.asked} seeds were not run to their end")
    if outcome.answered and outcome.trained < outcome.seeds and not row["fails"]:
        parts.append(f"{outcome.seeds - outcome.trained} of {outcome.seeds} seeds did not train")
    if outcome.answered and row["changed_after_test"]:
        parts.append(f"changed after a test score was known: {row['changed_after_test']}")
    if outcome.candidates:
        parts.append(f"the setting was chosen by validation from {outcome.candidates}")
    if row["note"]:
        parts.append(row["note"])
    return "; ".join(parts)


def _verdict(row: Line, mean: float, spread: float | None, seeds: int) -> str:
    better = 1.0 if row["unit"] in HIGHER_IS_BETTER else -1.0
    above = better * (mean - row["published"])
    if spread is not None and above > 2 * math.sqrt(spread**2 / seeds + 2 * (row["tolerance"] / 2) ** 2):
        return BEATEN
    return HELD if above >= -row["tolerance"] else MISSED


def _difference(row: Line, outcome: Outcome) -> str:
    """How far the result is from the published number; empty if it is held."""
    if row["fails"]:
        return _failure(outcome) if outcome.answered else ""
    if outcome.verdict in (MISSED, OPEN) and outcome.reached is not None:
        return f"{outcome.reached} of {outcome.asked} seeds came to {row['published'] + row['tolerance']:.3g}"
    if outcome.verdict in (MISSED, OPEN, BEATEN) and outcome.mean is not None:
        gap = outcome.mean - row["published"]
        return f"{gap:+.3g} {'points' if row['unit'] == '%' else row['unit']} from the published number"
    return ""


def _failure(outcome: Outcome) -> str:
    """The answer to a claim of failure."""
    if outcome.reached is not None:
        return f"the claim is failure; {outcome.reached} of {outcome.seeds} seeds solved the task"
    more = f", {outcome.diverged} diverged" if outcome.diverged else ""
    return f"the claim is failure; {outcome.trained} of {outcome.seeds} seeds trained{more}"


def _traced(line: Line) -> bool:
    commit = line["about"].get("commit")
    return commit is not None and not commit.endswith("-dirty")


def diverged(line: Line) -> bool:
    """Whether training ended in a loss that is not finite."""
    return bool(line["status"] == "diverged")


def _counted(row: Line, lines: Sequence[Line]) -> Outcome:
    if not lines:
        return Outcome(NOT_RUN)
    count = lines[-1]["parameters"]["all"] / 1000
    verdict = HELD if abs(count - row["published"]) <= row["tolerance"] else MISSED
    return Outcome(verdict, count, seeds=1, trained=1, parameters=lines[-1]["parameters"])


def machine_of(line: Line) -> str:
    """The GPU of a run, or the processor with its number of cores."""
    machine = line["about"]["machine"]
    return str(machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores")
