"""`scan`: a step function over time, compiled like a cell, for those who know `jax.lax.scan`.

The step becomes a cell. The state of the cell is the carry, followed by what the step returns beside it, which the loop stores
for every step. The cell, and with it the compiled loop, serves later calls of the same function with the same shapes.
"""

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from unfading.backends.choose import check_backend, run
from unfading.cells.base import Cell
from unfading.errors import check_flag
from unfading.lengths import checked_lengths, zero_past
from unfading.loop_options import LoopOptions
from unfading.torch_state import traced

STORED = 128  # cells of step functions; the one that was not used for the longest time is dropped

Shape = tuple[int, ...]


def scan(
    step: Callable[..., tuple[Any, Any]],
    init: Any,
    xs: Any,
    *,
    weights: Any = None,
    lengths: Tensor | None = None,
    reverse: bool = False,
    backend: str = "auto",
) -> tuple[Any, Any]:
    """Run a step function over time; return the last carry, and the outputs of all steps.

        def step(carry, x, weights):
            h = torch.tanh(x + unfading.linear(carry, weights["U"]))
            return h, h

        h, hs = unfading.scan(step, torch.zeros(32, 128), xs, weights={"U": U})

    The loop is compiled under the rules for the step of a cell: rows of the batch do not mix, and every tensor that the step
    reads is an argument. A step outside these rules runs as a plain loop. A function is traced at its first call, so define
    it once and not before every call.

    Args:
        step: `step(carry, x, weights)` returns the next carry and an output; without weights it is `step(carry, x)`. Carry, x
            and output are tensors [B, ...], or nested tuples, lists or dicts of them. The output may be None.
        init: the carry before the first step, tensors [B, ...].
        xs: the inputs of all steps, tensors [T, B, ...] of the carry's dtype.
        weights: what is the same for all steps and rows: matrices, vectors, scalars, `LowRank` and `BlockDiagonal` matrices.
        lengths: int64 [B], in 1..T. A row's carry stays the same after its last step, and its outputs are 0 from there on.
        reverse: run each row from its last step to its first. The outputs are in the order of time.
        backend: which implementation runs the loop, as `unfading.use_backend` names them.
    """
    _check_arguments(step, reverse, backend)
    carry, inputs, constants = (_tensors(name, tree) for name, tree in (("init", init), ("xs", xs), ("weights", weights)))
    _check_shapes(carry, inputs)
    cell = _cell(step, (init, xs, weights), (carry, inputs, constants))
    outputs = [carry[0].new_zeros(carry[0].shape[0], width) for width in cell.output_widths]
    rows = [_flat(each, 2) for each in inputs]
    x = rows[0] if len(rows) == 1 else torch.cat(rows, 2)
    if lengths is not None:
        lengths = checked_lengths(lengths, x)
        x = zero_past(x, lengths)
    options = LoopOptions(lengths, reverse, backend=backend)
    trajectory, final = run(cell, x, cell.make_state(*map(_flat, carry), *outputs), options, weights=tuple(constants))
    return cell.carry.tree(final[: len(carry)]), cell.output_form.tree([trajectory[i] for i in cell.stored_in])


class Form(NamedTuple):
    """How tensors are nested, and the shapes of their features."""

    numbers: Any  # nested as the tensors are, with the number of each in its place
    shapes: tuple[Shape, ...]

    def tree(self, leaves: Iterable[Tensor]) -> Any:
        """The nested tensors, from tensors whose features lie along one axis, the last."""
        pairs = zip(leaves, self.shapes, strict=True)
        return self.nested([leaf.unflatten(-1, shape) if shape else leaf.squeeze(-1) for leaf, shape in pairs])

    def nested(self, leaves: Sequence[Tensor]) -> Any:
        """The nested tensors, from tensors as they are."""
        return _pytree.tree_map_only(int, lambda number: leaves[number], self.numbers)


class StepCell(Cell):
    """A step function as a cell: its inputs are the tensors of xs, its state those of the carry and of the output.

    Args:
        function: the step.
        trees: init, xs and weights.
        tensors: those in them.
    """

    like: Tensor

    def __init__(self, function: Callable[..., Any], trees: Sequence[Any], tensors: Sequence[Sequence[Tensor]]):
        carry, inputs, constants = ([each.detach() for each in own] for own in tensors)
        super().__init__(sum(prod(each.shape[2:]) for each in inputs), prod(carry[0].shape[1:]))
        self.function, self.weighted = function, trees[2] is not None
        self.carry, self.inputs, self.constants = map(_form, trees, (carry, inputs, constants), (1, 2, 0))
        # The numbers of the first call, with which the compiler tests the step. Every call brings its own weights.
        self.examples = nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in constants)
        self.register_buffer("like", carry[0][:0])
        with torch.no_grad():
            new, output = self._call(map(_flat, carry), [_flat(each[0]) for each in inputs], constants)
        held, outputs = _tensors("the carry that step returns", new), _tensors("the output of step", output)
        _check_carry(new, held, trees[0], carry)
        for each in outputs:
            held += [] if any(each is part for part in held) else [each]
        self.output_form = _form(output, outputs, 1)
        # For each tensor of the output, the part of the state that holds it: one of the carry where it is that tensor.
        self.stored_in = [next(i for i, part in enumerate(held) if part is each) for each in outputs]
        self.output_widths = [prod(each.shape[1:]) for each in held[len(carry) :]]
        make: Any = namedtuple  # the names of the fields are known only here
        self.make_inputs = make("Inputs", [f"x{i}" for i in range(len(inputs))])
        self.make_state = make("State", [f"carry{i}" if i < len(carry) else f"y{i - len(carry)}" for i in range(len(held))])

    @property
    def described_as(self) -> str:
        """The name in messages: that of the function."""
        return f"the step {getattr(self.function, '__name__', 'function')}"

    def _call(self, carry: Iterable[Tensor], x: Iterable[Tensor], weights: Sequence[Tensor]) -> tuple[Any, Any]:
        """The new carry and the output of the function, from tensors whose features lie along one axis."""
        more = [self.constants.nested(weights)] if self.weighted else []
        result = self.function(self.carry.tree(carry), self.inputs.tree(x), *more)
        if not isinstance(result, tuple) or len(result) != 2:
            got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise TypeError(f"step must return a pair, the next carry and the output of the step; got {got}.")
        return result

    def project(self, x: Tensor, start: int = 0) -> Any:
        return self.make_inputs(*x.split([prod(shape) for shape in self.inputs.shapes], -1))

    def weights(self) -> tuple[Tensor, ...]:
        return tuple(self.examples)

    def initial_state(self, batch: int) -> Any:
        widths = [*map(prod, self.carry.shapes), *self.output_widths]
        return self.make_state(*(self.like.new_zeros(batch, width) for width in widths))

    def step(self, inputs: Any, state: Any, weights: Any) -> Any:
        n = len(self.carry.shapes)
        new, output = self._call(state[:n], inputs, weights)
        outputs = dict(zip(self.stored_in, [] if output is None else _pytree.tree_leaves(output), strict=True))
        return self.make_state(*map(_flat, _pytree.tree_leaves(new)), *(_flat(outputs[i]) for i in range(n, len(state))))


_cells: OrderedDict[Any, StepCell] = OrderedDict()  # by function, and by the form of its arguments


def _cell(step: Callable[..., Any], trees: Sequence[Any], tensors: Sequence[Sequence[Tensor]]) -> StepCell:
    """The cell of a step function for arguments of this form."""
    pairs = zip(tensors, (1, 2, 0), strict=True)
    kinds = ((tuple(each.shape[axes:]), each.dtype, each.device) for own, axes in pairs for each in own)
    key = (step, *map(_pytree.tree_structure, trees), *kinds)
    cell = _cells.pop(key, None) or StepCell(step, trees, tensors)
    if not traced():  # else the tensors have no numbers with which the step could be tested
        _cells[key] = cell  # now the last one
        if len(_cells) > STORED:
            _cells.popitem(last=False)
    return cell


# -- the forms of arguments ---------------------------------------------------------------------------------------------------


def _tensors(name: str, tree: Any) -> list[Tensor]:
    leaves = _pytree.tree_leaves(tree) if tree is not None else []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{name} must be a tensor, or nested tuples, lists or dicts of tensors; got {type(leaf).__name__} in it."
            )
    return leaves


def _form(tree: Any, tensors: Sequence[Tensor], axes: int) -> Form:
    """The form of nested tensors whose first axes are those of batch and time."""
    if tree is None:
        return Form(None, ())
    numbers = _pytree.tree_unflatten(range(len(tensors)), _pytree.tree_structure(tree))
    return Form(numbers, tuple(tuple(each.shape[axes:]) for each in tensors))


def _flat(tensor: Tensor, axes: int = 1) -> Tensor:
    """The tensor with its features along one axis, behind those of batch and time."""
    return tensor.unsqueeze(axes) if tensor.dim() == axes else tensor.flatten(axes)


def _check_arguments(step: Any, reverse: bool, backend: str) -> None:
    if isinstance(step, Cell) or not callable(step) or not isinstance(step, Hashable):
        raise TypeError(
            f"scan takes a function step(carry, x, weights); got {type(step).__name__}. To run a cell, use unfading.Recurrent."
        )
    check_flag("reverse", reverse)
    check_backend(backend)


def _check_shapes(carry: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    if not carry or not inputs:
        raise ValueError(f"{'xs' if carry else 'init'} of scan must have at least one tensor; got none.")
    dtype, device = carry[0].dtype, carry[0].device
    B, T = (carry[0].shape or (0,))[0], (inputs[0].shape or (0,))[0]
    for name, own, front in (("init", carry, [B]), ("xs", inputs, [T, B])):
        for each in own:
            shape = list(each.shape)
            if len(shape) < len(front) or 0 in shape[: len(front)]:
                wanted = (
                    "[B, ...] with at least one row" if name == "init" else "[T, B, ...] with at least one step and one row"
                )
                raise ValueError(f"{name} of scan must have tensors {wanted}; got shape {shape}.")
            if name == "xs" and shape[0] != T:
                raise ValueError(
                    f"all tensors in xs of scan must have the same number of steps, their first axis; got {T} and {shape[0]}."
                )
            if shape[len(front) - 1] != B:
                raise ValueError(
                    "all tensors in init and xs of scan must have the same number of rows B: [B, ...] in init, [T, B, ...] in "
                    f"xs; got {B} in the first tensor of init, and shape {shape} in {name}."
                )
            if each.dtype != dtype or each.device != device or not dtype.is_floating_point:
                raise TypeError(
                    f"init and xs of scan have tensors of one floating-point type on one device, here {dtype} on {device}; got "
                    f"{each.dtype} on {each.device} in {name}. Convert it with .to({dtype})."
                )


def _check_carry(new: Any, parts: Sequence[Tensor], init: Any, carry: Sequence[Tensor]) -> None:
    """Raise unless what a step returns as the next carry is like the first one."""
    kinds = [[f"{each.dtype} {list(each.shape)}" for each in own] for own in (carry, parts)]
    same = _pytree.tree_structure(new) == _pytree.tree_structure(init)
    if not same or kinds[0] != kinds[1]:
        nested = "" if same else ", nested otherwise"
        raise ValueError(f"step must return a carry like init, {', '.join(kinds[0])}; got {', '.join(kinds[1])}{nested}.")
