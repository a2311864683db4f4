"""Records of runs, found and read.

A run's folder holds `run.json` from its start, `curve.jsonl` as it grows and `record.json` from its end. A folder without the
last is a run that is going on or was killed: it is shown with the curve it has. Everything else that is not as it should be
is refused, by name: a report that leaves out what it cannot read would show another experiment.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

VERSION = 1
MAYBE = (int, float, type(None))
# What an unfinished run does not tell yet: of the tasks' measures this is the one in which more is better.
HIGHER_IS_BETTER = ("accuracy",)


class Watched(NamedTuple):
    """What was seen of the gradients: sizes by layer, and by layer at some steps of time."""

    layers: tuple[float | None, ...]
    times: tuple[int, ...]
    states: tuple[tuple[float | None, ...], ...]


class Point(NamedTuple):
    """One line of a curve; numbers that are not finite are None, since no axis has a place for them."""

    step: int
    loss: float | None
    valid: Mapping[str, float | None] | None
    watched: Watched | None = None


@dataclass(frozen=True)
class Record:
    """One run and what came of it. `valid` and `test` are in the task's metric; None where there is no such number."""

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
    curve: tuple[Point, ...]

    @property
    def seed(self) -> int:
        return int(self.run["seed"])

    @property
    def trained(self) -> bool | None:
        """Whether it ended a tenth better than a guess without diverging; None while that cannot be said."""
        if self.status == "unfinished" or self.guess is None:
            return None
        if self.status == "diverged" or self.test is None:
            return False
        return self.test >= self.guess + 0.1 * (1 - self.guess) if self.higher_is_better else self.test <= 0.9 * self.guess


def load(paths: Iterable[Path]) -> list[Record]:
    """Every run at or below these folders and record files, each once; a ValueError or OSError says what cannot be used."""
    given = list(paths)
    if not given:
        raise ValueError("a report needs at least one folder of runs; got none. Give the folder that train or compare wrote.")
    found: dict[str, Record] = {}
    for path in given:
        for folder, file in _find(path):
            real = os.path.realpath(folder if file is None else file)
            if real not in found:
                found[real] = _unfinished(folder) if file is None else _finished(file)
    return once(found.values())


def read(records: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Records that are at hand as dicts, as `record.json` holds them."""
    return once(_record(record, f"record {i}") for i, record in enumerate(records))


def once(records: Iterable[Record]) -> list[Record]:
    """The records without copies; two different outcomes of one run are refused, since both would count as the same seed."""
    kept: dict[str, Record] = {}
    for record in records:
        run = json.dumps(record.run, sort_keys=True)
        other = kept.setdefault(run, record)
        if _content(other) != _content(record):
            raise ValueError(
                f"{other.where} and {record.where} are two outcomes of the same run (same settings, same seed); "
                f"a report can hold one of them. Leave one out."
            )
    return list(kept.values())


def _content(record: Record) -> str:
    return repr({**record.__dict__, "where": None})


def _find(path: Path) -> list[tuple[Path, Path | None]]:
    """Run folders, each with its record file or, where the run has not ended, None."""
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}. Give the folder that train or compare wrote.")
    if path.is_file():
        if path.suffix != ".json":
            raise ValueError(f"{path} is no record: a run's record is its record.json. Give that file or the run's folder.")
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
    curve = _lines(folder / "curve.jsonl")
    names = [name for point in curve for name in point.valid or ()]
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
        guess=_finite(_take(value, "guess", MAYBE, where)),
        valid=None if best is None else _finite(_take(best, metric, MAYBE, f"{where}, 'best'")),
        test=None if test is None else _finite(_take(test, metric, MAYBE, f"{where}, 'test'")),
        seconds=_finite(_take(value, "seconds", MAYBE, where)),
        milliseconds=_finite(_take(value, "milliseconds_per_sequence", MAYBE, where)),
        parameters={name: _take(parameters, name, (int,), f"{where}, 'parameters'") for name in ("all", "recurrent")},
        kilobytes=_finite(_take(value, "kilobytes", MAYBE, where)),
        about=_take(value, "about", (dict, type(None)), where),
        curve=_curve(_take(value, "curve", (list,), where), where),
    )


def _versioned(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or "version" not in value:
        raise ValueError(f"{where} is no record of an unfading run: it has no 'version'. Leave it out.")
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
        raise ValueError(f"{where} is no record of an unfading run: it has no {name!r}. Leave it out.")
    found = value[name]
    # True is an int for Python and a mistake in a record.
    if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
        wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{where}: {name!r} must be {wanted}; got {found!r}. Run it again.")
    return found


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _curve(lines: Sequence[Any], where: str) -> tuple[Point, ...]:
    points = []
    for i, line in enumerate(lines, 1):
        here = f"{where}, line {i} of the curve"
        if not isinstance(line, dict):
            raise ValueError(f"{here} must be an object with 'step' and 'loss'; got {line!r}. Run it again.")
        if "watched" in line:
            step = _take(line, "step", (int,), here)
            points.append(Point(step, None, None, _watched(_take(line, "watched", (dict,), here), here)))
            continue
        valid = _take(line, "valid", (dict,), here) if "valid" in line else None
        points.append(
            Point(
                step=_take(line, "step", (int,), here),
                loss=_finite(_take(line, "loss", MAYBE, here)),
                valid=valid and {str(name): _finite(_take(valid, name, MAYBE, here)) for name in valid},
            )
        )
    return tuple(points)


def _watched(value: dict[str, Any], where: str) -> Watched | None:
    """What `train --watch gradients` writes; None for what a watch of the user's own has seen."""
    if set(value) != set(Watched._fields):
        return None

    def numbers(found: Any) -> tuple[Any, ...]:
        if not isinstance(found, list) or not all(isinstance(each, MAYBE) and not isinstance(each, bool) for each in found):
            raise ValueError(f"{where}: 'watched' must hold lists of numbers; got {found!r}. Run it again.")
        return tuple(found)

    states = tuple(map(numbers, _take(value, "states", (list,), where)))
    return Watched(numbers(value["layers"]), numbers(value["times"]), states)


def _lines(file: Path) -> tuple[Point, ...]:
    """The curve of a run that has not ended. A last line without its line break is being written, or was when the run died."""
    if not file.exists():
        return ()
    whole, _, _ = file.read_bytes().rpartition(b"\n")
    return _curve([_json(line, f"{file}, line {i}") for i, line in enumerate(whole.splitlines(), 1)], str(file))


def _json(content: bytes, where: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: it is no JSON ({error}). Leave it out, or run it again.") from None
