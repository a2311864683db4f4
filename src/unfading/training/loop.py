"""The training loop: take steps, log and evaluate, write checkpoints, and end with a test and a record."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from unfading import machine
from unfading.training.active_run import ActiveRun
from unfading.training.evaluate import Scores, evaluate
from unfading.training.monitor import Monitor
from unfading.training.options import TrainOptions
from unfading.training.persistence import Checkpoints
from unfading.training.record import finite_or_none, initial_record
from unfading.training.stepper import Stepper
from unfading.training.stopping import Stopped
from unfading.training.training_state import TrainingState


class Training:
    """Trains runs together, from where they are to their end.

    Args:
        active: the runs, of one shape.
        options: see `TrainOptions`.
        together: take each step in one pass over all models.
    """

    def __init__(self, active: Sequence[ActiveRun], options: TrainOptions, *, together: bool):
        self.options = options
        self.state = TrainingState(active, together=together)
        self.stepper = Stepper(self.state)
        self.checkpoints = Checkpoints(self.state)
        self.monitor = Monitor(self.state, self.checkpoints, options)
        about = machine.about(options.command)
        self.records = [
            initial_record(each.run, each.task, model, about)
            for each, model in zip(active, self.state.fleet.models, strict=True)
        ]

    def start(self) -> None:
        """Start from the initial weights, or continue from checkpoints, as the options say."""
        self.checkpoints.load(resume=self.options.resume, again=self.options.again)

    def go(self, asked_to_stop: Callable[[], int | None]) -> None:
        """Train to the end, or until asked to stop: then write checkpoints and raise `Stopped`."""
        state = self.state
        state.fleet.train()
        self.finish()  # a process may have ended between the last step of a run and its record
        running = state.running()
        if state.step == 0:
            self.monitor.run_watch()
        buffers = state.fleet.copy_buffers()
        while running:
            self.advance(running)
            if buffers:  # after the first step only
                state.fleet.check_buffers(buffers)
                buffers = {}
            running = state.running()
            signal = asked_to_stop()
            if running and (signal is not None or time.monotonic() - self.checkpoints.saved > self.options.save_every):
                self.checkpoints.save()
            if running and signal is not None:
                raise Stopped(signal, state.step)

    def advance(self, running: list[int]) -> None:
        """Take one step with these runs, then log, evaluate and save what is due."""
        self.stepper.take(running)
        self.monitor.run_watch()
        if self.monitor.log():
            self.checkpoints.save()
            self.finish()

    def finish(self) -> None:
        """Test the runs that have ended, with their best weights if validation chose some, and write their records."""
        state, diverged_at = self.state, self.state.diverged_at()
        over = [e for e in state.running() if diverged_at[e] >= 0 or state.active[e].over(state.step)]
        if not over:
            return
        w = state.fleet.w.clone()
        for e in over:
            if state.active[e].best is not None:
                state.fleet.w[e] = state.best_w[e]
        tested = evaluate(state.fleet, state.active[over[0]].run, "test")
        state.fleet.w.copy_(w)
        for e in over:
            each = state.active[e]
            self.records[e] |= self._outcome(e, diverged_at[e], tested)
            if each.folder is not None:
                each.folder.save_record(self.records[e])
            each.done = True
            self.monitor.report(e, status=self.records[e]["status"])

    def _outcome(self, e: int, diverged_at: int, tested: Scores) -> dict[str, Any]:
        """The part of a record that is known after training."""
        state, each, models = self.state, self.state.active[e], len(self.state.active)
        diverged = diverged_at >= 0
        return {
            "status": "diverged" if diverged else "finished",
            "reason": f"loss or gradient not finite at step {diverged_at}" if diverged else None,
            "steps": diverged_at if diverged else state.step,
            "returns": int(state.update.returns[e]),
            "together": models,
            "best": each.best,
            "test": finite_or_none(tested.models[e]) if not diverged or each.best is not None else None,
            "seconds": round(state.seconds / models, 3),
            "milliseconds_per_sequence": round(1e3 * tested.seconds / tested.sequences / models, 6),
            "curve": each.curve(),
        }
