"""One step of training for every model of a fleet: clip, optimiser, and what happens where a number is not finite.

A model whose loss or gradient is not finite takes no step. It goes back to what it was at its best stretch, with half the rate,
as often as its run allows, and after that stands still for good. All of it is arithmetic on rows, so that a GPU is not waited
for; what is kept of each model is a row of a tensor, and goes into its checkpoint as it is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unfading.training.fleet import Fleet
from unfading.training.optimise import clip_norms, clip_values, norms
from unfading.training.run import Run


class Update:
    """The optimisers of a fleet.

    Args:
        fleet: what is trained.
        runs: one for each model, with one optimiser and its options in common.
    """

    def __init__(self, fleet: Fleet, runs: Sequence[Run]):
        E, device = len(runs), fleet.w.device
        self.fleet = fleet
        self.rule = runs[0].make_optimiser()
        self.factors = _factors(fleet, runs)
        self.clip_norm = _limits([run.clip_norm for run in runs], device)
        self.clip_value = _limits([run.clip_value for run in runs], device)
        self.retries = torch.tensor([run.retries for run in runs], device=device).unsqueeze(1)
        self.may_return = any(run.retries for run in runs)
        # What a model was at its best stretch, and all that a checkpoint needs, row by row.
        self.kept = {name: torch.zeros_like(fleet.w) for name in self.rule.keeps}
        self.taken = torch.zeros(E, 1, dtype=torch.float64, device=device)
        self.best = {name: part.clone() for name, part in self._moving().items()} if self.may_return else {}
        self.waits = torch.zeros(E, 1, dtype=torch.bool, device=device)  # to be remembered, once their loss is known
        self._asked = self.may_return
        self.failed = False  # whether a step of some model may not have been taken since this was last reset
        self.scale = torch.ones(E, 1, dtype=torch.float64, device=device)
        self.returns = torch.zeros(E, 1, dtype=torch.int64, device=device)
        self.ended = torch.full((E, 1), -1, dtype=torch.int64, device=device)  # the step that could not be taken
        self.lost = torch.zeros(E, 1, dtype=torch.float64, device=device)  # losses since they were last read, and their number
        self.seen = torch.zeros(E, 1, dtype=torch.float64, device=device)

    def _moving(self) -> dict[str, Tensor]:
        """What a step changes."""
        return {"w": self.fleet.w, "taken": self.taken, **self.kept}

    def rows(self) -> dict[str, Tensor]:
        """All that is kept beside the parameters, one row a model."""
        alone = {"taken": self.taken, "scale": self.scale, "returns": self.returns, "ended": self.ended, "waits": self.waits}
        stretch = {"lost": self.lost, "seen": self.seen}
        best = {f"best.{name}": part for name, part in self.best.items()}
        return {**{f"kept.{name}": part for name, part in self.kept.items()}, **alone, **stretch, **best}

    def apply(self, losses: Tensor, rates: Tensor, step: int | Tensor, running: Tensor) -> Tensor:
        """Take the step of index `step` with the gradients that the fleet holds; say which were finite, [E, 1].

        Args:
            losses: [E] of this step.
            rates: [E, 1] float64 before `scale`.
            step: how many came before it; beside the models, where the host is not to wait for them.
            running: [E, 1] bool; models that have more steps to take.
        """
        g = self.fleet.g
        norm = norms(g)
        losses = losses.to(torch.float64).unsqueeze(1)
        finite = torch.isfinite(norm) & torch.isfinite(losses)
        running = running & (self.ended < 0)
        moves = running & finite
        if self._asked or (self.may_return and g.is_cuda):  # what is captured cannot ask
            self._remember(moves)
        if self.clip_norm is not None:
            clip_norms(g, norm, self.clip_norm)
        if self.clip_value is not None:
            clip_values(g, self.clip_value)
        # On a CPU looking costs nothing, and all is well but for rare steps.
        if g.device.type == "cpu" and bool(moves.all()):
            self._move(rates)
            self.lost += losses
            self.seen += 1
            return finite
        self.failed = True
        before = {name: part.clone() for name, part in self._moving().items()}
        self._move(rates)
        for name, part in self._moving().items():
            part.copy_(torch.where(moves, part, before[name]))
        self.lost += torch.where(moves, losses, 0.0)
        self.seen += moves
        self._settle(running & ~finite, step)
        return finite

    def _move(self, rates: Tensor) -> None:
        self.taken += 1
        rate = rates * self.scale
        rate = rate if self.factors is None else rate.to(self.factors.dtype) * self.factors
        self.rule.update(self.fleet.w, self.fleet.g, self.kept, rate, self.taken)

    def _settle(self, failed: Tensor, step: int | Tensor) -> None:
        back = failed & (self.returns < self.retries)
        if self.may_return:
            for name, part in self._moving().items():
                part.copy_(torch.where(back, self.best[name], part))
            self.scale.copy_(torch.where(back, self.scale / 2, self.scale))
            self.returns += back
        self.ended.copy_(torch.where(failed & ~back, step, self.ended))

    def stretch(self, members: Sequence[int]) -> list[float]:
        """The mean losses of these models since they were last asked for, NaN where no step was taken; they begin anew."""
        rows = list(members)
        means: list[float] = (self.lost[rows] / self.seen[rows]).squeeze(1).tolist()
        self.lost[rows] = 0.0
        self.seen[rows] = 0.0
        return means

    def remember(self, e: int) -> None:
        """This is the best that model e has been: what it returns to, if its next loss is finite."""
        if self.may_return:
            self.waits[e] = True
            self._asked = True

    def _remember(self, good: Tensor) -> None:
        for name, part in self.best.items():
            part.copy_(torch.where(self.waits & good, self._moving()[name], part))
        self.waits.zero_()
        self._asked = False


def _factors(fleet: Fleet, runs: Sequence[Run]) -> Tensor | None:
    """The factors on each entry's rate, [E, N]; None where all are 1."""
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
