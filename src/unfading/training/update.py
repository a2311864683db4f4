"""One update of every model of a fleet: clip, optimise, and handle numbers that are not finite.

A model whose loss or gradient is not finite takes no step. It returns to its weights of the interval with the lowest loss, with
half the learning rate, as often as its run allows; after that it no longer changes. All of this is arithmetic on rows, so that
the host does not wait for a GPU. What a checkpoint must hold of a model is a row of each tensor.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unfading.training.compress import Compression
from unfading.training.fleet import Fleet
from unfading.training.optimise import clip_norms, clip_values, norms
from unfading.training.run import Run


class Update:
    """The optimisers of a fleet.

    Args:
        fleet: the models.
        runs: one for each model; they share the optimiser and its options.
        compression: of the models, if they are compressed.
    """

    def __init__(self, fleet: Fleet, runs: Sequence[Run], compression: Compression | None = None):
        E, device = len(runs), fleet.w.device
        self.fleet = fleet
        self.compression = compression
        self.w = fleet.w if compression is None else compression.w
        self.rule = runs[0].make_optimiser()
        self.factors = _factors(fleet, runs)
        self.clip_norm = _limits([run.clip_norm for run in runs], device)
        self.clip_value = _limits([run.clip_value for run in runs], device)
        self.retries = torch.tensor([run.retries for run in runs], device=device).unsqueeze(1)
        self.may_return = any(run.retries for run in runs)
        self.state = {name: torch.zeros_like(fleet.w) for name in self.rule.state_names}
        self.taken = torch.zeros(E, 1, dtype=torch.float64, device=device)  # number of steps
        # What a model returns to: its tensors at the interval with the lowest loss.
        self.best = {name: part.clone() for name, part in self._moving().items()} if self.may_return else {}
        self.pending = torch.zeros(E, 1, dtype=torch.bool, device=device)  # to be stored, once the next loss is known
        self._any_pending = self.may_return
        self.failed = False  # whether some model may have failed to take a step since this was last reset
        self.scale = torch.ones(E, 1, dtype=torch.float64, device=device)  # factor on the rate, halved at each return
        self.returns = torch.zeros(E, 1, dtype=torch.int64, device=device)
        self.ended = torch.full((E, 1), -1, dtype=torch.int64, device=device)  # the step at which a model diverged, or -1
        # Sum and number of the losses since the last call of `mean_losses`.
        self.loss_sum = torch.zeros(E, 1, dtype=torch.float64, device=device)
        self.loss_count = torch.zeros(E, 1, dtype=torch.float64, device=device)

    def _moving(self) -> dict[str, Tensor]:
        """The tensors that a step changes."""
        return {"w": self.w, "taken": self.taken, **self.state}

    def rows(self) -> dict[str, Tensor]:
        """All tensors beside the parameters, one row per model, by the names that checkpoints use."""
        return {
            **{f"kept.{name}": part for name, part in self.state.items()},
            "taken": self.taken,
            "scale": self.scale,
            "returns": self.returns,
            "ended": self.ended,
            "waits": self.pending,
            "lost": self.loss_sum,
            "seen": self.loss_count,
            **({} if self.compression is None else {"exact": self.w}),
            **{f"best.{name}": part for name, part in self.best.items()},
        }

    def apply(self, losses: Tensor, rates: Tensor, step: int | Tensor, running: Tensor) -> Tensor:
        """Take a step with the gradients of the fleet; return which losses and gradients were finite, [E, 1].

        Args:
            losses: [E] of this step.
            rates: [E, 1] float64, before `scale`.
            step: number of steps before this one; a tensor on the GPU if the host must not wait.
            running: [E, 1] bool; models that have more steps to take.
        """
        if self.compression is None:
            return self._apply(losses, rates, step, running)
        movable = self.compression.movable(step)
        if movable is not None:
            self.fleet.g.masked_fill_(~movable, 0.0)
        finite = self._apply(losses, rates, step, running)
        self.compression.apply(step, movable)
        return finite

    def _apply(self, losses: Tensor, rates: Tensor, step: int | Tensor, running: Tensor) -> Tensor:
        g = self.fleet.g
        norm = norms(g)
        losses = losses.to(torch.float64).unsqueeze(1)
        finite = torch.isfinite(norm) & torch.isfinite(losses)
        running = running & (self.ended < 0)
        moves = running & finite
        if self._any_pending or (self.may_return and g.is_cuda):  # a captured step cannot branch
            self._store_best(moves)
        if self.clip_norm is not None:
            clip_norms(g, norm, self.clip_norm)
        if self.clip_value is not None:
            clip_values(g, self.clip_value)
        # Reading `moves` is free on a CPU, and almost all steps are finite.
        if g.device.type == "cpu" and bool(moves.all()):
            self._move(rates)
            self.loss_sum += losses
            self.loss_count += 1
            return finite
        self.failed = True
        before = {name: part.clone() for name, part in self._moving().items()}
        self._move(rates)
        for name, part in self._moving().items():
            part.copy_(torch.where(moves, part, before[name]))
        self.loss_sum += torch.where(moves, losses, 0.0)
        self.loss_count += moves
        self._return_or_end(running & ~finite, step)
        return finite

    def _move(self, rates: Tensor) -> None:
        self.taken += 1
        rate = rates * self.scale
        rate = rate if self.factors is None else rate.to(self.factors.dtype) * self.factors
        self.rule.update(self.w, self.fleet.g, self.state, rate, self.taken)

    def _return_or_end(self, failed: Tensor, step: int | Tensor) -> None:
        """Failed models return to their best weights with half the rate, or end if they have no retries left."""
        back = failed & (self.returns < self.retries)
        if self.may_return:
            for name, part in self._moving().items():
                part.copy_(torch.where(back, self.best[name], part))
            self.scale.copy_(torch.where(back, self.scale / 2, self.scale))
            self.returns += back
        self.ended.copy_(torch.where(failed & ~back, step, self.ended))

    def fail(self, e: int, step: int) -> bool:
        """Treat model e as one whose loss is not finite; True if it returned to its best weights, False if it has ended.

        Args:
            step: number of steps taken.
        """
        failed = torch.zeros_like(self.pending)
        failed[e] = True
        self._return_or_end(failed, step)
        if self.compression is not None:
            self.compression.apply(step - 1, None)
        return bool(self.ended[e] < 0)

    def mean_losses(self, models: Sequence[int]) -> list[float]:
        """The mean losses of these models since the last call, NaN if no step was taken; the sums start again."""
        rows = list(models)
        means: list[float] = (self.loss_sum[rows] / self.loss_count[rows]).squeeze(1).tolist()
        self.loss_sum[rows] = 0.0
        self.loss_count[rows] = 0.0
        return means

    def remember(self, e: int) -> None:
        """Mark the present weights of model e as those to return to, if its next loss is finite."""
        if self.may_return:
            self.pending[e] = True
            self._any_pending = True

    def _store_best(self, finite: Tensor) -> None:
        for name, part in self.best.items():
            part.copy_(torch.where(self.pending & finite, self._moving()[name], part))
        self.pending.zero_()
        self._any_pending = False


def _factors(fleet: Fleet, runs: Sequence[Run]) -> Tensor | None:
    """The factors on the learning rate of each entry, [E, N]; None if all are 1."""
    if not any(run.rates for run in runs):
        return None
    factors = torch.ones_like(fleet.w)
    for e, run in enumerate(runs):
        for name, factor in run.factors(fleet.names).items():
            fleet.view(factors[e], name).fill_(factor)
    return factors


def _limits(limits: list[float | None], device: torch.device) -> Tensor | None:
    if all(limit is None for limit in limits):
        return None
    numbers = [float("inf") if limit is None else limit for limit in limits]
    return torch.tensor(numbers, dtype=torch.float64, device=device).unsqueeze(1)
