"""`RecurrentClassifier` on sets of the UCR and UEA archives: `python benchmarks/ucr.py --sets GunPoint ItalyPowerDemand`

The first row of a set is the classifier as it is, without any choice. The others are LSTM, GRU and STAR whose learning rate and
readout are chosen by cross-validation on the training file alone, by the mean accuracy over the folds. Each is then trained
on the training file with every seed and scored once on the test file. Prints one JSON line per set and cell.
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

SETS = ("ArrowHead", "BasicMotions", "GunPoint", "ItalyPowerDemand", "JapaneseVowels")
GRID: list[dict[str, Any]] = [
    {"rate": rate, "readout": readout} for rate, readout in product((2e-3, 5e-3, 2e-2), ("mean", "last"))
]


def read(name: str, part: str) -> tuple[list[Any], Any]:
    """The sequences, [T, channels] each, and the labels."""
    (path,) = (store.root() / "UCR" / name).glob(f"{name}_{part}.*")
    table = read_file(path, Columns())
    return list(table.X), np.asarray(table.y)


def crossed(cell: str, setting: dict[str, Any], X: list[Any], y: Any, folds: int) -> float:
    """Mean accuracy over the folds of the training rows."""
    scores = []
    for train, held_out in StratifiedKFold(folds, shuffle=True, random_state=0).split(np.zeros(len(y)), y):
        model = RecurrentClassifier(cell, **setting).fit([X[i] for i in train], y[train])
        scores.append(model.score([X[i] for i in held_out], y[held_out]))
    return float(np.mean(scores))


def main(sets: tuple[str, ...] = SETS, seeds: int = 3, folds: int = 3) -> None:
    """Score the classifiers.

    Args:
        sets: Names of folders in UCR.
        seeds: Trainings per cell on the whole training file.
        folds: Of the cross-validation.
    """
    for name in sets:
        (X, y), (X_test, y_test) = read(name, "TRAIN"), read(name, "TEST")
        for cell in ("default", "LSTM", "GRU", "STAR"):
            began = perf_counter()
            tried = [] if cell == "default" else [(crossed(cell, setting, X, y, folds), setting) for setting in GRID]
            chosen: dict[str, Any] = max(tried, key=lambda pair: pair[0])[1] if tried else {}
            used = "STAR" if cell == "default" else cell
            models = [RecurrentClassifier(used, random_state=seed, **chosen).fit(X, y) for seed in range(seeds)]
            scores = [model.score(X_test, y_test) for model in models]
            line = {
                "set": name,
                "cell": cell,
                "chosen": chosen,
                "tried": tried,
                "test": scores,
                "mean": float(np.mean(scores)),
                "seconds": perf_counter() - began,
                "about": machine.about("python benchmarks/ucr.py"),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
