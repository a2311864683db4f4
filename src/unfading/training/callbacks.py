"""Callbacks: functions of a user that are called after every step, after every evaluation, and at the end of a run.

def callback(event: TrainingEvent) -> bool | None       returns True to end the training of the run

A callback may read the model and must not change it. One that raises ends the training, after a checkpoint has been written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unfading.layers.model import Model
from unfading.training.check_task import blame
from unfading.training.run import Run
from unfading.training.training_state import TrainingState


@dataclass(frozen=True)
class TrainingEvent:
    """What a callback is called with.

    Args:
        kind: "step" after every training step, "evaluation" after the scores of the validation rows are known, "end" after the
            record is complete.
        run: the run that is trained.
        step: number of steps taken.
        total: number of steps of the whole run.
        seconds: of training so far.
        loss: mean training loss of the last interval of the log, about a two-hundredth of the run; None before the first.
        scores: of the validation rows, by name, at an evaluation; else None.
        model: the model, with its present weights. It must not be changed.
        record: the record of the run, at its end; else None.
    """

    kind: Literal["step", "evaluation", "end"]
    run: Run
    step: int
    total: int
    seconds: float
    loss: float | None
    scores: Mapping[str, float] | None
    model: Model
    record: Mapping[str, Any] | None


# Returns True to end the training of the run after this step; None or False to continue.
Callback = Callable[[TrainingEvent], bool | None]


class Callbacks:
    """Calls the callbacks of runs that are trained together.

    Args:
        callbacks: in the order of their calls.
        state: of training.
        save: writes checkpoints.
        say: called with messages for the user.
    """

    def __init__(
        self, callbacks: Sequence[Callback], state: TrainingState, save: Callable[[], None], say: Callable[[str], None]
    ):
        self.callbacks, self.state, self.save, self.say = callbacks, state, save, say

    def after_step(self, running: Sequence[int], valid: Mapping[int, Mapping[str, float]]) -> bool:
        """Call them for runs that took a step, some of which have validation scores; True if one asks to end a run."""
        if not self.callbacks:
            return False
        for e in running:
            self._call(e, "step")
            if e in valid:
                self._call(e, "evaluation", scores=valid[e])
        return any(self.state.active[e].stopped_by is not None for e in running)

    def at_end(self, e: int, record: Mapping[str, Any]) -> None:
        """Call them for a run whose record is complete. Nothing is left to stop, so an error is only reported."""
        for callback in self.callbacks:
            try:
                callback(self._event(e, "end", record=record))
            except Exception as error:
                self.say(f"the callback {_name(callback)} raised {type(error).__name__} at the end of the run: {error}")

    def _call(self, e: int, kind: Literal["step", "evaluation"], scores: Mapping[str, float] | None = None) -> None:
        each = self.state.active[e]
        for callback in self.callbacks:
            name = _name(callback)
            try:
                answer = callback(self._event(e, kind, scores))
                if answer not in (None, False, True):
                    raise TypeError(f"it must return True to end training, else None or False; got {answer!r}")
            except Exception as error:
                self.save()
                if each.folder is not None:
                    self.say(f"The checkpoint of step {self.state.step} is in {each.folder.path}; resume=True continues.")
                blame(error, f"the callback {name} at step {self.state.step}")
            if answer:
                each.stop(f"callback {name}")

    def _event(
        self,
        e: int,
        kind: Literal["step", "evaluation", "end"],
        scores: Mapping[str, float] | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> TrainingEvent:
        state, each = self.state, self.state.active[e]
        return TrainingEvent(
            kind, each.run, state.step, each.total, state.seconds, each.loss, scores, state.fleet.models[e], record
        )


def _name(callback: Callback) -> str:
    return getattr(callback, "__name__", type(callback).__name__)


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Raise unless these are functions in a list."""
    if callable(callbacks) or not isinstance(callbacks, Sequence):
        raise TypeError(f"callbacks must be a list of functions, def callback(event); got {callbacks!r}.")
    for callback in callbacks:
        if not callable(callback):
            raise TypeError(f"a callback is a function, def callback(event); got {callback!r}.")
