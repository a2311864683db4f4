"""Runs on their way: steps, looks at how they go, checkpoints, records."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from unfading import machine
from unfading.layers.model import Model
from unfading.tasks.base import Batch, Task
from unfading.tasks.draw import stream
from unfading.training import checkpoint
from unfading.training.active_run import Member, Moment
from unfading.training.captured_step import Captured, Clock
from unfading.training.evaluate import evaluate
from unfading.training.fleet import Fleet
from unfading.training.record import described, plain
from unfading.training.run import Run
from unfading.training.stopping import Stopped
from unfading.training.update import Update

Listener = Callable[[Moment], None]
# Looks at a model on a batch, and says in JSON values what it saw.
Watch = Callable[[Model, Task, Batch], dict[str, Any]]

# What people watch changes so often a second at most.
TOLD_PER_SECOND = 4
WATCHED_EVERY = 100  # steps


class Training:
    """Runs on their way, from where they are to their end."""

    def __init__(
        self,
        members: list[Member],
        listen: Listener | None,
        save_every: float,
        command: str,
        *,
        together: bool,
        watch: Watch | None = None,
    ):
        self.members = members
        self.listen = listen
        self.watch = watch
        self.save_every = save_every
        self.task = members[0].task
        run = members[0].run
        device = _device(run)
        models = [member.run.make_model().to(device) for member in members]
        about = machine.about(command)
        self.described = [described(m.run, self.task, model, about) for m, model in zip(members, models, strict=True)]
        self.fleet = Fleet(models, self.task, together=together and len(members) > 1)
        self.update = Update(self.fleet, [member.run for member in members])
        self.best = torch.zeros_like(self.fleet.w)
        self.step = 0
        self.seconds = 0.0
        self.state: Any = None
        self.time = 0  # steps of time since the state began
        self.records: list[dict[str, Any]] = [{} for _ in members]
        self._sent: dict[str, tuple[list[Any], Tensor]] = {}
        self.captured: Captured | None = None
        if device.type == "cuda":
            clock = Clock(members, device)
            self.captured = Captured(self.fleet, self.update, clock, run.truncate)
        self._told = self._saved = time.monotonic()

    def start(self, *, resume: bool, again: bool) -> None:
        """Begin anew, or go on where the checkpoints are; all of them must be at one step."""
        found = [member.load(resume=resume, again=again) for member in self.members]
        steps = {0 if each is None else each[1]["step"] for each in found}
        if len(steps) > 1:
            raise ValueError(
                f"runs that are trained together must be at one step; these are at {sorted(steps)}. Resume them apart."
            )
        for e, each in enumerate(found):
            if each is not None:
                self._restore(e, *each)

    def go(self, asked: Callable[[], int | None]) -> None:
        """Train to the end, or until asked to stop: then raise, with everything on disk."""
        self.fleet.train()
        self._finish()  # a process may have ended between a run's last step and its record
        running = self._running()
        if self.step == 0:
            self._watch()
        held = self.fleet.held()
        while running:
            self.advance(running)
            if held:  # after the first step alone
                held = self.fleet.check_held(held)
            running = self._running()
            signal = asked()
            if running and (signal is not None or time.monotonic() - self._saved > self.save_every):
                self.save()
            if running and signal is not None:
                raise Stopped(signal, self.step)

    def advance(self, running: list[int]) -> None:
        """One step for these, and a look at all."""
        began = time.perf_counter()
        self._one_step(running)
        if self.fleet.w.is_cuda and any(member.line_due(self.step) for member in self.members):
            torch.cuda.synchronize()  # the steps since the last line are counted when they are done
        self.seconds += time.perf_counter() - began
        self._watch()
        self._look()

    def _watch(self) -> None:
        """A line of what the watch sees, on the batch of the step that comes; training does not notice."""
        if self.watch is None or self.step % WATCHED_EVERY:
            return
        for member, model in ((self.members[e], self.fleet.models[e]) for e in self._running()):
            run, device = member.run, self.fleet.w.device
            batch = self.task.batch(self.step, run.batch, split=run.split, seed=run.seed, device=device)
            member.add({"step": self.step, "watched": self.watch(model, self.task, self.fleet.cast(batch))})

    def _running(self) -> list[int]:
        return [e for e, member in enumerate(self.members) if not member.done]

    def _one_step(self, running: list[int]) -> None:
        step, run, device = self.step, self.members[0].run, self.fleet.w.device
        batches = [self.task.batch(step, m.run.batch, split=run.split, seed=m.run.seed, device=device) for m in self.members]
        if not self.task.carried(step, run.batch, split=run.split):
            self.state, self.time = None, 0
        # Noise is as pure in seed and step as the data are.
        _seed_noise(stream(run.seed, run.split, step, "cpu", purpose="noise").initial_seed(), device)
        carried = self.task.carried(step + 1, run.batch, split=run.split)
        if self.captured is not None:
            self.captured.clock.set(step, running)
            if self.state is None and not carried:
                self.captured.step(batches)
                self.step += 1
                return
        losses, state = self.fleet.gradients(batches, self.state, self.time, run.truncate)
        rates = self._tensor("rates", [[member.rate(step)] for member in self.members], torch.float64)
        moving = self._tensor("moving", [[e in running] for e in range(len(self.members))], torch.bool)
        finite = self.update.apply(losses, rates, step, moving)
        self.step += 1
        if carried:
            self.state = _pytree.tree_map_only(Tensor, lambda part: _where_rows(finite, part), state)
            self.time += batches[0].x.shape[0]

    def _tensor(self, name: str, values: list[Any], dtype: torch.dtype) -> Tensor:
        """As a tensor beside the models; the last one again, where nothing has changed: a GPU is not waited for."""
        if name not in self._sent or self._sent[name][0] != values:
            self._sent[name] = (values, torch.tensor(values, dtype=dtype, device=self.fleet.w.device))
        return self._sent[name][1]

    def _look(self) -> None:
        """Lines of the curves, evaluations, ends."""
        due = [e for e, member in enumerate(self.members) if member.line_due(self.step)]
        on_cpu = self.captured is None
        if self.update.failed and (on_cpu or due):  # noticed at once on a CPU, and at the next line on a GPU
            due = sorted({*due, *(e for e in self._running() if self.update.ended[e] >= 0)})
            self.update.failed = False
        if not due:
            now = time.monotonic()
            if self.listen is not None and now - self._told >= 1 / TOLD_PER_SECOND:
                self._told = now
                for member in (self.members[e] for e in self._running()):
                    self.listen(Moment(member.run, self.step, member.total, self.seconds, member.loss, None))
            return
        ended = self.update.ended.squeeze(1).tolist()
        scales = self.update.scale.squeeze(1).tolist()
        valid = [e for e in due if self.members[e].valid_due(self.step) and ended[e] < 0]
        scores = evaluate(self.fleet, self.members[valid[0]].run, "valid").models if valid else []
        self._told = time.monotonic()
        for e, loss in zip(due, self.update.stretch(due), strict=True):
            member = self.members[e]
            if math.isfinite(loss):
                member.loss = loss
                if member.least_so_far(loss):
                    self.update.remember(e)
            line: dict[str, Any] = {"step": self.step, **plain({"loss": loss, "rate": member.rate(self.step - 1) * scales[e]})}
            line["seconds"] = round(self.seconds, 3)
            if e in valid:
                line["valid"] = plain(scores[e])
                if member.improved(self.step, scores[e]):
                    self.best[e] = self.fleet.w[e]
                    self._save_best(e)
            member.add(line)
            if self.listen is not None:
                self.listen(Moment(member.run, self.step, member.total, self.seconds, member.loss, line.get("valid")))
        if valid or any(ended[e] >= 0 or self.members[e].over(self.step) for e in due):
            self.save()
            self._finish()

    def _finish(self) -> None:
        """Test those that have ended, with their best weights where validation chose some, and write their records."""
        ended = self.update.ended.squeeze(1).tolist()
        returns = self.update.returns.squeeze(1).tolist()
        over = [e for e in self._running() if ended[e] >= 0 or self.members[e].over(self.step)]
        if not over:
            return
        now = self.fleet.w.clone()
        for e in over:
            if self.members[e].best is not None:
                self.fleet.w[e] = self.best[e]
        tested = evaluate(self.fleet, self.members[over[0]].run, "test")
        self.fleet.w.copy_(now)
        for e in over:
            member, reason = self.members[e], None
            if ended[e] >= 0:
                reason = f"loss or gradient not finite at step {ended[e]}"
            self.records[e] = {
                **self.described[e],
                "status": "finished" if reason is None else "diverged",
                "reason": reason,
                "steps": self.step if reason is None else ended[e],
                "returns": returns[e],
                "together": len(self.members),
                "best": member.best,
                "test": plain(tested.models[e]) if reason is None or member.best is not None else None,
                "seconds": round(self.seconds / len(self.members), 3),
                "milliseconds_per_sequence": round(1e3 * tested.seconds / tested.sequences / len(self.members), 6),
                "curve": member.curve(),
            }
            if member.folder is not None:
                member.folder.save_record(self.records[e])
            member.done = True
            if self.listen is not None:
                status = self.records[e]["status"]
                self.listen(Moment(member.run, self.step, member.total, self.seconds, member.loss, None, status))

    def save(self) -> None:
        """Checkpoints of all that is still running."""
        for e in self._running():
            member = self.members[e]
            if member.folder is None:
                continue
            parts = [] if self.state is None else _pytree.tree_leaves(self.state)
            carried = {f"state.{i}": part[e] for i, part in enumerate(parts)}
            about = {"step": self.step, "seconds": self.seconds, "time": self.time, **member.about()}
            member.folder.save("last", {**self._places(e), **carried}, about)
        self._saved = time.monotonic()

    def _save_best(self, e: int) -> None:
        member = self.members[e]
        if member.folder is not None and member.best is not None:
            member.folder.save("best", {**self._weights(e), **self._best(e, "model")}, member.best)

    def _weights(self, e: int) -> dict[str, Tensor]:
        return {f"model.{name}": part for name, part in self.fleet.models[e].state_dict().items()}

    def _best(self, e: int, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.{name}": self.fleet.view(self.best[e], name) for name in self.fleet.names}

    def _places(self, e: int) -> dict[str, Tensor]:
        """All of a model that a checkpoint holds, where it lies, but for a state that is carried."""
        rows = {f"update.{name}": part[e] for name, part in self.update.rows().items()}
        if not self.members[e].run.retries:
            # It returns to nothing; what stands there is for another of its pass.
            rows = {name: part for name, part in rows.items() if not name.startswith("update.best.")}
        return {**self._weights(e), **rows, **({} if self.members[e].best is None else self._best(e, "best"))}

    def _restore(self, e: int, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        member = self.members[e]
        assert member.folder is not None
        member.restore(about)
        checkpoint.restore(self._places(e), tensors, member.folder.path / "last.safetensors")
        self._save_best(e)  # the file may be of a later step than this, or gone
        self.step, self.seconds, self.time = about["step"], about["seconds"], about["time"]
        count = sum(name.startswith("state.") for name in tensors)
        if count:
            self._restore_state(e, [tensors[f"state.{i}"] for i in range(count)])

    def _restore_state(self, e: int, parts: list[Tensor]) -> None:
        """The state that was carried, in the structure in which the model gives it."""
        if self.state is None:
            batch = self.task.batch(0, self.members[e].run.batch, split="train", seed=0, device=self.best.device)
            self.fleet.eval()
            _, self.state = self.fleet.scores(batch, None, 0)
            self.fleet.train()
        for place, part in zip(_pytree.tree_leaves(self.state), parts, strict=True):
            place[e].copy_(part)


def _seed_noise(seed: int, device: torch.device) -> None:
    # Not torch.manual_seed: while no GPU is in use it writes down a stack trace for each, in half a millisecond.
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _where_rows(finite: Tensor, part: Tensor) -> Tensor:
    """Zeros for models whose numbers are not finite."""
    return torch.where(finite.reshape(-1, *[1] * (part.dim() - 1)), part, 0.0)


def _device(run: Run) -> torch.device:
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ValueError('device="cuda", and torch finds no GPU here. device="cpu" runs it, with other random numbers.')
    return torch.device(run.device)
