"""Training steps: draw the batches, compute gradients, update the parameters, carry the recurrent state."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading.tasks.base import Batch
from unfading.tasks.draw import stream
from unfading.training.captured_step import CapturedStep, StepClock
from unfading.training.check_task import Place, explain
from unfading.training.data_parallel import LostProcess
from unfading.training.training_state import TrainingState

# Of the steps before an error of a GPU, so many are examined.
MOST_STEPS = 1000


class Stepper:
    """Takes training steps.

    Args:
        state: of training; a step changes it.
        say: called with a message for the user.
    """

    def __init__(self, state: TrainingState, say: Callable[[str], None]):
        self.state = state
        self._sent: dict[str, tuple[list[Any], Tensor]] = {}
        self.say = say
        self.captured = self._make_captured_step()

    def _make_captured_step(self) -> CapturedStep | None:
        """What captures the steps on a GPU from now on."""
        state, device = self.state, self.state.fleet.w.device
        if device.type != "cuda":
            return None
        clock = StepClock(state.active, device)
        return CapturedStep(state.fleet, state.update, clock, state.active[0].run.truncate, self.say, state.processes)

    def take(self, running: list[int]) -> None:
        """Take one step with these runs, and count its time."""
        state, began = self.state, time.perf_counter()
        try:
            self._step(running)
            if state.fleet.w.is_cuda and any(each.log_due(state.step) for each in state.active):
                torch.cuda.synchronize()  # so that the seconds of a log row include all steps before it
        except LostProcess:
            raise
        except Exception as error:
            explain(error, state.task, state.fleet.models[0], self._places(error))
        state.seconds += time.perf_counter() - began

    def _places(self, error: Exception) -> list[Place]:
        """The batches at which an error may have happened. A GPU reports an error some steps later, at the next log row."""
        state = self.state
        late = state.active[0].log_every if isinstance(error, torch.AcceleratorError) else 0
        steps = range(max(0, state.step - min(late, MOST_STEPS)), state.step + 1)
        return [state.place(e, step) for step in steps for e in range(len(state.active))]

    def _step(self, running: list[int]) -> None:
        state, task, processes = self.state, self.state.task, self.state.processes
        step, run, device = state.step, state.active[0].run, state.fleet.w.device
        batches = [
            task.batch(step, each.run.batch, split=run.split, seed=each.run.seed, device=device) for each in state.active
        ]
        if not task.carried(step, run.batch, split=run.split):
            state.carried, state.time = None, 0
        # Like the data, noise depends on the seed and the step alone, and each process draws that of its own rows.
        purpose = f"noise {processes.rank}" if processes.rank else "noise"
        _seed_noise(stream(run.seed, run.split, step, "cpu", purpose=purpose).initial_seed(), device)
        own = [processes.rows(batch) for batch in batches]
        shares = self._shares(batches, own)
        carries = task.carried(step + 1, run.batch, split=run.split)
        if step == task.full_length_from > 0:  # a graph is of one length: the steps of the shorter batches are over
            before, self.captured = self.captured, self._make_captured_step()
            if before is not None and self.captured is not None:
                self.captured.trouble = before.trouble  # steps that could not be captured cannot be with longer sequences
        if self.captured is not None:
            self.captured.clock.set(step, running)
            if state.carried is None and not carries:
                self.captured.step(own, shares)
                state.step += 1
                return
        losses, final = state.fleet.gradients(own, state.carried, state.time, run.truncate)
        if shares is not None:
            processes.weigh(state.fleet, losses, shares)
            losses = processes.sum_gradients(state.fleet)
        rates = self._tensor("rates", [[each.rate(step)] for each in state.active], torch.float64)
        moving = self._tensor("moving", [[e in running] for e in range(len(state.active))], torch.bool)
        finite = state.update.apply(losses, rates, step, moving)
        state.step += 1
        if carries:
            state.carried = _pytree.tree_map_only(Tensor, lambda part: _zero_unless(finite, part), final)
            state.time += batches[0].x.shape[0]

    def _shares(self, batches: list[Batch], own: list[Batch]) -> Tensor | None:
        """The weights [E, 1] of the own rows in the losses of the batches; None for one process, which has them all."""
        processes = self.state.processes
        if processes.size == 1:
            return None
        shares = [[processes.share(self.state.task, *pair)] for pair in zip(batches, own, strict=True)]
        return self._tensor("shares", shares, torch.float64)

    def _tensor(self, name: str, values: list[Any], dtype: torch.dtype) -> Tensor:
        """The values as a tensor on the device; unchanged values are not sent again, so that the host does not wait."""
        if name not in self._sent or self._sent[name][0] != values:
            self._sent[name] = (values, torch.tensor(values, dtype=dtype, device=self.state.fleet.w.device))
        return self._sent[name][1]


def _seed_noise(seed: int, device: torch.device) -> None:
    # Not torch.manual_seed: while no GPU is in use it records a stack trace for each GPU, which takes half a millisecond.
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _zero_unless(finite: Tensor, part: Tensor) -> Tensor:
    """The states, [E, ...], with zeros for models whose numbers are not finite."""
    return torch.where(finite.reshape(-1, *[1] * (part.dim() - 1)), part, 0.0)
