"""Recurrent: a stack of any cell, with the shapes and behaviour of torch.nn's recurrent layers.

    output, state = recurrent(x, state=None, *, lengths=None, start=0)

State comes in and goes out as the cell's own NamedTuple, each part [layers * directions, B, n] in torch.nn's order, and is
nowhere remembered.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree
from typing_extensions import TypeVar

from unfading.backends.choose import How, check_backend, output_of, outputs, run
from unfading.cells.base import Cell
from unfading.cells.wrap import RecurrentDropoutCell, ZoneoutCell
from unfading.errors import check_count, check_share
from unfading.layers.shapes import Sequences, enter, enter_state, leave, leave_state

if TYPE_CHECKING:
    from unfading.layers.stream import Stream

# The cells' NamedTuple, where all cells of a stack have one; not checked for a bare `Recurrent`.
State = TypeVar("State", bound=tuple[Any, ...], default=Any)
# Output has the form of the input.
Sequence = TypeVar("Sequence", Tensor, PackedSequence)


class Recurrent(nn.Module, Generic[State]):
    """A stack of any cell, run over time.

    Args:
        make_cell: makes one cell for a given input size; called once per layer and direction.
        input_size: features of the input.
        num_layers: layers, each reading the output of the one below.
        batch_first: input and output are [B, T, n] instead of [T, B, n]. As in torch.nn, not the state.
        dropout: share of each layer's output that is dropped in training, except the last layer's.
        bidirectional: a second cell per layer reads each row from its end; outputs are joined.
        recurrent_dropout: share of what the recurrent matrices read that is dropped in training, one mask for all time.
        zoneout: share of the state's entries that stand still at each step in training.
        learn_initial_state: make the state before the first step a parameter; it starts at the cell's own.
        checkpoint_every: store the state every so many steps only and compute the rest again in the backward pass; about
            the root of the sequence length makes memory least. Each layer's input is kept all the same.
        backend: which implementation runs the loop over time; see `unfading.use_backend`.
        device: where the parameters are made.
        dtype: of the parameters.
    """

    def __init__(
        self,
        make_cell: Callable[[int], Cell],
        input_size: int,
        num_layers: int = 1,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
        learn_initial_state: bool = False,
        checkpoint_every: int | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_count("input_size", input_size)
        check_count("num_layers", num_layers)
        check_share("dropout", dropout)
        check_share("recurrent_dropout", recurrent_dropout)
        check_share("zoneout", zoneout)
        check_backend(backend)
        if checkpoint_every is not None:
            check_count("checkpoint_every", checkpoint_every)
        if dropout and num_layers == 1:
            warnings.warn(
                f"dropout={dropout} acts between layers, and num_layers=1 has nothing between; it does nothing here.",
                stacklevel=2 if type(self) is Recurrent else 3,
            )
        self.input_size = input_size
        self.num_layers = num_layers
        self.batch_first = batch_first
        self.dropout = dropout
        self.bidirectional = bidirectional
        self.recurrent_dropout = recurrent_dropout
        self.zoneout = zoneout
        self.checkpoint_every = checkpoint_every
        self.backend = backend
        self.directions = 2 if bidirectional else 1
        with _made_on(device, dtype):
            cells: list[Cell] = []
            for _ in range(num_layers):
                size = cells[-1].output_size * self.directions if cells else input_size
                cells.extend(_made_cell(make_cell, size) for _ in range(self.directions))
        self.cells = nn.ModuleList(cells)
        self.to(device=device, dtype=dtype)
        self.output_size = cells[-1].output_size * self.directions
        # Each cell with what runs it. A plain list, so that the parameters keep the cells' own names.
        self._noisy = [(cell, _with_noise(cell, recurrent_dropout, zoneout)) for cell in cells]

        initial = [cell.initial_state(1) for cell in cells]
        # One stacked state where all cells agree; a tuple of states where they differ.
        self.stacked_state = len({(type(s), tuple(part.shape for part in s)) for s in initial}) == 1
        self.learned_state = (
            nn.ParameterList(nn.Parameter(part[0].detach().clone()) for s in initial for part in s)
            if learn_initial_state
            else None
        )

    def forward(
        self, x: Sequence, state: State | tuple[Tensor, ...] | None = None, *, lengths: Tensor | None = None, start: int = 0
    ) -> tuple[Sequence, State]:
        """Run over x; return the output of the last layer and the final state.

        Args:
            x: [T, B, I] ([B, T, I] with batch_first), [T, I] unbatched, or a PackedSequence.
            state: as an earlier call returned it; None starts anew.
            lengths: int64 [B], in 1..T, any order. Output past a row's end is 0, the final state is that of its last
                step, and the reverse direction starts at its own end.
            start: absolute index of x's first step, where x continues an earlier piece.
        """
        sequences, output, finals = self._run(x, state, lengths, start)
        final = leave_state(finals, stacked=self.stacked_state, batched=sequences.batched, axis=0)
        return cast(Sequence, leave(output, sequences, batch_first=self.batch_first)), final

    if TYPE_CHECKING:
        __call__ = forward

    def trajectory(
        self,
        x: Tensor | PackedSequence,
        state: State | tuple[Tensor, ...] | None = None,
        *,
        lengths: Tensor | None = None,
        start: int = 0,
    ) -> State:
        """The state after every step: as the state that `forward` returns, with a time axis in front.

        Each part is [T, layers * directions, B, n], also with batch_first and for a PackedSequence; zeros past a row's end.
        """
        trajectories: list[Any] = []
        sequences, _, _ = self._run(x, state, lengths, start, trajectories)
        return leave_state(trajectories, stacked=self.stacked_state, batched=sequences.batched, axis=1)

    def stream(self, batch: int = 1, state: State | tuple[Tensor, ...] | None = None, *, start: int = 0) -> "Stream":
        """Feed the layer one step at a time: `push(x)` takes x [batch, I] and gives the output [batch, n].

        The matrices are built once, now; a later change of the parameters does not reach the stream.

        Args:
            batch: rows that are fed side by side.
            state: as a call returned it; None starts anew.
            start: absolute index of the first step.
        """
        name = type(self).__name__
        check_count("batch", batch)
        if self.bidirectional:
            raise ValueError(f"{name} is bidirectional: its backward half begins at the end, which a stream has not.")
        states = self.initial_states(batch)
        if state is not None:
            states = enter_state(state, states, name, stacked=self.stacked_state, batched=True)
        # Imported here, since it loads the compiler.
        from unfading.layers.stream import Stream

        return Stream(self.runners, [type(s)(*(part.detach() for part in s)) for s in states], start, self.backend)

    def _run(
        self,
        x: Tensor | PackedSequence,
        state: State | tuple[Tensor, ...] | None,
        lengths: Tensor | None,
        start: int,
        trajectories: list[Any] | None = None,
    ) -> tuple[Sequences, Tensor, list[Any]]:
        """What came in, the output of the last layer, and all final states; `trajectories`, where given, takes the rest."""
        name, cells = type(self).__name__, self.runners
        like = cells[0].initial_state(1)[0]
        sequences = enter(x, lengths, start, name, self.input_size, batch_first=self.batch_first, like=like)
        states = self.initial_states(sequences.x.shape[1])
        if state is not None:
            states = enter_state(state, states, name, stacked=self.stacked_state, batched=sequences.batched)
        output, lengths = sequences.x, sequences.lengths
        finals = []
        for depth in range(self.num_layers):
            if depth:
                output = nn.functional.dropout(output, self.dropout, self.training)
            sides = []
            for direction in range(self.directions):
                i = depth * self.directions + direction
                how = How(lengths, direction == 1, start, self.backend, self.checkpoint_every)
                if trajectories is None:
                    side, final = outputs(cells[i], output, states[i], how)
                else:
                    trajectory, final = run(cells[i], output, states[i], how)
                    trajectories.append(trajectory)
                    side = output_of(cells[i], trajectory, lengths)
                if side.shape[-1] != cells[i].output_size:
                    raise ValueError(
                        f"{type(self.cells[i]).__name__} declares output_size={cells[i].output_size}, and its output has "
                        f"{side.shape[-1]} features."
                    )
                sides.append(side)
                finals.append(final)
            output = torch.cat(sides, dim=-1) if self.bidirectional else sides[0]
        return sequences, output, finals

    @property
    def runners(self) -> list[Cell]:
        """What runs: the cells, inside their noise."""
        for i, cell in enumerate(cast(list[Cell], self.cells)):
            if self._noisy[i][0] is not cell:  # somebody has put another cell in its place
                self._noisy[i] = (cell, _with_noise(cell, self.recurrent_dropout, self.zoneout))
        return [runner for _, runner in self._noisy]

    def initial_states(self, batch: int) -> list[Any]:
        """The state of every layer and direction before the first step, each part [batch, n]."""
        states = [cell.initial_state(batch) for cell in self.runners]
        if self.learned_state is None:
            return states
        learned = iter(self.learned_state)
        return [type(s)(*(next(learned).expand_as(part) for part in s)) for s in states]

    def penalty(self) -> Tensor | None:
        """What training should add to the loss on account of the cells' parameters; None where no cell asks for any."""
        penalties = [penalty for cell in self.runners if (penalty := cell.penalty()) is not None]
        return torch.stack(penalties).sum() if penalties else None

    def extra_repr(self) -> str:
        names = ("batch_first", "dropout", "bidirectional", "recurrent_dropout", "zoneout", "checkpoint_every")
        said = {name: getattr(self, name) for name in names}
        shown = "".join(f", {name}={value}" for name, value in said.items() if value)
        return f"{self.input_size}, num_layers={self.num_layers}{shown}"


def detach(state: Any) -> Any:
    """The same state, cut off from the graph that computed it: for truncated backpropagation through time."""
    return _pytree.tree_map_only(Tensor, torch.Tensor.detach, state)


def _with_noise(cell: Cell, recurrent_dropout: float, zoneout: float) -> Cell:
    if recurrent_dropout:
        cell = RecurrentDropoutCell(cell, recurrent_dropout)
    return ZoneoutCell(cell, zoneout) if zoneout else cell


def _made_cell(make_cell: Callable[[int], Cell], size: int) -> Cell:
    if isinstance(make_cell, Cell):
        raise TypeError(
            f"make_cell makes a cell for each layer; got one {type(make_cell).__name__}. Pass a function of the input size."
        )
    cell = make_cell(size)
    if not isinstance(cell, Cell):
        raise TypeError(f"make_cell must return an unfading.Cell; got {type(cell).__name__}.")
    if cell.input_size != size:
        raise ValueError(f"make_cell({size}) must return a cell with input_size={size}; got {cell.input_size}.")
    return cell


@contextmanager
def _made_on(device: torch.device | str | None, dtype: torch.dtype | None) -> Iterator[None]:
    """Parameters are made on `device` and in `dtype`, not cast to it: an orthogonal start is orthogonal in float64 too."""
    before = torch.get_default_dtype()
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point type; got {dtype}.")
    torch.set_default_dtype(before if dtype is None else dtype)
    try:
        with nullcontext() if device is None else torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
