"""Metrics in the record of a run, also of one that has finished before they were asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unfading.tasks.base import Split
from unfading.training.evaluate import evaluate
from unfading.training.fleet import Fleet
from unfading.training.record import finite_or_none
from unfading.training.run import Run
from unfading.training.run_dir import RunFolder
from unfading.training.user_metrics import CONFUSION_MATRIX, ConfusionMatrix, UserMetrics
from unfading.training.weights import chosen_weights, trained_model


def metrics_of_record(metrics: UserMetrics, matrix: ConfusionMatrix | None) -> dict[str, Any]:
    """The part of a record that the metrics of a user add to the scores: their names, and the confusion matrix."""
    return {"metrics": list(metrics.numbers), **({} if matrix is None else {"confusion_matrix": matrix._asdict()})}


def with_metrics(
    record: dict[str, Any], run: Run, where: Path, metrics: UserMetrics, say: Callable[[str], None]
) -> dict[str, Any]:
    """The record of a finished run with these metrics. Those that it lacks are computed from the stored weights."""
    present = [*record.get("metrics", ()), *([CONFUSION_MATRIX] if CONFUSION_MATRIX in record else [])]
    lacking = [name for name in metrics.names if name not in present]
    if not lacking or (record["test"] is None and record["best"] is None):
        return record
    say(f"{run.cell} seed {run.seed}: finished before; {', '.join(lacking)} computed from its stored weights.")
    folder = RunFolder(where, run)
    try:
        record = _scored(record, run, folder.path, metrics)
        folder.save_record(record)
    finally:
        folder.close()
    return record


def _scored(record: dict[str, Any], run: Run, folder: Path, metrics: UserMetrics) -> dict[str, Any]:
    """The record with the metrics of the chosen weights; scores that it has stay as they are."""
    tensors, path = chosen_weights(folder)
    fleet = Fleet([trained_model(run, tensors, path).to(run.device)], run.make_task(), together=False)
    scores: dict[Split, Any] = {"test": record["test"], "valid": record["best"] and record["best"]["valid"]}
    matrix = None
    for split, earlier in scores.items():
        if earlier is not None:
            evaluation = evaluate(fleet, run, split, metrics)
            scores[split] = {**finite_or_none(evaluation.models[0]), **earlier}
            matrix = matrix or evaluation.confusion[0]
    names = [*record.get("metrics", ()), *(name for name in metrics.numbers if name not in record.get("metrics", ()))]
    best = record["best"] and {**record["best"], "valid": scores["valid"]}
    record = {**record, "test": scores["test"], "best": best}
    return {**record, **metrics_of_record(metrics, matrix), "metrics": names}
