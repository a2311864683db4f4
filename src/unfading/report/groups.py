"""Group records: one `TaskGroup` per task with its options, and in it one `Setting` for all runs that differ only in seed.

Settings are sorted by the number of diverged seeds, fewest first, and then by the mean validation score. The test score is used
for sorting only if there is no validation score: the best of many settings by its test score would look better than it is.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from unfading.report.records import Record

# Options are compared only among settings that share what they are options of.
OWNERS = {"optimiser_options": "optimiser", "schedule_options": "schedule"}

Path = tuple[str, ...]


class Summary(NamedTuple):
    """The numbers of a setting over its seeds. Scores are in the task's metric; None if no run has one."""

    setting: str
    seeds: tuple[int, ...]
    diverged: int
    unfinished: int
    valid: float | None  # mean
    mean: float | None  # of the test scores, like spread and best
    spread: float | None  # sample standard deviation; None for one seed
    best: float | None
    trained: int | None  # number of runs that trained, of those that ended
    ended: int
    share: float | None
    steps: int
    seconds: float | None  # median
    milliseconds: float | None  # for one test sequence, median
    parameters: int | None
    recurrent: int | None
    kilobytes: float | None


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in seed, sorted by seed."""

    label: str
    records: tuple[Record, ...]

    @property
    def summary(self) -> Summary:
        records = self.records
        tests = [record.test for record in records if record.test is not None]
        trained = [record.trained for record in records if record.trained is not None]
        parameters = next((record.parameters for record in records if record.parameters), None)
        return Summary(
            setting=self.label,
            seeds=tuple(record.seed for record in records),
            diverged=sum(record.status == "diverged" for record in records),
            unfinished=sum(record.status == "unfinished" for record in records),
            valid=_of(statistics.fmean, [record.valid for record in records]),
            mean=_of(statistics.fmean, tests),
            spread=statistics.stdev(tests) if len(tests) > 1 else None,
            best=_of(max if any(record.higher_is_better for record in records) else min, tests),
            trained=sum(trained) if trained else None,
            ended=sum(record.status != "unfinished" for record in records),
            share=statistics.fmean(trained) if trained else None,
            steps=max(record.steps for record in records),
            seconds=_of(statistics.median, [record.seconds for record in records]),
            milliseconds=_of(statistics.median, [record.milliseconds for record in records]),
            parameters=parameters["all"] if parameters else None,
            recurrent=parameters["recurrent"] if parameters else None,
            kilobytes=next((record.kilobytes for record in records if record.kilobytes is not None), None),
        )


@dataclass(frozen=True)
class TaskGroup:
    """All settings that were run on one task, the best validation score first."""

    name: str
    metric: str | None
    higher_is_better: bool
    guess: float | None
    settings: tuple[Setting, ...]

    @property
    def records(self) -> list[Record]:
        return [record for setting in self.settings for record in setting.records]


def group_by_task(records: Sequence[Record]) -> list[TaskGroup]:
    """The records grouped by task, sorted by the name of the task."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        options = dict(sorted(record.run["task_options"].items()))
        groups.setdefault(_text([record.run["task"]], options), []).append(record)
    return [_task(name, group) for name, group in sorted(groups.items())]


def _task(name: str, records: list[Record]) -> TaskGroup:
    # Runs that have ended record the metric, its direction and the score of a guess; unfinished ones take these from them.
    ended = next((record for record in records if record.status != "unfinished"), records[0])
    for record in records:
        if record.status != "unfinished" and (record.metric, record.higher_is_better) != (ended.metric, ended.higher_is_better):
            raise ValueError(
                f"{ended.where} and {record.where} are runs of {name}, measured in {ended.metric} and in {record.metric}; "
                f"such scores cannot be in one table. Make one report of each."
            )
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps(_settings(record.run), sort_keys=True), []).append(record)
    # Sorted, so that the page does not depend on the order in which a file system lists folders.
    by_seed = [sorted(group, key=lambda record: record.seed) for _, group in sorted(groups.items())]
    names = labels([group[0].run for group in by_seed])
    settings = [Setting(label, tuple(group)) for label, group in zip(names, by_seed, strict=True)]
    return TaskGroup(name, ended.metric, ended.higher_is_better, ended.guess, tuple(_ordered(settings, ended.higher_is_better)))


def _ordered(settings: Sequence[Setting], higher_is_better: bool) -> list[Setting]:
    rows = {setting.label: setting.summary for setting in settings}
    validated = any(row.valid is not None for row in rows.values())

    def rank(setting: Setting) -> tuple[int, bool, float, str]:
        row = rows[setting.label]
        score = row.valid if validated else row.mean
        # Runs that diverged are not in the mean, so their number is compared first.
        return row.diverged, score is None, 0.0 if score is None else -score if higher_is_better else score, setting.label

    return sorted(settings, key=rank)


def varying(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the settings, including the seed, in which these runs differ."""
    flat = [_flat(run) for run in runs]
    paths = list(dict.fromkeys(path for one in flat for path in one))
    return [".".join(path) for path in paths if len({_canonical(one, path) for one in flat}) > 1]


def flat_settings(run: Mapping[str, Any]) -> dict[str, str]:
    """All settings of a run as text, with options under dotted names."""
    return {".".join(path): _value(value) for path, value in _flat(run).items()}


def labels(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A label for each run: its cell, and the settings in which other runs of this cell differ from it.

    Labels are unique. Differences between cells, such as their learning rates, are in the table of settings.
    """
    flat = [_flat(_settings(run)) for run in runs]
    # The values of each option among runs of one cell, and of one owner where the option has one.
    values: dict[tuple[Path, str, str], set[str]] = {}
    for path in dict.fromkeys(path for own in flat for path in own):
        for run, own in zip(runs, flat, strict=True):
            values.setdefault((path, *_peers(run, path)), set()).add(_canonical(own, path))
    texts = []
    for run, own in zip(runs, flat, strict=True):
        named = {}
        for path, value in own.items():
            if path != ("cell",) and len(values[(path, *_peers(run, path))]) > 1:
                bare = path[0] == "cell_options" and path[1:] not in own
                named[".".join(path[1:] if bare else path)] = value
        # The cell's own options come first: they are part of the model, the others of its training.
        options = {name: value for name, value in named.items() if ("cell_options", name) in own}
        texts.append(_text([run["cell"]], {**options, **named}))
    return texts


def _peers(run: Mapping[str, Any], path: Path) -> tuple[str, str]:
    """What a run shares with those with which an option is compared: its cell, and the owner of the option."""
    owner = OWNERS.get(path[0], "cell")
    return json.dumps(run.get("cell")), json.dumps(run.get(owner))


def _settings(run: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in ("seed", "task", "task_options")}


def _flat(run: Mapping[str, Any]) -> dict[Path, Any]:
    flat: dict[Path, Any] = {}
    for name, value in run.items():
        if isinstance(value, dict):
            flat.update({(name, str(option)): inner for option, inner in value.items()})
        else:
            flat[name,] = value
    return flat


def _canonical(flat: Mapping[Path, Any], path: Path) -> str:
    return json.dumps(flat[path], sort_keys=True) if path in flat else ""


def _text(words: Sequence[str], options: Mapping[str, Any]) -> str:
    return " ".join([*words, *(f"{name}={_value(value)}" for name, value in options.items())])


def _value(value: Any) -> str:
    if not isinstance(value, str):
        return "none" if value is None else json.dumps(value, ensure_ascii=False)
    # Quoted if it would read as another value: 1 and "1" are different settings and need different labels.
    try:
        json.loads(value)
    except ValueError:
        return json.dumps(value, ensure_ascii=False) if value == "none" else value
    return json.dumps(value, ensure_ascii=False)


def _of(function: Any, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(function(known)) if known else None
