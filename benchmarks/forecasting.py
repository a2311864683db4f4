"""Forecast a person's walk one second ahead: `python benchmarks/forecasting.py --cells STAR LSTM -o backtest.png`

The series is the vertical acceleration of the trunk on a treadmill, 25 samples a second for five minutes (dataset `dsa`,
activity 10). The first four minutes train and validate, and the last minute is forecast, each second from the three before it.
The season, one step of the walk, is the lag of the largest autocorrelation in the first four minutes.
"""

from pathlib import Path
from time import perf_counter

import numpy as np
import tyro
from numpy.typing import NDArray

from unfading.data import store
from unfading.estimators import RecurrentForecaster

RATE = 25  # samples a second
TRAINING = 240 * RATE
LAGS = range(RATE // 2, 2 * RATE)  # of one step or of two, at any pace


def walk(person: int) -> NDArray[np.float64]:
    """The acceleration, [7500]; the files hold five seconds each, consecutive in time."""
    files = [store.path("dsa", f"a10/p{person}/s{segment:02d}.txt") for segment in range(1, 61)]
    return np.concatenate([np.loadtxt(file, delimiter=",", usecols=0) for file in files])


def season_of(series: NDArray[np.float64]) -> int:
    """The lag of the largest autocorrelation."""
    centred = series - series.mean()
    return max(LAGS, key=lambda lag: float((centred[lag:] * centred[:-lag]).mean()))


def main(
    cells: tuple[str, ...] = ("STAR", "LSTM"), person: int = 1, epochs: int = 20, seed: int = 0, output: Path | None = None
) -> None:
    """Train each cell and print its scores beside the naive ones.

    Args:
        cells: Names of layers.
        person: 1 to 8.
        epochs: Largest number of epochs.
        seed: Seed of weights and order.
        output: Write the backtest of the first cell: .html, .png or .svg.
    """
    series = walk(person)
    season = season_of(series[:TRAINING])
    print(f"person {person}, season of {season} samples")
    for i, cell in enumerate(cells):
        began = perf_counter()
        model = RecurrentForecaster(
            cell, horizon=RATE, context=3 * RATE, season=season, hidden=64, epochs=epochs, random_state=seed
        ).fit(series[:TRAINING])
        result = model.backtest(series)
        print(f"{result}\n{len(result.target)} windows; {model.record_['steps']:,} steps in {perf_counter() - began:.0f} s")
        if i == 0 and output is not None:
            result.save(output)


if __name__ == "__main__":
    tyro.cli(main)
