"""The record of a run that has ended: the run, its scores, its log, and the machine."""

import math
from collections.abc import Mapping
from typing import Any

from unfading.data import store
from unfading.data.datasets import DATASETS
from unfading.files.schema import VERSION
from unfading.layers.model import Model
from unfading.tasks.base import Task
from unfading.training.run import Run


def finite_or_none(values: Mapping[str, float]) -> dict[str, float | None]:
    """Scores as JSON values: None (null) for a number that is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def sizes(model: Model) -> dict[str, Any]:
    """Number of parameters with and without encoder and head, and the kilobytes of all of them in float32."""
    count = sum(parameter.numel() for parameter in model.parameters())
    recurrent = sum(parameter.numel() for parameter in model.rnn.parameters())
    return {"parameters": {"all": count, "recurrent": recurrent}, "kilobytes": round(count * 4 / 1024, 2)}


def initial_record(run: Run, task: Task, model: Model, about: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that is known before training."""
    return {
        "version": VERSION,
        "key": run.key,
        "run": run.to_json(),
        "measure": task.metric,
        "rising": task.higher_is_better,
        "guess": task.guess,
        **sizes(model),
        "about": {
            **about,
            **({"sources": run.sources} if run.sources else {}),
            **({"data": {"dataset": task.dataset, "files": store.hashes(task.dataset)}} if task.dataset in DATASETS else {}),
        },
    }


def data_changed(record: Mapping[str, Any]) -> str | None:
    """A sentence if the data of a finished run are not those of its training any more; None if they are, or if nobody knows."""
    data = record["about"].get("data")
    if data is None or data["dataset"] not in DATASETS:
        return None
    present = store.hashes(data["dataset"])
    changed = [file for file, digest in data["files"].items() if present.get(file, digest) != digest]
    if not changed:
        return None
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    run = record["run"]
    return (
        f"{run['cell']} on {run['task']}, seed {run['seed']}: the dataset {data['dataset']} has changed since this run was "
        f"trained ({changed[0]}{more}). The record is that of the earlier data; again (--again) trains it again."
    )


def is_better(score: float, other: float | None, higher_is_better: bool) -> bool:
    """Whether a score is better than another; a score that is not finite is never better."""
    if not math.isfinite(score):
        return False
    return other is None or (score > other if higher_is_better else score < other)
