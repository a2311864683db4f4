"""Your own data: windows of a sensor's CSV, each with a class. `python examples/own_data.py`

The class `Sensor` is all it takes; the command line trains it too:

    unfading compare --task examples/own_data.py:Sensor,file=sensor.csv --cells STAR LSTM --hidden 32 --epochs 5
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import unfading
from unfading import Run
from unfading.tasks.resident import Examples, Labelled, Part


@dataclass(frozen=True)
class Sensor(Labelled):
    """Whether a machine runs badly, from its vibration: columns x, y, z, label; one class for each window of T rows."""

    file: str = "sensor.csv"
    T: int = 64

    input_size = 3
    classes = 2
    paper = "own"

    def examples(self, part: Part) -> Examples:
        table = torch.tensor(np.loadtxt(self.file, delimiter=",", skiprows=1), dtype=torch.float32)
        windows = table[: len(table) // self.T * self.T].unflatten(0, (-1, self.T))  # [N, T, 4]
        cut = len(windows) * 4 // 5  # the last fifth in time is the test
        rows = windows[:cut] if part == "train" else windows[cut:]
        return Examples(rows[:, :, :3], rows[:, -1, 3].long())


def write_example(path: Path, minutes: int = 40) -> None:
    """A made-up sensor: early in each window a knock in x, one way if the machine runs badly and the other way if not."""
    draw = np.random.default_rng(0)
    table = 0.3 * draw.standard_normal((minutes * 1024, 4))
    for window in range(len(table) // 64):
        rows = table[window * 64 : (window + 1) * 64]
        rows[:, 3] = draw.integers(2)
        rows[draw.integers(8), 0] += 3.0 if rows[0, 3] else -3.0
    np.savetxt(path, table, delimiter=",", header="x,y,z,label", comments="", fmt="%.3f")


def main() -> None:
    torch.set_num_threads(1)
    file = Path("sensor.csv")
    if not file.exists():
        write_example(file)
    run = Run(
        task=f"{Path(__file__).resolve()}:Sensor",
        task_options={"file": str(file)},
        cell="STAR",
        cell_options={"max_lag": 64},
        hidden=32,
        batch=16,
        rate=5e-3,
        epochs=15,
    )
    record = unfading.train(run, "runs/sensor", again=True)
    print(
        f"test accuracy {record['test']['accuracy']:.3f}, a guess has {record['guess']:.3f}; all of it in runs/sensor/{run.key}"
    )


if __name__ == "__main__":
    main()
