"""E models of one shape, side by side: the parameters of each are a row of one matrix. A single model is E = 1.

    w [E, N]    parameters; those of model e are views of row e
    g [E, N]    gradients, laid out alike

Together, in one pass, with `torch.func.vmap` over the rows: what fills a GPU. Or one model after the other, which is faster on
a CPU, and needed where batches differ in shape.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree

from unfading.backends.choose import choose
from unfading.layers.model import Model
from unfading.layers.recurrent import detach
from unfading.tasks.base import Batch, Task

# Parameters begin at multiples of so many entries, hence of 64 bytes and more: vector loads like it.
ALIGNED = 16


class Judged(nn.Module):
    """A model and its task."""

    def __init__(self, model: Model, task: Task):
        super().__init__()
        self.model = model
        self.task = task


class Loss(Judged):
    """What training makes small, and what is told of it."""

    def forward(self, batch: Batch, state: Any, start: int, truncate: int | None) -> tuple[Tensor, Tensor, Any]:
        """Loss with the cells' penalty, loss of the task alone, final state."""
        prediction, state = self.model(batch.x, state, lengths=batch.lengths, start=start, truncate=truncate)
        loss = self.task.loss(prediction, batch)
        penalty = self.model.rnn.penalty()
        return loss if penalty is None else loss + penalty, loss, state


class Score(Judged):
    """The loss and the metrics of a batch."""

    def forward(self, batch: Batch, state: Any, start: int) -> tuple[dict[str, Tensor], Any]:
        """Means over the batch by name, final state."""
        prediction, state = self.model(batch.x, state, lengths=batch.lengths, start=start)
        return {"loss": self.task.loss(prediction, batch), **self.task.metrics(prediction, batch)}, state


class Fleet:
    """Models of one shape with their gradients and scores.

    Args:
        models: alike but for their numbers; from now on their parameters are views of `w`.
        task: what all of them are trained on.
        together: run them in one pass, where their batches have one shape.
    """

    def __init__(self, models: Sequence[Model], task: Task, *, together: bool):
        self.models = list(models)
        self.task = task
        self.together = together
        self.names = models[0].trainable
        shapes = [dict(model.named_parameters())[name].shape for model in models for name in self.names]
        if shapes != shapes[: len(self.names)] * len(models):
            raise ValueError("the models of a fleet must have parameters of equal shapes; train these apart.")
        first = dict(models[0].named_parameters())
        self.places: dict[str, tuple[int, torch.Size]] = {}
        end = 0
        for name in self.names:
            self.places[name] = (end, first[name].shape)
            end += -(-first[name].numel() // ALIGNED) * ALIGNED
        like = first[self.names[0]]
        self.w = torch.zeros(len(models), end, dtype=like.dtype, device=like.device)
        self.g = torch.zeros_like(self.w)
        for e, model in enumerate(models):
            for name, parameter in model.named_parameters():
                if name in self.places:
                    mine = self.view(self.w[e], name)
                    mine.copy_(parameter.detach())
                    parameter.data = mine
                    parameter.grad = self.view(self.g[e], name)
        if together:
            self._plan()
        self.loss = [Loss(model, task) for model in models]
        self.score = [Score(model, task) for model in models]

    def _plan(self) -> None:
        """Compile the cells now: inside `vmap` their parameters are not themselves, and could not be planned with."""
        rnn = self.models[0].rnn
        for mode in (False, True):
            self.models[0].train(mode)
            for cell in rnn.runners:
                choose(cell, rnn.backend)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """A parameter in rows that are laid out as w: [N] -> its shape, [E, N] -> [E, its shape]."""
        start, shape = self.places[name]
        return flat[..., start : start + shape.numel()].unflatten(-1, shape) if shape else flat[..., start]

    def train(self) -> None:
        """The models noisy, if they have noise."""
        for model in self.models:
            model.train()

    def eval(self) -> None:
        """The models without noise."""
        for model in self.models:
            model.eval()

    def held(self) -> dict[str, Tensor]:
        """What training must not change: running statistics, as BatchNorm has them, would be in no row."""
        first = self.models[0]
        return {name: buffer.clone() for name, buffer in first.named_buffers()}

    def check_held(self, held: dict[str, Tensor]) -> dict[str, Tensor]:
        """Raise where a step has; nothing is left to look at then."""
        buffers = dict(self.models[0].named_buffers())
        for name, before in held.items():
            if not torch.equal(buffers[name], before):
                raise ValueError(
                    f"training changes {name}, which is no parameter: it could neither go back nor be chosen with the weights. "
                    "Use a layer without running statistics, as nn.LayerNorm or nn.BatchNorm1d(..., track_running_stats=False)."
                )
        return {}

    def gradients(self, batches: Sequence[Batch], state: Any, start: int, truncate: int | None) -> tuple[Tensor, Any]:
        """Fill g; return the losses [E] and the final states, each part with a first axis [E], cut from their graphs.

        Args:
            batches: one for each model.
            state: to begin with, as an earlier call returned it; None begins anew.
            start: absolute index of the first step.
            truncate: as `Model` takes it.
        """
        batches = [self.cast(batch) for batch in batches]
        if self.together and len({tuple(_shapes(batch)) for batch in batches}) == 1:
            return self._gradients_together(_stacked(batches), state, start, truncate)
        self.g.zero_()
        losses, finals = [], []
        for e, (loss, batch) in enumerate(zip(self.loss, batches, strict=True)):
            objective, value, final = loss(batch, _member(state, e), start, truncate)
            objective.backward()
            losses.append(value.detach())
            finals.append(detach(final))
        return torch.stack(losses), _stacked(finals)

    def _gradients_together(self, batch: Batch, state: Any, start: int, truncate: int | None) -> tuple[Tensor, Any]:
        def objective(w: dict[str, Tensor], buffers: dict[str, Tensor], batch: Batch, state: Any) -> tuple[Tensor, Any]:
            value, loss, final = functional_call(self.loss[0], (w, buffers), (batch, state, start, truncate))
            return value, (loss, final)

        dims = (0, 0, Batch(*(None if part is None else 0 for part in batch)), None if state is None else 0)  # type: ignore[arg-type]
        mapped = vmap(grad(objective, has_aux=True), in_dims=dims, randomness="different")
        found, (losses, finals) = mapped(self._stacked_parameters, self._stacked_buffers, batch, state)
        self.g.zero_()  # between parameters too: a clip by a norm that is NaN leaves NaN there, and every later norm would be
        torch._foreach_copy_([self.view(self.g, name) for name in self.names], [found[f"model.{name}"] for name in self.names])
        return losses, finals

    def scores(self, batch: Batch, state: Any, start: int) -> tuple[dict[str, Tensor], Any]:
        """Loss and metrics of every model on ONE batch, each [E], and the final states."""
        batch = self.cast(batch)
        with torch.no_grad():
            if self.together:

                def one(w: dict[str, Tensor], buffers: dict[str, Tensor], state: Any) -> Any:
                    return functional_call(self.score[0], (w, buffers), (batch, state, start))

                dims = (0, 0, None if state is None else 0)
                return vmap(one, in_dims=dims)(self._stacked_parameters, self._stacked_buffers, state)
            made = [score(batch, _member(state, e), start) for e, score in enumerate(self.score)]
        return {name: torch.stack([values[name] for values, _ in made]) for name in made[0][0]}, _stacked([s for _, s in made])

    # Made once: the former are views of w, and the latter stay as they are.
    @cached_property
    def _stacked_parameters(self) -> dict[str, Tensor]:
        return {f"model.{name}": self.view(self.w, name) for name in self.names}

    @cached_property
    def _stacked_buffers(self) -> dict[str, Tensor]:
        """What is not trained: buffers, and parameters that are held; of models that differ, as in their permutations."""
        held = [{**dict(m.named_buffers()), **dict(m.named_parameters())} for m in self.models]
        return {f"model.{n}": torch.stack([h[n].detach() for h in held]) for n in held[0] if n not in self.places}

    def cast(self, batch: Batch) -> Batch:
        """Floating-point numbers in the precision of the parameters."""
        x, target = (part.to(self.w.dtype) if part.is_floating_point() else part for part in (batch.x, batch.target))
        return batch._replace(x=x, target=target)


def _shapes(batch: Batch) -> list[torch.Size | None]:
    return [None if field is None else field.shape for field in batch]


def _stacked(made: Sequence[Any]) -> Any:
    """The same structure with a first axis for the models."""
    return _pytree.tree_map(lambda *parts: None if parts[0] is None else torch.stack(parts), *made)


def _member(state: Any, e: int) -> Any:
    return _pytree.tree_map_only(Tensor, lambda part: part[e], state)
