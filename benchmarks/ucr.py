"""`RecurrentClassifier` on sets of the UCR and UEA archives: `python benchmarks/ucr.py --sets GunPoint ItalyPowerDemand`

The cell "default" is the classifier as it is, without any choice; its accuracy over the folds is there for comparison. The
learning rate and the readout of LSTM, GRU and STAR are chosen by cross-validation on the training file alone, by the mean
accuracy over the folds. Each is then trained on the training file with every seed and scored once on the test file. Prints one
JSON line per set and cell.
"""

import json
from itertools import product
from time import perf_counter
from typing import Any

import numpy as np
import tyro
from sklearn.model_selection import StratifiedKFold

from unfading import machine
from unfading.data import store
from unfading.estimators import RecurrentClassifier
from unfading.own_data.table_files import Columns, read_file

CELLS = ("default", "LSTM", "GRU", "STAR")
SETS = ("ArrowHead", "BasicMotions", "GunPoint", "ItalyPowerDemand", "JapaneseVowels")
GRID: list[dict[str, Any]] = [{"rate": rate, "readout": readout} for rate, readout in product((3e-3, 1e-2), ("last", "pooled"))]


def read(name: str, part: str) -> tuple[list[Any], Any]:
    """The sequences, [T, channels] each, and the labels."""
    (path,) = (store.root() / "UCR" / name).glob(f"{name}_{part}.*")
    table = read_file(path, Columns())
    return list(table.X), np.asarray(table.y)


def crossed(setting: dict[str, Any], X: list[Any], y: Any, folds: int) -> float:
    """Mean accuracy over the folds of the training rows."""
    scores = []
    for train, held_out in StratifiedKFold(folds, shuffle=True, random_state=0).split(np.zeros(len(y)), y):
        model = RecurrentClassifier(**setting).fit([X[i] for i in train], y[train])
        scores.append(model.score([X[i] for i in held_out], y[held_out]))
    return float(np.mean(scores))


def main(sets: tuple[str, ...] = SETS, cells: tuple[str, ...] = CELLS, seeds: int = 3, folds: int = 3) -> None:
    """Score the classifiers.

    Args:
        sets: Names of folders in UCR.
        cells: Cells to tune, and "default".
        seeds: Trainings per cell on the whole training file.
        folds: Of the cross-validation.
    """
    for name in sets:
        (X, y), (X_test, y_test) = read(name, "TRAIN"), read(name, "TEST")
        for cell in cells:
            began = perf_counter()
            named: dict[str, Any] = {} if cell == "default" else {"cell": cell}
            grid = [{}] if cell == "default" else GRID
            tried = [(crossed({**named, **setting}, X, y, folds), setting) for setting in grid]
            chosen = max(tried, key=lambda pair: pair[0])[1]
            models = [RecurrentClassifier(random_state=seed, **named, **chosen).fit(X, y) for seed in range(seeds)]
            scores = [model.score(X_test, y_test) for model in models]
            line = {
                "set": name,
                "cell": cell,
                "chosen": chosen,
                "tried": tried,
                "test": scores,
                "mean": float(np.mean(scores)),
                "seconds": perf_counter() - began,
                "about": machine.about(f"python benchmarks/ucr.py --cells {cell}"),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
