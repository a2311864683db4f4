"""Find and read the records of runs.

A run's folder holds `run.json` from its start, `curve.jsonl`, which grows, and `record.json` from its end. A folder without
`record.json` is a run that is still training or was killed: it is shown with the log rows it has. Anything else that cannot be
read raises an error with its name, since a report without it would show another experiment.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from unfading.files.checked_json import brief, read_json
from unfading.files.run_log import read_log
from unfading.files.schema import RecordFile, RunFields, RunFile, check, check_version, fields

LEAVE_OUT = "Leave it out, or run it again."
OTHER_VERSION = "Make the report with the unfading that wrote it."
OPTIONAL_NUMBER = (int, float, type(None))
# The metrics of tasks that are better when higher. An unfinished run does not say so itself.
HIGHER_IS_BETTER = ("accuracy",)


class WatchedGradients(NamedTuple):
    """Gradient norms during training: of each layer's parameters, and of each layer's state at some time steps."""

    layers: tuple[float | None, ...]
    times: tuple[int, ...]
    states: tuple[tuple[float | None, ...], ...]


class LogRow(NamedTuple):
    """One row of a run's log. Numbers that are not finite are None: no axis can show them."""

    step: int
    loss: float | None
    valid: Mapping[str, float | None] | None
    watched: WatchedGradients | None = None


@dataclass(frozen=True)
class Record:
    """A run and its results. `valid` and `test` are in the task's metric; None if there is no such number."""

    where: str
    key: str
    run: Mapping[str, Any]
    status: str  # finished, diverged, unfinished
    reason: str | None
    steps: int
    returns: int
    metric: str | None
    higher_is_better: bool
    guess: float | None
    valid: float | None
    test: float | None
    seconds: float | None
    milliseconds: float | None
    parameters: Mapping[str, int] | None
    kilobytes: float | None
    about: Mapping[str, Any] | None
    curve: tuple[LogRow, ...]
    # Metrics that the user asked for, of the test or else of validation.
    further: Mapping[str, float | None] = field(default_factory=dict)
    confusion: Mapping[str, Any] | None = None
    tested: bool = True  # False for a task without test rows

    @property
    def seed(self) -> int:
        return int(self.run["seed"])

    @property
    def trained(self) -> bool | None:
        """Whether it ended a tenth better than a guess without diverging; None if that is not known.

        The score is that of the test, or of validation for a task without test rows.
        """
        if self.status == "unfinished" or self.guess is None:
            return None
        if self.status == "diverged":
            return False
        score = self.test if self.tested else self.valid
        if score is None:
            return False if self.tested else None
        return score >= self.guess + 0.1 * (1 - self.guess) if self.higher_is_better else score <= 0.9 * self.guess


def load(paths: Iterable[Path]) -> list[Record]:
    """Every run in these folders, at any depth, and in these record files, each once; raises for what cannot be read."""
    paths = list(paths)
    if not paths:
        raise ValueError("a report needs at least one folder of runs; got none. Give the folder that train or compare wrote.")
    records: dict[str, Record] = {}
    for path in paths:
        for folder, file in _find(path):
            real = os.path.realpath(folder if file is None else file)
            if real not in records:
                records[real] = _unfinished(folder) if file is None else _finished(file)
    return unique(records.values())


def read(records: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Records from dicts, as `record.json` holds them."""
    return unique(_record(record, f"record {i}") for i, record in enumerate(records))


def unique(records: Iterable[Record]) -> list[Record]:
    """The records without copies. Two different outcomes of one run raise, since both would count as the same seed."""
    by_run: dict[str, Record] = {}
    for record in records:
        run = json.dumps(record.run, sort_keys=True)
        other = by_run.setdefault(run, record)
        if _content(other) != _content(record):
            raise ValueError(
                f"{other.where} and {record.where} are two outcomes of the same run (same settings, same seed); "
                f"a report can hold one of them. Leave one out."
            )
    return list(by_run.values())


def _content(record: Record) -> str:
    return repr({**record.__dict__, "where": None})


def _find(path: Path) -> list[tuple[Path, Path | None]]:
    """Run folders, each with its record file, or None if the run has not ended."""
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}. Give the folder that train or compare wrote.")
    if path.is_file():
        if path.suffix != ".json":
            raise ValueError(f"{path} is not a record: a run's record is its record.json. Give that file or the run's folder.")
        return [(path.parent, path)]
    folders = sorted({file.parent for name in ("record.json", "run.json") for file in path.rglob(name)})
    if not folders:
        raise ValueError(
            f"no runs in {path}: there is neither a record.json nor a run.json below it. "
            f"Give the folder that train or compare wrote."
        )
    return [(folder, file if (file := folder / "record.json").exists() else None) for folder in folders]


def _finished(file: Path) -> Record:
    return _record(read_json(file, fields(RecordFile), LEAVE_OUT), str(file))


def _unfinished(folder: Path) -> Record:
    file = folder / "run.json"
    content = read_json(file, fields(RunFile), LEAVE_OUT)
    check_version(content, str(file), OTHER_VERSION)
    check(RunFile, content, str(file), LEAVE_OUT)
    check(RunFields, content["run"], f"{file}, 'run'", LEAVE_OUT)
    curve = _log_rows(read_log(folder / "curve.jsonl", LEAVE_OUT), str(folder / "curve.jsonl"))
    names = [name for row in curve for name in row.valid or ()]
    metric = next((name for name in names if name != "loss"), names[0] if names else None)
    return Record(
        where=str(folder), key=folder.name, run=content["run"], status="unfinished", reason=None,
        steps=curve[-1].step if curve else 0, returns=0, metric=metric, higher_is_better=metric in HIGHER_IS_BETTER, guess=None,
        valid=None, test=None, seconds=None, milliseconds=None, parameters=None, kilobytes=None, about=None, curve=curve,
    )  # fmt: skip


def _record(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object; got {brief(value)}. {LEAVE_OUT}")
    check_version(value, where, OTHER_VERSION)
    check(RecordFile, value, where, LEAVE_OUT)
    metric = value["measure"]
    return Record(
        where=where,
        key=value["key"],
        run=value["run"],
        status=value["status"],
        reason=value["reason"],
        steps=value["steps"],
        returns=value["returns"],
        metric=metric,
        higher_is_better=value["rising"],
        guess=_finite(value["guess"]),
        valid=None if value["best"] is None else _score(value["best"]["valid"], metric, f"{where}, 'best'"),
        test=None if value["test"] is None else _score(value["test"], metric, f"{where}, 'test'"),
        seconds=_finite(value["seconds"]),
        milliseconds=_finite(value["milliseconds_per_sequence"]),
        parameters={name: value["parameters"][name] for name in ("all", "recurrent")},
        kilobytes=_finite(value["kilobytes"]),
        about=value["about"],
        curve=_log_rows(value["curve"], where),
        further=_further(value),
        confusion=_confusion(value.get("confusion_matrix"), where),
        tested=value["test"] is not None,
    )


def _further(value: Mapping[str, Any]) -> dict[str, float | None]:
    scores = value["test"] if value["test"] is not None else (value["best"] or {"valid": {}})["valid"]
    return {name: _finite(scores[name]) for name in value.get("metrics", ()) if name in scores}


def _confusion(matrix: Mapping[str, Any] | None, where: str) -> Mapping[str, Any] | None:
    if matrix is not None:
        size, counts = len(matrix["classes"]), matrix["counts"]
        if len(counts) != size or any(len(row) != size for row in counts):
            raise ValueError(f"{where}: 'confusion_matrix' must have {size} rows and columns, one per class. {LEAVE_OUT}")
    return matrix


def _score(scores: Mapping[str, float | None], metric: str, where: str) -> float | None:
    if metric not in scores:
        raise ValueError(f"{where} is not a record of an unfading run: it has no {brief(metric)}. {LEAVE_OUT}")
    return _finite(scores[metric])


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _log_rows(lines: Sequence[Mapping[str, Any]], where: str) -> tuple[LogRow, ...]:
    rows = []
    for i, line in enumerate(lines, 1):
        if "watched" in line:
            rows.append(LogRow(line["step"], None, None, _watched(line["watched"], f"{where}, log row {i}")))
            continue
        if "loss" not in line:
            raise ValueError(f"{where}, log row {i} is not a log row of a run: it has no 'loss'. {LEAVE_OUT}")
        valid = line.get("valid")
        scores = None if valid is None else {name: _finite(score) for name, score in valid.items()}
        rows.append(LogRow(step=line["step"], loss=_finite(line["loss"]), valid=scores))
    return tuple(rows)


def _watched(value: Any, where: str) -> WatchedGradients | None:
    """What `train --watch gradients` writes; None for the values of a user's own watch function."""
    if not isinstance(value, dict) or set(value) != set(WatchedGradients._fields):
        return None

    def numbers(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, list) or not all(isinstance(v, OPTIONAL_NUMBER) and not isinstance(v, bool) for v in values):
            raise ValueError(f"{where}: 'watched' must hold lists of numbers; got {brief(values)}. {LEAVE_OUT}")
        return tuple(values)

    if not isinstance(value["states"], list):
        raise ValueError(f"{where}: 'states' must be a list; got {brief(value['states'])}. {LEAVE_OUT}")
    states = tuple(map(numbers, value["states"]))
    return WatchedGradients(numbers(value["layers"]), numbers(value["times"]), states)
