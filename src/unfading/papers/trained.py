"""Models on their way through training, for figures that look into them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from unfading.cells.base import Cell
from unfading.member import Member
from unfading.model import Model
from unfading.run import Run
from unfading.scan import scan
from unfading.training import Training


def on_the_way(run: Run, every: int) -> Iterator[tuple[int, Model]]:
    """The model of a run before its first step, after every so many, and at its end; the next is asked for, then trained."""
    with torch.random.fork_rng(devices=[]):
        member = Member(run, run.make_task())
        training = Training([member], None, float("inf"), "", together=False)
        training.fleet.train()
        model = training.fleet.models[0]
        assert isinstance(model, Model)
        yield 0, model
        while not member.done:
            training.advance([0])
            if training.step % every == 0 or member.done:
                yield training.step, model


def first_to_last(cell: Cell, x: Tensor) -> Tensor:
    """dh_T/dh_1 for every row of x [T, B, I], [B, H, H], of a cell whose state is h alone.

    Each row is repeated H times, and each copy is asked for another row of the Jacobian, so that one backward pass gives all.
    """
    B, H = x.shape[1], cell.output_size
    inputs, weights = cell.project(x), cell.weights()
    _, state = scan(cell, _steps(cell, inputs, 0, 1), cell.initial_state(B), weights)
    repeated = type(inputs)(
        *(
            field if name in cell.shared else field.repeat_interleave(H, dim=1)
            for name, field in zip(inputs._fields, inputs, strict=True)
        )
    )
    h = state.h.detach().repeat_interleave(H, dim=0).requires_grad_()
    _, last = scan(cell, _steps(cell, repeated, 1, len(x)), type(state)(h), weights)
    (gradient,) = torch.autograd.grad(last.h, [h], torch.eye(H, dtype=h.dtype).repeat(B, 1))
    return gradient.reshape(B, H, H)


def _steps(cell: Cell, inputs: object, first: int, last: int) -> object:
    """Some steps of what `project` gave."""
    assert isinstance(inputs, tuple)
    named = zip(inputs._fields, inputs, strict=True)  # type: ignore[attr-defined]
    return type(inputs)(*(field if name in cell.constant else field[first:last] for name, field in named))
