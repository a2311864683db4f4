"""The settings that a sweep searches, as the command line writes them.

rate=1e-4..1e-2:log            a number between two, on a logarithmic scale
hidden=32..256:32              a whole number between two, in steps of 32
layers=1,2,4                   one of several values
cell.dropout=0..0.5            an option of the cell; also of the optimiser, the schedule and of compress, and a factor of rates
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from unfading.errors import unknown
from unfading.training.names import parse_value
from unfading.training.run import Run
from unfading.training.settings import FIELDS
from unfading.training.sweep.storage import needed

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

EXAMPLES = "rate=1e-4..1e-2:log, hidden=32,64,128 or cell.dropout=0..0.5"
# Options that can be searched, by the first part of their names.
OPTIONS = {
    "cell": "cell_options",
    "optimiser": "optimiser_options",
    "schedule": "schedule_options",
    "rates": "rates",
    "compress": "compress",
}
# Settings that cannot be searched, and why.
REFUSED = {
    "task": "scores of different tasks cannot be compared",
    "cell": "each cell deserves its own search; start one sweep per cell",
    "seed": "the best of several seeds is luck; `unfading compare --seeds` measures their spread",
    "split": "a score on the validation rows needs them held out",
    "select_by": "it decides which score the sweep improves",
    "valid_every": "curves with other evaluations cannot be compared",
    "valid_batches": "scores of other rows cannot be compared",
    "device": "each worker has its own",
    "backend": "it decides the speed, not the result",
}

Space = dict[str, "BaseDistribution"]


def parse_space(texts: Sequence[str]) -> Space:
    """The distribution of each setting, by name."""
    space: Space = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f"--search takes NAME=VALUES: {EXAMPLES}; got {text!r}.")
        _check_name(name)
        if name in space:
            raise ValueError(f"--search gives {name} twice. Leave one out.")
        space[name] = _distribution(text, name, values)
    if not space:
        raise ValueError(f"--search says what to search: {EXAMPLES}.")
    return space


def with_settings(run: Run, settings: Mapping[str, Any]) -> Run:
    """The run with these settings of a search."""
    fields: dict[str, Any] = {}
    for name, value in settings.items():
        role, dot, option = name.partition(".")
        if dot:
            field = OPTIONS[role]
            fields[field] = {**fields.get(field, getattr(run, field)), option: value}
        else:
            fields[name] = value
    return replace(run, **fields)


def check_space(run: Run, space: Space) -> None:
    """Raise for a value that a run cannot have. Each end and each choice is tried, the others as in the run."""
    ends = {name: list(_ends(distribution)) for name, distribution in space.items()}
    corners = [{name: values[i] for name, values in ends.items()} for i in (0, -1)]
    for settings in [*corners, *({name: value} for name, values in ends.items() for value in values)]:
        try:
            candidate = with_settings(run, settings)
            candidate.factors(candidate.make_model().trainable)
        except (ValueError, TypeError) as error:
            words = ", ".join(f"{name}={value}" for name, value in settings.items())
            raise ValueError(f"--search: {words} cannot be trained: {error}") from None


def _check_name(name: str) -> None:
    role, dot, option = name.partition(".")
    if role == "task" or (name in REFUSED and not dot):
        raise ValueError(f"--search cannot take {name}: {REFUSED[role]}.")
    known = [*(each for each in FIELDS if each not in (*REFUSED, *OPTIONS.values())), *(f"{each}.NAME" for each in OPTIONS)]
    if (dot and (role not in OPTIONS or not option)) or (not dot and name not in known):
        raise ValueError(f"--search: {unknown('setting', name, known)}")


def _distribution(text: str, name: str, values: str) -> "BaseDistribution":
    distributions = needed("optuna").distributions
    if ".." not in values:
        choices = [parse_value(each) for each in values.split(",")]
        if len(set(map(json.dumps, choices))) < len(choices) or "" in choices:
            raise ValueError(f"--search {text}: give each value once, e.g. hidden=32,64,128.")
        return distributions.CategoricalDistribution(choices)
    interval, _, scale = values.partition(":")
    low, high = map(parse_value, interval.split("..", 1))
    step = None if scale in ("", "log") else parse_value(scale)
    if not all(_is_number(each) for each in (low, high, step) if each is not None) or None in (low, high):
        raise ValueError(f"--search {text}: expected LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP with numbers: {EXAMPLES}.")
    whole = all(isinstance(each, int) for each in (low, high, step) if each is not None) and not _is_float(name)
    try:
        if whole:
            return distributions.IntDistribution(low, high, log=scale == "log", step=1 if step is None else step)
        return distributions.FloatDistribution(float(low), float(high), log=scale == "log", step=step)
    except ValueError as error:
        raise ValueError(f"--search {text}: {error}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_float(name: str) -> bool:
    """Whether a setting is a float, so that 1..2 holds numbers between the two."""
    annotation = FIELDS[name].annotation if name in FIELDS else None
    return name.startswith("rates.") or annotation is float or float in get_args(annotation)


def _ends(distribution: Any) -> Iterator[Any]:
    """The smallest and the largest value, or all choices."""
    if hasattr(distribution, "choices"):
        yield from distribution.choices
    else:
        yield from (distribution.low, distribution.high)
