"""Rows of the incremental RNN's tables that we missed, at settings that remove a likely cause of the miss.

Each row is held against the published number of the row that it repeats. Its setting is ours and was found after the test
score of the earlier row was known, so it is marked; within a row validation chooses, never the test.

    words                    the published start has ||P U|| near 8 at 256 units, and eta = 0.01 moves the state by a hundredth
                             of what a word asks for: V, H ~ N(0, 0.01^2) and eta = 0.5
    noisy, FastRNN           at its authors' start the state of step 28 is multiplied by beta^972 = 1e-20: beta = 0.999
    noisy, Antisymmetric     at epsilon = 0.1 the cell adds up noise: a smaller epsilon
    noisy, ours              eta = 0.01 gives eta K T = 30 at K = 3, where skew modes grow: eta = 2 / (K T), which learns slowly
    HAR-2                    fewer epochs, means per step, and a choice by five folds of people, with a seed each
    pixel, LSTM              its loss is flat for the first thousands of steps: chrono initialisation
    copying                  one inner step, and eta = 4 / (K T)
"""

import math
from dataclasses import replace
from typing import Any

from unfading.papers.incremental.runs import RATES, STABLE_RATES, baseline, incremental, stable
from unfading.papers.incremental.tables import EPOCHS, SENSOR_PUBLISHED, SENSOR_SIGMOID, STANDARD
from unfading.papers.row import Row, two_sigma
from unfading.tasks.sensors import FOLDS
from unfading.training.run import Run

IMAGES = 10_000  # test rows of MNIST and of CIFAR
T = 1_000  # of the noisy images
NOISY = {
    "noisy_mnist": ("noisy MNIST", {"FastRNN": 98.12, "Antisymmetric": 97.76, "iRNN": 98.48}),
    "noisy_cifar": ("noisy CIFAR", {"FastRNN": 45.76, "Antisymmetric": 48.63, "iRNN": 54.50}),
}


def causes() -> list[Row]:
    """Rows that were missed, each at a setting that removes a likely cause."""
    return [*_words(), *_noisy(), *_sensors(), _pixel_lstm(), *_copying()]


def _row(name: str, run: Run, published: float, note: str, **own: Any) -> Row:
    fields = {"tolerance": two_sigma(published, own.pop("rows", IMAGES)), "retrain": True, **own}
    return Row(run, published, note=f"our setting: {note}", name=name, changed_after_test="the setting is new", **fields)


def _words() -> list[Row]:
    """Penn Treebank by words, with Adam and with gradient descent, and an LSTM at the same settings."""
    cells: dict[str, tuple[str, dict[str, Any], float]] = {
        "iRNN K=1, rank 15, eta 0.5, std 0.01": (
            "IncrementalRNN", {"inner_steps": 1, "rank": 15, "steps": 300, "eta": 0.5, "std": 0.01}, 115.71,
        ),
        "LSTM": ("LSTM", {}, 117.41),
    }  # fmt: skip
    optimisers: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
        "": ({}, (1e-3, 3e-3)),
        ", SGD": ({"optimiser": "sgd", "clip_norm": 5.0}, (1.0, 4.0)),
    }
    dropouts: list[dict[str, Any]] = [{"carry": True, "dropout": share} for share in (0.3, 0.5)]
    note = "batch 20, carried state and dropout; held within 5 %"
    rows = []
    for name, (cell, options, published) in cells.items():
        rates = {"eta": 0.1} if "eta" in options else {}
        for label, (fields, grid) in optimisers.items():
            run = baseline(cell, "ptb_words", dropouts[0], options, hidden=256, batch=20, epochs=40, rates=rates, **fields)
            own: dict[str, Any] = {"unit": "perplexity", "tolerance": round(0.05 * published, 2), "retrain": False}
            choices = tuple({"task_options": each} for each in dropouts)
            rows.append(_row(f"words {name}{label}", run, published, note, rates=grid, choices=choices, **own))
    return rows


def _noisy() -> list[Row]:
    rows = []
    for task, (label, published) in NOISY.items():
        fast = baseline("FastRNN", task, {}, {"alpha": 0.02, "beta": 0.999, "activation": "relu"}, epochs=EPOCHS)
        note = "ReLU, and a start that remembers 1,000 steps"
        rows.append(_row(f"{label} FastRNN, alpha 0.02, beta 0.999", fast, published["FastRNN"], note, rates=RATES))
        skew = baseline("AntisymmetricRNN", task, {}, {"epsilon": 0.01, "gamma": 0.01}, epochs=EPOCHS)
        grid = tuple({"cell_options": {"epsilon": e, "gamma": g}} for e in (0.001, 0.01) for g in (0.01, 0.1))
        note = "epsilon 0.001 or 0.01, gamma 0.01 or 0.1"
        own: dict[str, Any] = {"rates": RATES, "choices": grid}
        rows.append(_row(f"{label} Antisymmetric, small epsilon", skew, published["Antisymmetric"], note, **own))
        for K in (1, 3):
            ours = stable(task, {}, T=T, K=K, rank=8, eta=round(2 / (K * T), 6), epochs=EPOCHS)
            ours = replace(ours, rates={"eta": 0.02})
            note = "the stable form with eta = 2 / (K T) and a fiftieth of the rate for eta"
            own = {"rates": STABLE_RATES, "seeds": 5}
            rows.append(_row(f"{label} ours K={K}, eta 2 / (K T)", ours, published["iRNN"], note, **own))
    return rows


def _sensors() -> list[Row]:
    """HAR-2 with ReLU and with sigmoid."""
    choices = tuple(
        {"epochs": epochs, "task_options": {"normalise": normalise}}
        for normalise in ("channel", "step")
        for epochs in (5, 10, 30, 100)
    )
    judges = tuple({"seed": fold, "task_options": {"validation": fold}} for fold in range(FOLDS))
    note = "chosen by five folds of people, among 5 to 100 epochs and means per channel or per step"
    own: dict[str, Any] = {"rates": (3e-3, 1e-2), "choices": choices, "judges": judges, "seeds": 5, "rows": 2_947}
    rows = []
    for activation in ("relu", "sigmoid"):
        for K in (1, 3, 5):
            published = SENSOR_PUBLISHED["har2"][f"K={K}"][0] if activation == "relu" else SENSOR_SIGMOID[K][0]
            run = incremental("har2", {}, T=128, K=K, rank=20, hidden=80, epochs=100, activation=activation)
            rows.append(_row(f"HAR-2 iRNN K={K}, {activation}, by people", run, published, note, **own))
    return rows


def _pixel_lstm() -> Row:
    run = baseline("LSTM", "pixel_mnist", STANDARD, {"max_lag": 784}, epochs=EPOCHS)
    return _row("pixel LSTM, chrono", run, 97.81, "chrono initialisation for lags up to 784", rates=(1e-3, 3e-3, 1e-2))


def _copying() -> list[Row]:
    rows = []
    for lag in (200, 500):
        guess = 10 * math.log(8) / (lag + 20)
        run = incremental(
            "copying", {"T": lag}, T=lag + 20, K=1, rank=16, eta=round(4 / lag, 5), steps=20_000,
            stop_at=round(0.05 * guess, 6),
        )  # fmt: skip
        note = f"K = 1 and eta = 4 / (K T); cross entropy under a tenth of a guess ({guess:.4f}) in 3 of 5 seeds"
        own: dict[str, Any] = {"unit": "error", "tolerance": 0.1 * guess, "retrain": False, "seeds": 5, "share": 0.6}
        rows.append(_row(f"copying {lag} iRNN K=1, eta 4 / (K T)", run, 0.0, note, rates=(3e-3, 6e-3), **own))
    return rows
