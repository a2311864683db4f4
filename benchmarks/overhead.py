"""What the training loop costs beside the bare work: `python benchmarks/overhead.py`.

A step of `train` (draw the batch, forward, backward, look whether all is finite, clip, Adam, curve) and forward + backward +
torch.optim.Adam on one batch that is there already, in turns, step by step; one thread, medians. Evaluations are not counted.
What `--watch gradients` adds is its own median beside that of a hundred steps, between which it stands.
"""

import statistics
import time
from collections.abc import Callable

import torch

from unfading import Run
from unfading.diagnostics.watch import gradients
from unfading.training.active_run import Member
from unfading.training.loop import WATCHED_EVERY, Training

CELLS = ("STAR", "LSTM", "IncrementalRNN")
STEPS = 300


def bare(run: Run) -> Callable[[], None]:
    """A step without a loop around it."""
    task, model = run.make_task(), run.make_model()
    batch = task.batch(0, run.batch, split="train", seed=0, device="cpu")
    optimiser = torch.optim.Adam(model.parameters(), lr=run.rate)

    def step() -> None:
        optimiser.zero_grad()
        task.loss(model(batch.x)[0], batch).backward()
        optimiser.step()

    return step


def trained(run: Run) -> Callable[[], None]:
    """A step of `train`, with a listener."""
    training = Training([Member(run, run.make_task())], lambda moment: None, 60.0, "", together=False)
    training.fleet.train()
    return lambda: training.advance([0])


def watched(run: Run) -> Callable[[], None]:
    """A look of the watch, with its batch."""
    task, model = run.make_task(), run.make_model()

    def look() -> None:
        gradients(model, task, task.batch(0, run.batch, split="train", seed=0, device="cpu"))

    return look


def main() -> None:
    torch.set_num_threads(1)
    for cell in CELLS:
        run = Run(task="adding", task_options={"T": 200}, cell=cell, hidden=64, batch=32, steps=10**6, valid_every=10**6)
        steps = (bare(run), trained(run), watched(run))
        times: tuple[list[float], ...] = ([], [], [])
        for _ in range(STEPS):
            for step, taken in zip(steps, times, strict=True):
                began = time.perf_counter()
                step()
                taken.append(time.perf_counter() - began)
        alone, loop, look = (statistics.median(taken[STEPS // 10 :]) for taken in times)
        share = look / (WATCHED_EVERY * loop)
        print(
            f"{cell:16} bare {1e3 * alone:6.2f} ms, train {1e3 * loop:6.2f} ms: {loop / alone:.3f} x; "
            f"watching {1e3 * look:6.2f} ms, {share:.1%} of training"
        )


if __name__ == "__main__":
    main()
