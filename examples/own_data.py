"""Train on your own data, windows of a CSV file with one class each: `python examples/own_data.py`

The class `Sensor` defines the task. The command line can train it too:

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
    """Detect a faulty machine from its vibration. Columns: x, y, z, label. Each window of T rows has one class."""

    file: str = "sensor.csv"
    T: int = 64

    input_size = 3
    classes = 2
    paper = "own"

    def examples(self, part: Part) -> Examples:
        table = torch.tensor(np.loadtxt(self.file, delimiter=",", skiprows=1), dtype=torch.float32)
        windows = table[: len(table) // self.T * self.T].unflatten(0, (-1, self.T))  # [N, T, 4]
        cut = len(windows) * 4 // 5  # the last fifth, in time, is the test set
        rows = windows[:cut] if part == "train" else windows[cut:]
        return Examples(rows[:, :, :3], rows[:, -1, 3].long())


def write_example(path: Path, minutes: int = 40) -> None:
    """Write a synthetic sensor: each window has an early knock in x, positive if the machine is faulty, else negative."""
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
        f"test accuracy {record['test']['accuracy']:.3f}; a guess: {record['guess']:.3f}; the run is in runs/sensor/{run.key}"
    )


if __name__ == "__main__":
    main()
