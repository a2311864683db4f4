"""What is written of a run that has ended: what it was, how it went, on what."""

import math
from collections.abc import Mapping
from typing import Any

from unfading.layers.model import Model
from unfading.tasks.base import Task
from unfading.training.run import VERSION, Run


def plain(values: Mapping[str, float]) -> dict[str, float | None]:
    """Scores as JSON has them: null for what is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def sizes(model: Model) -> dict[str, Any]:
    """Parameters with and without encoder and head, and the kilobytes of all in float32."""
    count = sum(parameter.numel() for parameter in model.parameters())
    recurrent = sum(parameter.numel() for parameter in model.rnn.parameters())
    return {"parameters": {"all": count, "recurrent": recurrent}, "kilobytes": round(count * 4 / 1024, 2)}


def described(run: Run, task: Task, model: Model, about: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that is known before the run."""
    return {
        "version": VERSION,
        "key": run.key,
        "run": run.to_json(),
        "measure": task.metric,
        "rising": task.higher_is_better,
        "guess": task.guess,
        **sizes(model),
        "about": {**about, **({"sources": run.sources} if run.sources else {})},
    }


def better(task: Task, score: float, than: float | None) -> bool:
    """Whether a score in the task's metric beats another; none beats one that is not finite."""
    if not math.isfinite(score):
        return False
    return than is None or (score > than if task.higher_is_better else score < than)
