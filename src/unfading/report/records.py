"""Find and read the records of runs.

A run's folder holds `run.json` from its start, `curve.jsonl`, which grows, and `record.json` from its end. A folder without
`record.json` is a run that is still training or was killed: it is shown with the log rows it has. Anything else that cannot be
read raises an error with its name, since a report without it would show another experiment.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

VERSION = 1
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

    @property
    def seed(self) -> int:
        return int(self.run["seed"])

    @property
    def trained(self) -> bool | None:
        """Whether it ended a tenth better than a guess without diverging; None if that is not known."""
        if self.status == "unfinished" or self.guess is None:
            return None
        if self.status == "diverged" or self.test is None:
            return False
        return self.test >= self.guess + 0.1 * (1 - self.guess) if self.higher_is_better else self.test <= 0.9 * self.guess


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
    return _record(_json(file.read_bytes(), str(file)), str(file))


def _unfinished(folder: Path) -> Record:
    file = folder / "run.json"
    run = _run(_versioned(_json(file.read_bytes(), str(file)), str(file)), str(file))
    curve = _read_log(folder / "curve.jsonl")
    names = [name for row in curve for name in row.valid or ()]
    metric = next((name for name in names if name != "loss"), names[0] if names else None)
    return Record(
        where=str(folder), key=folder.name, run=run, status="unfinished", reason=None, steps=curve[-1].step if curve else 0,
        returns=0, metric=metric, higher_is_better=metric in HIGHER_IS_BETTER, guess=None, valid=None, test=None, seconds=None,
        milliseconds=None, parameters=None, kilobytes=None, about=None, curve=curve,
    )  # fmt: skip


def _record(value: Any, where: str) -> Record:
    value = _versioned(value, where)
    run = _run(value, where)
    status = _take(value, "status", (str,), where)
    if status not in ("finished", "diverged"):
        raise ValueError(f"{where}: 'status' must be 'finished' or 'diverged'; got {status!r}. Run it again.")
    metric = _take(value, "measure", (str,), where)
    best, test = _take(value, "best", (dict, type(None)), where), _take(value, "test", (dict, type(None)), where)
    if best is not None:
        best = _take(best, "valid", (dict,), f"{where}, 'best'")
    parameters = _take(value, "parameters", (dict,), where)
    return Record(
        where=where,
        key=_take(value, "key", (str,), where),
        run=run,
        status=status,
        reason=_take(value, "reason", (str, type(None)), where),
        steps=_take(value, "steps", (int,), where),
        returns=_take(value, "returns", (int,), where),
        metric=metric,
        higher_is_better=_take(value, "rising", (bool,), where),
        guess=_finite(_take(value, "guess", OPTIONAL_NUMBER, where)),
        valid=None if best is None else _finite(_take(best, metric, OPTIONAL_NUMBER, f"{where}, 'best'")),
        test=None if test is None else _finite(_take(test, metric, OPTIONAL_NUMBER, f"{where}, 'test'")),
        seconds=_finite(_take(value, "seconds", OPTIONAL_NUMBER, where)),
        milliseconds=_finite(_take(value, "milliseconds_per_sequence", OPTIONAL_NUMBER, where)),
        parameters={name: _take(parameters, name, (int,), f"{where}, 'parameters'") for name in ("all", "recurrent")},
        kilobytes=_finite(_take(value, "kilobytes", OPTIONAL_NUMBER, where)),
        about=_take(value, "about", (dict, type(None)), where),
        curve=_log_rows(_take(value, "curve", (list,), where), where),
    )


def _versioned(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or "version" not in value:
        raise ValueError(f"{where} is not a record of an unfading run: it has no 'version'. Leave it out.")
    if value["version"] != VERSION:
        raise ValueError(
            f"{where} has version {value['version']!r}; this unfading reads version {VERSION}. "
            f"Make the report with the unfading that wrote it."
        )
    return value


def _run(value: dict[str, Any], where: str) -> dict[str, Any]:
    run: dict[str, Any] = _take(value, "run", (dict,), where)
    for name, kind in (("task", str), ("task_options", dict), ("cell", str), ("cell_options", dict), ("seed", int)):
        _take(run, name, (kind,), f"{where}, 'run'")
    return run


def _take(value: Mapping[str, Any], name: str, kinds: tuple[type, ...], where: str) -> Any:
    if name not in value:
        raise ValueError(f"{where} is not a record of an unfading run: it has no {name!r}. Leave it out.")
    field = value[name]
    # In Python True is an int; in a record it is a mistake.
    if not isinstance(field, kinds) or (isinstance(field, bool) and bool not in kinds):
        expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{where}: {name!r} must be {expected}; got {field!r}. Run it again.")
    return field


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _log_rows(lines: Sequence[Any], where: str) -> tuple[LogRow, ...]:
    rows = []
    for i, line in enumerate(lines, 1):
        here = f"{where}, log row {i}"
        if not isinstance(line, dict):
            raise ValueError(f"{here} must be an object with 'step' and 'loss'; got {line!r}. Run it again.")
        if "watched" in line:
            step = _take(line, "step", (int,), here)
            rows.append(LogRow(step, None, None, _watched(_take(line, "watched", (dict,), here), here)))
            continue
        valid = _take(line, "valid", (dict,), here) if "valid" in line else None
        rows.append(
            LogRow(
                step=_take(line, "step", (int,), here),
                loss=_finite(_take(line, "loss", OPTIONAL_NUMBER, here)),
                valid=valid and {str(name): _finite(_take(valid, name, OPTIONAL_NUMBER, here)) for name in valid},
            )
        )
    return tuple(rows)


def _watched(value: dict[str, Any], where: str) -> WatchedGradients | None:
    """What `train --watch gradients` writes; None for the values of a user's own watch function."""
    if set(value) != set(WatchedGradients._fields):
        return None

    def numbers(values: Any) -> tuple[Any, ...]:
        if not isinstance(values, list) or not all(isinstance(v, OPTIONAL_NUMBER) and not isinstance(v, bool) for v in values):
            raise ValueError(f"{where}: 'watched' must hold lists of numbers; got {values!r}. Run it again.")
        return tuple(values)

    states = tuple(map(numbers, _take(value, "states", (list,), where)))
    return WatchedGradients(numbers(value["layers"]), numbers(value["times"]), states)


def _read_log(file: Path) -> tuple[LogRow, ...]:
    """The log of a run that has not ended. A last line without line break is ignored: it is not complete."""
    if not file.exists():
        return ()
    complete, _, _ = file.read_bytes().rpartition(b"\n")
    return _log_rows([_json(line, f"{file}, line {i}") for i, line in enumerate(complete.splitlines(), 1)], str(file))


def _json(content: bytes, where: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: it is not JSON ({error}). Leave it out, or run it again.") from None
