"""What our runs say of a published number: held, beaten or missed.

With m the mean over seeds, s their standard deviation, n their number, p what is published and d its tolerance (two standard
errors of the test set), all in the paper's unit and with more being better,

    held     m >= p - d
    beaten   m - s / sqrt(n) > p
    missed   else

Where less is better the signs turn. A single seed has no s: half the tolerance stands for s / sqrt(n). A claim about a share
of seeds (an error of at most p + d, "solved") holds where that share of all that the row has comes to it: a run that solves
its task may end before the others, so those that are done are no fair sample. A claim that a cell does no better than a
guess holds where m is at most the guess plus d, and is beaten else. A count holds within its tolerance on either
side. Seeds are never left out: one that ended without a score counts as a guess. Lines are plain dicts, as JSON has them.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Line = Mapping[str, Any]

# From the unit of our score to the paper's.
UNITS = {"%": lambda score: 100 * score, "perplexity": lambda score: math.exp(min(score, 700.0))}
HIGHER_IS_BETTER = ("%",)
COUNTED = "thousand parameters"
NOT_RUN, NO_DATA, HELD, BEATEN, MISSED, MEASURED = "not run", "data not available", "held", "beaten", "missed", "measured"
# A stronger budget goes before a weaker one; a smoke is no measurement.
BUDGETS = ("paper", "short")


class Outcome(NamedTuple):
    """A row of a table, answered; numbers in the paper's unit, None where there are none."""

    verdict: str
    mean: float | None = None
    spread: float | None = None
    seeds: int = 0
    asked: int = 0  # seeds that the row has
    trained: int = 0  # seeds that ended a tenth better than a guess
    reached: int | None = None  # seeds within the tolerance, for a claim about a share
    steps: float | None = None  # until validation came within the tolerance, the median of the seeds in which it did
    parameters: Mapping[str, int] | None = None
    seconds: float | None = None  # of training, median, a seed's part where many were trained together
    machine: str = ""
    budget: str = ""
    run: Mapping[str, Any] | None = None
    earlier: bool = False  # measured at a setting that the row had once

    @property
    def told_seeds(self) -> str:
        """How many, and of how many where some were not run: "3 of 5"."""
        return f"{self.seeds} of {self.asked}" if self.seeds < self.asked else f"{self.seeds}"

    @property
    def answered(self) -> bool:
        return self.verdict not in (NOT_RUN, NO_DATA)


def judge(row: Line, lines: Sequence[Line], *, here: bool = True) -> Outcome:
    """The outcome of a row from the lines of its runs; here: whether its data are, where nothing was run."""
    if row["unit"] == COUNTED:
        return _counted(row, lines)
    now = row["settings"]
    runs = measurement(row, lines)
    if not runs:
        return Outcome(NOT_RUN if here and not row["missing"] else NO_DATA)
    scores = [_score(row, line) for line in runs]
    mean = statistics.fmean(scores)
    spread = statistics.stdev(scores) if len(scores) > 1 else None
    asked = max(len(scores), row["seeds"] if runs[0]["budget"] == "paper" else 1)
    reached, steps = None, None
    if row["published"] is None:
        verdict = MEASURED
    elif row["share"] is not None:
        within = [score <= row["published"] + row["tolerance"] for score in scores]
        reached = sum(within)
        verdict = HELD if reached >= row["share"] * asked else MISSED
        found = [first for line in runs if (first := to_reach(row, line)) is not None]
        steps = statistics.median(found) if found else None
    elif row["chance"]:
        verdict = BEATEN if mean > UNITS["%"](runs[0]["guess"]) + row["tolerance"] else HELD
    else:
        verdict = _verdict(row, mean, spread, len(scores))
    return Outcome(
        verdict=verdict,
        mean=mean,
        spread=spread,
        seeds=len(scores),
        asked=asked,
        trained=sum(map(trained, runs)),
        reached=reached,
        steps=steps,
        parameters=runs[0]["parameters"],
        seconds=statistics.median(line["seconds"] for line in runs),
        machine=_machine(runs[0]),
        budget=runs[0]["budget"],
        run=runs[0]["run"],
        earlier=runs[0]["budget"] == "paper" and bool(now) and setting(runs[0]["run"]) not in now,
    )


def measurement(row: Line, lines: Sequence[Line]) -> list[Line]:
    """Runs that belong together: of one budget, machine and setting, the strongest, present and fullest; each seed once."""
    groups: dict[tuple[Any, ...], dict[int, Line]] = {}
    for line in lines:
        if line["budget"] in BUDGETS:
            run = {name: value for name, value in line["run"].items() if name != "seed"}
            groups.setdefault((line["budget"], _machine(line), repr(sorted(run.items(), key=str))), {})[line["run"]["seed"]] = (
                line
            )
    if not groups:
        return []

    def rank(at: tuple[int, tuple[Any, ...]]) -> tuple[Any, ...]:
        place, group = at
        run = next(iter(groups[group].values()))["run"]
        # The last of equals: what was measured later.
        return -BUDGETS.index(group[0]), setting(run) in row["settings"], len(groups[group]), place

    best = max(enumerate(groups), key=rank)[1]
    return [line for _, line in sorted(groups[best].items())]


def setting(run: Mapping[str, Any]) -> str:
    """All fields of a run but those that tell its seed and where it ran, in twelve digits."""
    fields = {name: value for name, value in run.items() if name not in ("seed", "device", "dtype", "backend")}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def trained(line: Line) -> bool:
    """Whether a run ended a tenth better than a guess."""
    score, guess = (line["test"] or {}).get(line["measure"]), line["guess"]
    if line["status"] == "diverged" or score is None or guess is None:
        return False
    return bool(score >= guess + 0.1 * (1 - guess) if line["rising"] else score <= 0.9 * guess)


def to_reach(row: Line, line: Line) -> int | None:
    """Steps until the validation score came within the tolerance of what is published."""
    for point in line["curve"]:
        score = (point.get("valid") or {}).get(line["measure"])
        if score is not None and score <= row["published"] + row["tolerance"]:
            return int(point["step"])
    return None


def sentence(row: Line, outcome: Outcome) -> str:
    """Where it differs from the paper: by how much, at which budget, and what is known of the reason."""
    said = []
    if outcome.verdict == MISSED and outcome.reached is not None:
        said.append(f"{outcome.reached} of {outcome.asked} seeds came to {row['published'] + row['tolerance']:.3g}")
    elif outcome.verdict in (MISSED, BEATEN) and outcome.mean is not None:
        gap = outcome.mean - row["published"]
        said.append(f"{gap:+.3g} {'points' if row['unit'] == '%' else row['unit']} from the published number")
    if outcome.verdict == NO_DATA:
        said.append(f"needs {row['dataset']}")
    if outcome.earlier:
        said.append("measured at a setting that the row had before")
    if outcome.budget == "short":
        said.append("at a tenth of the paper's steps")
    if outcome.seeds < outcome.asked:
        said.append(f"{outcome.asked - outcome.seeds} of {outcome.asked} seeds were not run to their end")
    if outcome.answered and outcome.trained < outcome.seeds:
        said.append(f"{outcome.seeds - outcome.trained} of {outcome.seeds} seeds did not train")
    if row["note"]:
        said.append(row["note"])
    return "; ".join(said)


def _verdict(row: Line, mean: float, spread: float | None, seeds: int) -> str:
    better = 1.0 if row["unit"] in HIGHER_IS_BETTER else -1.0
    error = row["tolerance"] / 2 if spread is None else spread / math.sqrt(seeds)
    above = better * (mean - row["published"])
    if above - error > 0:
        return BEATEN
    return HELD if above >= -row["tolerance"] else MISSED


def _counted(row: Line, lines: Sequence[Line]) -> Outcome:
    if not lines:
        return Outcome(NOT_RUN)
    count = lines[-1]["parameters"]["all"] / 1000
    verdict = HELD if abs(count - row["published"]) <= row["tolerance"] else MISSED
    return Outcome(verdict, count, seeds=1, trained=1, parameters=lines[-1]["parameters"])


def _score(row: Line, line: Line) -> float:
    """A run's test score in the paper's unit; that of a guess where it has none."""
    score = (line["test"] or {}).get(line["measure"])
    return float(UNITS.get(row["unit"], float)(line["guess"] if score is None else score))


def _machine(line: Line) -> str:
    machine = line["about"]["machine"]
    return str(machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores")
