"""A training step captured once as a CUDA graph and replayed: the host copies the batches, and the GPU does the rest.

A step launches some hundred kernels, and the host takes longer to launch them than the GPU to run them. All that changes from
step to step lies in tensors at fixed addresses on the GPU: the batches, the step number, the learning rates, and which models
still move.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from unfading.backends.cuda_graph.backend import forget
from unfading.fuse.triton.waiting import check_waiting
from unfading.tasks.base import Batch
from unfading.training.active_run import ActiveRun
from unfading.training.data_parallel import ALONE, Processes
from unfading.training.fleet import Fleet
from unfading.training.update import Update

# Learning rates are sent to the GPU for so many steps at a time, because the host waits each time.
RATES_AHEAD = 1024
# Steps that run before one is captured; they compile kernels and let libraries allocate their workspaces.
WARM_UP = 3


class StepClock:
    """The step number and the learning rates, on the GPU.

    Args:
        active: the runs that are trained.
        device: a GPU.
    """

    def __init__(self, active: Sequence[ActiveRun], device: torch.device):
        self.active = active
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.table = torch.zeros(RATES_AHEAD, len(active), 1, dtype=torch.float64, device=device)
        self.block: int | None = None  # the table holds rates of steps from block * RATES_AHEAD
        self.at: int | None = None  # the value of `step`, as far as the host knows
        self.moving = torch.ones(len(active), 1, dtype=torch.bool, device=device)
        self._running = list(range(len(active)))

    def set(self, step: int, running: list[int]) -> None:
        """Prepare for the step number `step`, which these runs take."""
        if step // RATES_AHEAD != self.block:
            self.block = step // RATES_AHEAD
            steps = range(self.block * RATES_AHEAD, (self.block + 1) * RATES_AHEAD)
            rates = [[[each.rate(min(index, each.total - 1))] for each in self.active] for index in steps]
            self.table.copy_(torch.tensor(rates, dtype=torch.float64))
        if step != self.at:
            self.step.fill_(step)
            self.at = step
        if running != self._running:
            self._running = running
            self.moving.copy_(torch.tensor([[e in running] for e in range(len(self.active))]))

    def tick(self) -> None:
        """Count a step, on the GPU."""
        self.step += 1

    def rates(self) -> Tensor:
        """Learning rates of the next step, [E, 1] float64."""
        return self.table.index_select(0, (self.step % RATES_AHEAD).reshape(1)).squeeze(0)


class CapturedStep:
    """Takes steps of a fleet whose batches have one shape and carry no state.

    Args:
        fleet: the models.
        update: their optimisers.
        clock: step number and rates.
        truncate: as `Model` takes it.
        say: called with a message for the user.
        processes: those that share each batch.
    """

    def __init__(
        self,
        fleet: Fleet,
        update: Update,
        clock: StepClock,
        truncate: int | None,
        say: Callable[[str], None],
        processes: Processes = ALONE,
    ):
        self.fleet, self.update, self.clock, self.truncate, self.say = fleet, update, clock, truncate, say
        self.processes = processes
        self.batches: list[Batch] = []  # the tensors from which the graph reads
        self.shares: Tensor | None = None  # of the own rows in the losses, where processes share batches
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.stream: torch.cuda.Stream | None = None  # of the steps before the capture
        self.steps = 0
        self.trouble: str | None = None  # why no step could be captured

    def step(self, batches: Sequence[Batch], shares: Tensor | None = None) -> None:
        """Take one step.

        Args:
            batches: the own rows of each model's batch.
            shares: their weights [E, 1] in the losses; None for one process.
        """
        if not self.batches:
            self.batches = [Batch(*(None if part is None else part.clone() for part in batch)) for batch in batches]  # type: ignore[arg-type]
        if shares is not None:
            self.shares = shares.clone() if self.shares is None else self.shares.copy_(shares)
        self.clock.at = None if self.clock.at is None else self.clock.at + 1
        if not self._fits(batches):
            self._run(batches)
            return
        for own, new in zip(self.batches, batches, strict=True):
            for target, part in zip(own, new, strict=True):
                if target is not None and part is not None:
                    target.copy_(part)
        self.steps += 1
        if not self.graphs and self.steps > WARM_UP and self.trouble is None:
            self._capture()
        if not self.graphs:
            self._warm_up()
        else:
            self._replay()
            check_waiting()
            self.update.failed = True

    def _run(self, batches: Sequence[Batch]) -> None:
        self._gradients(batches)
        self.processes.sum(self.fleet.sums)
        self._update()

    def _gradients(self, batches: Sequence[Batch]) -> None:
        losses, _ = self.fleet.gradients(batches, None, 0, self.truncate)
        if self.shares is None:
            self.fleet.losses.copy_(losses)
        else:
            self.processes.weigh(self.fleet, losses, self.shares)

    def _update(self) -> None:
        self.update.apply(self.fleet.losses, self.clock.rates(), self.clock.step, self.clock.moving)
        self.clock.tick()

    def _replay(self) -> None:
        """One graph is a step of one process; of two, the first computes gradients, which the host lets all processes sum."""
        self.graphs[0].replay()
        for graph in self.graphs[1:]:
            self.processes.sum(self.fleet.sums)
            graph.replay()

    def _warm_up(self) -> None:
        """Take a step on another stream. Kernels that only a capture uses are compiled there, as for a deep stack."""
        caller = torch.cuda.current_stream()
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            self._run(self.batches)
        caller.wait_stream(self.stream)

    def _capture(self) -> None:
        parts: list[Callable[[], None]] = [partial(self._run, self.batches)]
        if self.processes.size > 1:
            parts = [partial(self._gradients, self.batches), self._update]
        graphs = [torch.cuda.CUDAGraph() for _ in parts]
        for model in self.fleet.models:  # the recordings of single layers, which the first steps made and the graph replaces
            for cell in model.rnn.runners:
                forget(cell)
        torch.cuda.empty_cache()  # a graph has its own memory pool, and the memory of the first steps is free now
        try:
            for graph, part in zip(graphs, parts, strict=True):
                with torch.cuda.graph(graph):
                    part()
        except RuntimeError as error:  # the step synchronises with the GPU, or a graph does not fit in memory beside it
            self.trouble = str(error).splitlines()[0]
            self.say(
                f"Steps of {self.clock.active[0].run.cell} cannot be captured as a CUDA graph; the host launches every kernel, "
                f"which is slower: {self.trouble}"
            )
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return
        self.graphs = graphs

    def _fits(self, batches: Sequence[Batch]) -> bool:
        """Whether the batches have the shapes of the first ones, and no lengths, which the host would have to read."""
        return all(_form(own) == _form(new) and new.lengths is None for own, new in zip(self.batches, batches, strict=True))


def _form(batch: Batch) -> list[tuple[torch.Size, torch.dtype] | None]:
    return [None if part is None else (part.shape, part.dtype) for part in batch]
