"""What a sweep found, as plain values for a report."""

import math
import warnings
from typing import Any

from unfading.training.sweep.queue import ATTEMPTS, RESULT, Queue
from unfading.training.sweep.storage import needed
from unfading.training.sweep.sweep import Sweep

# Importance is an estimate from the best tenth of the trials against all of them; of fewer it would say nothing.
LEAST_FOR_IMPORTANCE = 10


def results(queue: Queue) -> dict[str, Any]:
    """The trials of a sweep with their settings, scores and curves, and the importance of each setting."""
    if queue.definition["kind"] != "search":
        raise ValueError(f"the study {queue.name!r} is a queue of given runs; `unfading report` describes their folder.")
    if queue.definition["code"]:
        settings = queue.definition["runs"][0]
        names = {"score": "score", "higher_is_better": _maximises(queue)}
    else:
        sweep = Sweep.from_json(queue.definition)
        settings = sweep.run.to_json()
        names = {"score": sweep.objective.name, "higher_is_better": sweep.objective.higher_is_better}
    return {
        "name": queue.name,
        "storage": queue.storage.name,
        "task": settings["task"],
        "task_options": settings["task_options"],
        "cell": settings["cell"],
        **names,
        "search": queue.definition["search"],
        "prune": queue.definition["prune"],
        "sampler": queue.definition["sampler"],
        "log": _logarithmic(queue.definition["search"]),
        "counts": queue.counts(),
        "trials": [_trial(trial) for trial in queue.trials() if trial.state.name != "WAITING"],
        "importance": _importance(queue),
    }


def _maximises(queue: Queue) -> bool:
    return bool(queue.study().direction == needed("optuna").study.StudyDirection.MAXIMIZE)


def _logarithmic(search: list[str]) -> list[str]:
    return [text.partition("=")[0] for text in search if text.endswith(":log")]


def _trial(trial: Any) -> dict[str, Any]:
    result = trial.user_attrs.get(RESULT, {})
    curve = [[step, value if math.isfinite(value) else None] for step, value in sorted(trial.intermediate_values.items())]
    return {
        "number": trial.number,
        "state": trial.state.name,
        "status": result.get("status", "running"),
        "reason": result.get("reason"),
        "value": trial.value if trial.state.name == "COMPLETE" else None,
        "settings": dict(trial.params),
        "curve": curve,
        "attempts": trial.user_attrs.get(ATTEMPTS, {}).get("count", 0),
        "worker": result.get("worker"),
        "key": next(iter(result.get("keys", [])), None),
        "ended": None if trial.datetime_complete is None else trial.datetime_complete.timestamp(),
    }


def _importance(queue: Queue) -> dict[str, float]:
    """The importance of each setting by PED-ANOVA, which sums to 1; empty if too few trials are complete."""
    study = queue.study()
    complete = [trial for trial in queue.trials() if trial.state.name == "COMPLETE"]
    if len(complete) < LEAST_FOR_IMPORTANCE or len({trial.value for trial in complete}) < 2:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", needed("optuna").exceptions.ExperimentalWarning)
        return dict(needed("optuna").importance.get_param_importances(study))
