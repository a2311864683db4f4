"""A queue of trials that workers share. A trial waits, is trained by one worker at a time, and finishes once.

The queue is a study of Optuna. Its trials are created when the sweep is, so their number never depends on how many workers
ask. A worker that takes a trial holds a lease on it and renews it from a thread. If the lease is not renewed for `lease`
seconds, the worker has ended or has been suspended, and the next worker takes over the same trial: its number and its settings
stay. A worker that was only suspended finds that the lease is not its own any more, and its result is not stored.

Clocks of machines are never compared. A lease holds a counter; a worker measures with its own clock for how long it has not
changed.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from unfading.training.stopping import Stopped
from unfading.training.sweep.storage import Storage, needed

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial

# Seconds without a sign of life after which a trial is taken over, and how often a lease is renewed in that time.
LEASE, RENEWALS = 120.0, 4
# The attribute of a study that holds its definition, and those of a trial.
DEFINITION, LEASE_OF, ATTEMPTS, RESULT = "unfading", "lease", "attempts", "result"
UNFINISHED, FINISHED = ("WAITING", "RUNNING"), ("COMPLETE", "PRUNED", "FAIL")


class LostTrial(Exception):
    """Another worker has taken over a trial, because this one showed no sign of life."""


class Queue:
    """The trials of one study.

    Args:
        storage: where they are stored.
        name: name of the study.
    """

    def __init__(self, storage: Storage, name: str):
        self.storage = storage
        self.name = name
        self.worker = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        studies = definitions(storage)
        if name not in studies:
            raise ValueError(f"{storage.name} has no study {name!r}. It has: {', '.join(sorted(studies)) or 'none'}.")
        self.definition: dict[str, Any] = studies[name]
        self.lease = float(self.definition["lease"])
        self.study_id = storage.patiently(lambda: storage.trials.get_study_id_from_name(name))
        # The lease of each trial of another worker as it was last seen, and when it was first seen so.
        self._observed: dict[int, tuple[Any, float]] = {}

    def study(self, **options: Any) -> "Study":
        """The study, with a sampler and a pruner if they are given."""
        load = needed("optuna").load_study
        return self.storage.patiently(lambda: load(study_name=self.name, storage=self.storage.trials, **options))

    def trials(self) -> "Sequence[FrozenTrial]":
        """All trials. They are shared, and must not be changed."""
        return self.storage.patiently(lambda: self.storage.trials.get_all_trials(self.study_id, deepcopy=False))

    def counts(self) -> dict[str, int]:
        """The number of trials in each state."""
        states = [trial.state.name for trial in self.trials()]
        return {state: states.count(state) for state in (*FINISHED, *UNFINISHED)}

    def fill(self, count: int) -> None:
        """Let the queue have at least `count` trials."""

        def fill() -> None:
            for _ in range(count - len(self.trials())):
                self._append({})

        self.storage.locked(fill)

    def add(self, jobs: "Sequence[Mapping[str, Any]]") -> dict[str, int]:
        """Add a trial for each job whose runs are not in a trial that is unfinished.

        Args:
            jobs: attributes of the trials, among them `keys`, those of the runs.

        Returns:
            The number of the trial of each run, by its key.
        """

        def add() -> dict[str, int]:
            numbers: dict[str, int] = {}
            for trial in self.trials():
                if trial.state.name in UNFINISHED:
                    numbers |= dict.fromkeys(trial.user_attrs["keys"], trial.number)
            for job in jobs:
                if not numbers.keys() & set(job["keys"]):
                    numbers |= dict.fromkeys(job["keys"], self._append(job))
            return numbers

        return self.storage.locked(add)

    def _append(self, attributes: Mapping[str, Any]) -> int:
        optuna, trials = needed("optuna"), self.storage.trials
        waiting = optuna.trial.create_trial(state=optuna.trial.TrialState.WAITING, user_attrs=dict(attributes))
        return trials.get_trial(trials.create_new_trial(self.study_id, waiting)).number

    def take(self) -> "TakenTrial | None":
        """The next trial for this worker: one whose worker has ended, or else one that waits. None if there is none now."""

        def take() -> int | None:
            trials = self.trials()
            free = [*(trial for trial in trials if self._is_abandoned(trial)), *_in_state(trials, "WAITING")]
            if not free:
                return None
            trial = free[0]
            if trial.state.name == "WAITING":
                running = needed("optuna").trial.TrialState.RUNNING
                self.storage.trials.set_trial_state_values(self.trial_id(trial.number), running)
            self.write_lease(trial.number, 0)
            return trial.number

        number = self.storage.locked(take)
        return None if number is None else TakenTrial(self, number)

    def _is_abandoned(self, trial: "FrozenTrial") -> bool:
        """Whether the worker of a trial has shown no sign of life for the time of the lease."""
        if trial.state.name != "RUNNING":
            self._observed.pop(trial.number, None)
            return False
        lease, now = trial.user_attrs.get(LEASE_OF), time.monotonic()
        if lease is not None and lease["worker"] == self.worker:
            return True  # taken by this worker in a call that the storage did not answer
        if trial.number not in self._observed or self._observed[trial.number][0] != lease:
            self._observed[trial.number] = (lease, now)
        return now - self._observed[trial.number][1] > self.lease

    def write_lease(self, number: int, renewals: int) -> None:
        """Let this worker hold a trial."""
        lease = {"worker": self.worker, "renewals": renewals}
        self.storage.trials.set_trial_user_attr(self.trial_id(number), LEASE_OF, lease)

    def trial_id(self, number: int) -> int:
        """Optuna's key of a trial in the storage."""
        find = self.storage.trials.get_trial_id_from_study_id_trial_number
        return self.storage.patiently(lambda: find(self.study_id, number))


class TakenTrial:
    """A trial that this worker trains. Inside a `with` block its lease is renewed.

    Args:
        queue: its queue.
        number: its number.
    """

    def __init__(self, queue: Queue, number: int):
        self.queue = queue
        self.number = number
        self.trial_id = queue.trial_id(number)
        self.attributes = self.stored().user_attrs
        self.lost = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_until_ended, daemon=True)
        self._renewals = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop renewing. A trial that has not finished waits for another worker."""
        self._ended.set()
        self._thread.join()
        asked = kind is not None and (issubclass(kind, Stopped) or not issubclass(kind, Exception))
        self._give_back(asked=asked)

    def stored(self) -> "FrozenTrial":
        """The trial as it is stored now."""
        return self.queue.storage.patiently(lambda: self.queue.storage.trials.get_trial(self.trial_id))

    def settings(self, space: "Mapping[str, BaseDistribution]", study: "Study") -> tuple["Trial", dict[str, Any]]:
        """The trial, and its settings: those that it has already, and those that the sampler draws now."""

        def draw() -> tuple["Trial", dict[str, Any]]:
            trial = needed("optuna").trial.Trial(study, self.trial_id)
            return trial, {name: _suggest(trial, name, distribution) for name, distribution in space.items()}

        return self.queue.storage.locked(draw)

    def attempt(self, step: int) -> int:
        """How often the trial has begun at this step of its run, this time included."""

        def count() -> int:
            before = self.stored().user_attrs.get(ATTEMPTS, {"step": step, "count": 0})
            attempts = before["count"] + 1 if before["step"] == step else 1
            self._write(ATTEMPTS, {"step": step, "count": attempts})
            return attempts

        return self.queue.storage.locked(count)

    def check(self) -> None:
        """Raise if another worker has taken over the trial."""
        if self.lost:
            raise LostTrial(f"trial {self.number} was taken over by another worker")

    def finish(self, state: str, value: float | None, result: Mapping[str, Any]) -> bool:
        """Store how the trial has ended; False, and nothing is stored, if another worker has taken it over.

        Args:
            state: "COMPLETE", "PRUNED" or "FAIL".
            value: the score of a trial that is complete.
            result: what else a report shows.
        """

        def finish() -> bool:
            trial = self.stored()
            if not self._is_mine(trial):
                return False
            if trial.state.name in UNFINISHED:  # or else stored by a call that the storage did not answer
                self._write(RESULT, {**result, "worker": self.queue.worker})
                states = needed("optuna").trial.TrialState
                self.queue.study().tell(self.number, value, state=states[state])
            return True

        return self.queue.storage.locked(finish)

    def _give_back(self, *, asked: bool) -> None:
        def give_back() -> None:
            trial = self.stored()
            if trial.state.name != "RUNNING" or not self._is_mine(trial):
                return
            attempts = trial.user_attrs.get(ATTEMPTS)
            if asked and attempts:  # a worker that was asked to stop says nothing about its trial
                self._write(ATTEMPTS, {**attempts, "count": 0})
            waiting = needed("optuna").trial.TrialState.WAITING
            self.queue.storage.trials.set_trial_state_values(self.trial_id, waiting)

        self.queue.storage.locked(give_back)

    def _renew_until_ended(self) -> None:
        while not self._ended.wait(self.queue.lease / RENEWALS):
            with suppress(OSError, *self.queue.storage.unreachable):  # the next renewal may reach the storage
                self.lost = not self.renew()
                if self.lost:
                    return

    def renew(self) -> bool:
        """Renew the lease; False if another worker has taken over the trial."""

        def renew() -> bool:
            trial = self.stored()
            if not self._is_mine(trial):
                return False
            if trial.state.name == "RUNNING":  # or else this worker has just finished it
                self._renewals += 1
                self.queue.write_lease(self.number, self._renewals)
            return True

        return self.queue.storage.locked(renew)

    def _is_mine(self, trial: "FrozenTrial") -> bool:
        lease = trial.user_attrs.get(LEASE_OF)
        return lease is not None and lease["worker"] == self.queue.worker

    def _write(self, name: str, value: Any) -> None:
        self.queue.storage.trials.set_trial_user_attr(self.trial_id, name, value)


def create_queue(storage: Storage, name: str, definition: Mapping[str, Any], *, maximise: bool, lease: float = LEASE) -> Queue:
    """The queue of a study, which is created if it is missing.

    Args:
        storage: where to store it.
        name: name of the study.
        definition: what its trials are, as JSON values. A study of another definition raises a ValueError.
        maximise: whether higher scores are better.
        lease: seconds without a sign of life after which a trial is taken over. A study that exists has its own.
    """

    def create() -> None:
        trials = storage.trials
        studies = {study.study_name: study for study in trials.get_all_studies()}
        if name not in studies:
            direction = needed("optuna").study.StudyDirection
            study_id = trials.create_new_study([direction.MAXIMIZE if maximise else direction.MINIMIZE], name)
        else:
            study_id = trials.get_study_id_from_name(name)
            there = studies[name].user_attrs.get(DEFINITION)
            if there is not None:
                _check_definition(storage, name, there, definition)
                return
            if trials.get_all_trials(study_id, deepcopy=False):
                raise ValueError(f"the study {name!r} in {storage.name} was not made by unfading. Use another --name.")
        trials.set_study_user_attr(study_id, DEFINITION, {**definition, "lease": lease})

    storage.locked(create)
    return Queue(storage, name)


def definitions(storage: Storage) -> dict[str, dict[str, Any]]:
    """The definition of each study that unfading made, by name."""
    studies = storage.locked(storage.trials.get_all_studies)
    return {study.study_name: study.user_attrs[DEFINITION] for study in studies if DEFINITION in study.user_attrs}


def _check_definition(storage: Storage, name: str, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for path, old, new in _differences({key: there[key] for key in there if key != "lease"}, wanted):
        raise ValueError(
            f"{storage.name} has a study {name!r} with another {path}: {old!r}, not {new!r}. Use another --name, or the same "
            "settings."
        )


def _differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The entries in which two JSON values differ, with their names."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*new, *(key for key in old if key not in new)]:
            yield from _differences(old.get(key), new.get(key), str(key))
    elif old != new:
        yield path, old, new


def _suggest(trial: "Trial", name: str, distribution: Any) -> Any:
    if hasattr(distribution, "choices"):
        return trial.suggest_categorical(name, distribution.choices)
    whole = isinstance(distribution, needed("optuna").distributions.IntDistribution)
    suggest: Any = trial.suggest_int if whole else trial.suggest_float
    return suggest(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


def _in_state(trials: "Sequence[FrozenTrial]", state: str) -> "list[FrozenTrial]":
    return [trial for trial in trials if trial.state.name == state]
