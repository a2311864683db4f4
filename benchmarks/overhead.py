"""Measure the overhead of the training loop: `python benchmarks/overhead.py`.

A step of `train` (draw the batch, forward, backward, check that all is finite, clip, Adam, log) and a bare step (forward,
backward, torch.optim.Adam on a fixed batch) are timed alternately on one thread; the results are medians. Evaluations are not
counted. The cost of `--watch gradients` is its own median as a share of a hundred steps, after which it is called.
"""

import statistics
import time
from collections.abc import Callable

import torch

from unfading import Run
from unfading.diagnostics.watch import gradients
from unfading.training.active_run import ActiveRun
from unfading.training.loop import Training
from unfading.training.monitor import WATCH_EVERY
from unfading.training.options import TrainOptions

CELLS = ("STAR", "LSTM", "IncrementalRNN")
STEPS = 300


def bare(run: Run) -> Callable[[], None]:
    """A bare step, without the training loop."""
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
    options = TrainOptions(listen=lambda update: None)
    training = Training([ActiveRun(run, run.make_task())], options, together=False)
    training.state.fleet.train()
    return lambda: training.advance([0])


def watched(run: Run) -> Callable[[], None]:
    """One measurement of the gradients, with its batch."""
    task, model = run.make_task(), run.make_model()

    def watch() -> None:
        gradients(model, task, task.batch(0, run.batch, split="train", seed=0, device="cpu"))

    return watch


def main() -> None:
    torch.set_num_threads(1)
    for cell in CELLS:
        run = Run(task="adding", task_options={"T": 200}, cell=cell, hidden=64, batch=32, steps=10**6, valid_every=10**6)
        steps = (bare(run), trained(run), watched(run))
        times: tuple[list[float], ...] = ([], [], [])
        for _ in range(STEPS):
            for step, durations in zip(steps, times, strict=True):
                start = time.perf_counter()
                step()
                durations.append(time.perf_counter() - start)
        bare_time, loop_time, watch_time = (statistics.median(durations[STEPS // 10 :]) for durations in times)
        share = watch_time / (WATCH_EVERY * loop_time)
        print(
            f"{cell:16} bare {1e3 * bare_time:6.2f} ms, train {1e3 * loop_time:6.2f} ms: {loop_time / bare_time:.3f} x; "
            f"watching {1e3 * watch_time:6.2f} ms, {share:.1%} of training"
        )


if __name__ == "__main__":
    main()
