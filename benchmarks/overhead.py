"""What the training loop costs beside the bare work: `python benchmarks/overhead.py`.

A step of `train` (draw the batch, forward, backward, clip, Adam, look whether all is finite) against forward + backward +
torch.optim.Adam on one batch that is there already; one thread, in turns, medians.
"""

import statistics
import tempfile
import time

import torch

import unfading
from unfading.run import Run

CELLS = ("STAR", "LSTM", "IncrementalRNN")
STEPS, ROUNDS = 60, 7


def bare(run: Run) -> float:
    """Seconds of a step without a loop around it."""
    task, model = run.make_task(), run.make_model()
    batch = task.batch(0, run.batch, split="train", seed=0, device="cpu")
    optimiser = torch.optim.Adam(model.parameters(), lr=run.rate)

    def step() -> None:
        optimiser.zero_grad()
        task.loss(model(batch.x)[0], batch).backward()
        optimiser.step()

    step()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - began) / STEPS


def trained(run: Run) -> float:
    """Seconds of a step of `train`, by its own account, with files written and a listener."""
    with tempfile.TemporaryDirectory() as folder:
        record = unfading.train(run, folder, listen=lambda moment: None)
    return float(record["seconds"]) / STEPS


def main() -> None:
    torch.set_num_threads(1)
    for cell in CELLS:
        run = Run(task="adding", task_options={"T": 200}, cell=cell, hidden=64, batch=32, steps=STEPS, valid_batches=1)
        bare(run), trained(run)
        pairs = [(bare(run), trained(run)) for _ in range(ROUNDS)]
        ratio = statistics.median(t / b for b, t in pairs)
        print(f"{cell:16} bare {1e3 * statistics.median(b for b, _ in pairs):6.2f} ms  train {ratio:.3f} x")


if __name__ == "__main__":
    main()
