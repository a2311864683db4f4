"""A step of training captured once as a CUDA graph, and replayed: the host hands over batches, and the GPU does the rest.

A step launches some hundred kernels, and a host takes longer to launch them than a GPU to run them. All that changes from step
to step are tensors beside the models, at fixed places: batches, the number of the step, the rates, and who still moves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unfading.tasks.base import Batch
from unfading.training.active_run import Member
from unfading.training.fleet import Fleet
from unfading.training.update import Update

# Rates are handed over for so many steps at a time: each time the host waits.
AHEAD = 1024
# Steps that run as they are before one is captured: until then kernels are compiled, and libraries make their room.
FIRST = 3


class Clock:
    """The number of the next step and its rates, on the device of the models.

    Args:
        members: whose rates they are.
        device: a GPU.
    """

    def __init__(self, members: Sequence[Member], device: torch.device):
        self.members = members
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.table = torch.zeros(AHEAD, len(members), 1, dtype=torch.float64, device=device)
        self.block: int | None = None  # which steps the table is of
        self.at: int | None = None  # what `step` is, as far as the host knows
        self.moving = torch.ones(len(members), 1, dtype=torch.bool, device=device)
        self._running = list(range(len(members)))

    def set(self, step: int, running: list[int]) -> None:
        """This step is next, for these."""
        if step // AHEAD != self.block:
            self.block = step // AHEAD
            steps = range(self.block * AHEAD, (self.block + 1) * AHEAD)
            rates = [[[m.rate(min(index, m.total - 1))] for m in self.members] for index in steps]
            self.table.copy_(torch.tensor(rates, dtype=torch.float64))
        if step != self.at:
            self.step.fill_(step)
            self.at = step
        if running != self._running:
            self._running = running
            self.moving.copy_(torch.tensor([[e in running] for e in range(len(self.members))]))

    def tick(self) -> None:
        """On the device: the step is taken."""
        self.step += 1

    def rates(self) -> Tensor:
        """Of the next step, [E, 1] float64."""
        return self.table.index_select(0, (self.step % AHEAD).reshape(1)).squeeze(0)


class Captured:
    """Steps of a fleet whose batches have one shape and carry no state.

    Args:
        fleet: what is trained.
        update: its optimisers.
        clock: the number of the step.
        truncate: as `Model` takes it.
    """

    def __init__(self, fleet: Fleet, update: Update, clock: Clock, truncate: int | None):
        self.fleet, self.update, self.clock, self.truncate = fleet, update, clock, truncate
        self.batches: list[Batch] = []  # where the graph reads them
        self.graph: torch.cuda.CUDAGraph | None = None
        self.steps = 0
        self.trouble: str | None = None  # why no step could be captured

    def step(self, batches: Sequence[Batch]) -> None:
        """Take one."""
        if not self.batches:
            self.batches = [Batch(*(None if part is None else part.clone() for part in batch)) for batch in batches]  # type: ignore[arg-type]
        self.clock.at = None if self.clock.at is None else self.clock.at + 1
        if not self._fits(batches):
            self._run(batches)
            return
        for mine, given in zip(self.batches, batches, strict=True):
            for to, part in zip(mine, given, strict=True):
                if to is not None and part is not None:
                    to.copy_(part)
        self.steps += 1
        if self.graph is None and self.steps > FIRST and self.trouble is None:
            self._capture()
        if self.graph is None:
            self._run(self.batches)
        else:
            self.graph.replay()
            self.update.failed = True

    def _run(self, batches: Sequence[Batch]) -> None:
        losses, _ = self.fleet.gradients(batches, None, 0, self.truncate)
        self.update.apply(losses, self.clock.rates(), self.clock.step, self.clock.moving)
        self.clock.tick()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()  # a graph has memory of its own, and what the first steps had is free now
        try:
            with torch.cuda.graph(graph):
                self._run(self.batches)
        except RuntimeError as error:  # something in the step waits for the GPU, or there is no memory for a graph beside it
            self.trouble = str(error).splitlines()[0]
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return
        self.graph = graph

    def _fits(self, batches: Sequence[Batch]) -> bool:
        """Whether they are as the first were, and have no lengths, at which the host looks."""
        return all(
            _form(mine) == _form(given) and given.lengths is None for mine, given in zip(self.batches, batches, strict=True)
        )


def _form(batch: Batch) -> list[tuple[torch.Size, torch.dtype] | None]:
    return [None if part is None else (part.shape, part.dtype) for part in batch]
