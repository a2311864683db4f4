"""A fleet: E models of one shape, whose parameters are the rows of one matrix. A single model is E = 1.

    w [E, N]    parameters; those of model e are views of row e
    g [E, N]    gradients, with the same layout

A fleet runs its models in one pass, with `torch.func.vmap` over the rows, which keeps a GPU busy; or one after the other, which
is faster on a CPU and necessary if the batches differ in shape.
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

# Each parameter starts at a multiple of so many entries, that is of at least 64 bytes, for fast vector loads.
ALIGNMENT = 16


class ModelWithTask(nn.Module):
    """A model and its task."""

    def __init__(self, model: Model, task: Task):
        super().__init__()
        self.model = model
        self.task = task


class Loss(ModelWithTask):
    """The objective of training, and the loss of the task."""

    def forward(self, batch: Batch, state: Any, start: int, truncate: int | None) -> tuple[Tensor, Tensor, Any]:
        """The loss with the penalty of the cells, the loss of the task alone, and the final state."""
        prediction, state = self.model(batch.x, state, lengths=batch.lengths, start=start, truncate=truncate)
        loss = self.task.loss(prediction, batch)
        penalty = self.model.rnn.penalty()
        return loss if penalty is None else loss + penalty, loss, state


class Score(ModelWithTask):
    """The loss and the metrics of a batch."""

    def forward(self, batch: Batch, state: Any, start: int) -> tuple[dict[str, Tensor], Any, Tensor]:
        """Means over the batch, by name, the final state, and the prediction."""
        prediction, state = self.model(batch.x, state, lengths=batch.lengths, start=start)
        return {"loss": self.task.loss(prediction, batch), **self.task.metrics(prediction, batch)}, state, prediction


class Fleet:
    """Models of one shape, with their gradients and scores.

    Args:
        models: models that differ only in their numbers; their parameters become views of `w`.
        task: the task of all of them.
        together: run them in one pass, if their batches have one shape.
    """

    def __init__(self, models: Sequence[Model], task: Task, *, together: bool):
        self.models = list(models)
        self.task = task
        self.together = together
        self.names = models[0].trainable
        shapes = [dict(model.named_parameters())[name].shape for model in models for name in self.names]
        if shapes != shapes[: len(self.names)] * len(models):
            raise ValueError("the models of a fleet must have parameters of equal shapes. Train these separately.")
        first = dict(models[0].named_parameters())
        self._offsets: dict[str, tuple[int, torch.Size]] = {}
        end = 0
        for name in self.names:
            self._offsets[name] = (end, first[name].shape)
            end += -(-first[name].numel() // ALIGNMENT) * ALIGNMENT
        like = first[self.names[0]]
        self.w = torch.zeros(len(models), end, dtype=like.dtype, device=like.device)
        # One buffer for gradients and losses, which processes that train together sum at once.
        self.sums = torch.zeros(self.w.numel() + len(models), dtype=like.dtype, device=like.device)
        self.g = self.sums[: self.w.numel()].view_as(self.w)
        self.losses = self.sums[self.w.numel() :]  # of the whole batches, where processes share them
        for e, model in enumerate(models):
            for name, parameter in model.named_parameters():
                if name in self._offsets:
                    row = self.view(self.w[e], name)
                    row.copy_(parameter.detach())
                    parameter.data = row
                    parameter.grad = self.view(self.g[e], name)
        if together:
            self._compile()
        self.loss = [Loss(model, task) for model in models]
        self.score = [Score(model, task) for model in models]

    def _compile(self) -> None:
        """Compile the cells now: inside `vmap` their parameters are batched tensors, which the compiler cannot read."""
        rnn = self.models[0].rnn
        for mode in (False, True):
            self.models[0].train(mode)
            for cell in rnn.runners:
                choose(cell, rnn.backend)

    def view(self, flat: Tensor, name: str) -> Tensor:
        """The view of a parameter in rows with the layout of w: [N] -> its shape, [E, N] -> [E, its shape]."""
        start, shape = self._offsets[name]
        return flat[..., start : start + shape.numel()].unflatten(-1, shape) if shape else flat[..., start]

    def train(self) -> None:
        """Put all models in training mode."""
        for model in self.models:
            model.train()

    def eval(self) -> None:
        """Put all models in evaluation mode."""
        for model in self.models:
            model.eval()

    def copy_buffers(self) -> dict[str, Tensor]:
        """Copies of the first model's buffers. Training must not change them, because they are in no row of w."""
        return {name: buffer.clone() for name, buffer in self.models[0].named_buffers()}

    def check_buffers(self, before: dict[str, Tensor]) -> None:
        """Raise if a buffer differs from its copy, as the running statistics of BatchNorm do after a step."""
        buffers = dict(self.models[0].named_buffers())
        for name, copy in before.items():
            if not torch.equal(buffers[name], copy):
                raise ValueError(
                    f"training changes {name}, which is not a parameter: it is not restored or selected with the weights. Use "
                    "a layer without running statistics, e.g. nn.LayerNorm or nn.BatchNorm1d(..., track_running_stats=False)."
                )

    def gradients(self, batches: Sequence[Batch], state: Any, start: int, truncate: int | None) -> tuple[Tensor, Any]:
        """Compute g; return the losses [E] and the final states, detached, each part with a first axis [E].

        Args:
            batches: one for each model.
            state: initial states, as an earlier call returned them; None for the models' own.
            start: absolute index of the first step.
            truncate: as `Model` takes it.
        """
        batches = [self.cast(batch) for batch in batches]
        if self.together and len({tuple(_shapes(batch)) for batch in batches}) == 1:
            return self._gradients_together(_stacked(batches), state, start, truncate)
        self.g.zero_()
        losses, finals = [], []
        for e, (loss, batch) in enumerate(zip(self.loss, batches, strict=True)):
            objective, value, final = loss(batch, _state_of(state, e), start, truncate)
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
        gradients, (losses, finals) = mapped(self._stacked_parameters, self._stacked_buffers, batch, state)
        # The gaps between parameters too: clipping by a norm that is NaN writes NaN there, which would stay in all later norms.
        self.g.zero_()
        own = [self.view(self.g, name) for name in self.names]
        torch._foreach_copy_(own, [gradients[f"model.{name}"] for name in self.names])
        return losses, finals

    def scores(self, batch: Batch, state: Any, start: int) -> tuple[dict[str, Tensor], Any, Tensor]:
        """Loss and metrics of every model on ONE batch, each [E], the final states, and the predictions [E, ...]."""
        batch = self.cast(batch)
        with torch.no_grad():
            if self.together:

                def one(w: dict[str, Tensor], buffers: dict[str, Tensor], state: Any) -> Any:
                    return functional_call(self.score[0], (w, buffers), (batch, state, start))

                dims = (0, 0, None if state is None else 0)
                return vmap(one, in_dims=dims)(self._stacked_parameters, self._stacked_buffers, state)
            results = [score(batch, _state_of(state, e), start) for e, score in enumerate(self.score)]
        scores = {name: torch.stack([values[name] for values, _, _ in results]) for name in results[0][0]}
        predictions = torch.stack([prediction for _, _, prediction in results])
        return scores, _stacked([final for _, final, _ in results]), predictions

    # Cached: the parameters are views of w, and the buffers do not change.
    @cached_property
    def _stacked_parameters(self) -> dict[str, Tensor]:
        return {f"model.{name}": self.view(self.w, name) for name in self.names}

    @cached_property
    def _stacked_buffers(self) -> dict[str, Tensor]:
        """Buffers and parameters that are not trained; they may differ between models, as permutations do."""
        tensors = [{**dict(m.named_buffers()), **dict(m.named_parameters())} for m in self.models]
        return {f"model.{n}": torch.stack([t[n].detach() for t in tensors]) for n in tensors[0] if n not in self._offsets}

    def cast(self, batch: Batch) -> Batch:
        """The batch with its floating-point numbers in the dtype of the parameters."""
        x, target = (part.to(self.w.dtype) if part.is_floating_point() else part for part in (batch.x, batch.target))
        return batch._replace(x=x, target=target)


def _shapes(batch: Batch) -> list[torch.Size | None]:
    return [None if field is None else field.shape for field in batch]


def _stacked(trees: Sequence[Any]) -> Any:
    """One tree of the same structure, its tensors with a first axis for the models."""
    return _pytree.tree_map(lambda *parts: None if parts[0] is None else torch.stack(parts), *trees)


def _state_of(state: Any, e: int) -> Any:
    return _pytree.tree_map_only(Tensor, lambda part: part[e], state)
