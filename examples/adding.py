"""Train four cells on a short adding problem and print their learning curves.

Each sequence has T pairs (value in [0, 1], mark). Two steps are marked, one in each half; the answer, due after the last
step, is the sum of their values. Always answering 1 gives a mean squared error of 1/6; less than that takes memory.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

import unfading
from unfading import Model, Recurrent
from unfading.tasks import Adding

T, BATCH, HIDDEN, STEPS = 40, 64, 64, 500
CLIP, SEED = 1.0, 1
TASK = Adding(T)


class Contestant(NamedTuple):
    rate: float  # the better of a few tried on this task with two seeds
    make: Callable[[], Recurrent]


# NRU with the averaged heads of its authors' code: as printed, summed, its error leaps up on the way at this rate.
CONTESTANTS = {
    "IncrementalRNN": Contestant(4e-3, lambda: unfading.IncrementalRNN(2, HIDDEN, inner_steps=1, steps=T)),
    "STAR": Contestant(8e-3, lambda: unfading.STAR(2, HIDDEN, max_lag=T)),
    "NRU": Contestant(4e-3, lambda: unfading.NRU.released(2, HIDDEN, memory_size=16)),
    "LSTM": Contestant(1e-2, lambda: unfading.LSTM(2, HIDDEN)),
}


class Outcome(NamedTuple):
    name: str
    curve: list[float]  # mean squared error of each training batch, all of them fresh
    test: float
    parameters: int
    seconds: float


def train(name: str) -> Iterator[float | Outcome]:
    """Yield the error of every step, then the outcome."""
    rate, make = CONTESTANTS[name]
    torch.manual_seed(SEED)
    rnn = make()
    model = Model(TASK.encoder(), rnn, TASK.head(rnn.output_size))
    # The step sizes of the incremental RNN are small numbers; a tenth of the rate keeps them so.
    step_sizes = [p for key, p in model.named_parameters() if key.endswith("eta")]
    others = [p for key, p in model.named_parameters() if not key.endswith("eta")]
    groups: list[dict[str, Any]] = [{"params": others, "lr": rate}, {"params": step_sizes, "lr": rate / 10}]
    optimiser = torch.optim.Adam(groups)
    curve, began = [], time.perf_counter()
    for index in range(STEPS):
        batch = TASK.batch(index, BATCH, split="train", seed=SEED, device="cpu")
        loss = TASK.loss(model(batch.x)[0], batch)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        curve.append(loss.item())
        yield curve[-1]
    seconds = time.perf_counter() - began
    with torch.no_grad():
        batch = TASK.batch(0, 1000, split="test", seed=SEED, device="cpu")
        test = TASK.loss(model(batch.x)[0], batch).item()
    yield Outcome(name, curve, test, sum(p.numel() for p in model.parameters()), seconds)


def chart(outcome: Outcome, columns: int = 56) -> str:
    """The curve as a row of blocks, one per stretch of training; a full block is the error of a guess."""
    blocks = " ▁▂▃▄▅▆▇█"
    width = len(outcome.curve) / columns
    means = []
    for column in range(columns):
        stretch = outcome.curve[int(column * width) : int((column + 1) * width)]
        means.append(sum(stretch) / len(stretch))
    return "".join(blocks[min(8, max(0, round(8 * mean / TASK.guess)))] for mean in means)


def main() -> None:
    torch.set_num_threads(1)
    console = Console()
    console.print(f"Adding problem: T = {T}, hidden size {HIDDEN}, batch {BATCH}, {STEPS} steps, seed {SEED}", highlight=False)
    outcomes = []
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("error {task.fields[error]:.4f}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console, refresh_per_second=4) as progress:
        for name in CONTESTANTS:
            task = progress.add_task(name, total=STEPS, error=float("nan"))
            for news in train(name):
                if isinstance(news, Outcome):
                    outcomes.append(news)
                else:
                    progress.update(task, advance=1, error=news)
    console.print(f"\nError over training: a full block is the guesser's {TASK.guess:.3f}, an empty one zero.", highlight=False)
    for outcome in outcomes:
        console.print(f"{outcome.name:<16}{chart(outcome)}", highlight=False)
    table = Table(
        "cell", "rate", "test error", "of a guess", "parameters", "seconds", title="\nAfter training, on 1,000 fresh sequences"
    )
    for outcome in sorted(outcomes, key=lambda o: o.test):
        share = f"{outcome.test / TASK.guess:.1%}"
        table.add_row(
            outcome.name,
            f"{CONTESTANTS[outcome.name].rate:g}",
            f"{outcome.test:.5f}",
            share,
            f"{outcome.parameters:,}",
            f"{outcome.seconds:.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
