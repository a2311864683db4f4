"""The training loop: take steps, log and evaluate, write checkpoints, and end with a test and a record.

`train_together` trains runs of one shape in one pass; a single run is a pass of one.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unfading import machine
from unfading.backends.choose import observe_backends
from unfading.layers.model import Model
from unfading.tasks.base import Split
from unfading.torch_state import float32_products
from unfading.training.active_run import ActiveRun
from unfading.training.callbacks import Callbacks
from unfading.training.check_task import check_declared, draw, examine
from unfading.training.compress import compressed_size
from unfading.training.data_parallel import ALONE, Processes, check_divisible, join, rank, restarted, world_size
from unfading.training.evaluate import Scores, evaluate, first_place
from unfading.training.monitor import Monitor
from unfading.training.options import TrainOptions
from unfading.training.persistence import Checkpoints
from unfading.training.record import data_changed, finite_or_none, initial_record
from unfading.training.rescore import metrics_of_record, with_metrics
from unfading.training.run import Run
from unfading.training.run_dir import finished
from unfading.training.settings import FIELDS
from unfading.training.stepper import Stepper
from unfading.training.stopping import Stopped, asked_to_stop, late
from unfading.training.training_state import TrainingState
from unfading.training.user_metrics import ConfusionMatrix

# Fields in which runs of one pass may differ.
MAY_DIFFER = {
    *("seed", "rate", "rates", "schedule", "schedule_options"),
    *("clip_norm", "clip_value", "steps", "epochs", "stop_at", "patience", "select_by", "retries"),
}


class Training:
    """Trains runs together, from where they are to their end.

    Args:
        active: the runs, of one shape.
        options: see `TrainOptions`.
        together: take each step in one pass over all models.
        processes: those that share each batch.
    """

    def __init__(self, active: Sequence[ActiveRun], options: TrainOptions, *, together: bool, processes: Processes = ALONE):
        self.options = options
        self.processes = processes
        self.state = TrainingState(active, together=together, processes=processes)
        self.stepper = Stepper(self.state, options.say)
        self.checkpoints = Checkpoints(self.state)
        self.monitor = Monitor(self.state, self.checkpoints, options)
        self.callbacks = Callbacks(options.callbacks, self.state, self.checkpoints.save, options.say)
        self.observed = False  # whether the backends of this process are known
        about = machine.about(options.command)
        if processes.size > 1:
            about["processes"] = processes.size
        self.records = [
            initial_record(each.run, each.task, model, about)
            for each, model in zip(active, self.state.fleet.models, strict=True)
        ]

    def check_task(self) -> None:
        """Examine the first batches of training and of validation. The test rows are read once, at the end."""
        state, run = self.state, self.state.active[0].run
        check_declared(state.task)
        for e, (each, model) in enumerate(zip(state.active, state.fleet.models, strict=True)):
            each.explosion.guess = examine(state.task, model, state.place(e, 0))
            if 0 < state.task.full_length_from < each.total:
                examine(state.task, model, state.place(e, state.task.full_length_from))
        steps = max(each.total for each in state.active)
        if steps <= state.task.full_length_from:
            self.options.say(
                f"The training sequences of {type(state.task).__name__} have their full length after "
                f"{state.task.full_length_from} steps, and the run ends after {steps}: it does not train on sequences as long "
                "as those of validation. Take more steps, or let the length grow earlier."
            )
        if self.processes.size > 1:
            batch = draw(state.task, state.place(0, 0))
            self.processes.bounds(batch.x.shape[1])  # raises if there are too few rows
            check_divisible(state.task, state.fleet.models[0], batch)
        if run.split == "train":
            examine(state.task, state.fleet.models[0], first_place(run, state.task, "valid", state.fleet.w.device))
        self.check_metrics()

    def check_metrics(self) -> None:
        """Compute the metrics of the user once. A function of the user may need more than one batch, e.g. all classes."""
        run, metrics = self.state.active[0].run, self.options.user_metrics
        if metrics.names:
            split: Split = "valid" if run.split == "train" else run.split
            all_rows = metrics.own and split == "valid"
            evaluate(self.state.fleet, run if all_rows else replace(run, valid_batches=1), split, metrics)

    def start(self) -> None:
        """Start from the initial weights, or continue from checkpoints, as the options say."""
        self.checkpoints.load(resume=self.options.resume, again=self.options.again)
        for each in self.state.active:
            if each.folder is not None and (count := each.missing_rows(self.state.step)):
                self.options.say(
                    f"{each.folder.path / 'curve.jsonl'} lacks {count} rows of the first {self.state.step} steps, so the curve "
                    "of the record will lack them too."
                )
        for each, step in zip(self.state.active, self.state.diverged_at(), strict=True):
            each.replay(ended=step >= 0)

    def go(self, asked: Callable[[], int | None]) -> None:
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
            due = time.monotonic() - self.checkpoints.saved > self.options.save_every
            received, save = self.processes.agree(asked(), due)
            if running and (received is not None or save):
                self.checkpoints.save()
            if running and received is not None:
                self.processes.settle()  # nothing may be left for the next training
                raise Stopped(received, state.step)

    def advance(self, running: list[int]) -> None:
        """Take one step with these runs, then log, evaluate and save what is due."""
        if self.observed:
            self.stepper.take(running)
        else:
            self.take_first_step(running)
        self.monitor.run_watch()
        due = self.monitor.log()
        if self.callbacks.after_step(running, self.monitor.valid) or due:
            self.checkpoints.save()
            self.finish()

    def take_first_step(self, running: list[int]) -> None:
        """Take the first step in this process, and note which backend runs it."""
        with observe_backends() as observed:
            step = self.state.step
            self.stepper.take(running)
        self.observed = True
        for e in running:
            for sentence in self.state.active[e].update_backends(step, observed):
                self.options.say(sentence)

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
        tested, matrices = self._final_scores(state.active[over[0]].run)
        sizes = {e: self._compressed(e) for e in over}
        state.fleet.w.copy_(w)
        for e in over:
            each = state.active[e]
            self.records[e] |= {**self._outcome(e, diverged_at[e], tested), **sizes[e]}
            if self.options.metrics:
                self.records[e] |= metrics_of_record(self.options.user_metrics, matrices[e])
            self.records[e]["about"]["backends"] = each.backends
            if each.folder is not None:
                each.folder.save_record(self.records[e])
            each.done = True
            self.monitor.report(e, status=self.records[e]["status"])
            self.callbacks.at_end(e, self.records[e])

    def _final_scores(self, run: Run) -> tuple[Scores | None, list[ConfusionMatrix | None]]:
        """The scores of the test, if there is one, and the confusion matrices: of the test, or else of validation."""
        fleet, metrics = self.state.fleet, self.options.user_metrics
        tested = evaluate(fleet, run, "test", metrics, self.processes) if self.state.task.has_test else None
        if tested is None and metrics.confusion_matrix and run.split == "train":
            return None, evaluate(fleet, run, "valid", metrics, self.processes).confusion
        return tested, [None] * len(fleet.models) if tested is None else tested.confusion

    def _compressed(self, e: int) -> dict[str, Any]:
        """The size of a compressed model, with the weights that are tested."""
        options = self.state.active[e].run.compress
        if not options:
            return {}
        return {"compressed": compressed_size(self.state.fleet.models[e], self.state.matrices, options.get("bits"))}

    def chosen_model(self, e: int) -> Model:
        """The model of a run that has ended, on the CPU, with its best weights if validation chose some."""
        state = self.state
        if state.active[e].best is not None:
            state.fleet.w[e] = state.best_w[e]
        # A copy: the parameters of the fleet are views of one matrix, and carry its gradients.
        model = state.active[e].run.make_model()
        model.load_state_dict(state.fleet.models[e].state_dict())
        return model.eval()

    def _outcome(self, e: int, diverged_at: int, tested: Scores | None) -> dict[str, Any]:
        """The part of a record that is known after training."""
        state, each, models = self.state, self.state.active[e], len(self.state.active)
        diverged = diverged_at >= 0
        test = None if tested is None or (diverged and each.best is None) else finite_or_none(tested.models[e])
        return {
            "status": "diverged" if diverged else "finished",
            "reason": (each.explosion.reason or f"loss or gradient not finite at step {diverged_at}") if diverged else None,
            "steps": diverged_at if diverged else state.step,
            "returns": int(state.update.returns[e]),
            "together": models,
            "best": each.best,
            "test": test,
            "seconds": round(state.seconds / models, 3),
            "milliseconds_per_sequence": tested and round(1e3 * tested.seconds / tested.sequences / models, 6),
            "curve": each.curve(),
            **each.stop_field(),
        }


def train_together(runs: Sequence[Run], options: TrainOptions | None = None, *, together: bool = True) -> list[dict[str, Any]]:
    """Train runs of one shape together and return their records, in order.

    Args:
        runs: runs that differ only in the fields of `MAY_DIFFER`; `compare` groups runs in this way.
        options: see `TrainOptions`; None for the defaults, which write nothing.
        together: take each step in one pass over all models, or else model by model.
    """
    return _train(runs, TrainOptions() if options is None else options, together)[0]


def train_model(run: Run, options: TrainOptions) -> tuple[dict[str, Any], Model]:
    """Train one run that writes nothing; its record, and its model with the weights that validation chose, or the last."""
    assert options.folder is None
    [record], training = _train([run], options, together=False)
    assert training is not None
    return record, training.chosen_model(0)


def _train(runs: Sequence[Run], options: TrainOptions, together: bool) -> tuple[list[dict[str, Any]], Training | None]:
    """The records of runs that are trained together, and their training unless all had finished before."""
    _check_shape(runs)
    training = None
    task = runs[0].make_task()
    processes = join(runs[0].device)
    processes.check_same("runs", [run.key for run in runs])
    options = of_process(options)
    with ExitStack() as stack, torch.random.fork_rng(devices=_gpus(runs[0])):
        stack.enter_context(float32_products("tf32" if runs[0].dtype == "tf32" else "ieee"))
        earlier = processes.on_first(lambda: [_finished(run, options) for run in runs])
        active = [ActiveRun(run, task) for run, record in zip(runs, earlier, strict=True) if record is None]
        trained: Iterator[dict[str, Any]] = iter(())
        if active:
            if processes.on_first(late):
                raise Stopped(signal.SIGTERM, None)
            # Before the folders are created: a run that cannot be built, or whose task is at fault, leaves none.
            training = Training(active, options, together=together, processes=processes)
            with asked_to_stop() as asked:
                training.check_task()
                processes.on_first(partial(_open, active, options.folder, stack))
                training.start()
                training.go(asked)
                received = processes.agree_now(asked())
            # During the last step: the caller must not start another run.
            if received is not None and processes.on_first(lambda: options.folder is not None):
                raise Stopped(received, training.state.step)
            trained = iter(processes.on_first(partial(list, training.records)))  # what the first process has written
        return [next(trained) if record is None else record for record in earlier], training


def _open(active: Sequence[ActiveRun], folder: Path | None, stack: ExitStack) -> None:
    """Open the folders of the runs, until the stack is closed."""
    if folder is not None:
        for each in active:
            stack.callback(each.open(folder).close)


def of_process(options: TrainOptions) -> TrainOptions:
    """The options of one of several processes: all continue after a restart, and the first alone writes and speaks."""
    if restarted():
        options = replace(options, resume=True, again=False)
    if world_size() > 1 and options.callbacks:
        # Each process would call them, and one that stops its process alone would leave the others waiting.
        raise ValueError("callbacks run in one process only. Train without torchrun, or without callbacks.")
    if rank():
        options = replace(options, folder=None, listen=None, watch=None, progress=False, say=lambda sentence: None)
    return options


def train_pass(runs: Sequence[Run], options: TrainOptions) -> None:
    """Train runs of one shape in one pass, or in several if the memory of the GPU is too small."""
    try:
        train_together(runs, options)
        return
    except torch.OutOfMemoryError:
        if len(runs) == 1:
            raise ValueError(
                f"{runs[0].cell} with batch {runs[0].batch} does not fit in the memory of the GPU. Use a smaller batch, the "
                "cell option checkpoint_every, or fewer processes."
            ) from None
    # Outside the handler, which would keep the tensors of the failed pass alive.
    torch.cuda.empty_cache()
    half = len(runs) // 2
    options.say(
        f"{len(runs)} runs do not fit in the memory of the GPU together; continuing with {half} and {len(runs) - half}."
    )
    for part in (runs[:half], runs[half:]):
        train_pass(part, replace(options, resume=True))


def shared_fields(run: Run) -> dict[str, Any]:
    """The fields of a run that the other runs of its pass must share."""
    return {name: getattr(run, name) for name in (*FIELDS, "sources") if name not in MAY_DIFFER}


def _check_shape(runs: Sequence[Run]) -> None:
    for run in runs:
        for name, value in shared_fields(run).items():
            if value != getattr(runs[0], name):
                raise ValueError(
                    f"runs that are trained together must agree in {name}; got {getattr(runs[0], name)!r} and {value!r}. Train "
                    "them separately."
                )


def _finished(run: Run, options: TrainOptions) -> dict[str, Any] | None:
    if options.folder is None or options.again:
        return None
    record = finished(options.folder, run)
    if record is not None and (sentence := data_changed(record)) is not None:
        options.say(sentence)
    return record and with_metrics(record, run, options.folder, options.user_metrics, options.say)


def _gpus(run: Run) -> list[int]:
    return [torch.cuda.current_device()] if run.device == "cuda" and torch.cuda.is_available() else []
