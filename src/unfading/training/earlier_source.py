"""Runs whose files have been edited since they were stopped.

The source of a user's own task and cell is part of a run's key, so an edited file gives another run, with another folder. A
stopped run has its source in its folder and can continue with it. The user says which of the two is meant.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from unfading.training.run import Run
from unfading.training.run_dir import last_step, read_run_file, stored_code
from unfading.training.user_code import UserCode


class _Earlier(NamedTuple):
    """A folder that holds one of several runs, with another source."""

    folder: Path
    code: dict[str, UserCode] | None  # None if the folder does not hold its source


def with_earlier_source(
    runs: Sequence[Run], where: Path, *, resume: bool, again: bool, say: Callable[[str], None]
) -> list[Run]:
    """The runs with the source to train: the present one or, if they were stopped before an edit, that with which they began.

    Args:
        runs: the runs of one command.
        where: parent of their folders.
        resume: continue stopped runs, with the source with which they began.
        again: start with the present source.
        say: called with a message for the user.
    """
    groups: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in runs:
        groups[tuple(run.code)].append(run)
    code: dict[tuple[str, ...], dict[str, UserCode] | None] = {
        places: None if again or not places else _earlier_code(group, where, resume, say) for places, group in groups.items()
    }
    return [run if (earlier := code[tuple(run.code)]) is None else replace(run, code=earlier) for run in runs]


def _earlier_code(runs: Sequence[Run], where: Path, resume: bool, say: Callable[[str], None]) -> dict[str, UserCode] | None:
    """The source with which runs of the same files continue, if it is not the present one."""
    if any(_results(where / run.key) for run in runs):
        return None
    earlier = _newest(runs, where)
    if earlier is None:
        return None
    folder, code = earlier
    ended = "was trained" if (folder / "record.json").exists() else f"stopped at step {last_step(folder)}"
    when = f"{' or '.join(runs[0].code)} has changed since {folder} {ended}"
    complete = code is not None and all((where / run.key_with(code) / "record.json").exists() for run in runs)
    if complete or (code is None and not resume):
        say(f"{when}; this is a new run.")
        return None
    if code is None:
        raise ValueError(f"{when}, and its source is not stored there. Start with the present source by again (--again).")
    if not resume:
        raise ValueError(
            f"{when}. Continue with the source stored there by resume (--resume), or start with the present one by again "
            "(--again)."
        )
    say(f"{when}; continuing with the source stored there. --again starts with the present one.")
    return code


def _newest(runs: Sequence[Run], where: Path) -> _Earlier | None:
    """The folder that was last written, of those that hold one of the runs with another source and its checkpoint or record."""
    settings = [run.to_json() for run in runs]
    folders: list[tuple[int, Path, Run]] = []
    for file in where.glob("*/run.json"):
        with suppress(ValueError, OSError):  # a damaged file is not one of these runs
            content = read_run_file(file)
            if content["run"] in settings and _results(file.parent):
                time = max(each.stat().st_mtime_ns for each in _results(file.parent))
                folders.append((time, file.parent, runs[settings.index(content["run"])]))
    if not folders:
        return None
    _, folder, run = max(folders, key=lambda each: each[:2])
    try:
        code = stored_code(folder, run.to_json())
    except (ValueError, OSError):
        code = {}
    intact = code.keys() == run.code.keys() and run.key_with(code) == folder.name
    return _Earlier(folder, code if intact else None)


def _results(folder: Path) -> list[Path]:
    return [path for name in ("record.json", "last.safetensors") if (path := folder / name).exists()]
