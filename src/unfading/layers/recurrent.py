"""Recurrent: a stack of any cell, with the shapes and behaviour of torch.nn's recurrent layers.

    output, state = recurrent(x, state=None, *, lengths=None, resets=None, start=0)

Inside, x is [T, B, I] with lengths, and each layer and direction has its own state with parts [B, n]. Callers may pass x in any
form that torch.nn accepts, and the output has the same form. They hold one state: the cell's NamedTuple with parts
[layers * directions, B, n] in torch.nn's order, or, where the cells of a stack differ, a tuple with one state per layer and
direction. The layer itself stores no state.

Convolutional cells read frames: every x, output and part of a state has two more axes at its end, height and width.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils import _pytree
from typing_extensions import TypeVar

from unfading import allocation
from unfading.backends.choose import check_backend, output_of, outputs, run, stack_outputs
from unfading.cells.base import Cell, in_frame
from unfading.cells.reset import ResetCell, with_resets
from unfading.cells.wrap import RecurrentDropoutCell, ZoneoutCell
from unfading.errors import check_count, check_flag, check_share, check_type
from unfading.layers.exported_state import exported_class
from unfading.layers.scripting import NotScriptable
from unfading.lengths import checked_lengths, zero_past
from unfading.loop_options import LoopOptions
from unfading.source_lines import first_line
from unfading.torch_state import exporting

if TYPE_CHECKING:
    from unfading.layers.stream import Stream

# The cells' NamedTuple, where all cells of a stack have one; not checked for a bare `Recurrent`.
State = TypeVar("State", bound=tuple[Any, ...], default=Any)
# Output has the form of the input.
Form = TypeVar("Form", Tensor, PackedSequence)


class Sequences(NamedTuple):
    """The input in the layout of the library, and the form that it had."""

    x: Tensor  # [T, B, I], zeros past each row's end
    lengths: Tensor | None  # [B] int64
    batched: bool
    packed: PackedSequence | None


class Runner(NamedTuple):
    """A cell of a stack, and the cells that run in its place."""

    cell: Cell
    noisy: Cell  # with recurrent dropout and zoneout, if any
    resetting: ResetCell  # the same with resets


class Recurrent(NotScriptable, nn.Module, Generic[State]):
    """A stack of any cell, run over time.

    Args:
        make_cell: function that returns a cell for a given input size; called once per layer and direction.
        input_size: number of input features.
        num_layers: number of layers; each reads the output of the layer below.
        batch_first: input and output are [B, T, n] instead of [T, B, n]. As in torch.nn, this does not apply to the state.
        dropout: probability of dropping an entry of a layer's output in training, except the last layer's.
        bidirectional: add a second cell to each layer that reads each row from its end; the two outputs are concatenated.
        recurrent_dropout: probability of dropping an input of the recurrent matrices in training, with one mask for all time.
        zoneout: probability that an entry of the state keeps its value at a step in training.
        learn_initial_state: make the state before the first step a parameter, which starts at the cell's initial state.
        checkpoint_every: store only every N-th state and recompute the others in the backward pass. N near the square root
            of the sequence length needs the least memory. The input of each layer is stored in any case.
        backend: which implementation runs the loop over time: "auto", "fused", "graph" or "reference"; `unfading.use_backend`
            explains them.
        device: device of the parameters.
        dtype: dtype of the parameters.
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
        flags = {"batch_first": batch_first, "bidirectional": bidirectional, "learn_initial_state": learn_initial_state}
        for name, flag in flags.items():
            check_flag(name, flag)
        check_backend(backend)
        if checkpoint_every is not None:
            check_count("checkpoint_every", checkpoint_every)
        if dropout and num_layers == 1:
            warnings.warn(
                f"dropout={dropout} acts between layers and has no effect with num_layers=1.",
                stacklevel=1 + sum("__init__" in vars(each) for each in type(self).__mro__ if issubclass(each, Recurrent)),
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
        what = f"{type(self).__name__} with {num_layers} {'layer' if num_layers == 1 else 'layers'}"
        with _defaults(device, dtype), allocation.refuse_large(what, "hidden size or number of layers"):
            cells: list[Cell] = []
            for depth in range(num_layers):
                size = cells[-1].output_size * self.directions if cells else input_size
                cells.extend(_checked_cell(make_cell, size) for _ in range(self.directions))
                if depth == 1:  # all further layers are like the second
                    allocation.check_fits(
                        what, (num_layers - 2) * _bytes(cells[-self.directions :]), "number of layers", device or "cpu"
                    )
        self.cells = nn.ModuleList(cells)
        self.to(device=device, dtype=dtype)
        self.output_size = cells[-1].output_size * self.directions
        initial = [_checked_initial_state(cell) for cell in cells]
        self.frame_axes = len(cells[0].example_frame)
        if any(len(cell.example_frame) != self.frame_axes for cell in cells):
            raise ValueError(
                f"all cells of a stack read frames, or none does; got {', '.join(type(c).__name__ for c in cells)}."
            )
        # One stacked state where all cells have the same state; a tuple of states where they differ.
        one_size = num_layers == 1 or all(map(_keeps_frames, cells))
        self.stacked_state = one_size and len({(type(s), tuple(part.shape for part in s)) for s in initial}) == 1
        for state in initial:
            exported_class(type(state))  # torch.export(strict=True) does not see a class that is registered while it traces
        self.learned_state = (
            nn.ParameterList(nn.Parameter(part[0].detach().clone()) for s in initial for part in s)
            if learn_initial_state
            else None
        )
        # A plain list, which does not change parameter names.
        self._runners = [self._runner(i, cell) for i, cell in enumerate(cells)]

    def forward(
        self,
        x: Form,
        state: State | tuple[Tensor, ...] | None = None,
        *,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        start: int = 0,
    ) -> tuple[Form, State]:
        """Run over x; return the output of the last layer and the final state.

        Args:
            x: [T, B, I] ([B, T, I] with batch_first), [T, I] unbatched, or a PackedSequence. Frames have height and width
                behind the channels I.
            state: the state that an earlier call returned; None starts from the initial state.
            lengths: int64 [B], in 1..T, in any order. The output past the end of a row is 0, its final state is that of its
                last step, and the reverse direction starts at its end.
            resets: bool [T, B] ([B, T] with batch_first, [T] unbatched). Before a step that it marks, the state is set to the
                layer's initial state, also where `state` is given, and no gradient flows past it. For both directions the
                steps from one mark to the next are a sequence of its own; only the index of the step goes on.
            start: absolute index of the first step of x, where x continues an earlier sequence.
        """
        sequences, output, finals = self._run(x, state, lengths, resets, start)
        final = _join_states(finals, stacked=self.stacked_state, batched=sequences.batched, axis=0)
        return cast(Form, _in_form_of_input(output, sequences, batch_first=self.batch_first)), final

    if TYPE_CHECKING:
        __call__ = forward

    def trajectory(
        self,
        x: Tensor | PackedSequence,
        state: State | tuple[Tensor, ...] | None = None,
        *,
        lengths: Tensor | None = None,
        resets: Tensor | None = None,
        start: int = 0,
    ) -> State:
        """The state after every step: like the state that `forward` returns, with a time axis in front.

        Each part is [T, layers * directions, B, n], also with batch_first and for a PackedSequence, and zero past a row's end.
        """
        trajectories: list[Any] = []
        sequences, _, _ = self._run(x, state, lengths, resets, start, trajectories)
        return _join_states(trajectories, stacked=self.stacked_state, batched=sequences.batched, axis=1)

    def stream(
        self,
        batch: int = 1,
        state: State | tuple[Tensor, ...] | None = None,
        *,
        start: int = 0,
        frame: tuple[int, ...] = (),
    ) -> "Stream":
        """Run the layer one step at a time: `push(x)` takes x [batch, I] and returns the output [batch, n].

        `push(x, resets=ended)`, with a bool [batch], sets the state of some rows to the initial state before the step. The
        stream copies the parameters; a later change of the layer does not affect it.

        Args:
            batch: number of rows.
            state: the state that a call returned; None starts from the initial state.
            start: absolute index of the first step.
            frame: height and width of the input, for convolutional cells.
        """
        name = type(self).__name__
        check_count("batch", batch)
        if len(frame) != self.frame_axes:
            wanted = "needs the size of its frames: stream(frame=(height, width))" if self.frame_axes else "reads no frames"
            raise ValueError(f"a stream of {name} {wanted}; got frame={frame!r}.")
        if self.bidirectional:
            raise ValueError(f"{name} is bidirectional: its reverse direction begins at the end, which a stream does not have.")
        # Imported here, since it loads the compiler.
        from unfading.layers.stream import Stream

        with allocation.refuse_large(f"a stream of {batch} rows", "batch"):
            states = initial = self.initial_states(batch, frame)
            if state is not None:
                states = _split_state(state, initial, name, stacked=self.stacked_state, batched=True)
            return Stream(self.runners, states, initial, start, self.backend, frame)

    def check_chunks(self, steps: int, every: int) -> None:
        """Raise ValueError if separate calls of `every` steps would differ from one call: a projection may need all steps."""
        if steps > every and not torch.compiler.is_compiling():
            # Imported here, since it loads the compiler.
            from unfading.fuse.locality import check_local

            check_local(self.runners, steps, f"in chunks of {every} steps")

    def _run(
        self,
        x: Tensor | PackedSequence,
        state: State | tuple[Tensor, ...] | None,
        lengths: Tensor | None,
        resets: Tensor | None,
        start: int,
        trajectories: list[Any] | None = None,
    ) -> tuple[Sequences, Tensor, list[Any]]:
        """The checked input, the output of the last layer, and all final states.

        The states of every step are appended to `trajectories`, if given.
        """
        name, cells = type(self).__name__, self.runners
        sequences = _checked_input(x, lengths, start, name, self.input_size, self.frame_axes, batch_first=self.batch_first)
        if resets is not None:
            resets = _checked_resets(resets, sequences, name, batch_first=self.batch_first)
            cells = [runner.resetting for runner in self._runners]
        frame = tuple(sequences.x.shape[3:]) if self.frame_axes else ()
        states = self._initial_states(cells, sequences.x.shape[1], frame)
        _check_device_and_dtype(sequences.x, states[0][0], name)
        if state is not None:
            states = _split_state(state, states, name, stacked=self.stacked_state, batched=sequences.batched)
        output, lengths = sequences.x, sequences.lengths
        if self.num_layers > 1 and trajectories is None and not self.bidirectional:
            options = LoopOptions(lengths, False, start, self.backend, self.checkpoint_every)
            side_by_side = stack_outputs(cells, output, states, options, self.dropout if self.training else 0.0, resets)
            if side_by_side is not None:
                return sequences, *side_by_side
        finals = []
        for depth in range(self.num_layers):
            if depth:
                output = nn.functional.dropout(output, self.dropout, self.training)
            sides = []
            for direction in range(self.directions):
                i = depth * self.directions + direction
                options = LoopOptions(lengths, direction == 1, start, self.backend, self.checkpoint_every)
                marks = _from_end(resets) if resets is not None and direction else resets
                if trajectories is None:
                    side, final = outputs(cells[i], output, states[i], options, marks)
                else:
                    read = output if marks is None else with_resets(output, marks)
                    trajectory, final = run(cells[i], read, states[i], options)
                    trajectories.append(trajectory)
                    side = output_of(cells[i], trajectory, lengths)
                if side.shape[2] != cells[i].output_size:
                    raise ValueError(
                        f"{type(self.cells[i]).__name__} declares output_size={cells[i].output_size}, and its output has "
                        f"{side.shape[2]} features."
                    )
                sides.append(side)
                finals.append(final)
            output = torch.cat(sides, dim=2) if self.bidirectional else sides[0]
        return sequences, output, finals

    @property
    def runners(self) -> list[Cell]:
        """The cells as they are run: wrapped by recurrent dropout and zoneout, if any."""
        for i, cell in enumerate(cast(list[Cell], self.cells)):
            if self._runners[i].cell is not cell:  # the user has replaced a cell
                self._runners[i] = self._runner(i, cell)
        return [runner.noisy for runner in self._runners]

    def _runner(self, i: int, cell: Cell) -> Runner:
        """What runs in the place of the cell of layer and direction i."""
        noisy = _with_noise(cell, self.recurrent_dropout, self.zoneout)
        if self.learned_state is None:
            return Runner(cell, noisy, ResetCell(noisy))
        earlier = sum(len(each.initial_state(1)) for each in cast(list[Cell], self.cells)[:i])
        return Runner(cell, noisy, ResetCell(noisy, self.learned_state, earlier))

    def initial_states(self, batch: int, frame: tuple[int, ...] = ()) -> list[Any]:
        """The state of every layer and direction before the first step, each part [batch, n], or [batch, n, height, width].

        Args:
            batch: number of rows.
            frame: height and width of the input, for convolutional cells.
        """
        return self._initial_states(self.runners, batch, frame)

    def _initial_states(self, cells: list[Cell], batch: int, frame: tuple[int, ...]) -> list[Any]:
        states = [cell.initial_state(batch) for cell in cells]
        if frame:
            frames = [size for size in self.frames(frame)[1:] for _ in range(self.directions)]
            states = [in_frame(state, size) for state, size in zip(states, frames, strict=True)]
        if self.learned_state is None:
            return states
        learned = iter(self.learned_state)
        return [type(s)(*(next(learned).expand_as(part) for part in s)) for s in states]

    def frames(self, frame: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Height and width of the input of every layer, and of the output, for input frames of this height and width."""
        frames = [frame]
        for cell in cast(list[Cell], list(self.cells[:: self.directions])):
            frames.append(cell.state_frame(frames[-1]) if frame else ())
        return frames

    def penalty(self) -> Tensor | None:
        """The sum of the cells' penalties, which training adds to the loss; None where no cell has one."""
        penalties = [penalty for cell in self.runners if (penalty := cell.penalty()) is not None]
        return torch.stack(penalties).sum() if penalties else None

    def extra_repr(self) -> str:
        names = ("batch_first", "dropout", "bidirectional", "recurrent_dropout", "zoneout", "checkpoint_every")
        values = {name: getattr(self, name) for name in names}
        options = "".join(f", {name}={value}" for name, value in values.items() if value)
        return f"{self.input_size}, num_layers={self.num_layers}{options}"


def detach(state: Any) -> Any:
    """The same state without its history in the autograd graph: for truncated backpropagation through time."""
    return _pytree.tree_map_only(Tensor, torch.Tensor.detach, state)


def split_resets(resets: Tensor | None, x: Tensor, every: int, time: int = 0) -> Sequence[Tensor | None]:
    """The resets of each chunk of `every` steps of x, whose axis `time` is that of time."""
    if resets is None:
        return [None] * -(-x.shape[time] // every)
    check_type("resets", resets, Tensor)
    if resets.shape[time : time + 1] != x.shape[time : time + 1]:
        raise ValueError(f"resets must mark the {x.shape[time]} steps of x along axis {time}; got shape {list(resets.shape)}.")
    return resets.split(every, dim=time)


def check_reads_vectors(module: nn.Module, what: str) -> None:
    """Raise ValueError if a layer of the module reads frames."""
    for layer in module.modules():
        if isinstance(layer, Recurrent) and layer.frame_axes:
            raise ValueError(f"{what} takes layers over feature vectors; {type(layer).__name__} reads frames.")


def _with_noise(cell: Cell, recurrent_dropout: float, zoneout: float) -> Cell:
    if recurrent_dropout:
        cell = RecurrentDropoutCell(cell, recurrent_dropout)
    return ZoneoutCell(cell, zoneout) if zoneout else cell


def _bytes(cells: list[Cell]) -> int:
    """Bytes of the parameters and buffers of cells, and of the modules themselves."""
    tensors = [tensor for cell in cells for tensor in (*cell.parameters(), *cell.buffers())]
    return sum(allocation.MODULE_BYTES + tensor.numel() * tensor.element_size() for tensor in tensors)


def _checked_cell(make_cell: Callable[[int], Cell], size: int) -> Cell:
    if isinstance(make_cell, Cell):
        raise TypeError(
            f"make_cell must be a function that returns a cell for an input size; got one {type(make_cell).__name__}."
        )
    cell = make_cell(size)
    if not isinstance(cell, Cell):
        raise TypeError(f"make_cell must return an unfading.Cell; got {type(cell).__name__}.")
    if cell.input_size != size:
        raise ValueError(f"make_cell({size}) must return a cell with input_size={size}; got {cell.input_size}.")
    return cell


def _checked_initial_state(cell: Cell) -> Any:
    """The initial state of one row, whose parts must be tensors [1, n]."""
    state = cell.initial_state(1)
    if not hasattr(state, "_fields") or not all(isinstance(part, Tensor) and part.shape[:1] == (1,) for part in state):
        got = _kind(state) if not isinstance(state, tuple) else [getattr(part, "shape", type(part).__name__) for part in state]
        raise TypeError(f"{type(cell).__name__}.initial_state(1) must return a NamedTuple of tensors [1, n]; got {got}.")
    return state


def _keeps_frames(cell: Cell) -> bool:
    """Whether the state of a cell has frames of the size of its input. Of two sizes: a stride may keep one of them."""
    frames = [tuple(n + more for n in cell.example_frame) for more in (0, 2)]
    return all(cell.state_frame(frame) == frame for frame in frames)


@contextmanager
def _defaults(device: torch.device | str | None, dtype: torch.dtype | None) -> Iterator[None]:
    """Create parameters on `device` and in `dtype`. Casting them later would make an orthogonal start inexact in float64."""
    before = torch.get_default_dtype()
    if dtype is not None:
        check_type("dtype", dtype, torch.dtype)
    try:
        device = None if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must name a device of torch, e.g. 'cpu'; got {device!r} ({first_line(error)}).") from None
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point type; got {dtype}.")
    torch.set_default_dtype(before if dtype is None else dtype)
    try:
        with nullcontext() if device is None else torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


# -- the forms of input, output and state -------------------------------------------------------------------------------------


def _checked_input(
    x: Tensor | PackedSequence,
    lengths: Tensor | None,
    start: int,
    name: str,
    input_size: int,
    frame_axes: int,
    *,
    batch_first: bool,
) -> Sequences:
    """Check the input and bring it to [T, B, I], or [T, B, I, height, width]."""
    if type(start) is not int or start < 0:
        check_count("start", start, least=0)
    packed = None
    if isinstance(x, PackedSequence):
        if lengths is not None:
            raise ValueError("a PackedSequence has its own lengths; got lengths= as well. Leave one of them out.")
        packed = x
        x, lengths = pad_packed_sequence(packed)
    elif not isinstance(x, Tensor):
        raise TypeError(f"{name} takes a Tensor or a PackedSequence; got {type(x).__name__}.")
    elif batch_first and x.dim() == 3 + frame_axes:
        x = x.transpose(0, 1)
    _check_shape(x, name, input_size, frame_axes, batch_first)
    batched = x.dim() == 3 + frame_axes
    if not batched:
        if lengths is not None:
            raise ValueError("lengths= needs a batch; got unbatched input. Cut the sequence to its length instead.")
        x = x.unsqueeze(1)
    if lengths is not None:
        lengths = checked_lengths(lengths, x)
        # Before any arithmetic, so that no value of the padding, not even NaN, reaches the output or a gradient.
        x = zero_past(x, lengths)
    return Sequences(x, lengths, batched, packed)


def _checked_resets(resets: Tensor, sequences: Sequences, name: str, *, batch_first: bool) -> Tensor:
    """The resets as [T, B], on the device of the input, and none past the end of a row."""
    x, lengths = sequences.x, sequences.lengths
    if not isinstance(resets, Tensor) or resets.dtype != torch.bool:
        got = resets.dtype if isinstance(resets, Tensor) else type(resets).__name__
        raise TypeError(f"{name}'s resets must be a tensor of torch.bool; got {got}. Compare first, as in resets=done != 0.")
    transposed = batch_first and sequences.batched and sequences.packed is None
    wanted = list(x.shape[:2][::-1] if transposed else x.shape[:2]) if sequences.batched else [x.shape[0]]
    if list(resets.shape) != wanted:
        raise ValueError(f"{name}'s resets must have shape {wanted}, steps and rows as in the input; got {list(resets.shape)}.")
    resets = resets.to(x.device)
    resets = resets.unsqueeze(1) if not sequences.batched else resets.transpose(0, 1) if transposed else resets
    return resets if lengths is None else zero_past(resets, lengths)


def _from_end(resets: Tensor) -> Tensor:
    """The resets [T, B] of the reverse direction: a sequence begins at the step before a mark, and goes backwards."""
    return torch.cat([resets[1:], torch.zeros_like(resets[:1])])


def _in_form_of_input(output: Tensor, sequences: Sequences, *, batch_first: bool) -> Tensor | PackedSequence:
    """Output [T, B, n] in the form that the input had."""
    packed = sequences.packed
    if packed is not None:
        if packed.sorted_indices is not None:
            output = output.index_select(1, packed.sorted_indices)
        rows = torch.arange(output.shape[1])
        within = rows < packed.batch_sizes.unsqueeze(1)
        data = output[within.to(output.device)]
        return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    if not sequences.batched:
        return output.squeeze(1)
    return output.transpose(0, 1) if batch_first else output


def _split_state(state: Any, initial: list[Any], name: str, *, stacked: bool, batched: bool) -> list[Any]:
    """One state per layer and direction from the caller's state, which must have the shapes of the initial states."""
    if stacked:
        parts = _checked_parts(state, initial[0], name, [len(initial)], batched)
        return [type(initial[0])(*rows) for rows in zip(*(part.unbind(0) for part in parts), strict=True)]
    if not isinstance(state, tuple) or len(state) != len(initial):
        raise ValueError(
            f"{name} has cells that differ, so its state is a tuple of {len(initial)} states, one per layer and direction; "
            f"got {_kind(state)}."
        )
    pairs = zip(state, initial, strict=True)
    return [type(own)(*_checked_parts(given, own, name, [], batched)) for given, own in pairs]


def _join_states(states: list[Any], *, stacked: bool, batched: bool, axis: int) -> Any:
    """The caller's state from the states of all layers and directions; `axis` is 0, or 1 where the first axis is time."""
    if not batched:
        states = [type(state)(*(part.squeeze(axis) for part in state)) for state in states]
    if torch.compiler.is_compiling() and exporting():
        states = [exported_class(type(state))(*state) for state in states]
    if not stacked:
        return tuple(states)
    return type(states[0])(*(torch.stack(part, dim=axis) for part in zip(*states, strict=True)))


def _checked_parts(state: Any, own: Any, name: str, front: list[int], batched: bool) -> list[Tensor]:
    """The parts of a given state, with a batch axis; their shapes must be the axes `front` followed by those of `own`."""
    fields = ", ".join(own._fields)
    if not isinstance(state, tuple) or len(state) != len(own):
        hint = f" Pass ({fields},)." if isinstance(state, Tensor) and len(own) == 1 else ""
        raise TypeError(f"{name}'s state is a tuple ({fields}) of {len(own)} tensors; got {_kind(state)}.{hint}")
    parts = []
    for field, part, mine in zip(own._fields, state, own, strict=True):
        if not isinstance(part, Tensor):
            raise TypeError(f"{name}'s state has tensors in it; got {type(part).__name__} for {field}.")
        shape = [*front, *(mine.shape if batched else mine.shape[1:])]
        if list(part.shape) != shape:
            raise ValueError(f"{name}'s state {field} must have shape {shape} for this input; got {list(part.shape)}.")
        if part.device != mine.device:
            way_out = f"Move it with {field}.to({str(mine.device)!r})."
            raise ValueError(f"{name} lives on {mine.device}, its state {field} on {part.device}. {way_out}")
        if part.dtype != mine.dtype:
            way_out = f"Convert it with {field}.to({mine.dtype})."
            raise TypeError(f"{name}'s state {field} must be {mine.dtype}; got {part.dtype}. {way_out}")
        parts.append(part if batched else part.unsqueeze(len(front)))
    return parts


def _kind(value: Any) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def _check_shape(x: Tensor, name: str, input_size: int, frame_axes: int, batch_first: bool) -> None:
    batched = x.dim() == 3 + frame_axes
    if (batched or x.dim() == 2 + frame_axes) and x.shape[-1 - frame_axes] == input_size and 0 not in x.shape[: 1 + batched]:
        return
    features = f"{input_size}{', height, width' if frame_axes else ''}"
    wanted = f"[{'B, T' if batch_first else 'T, B'}, {features}], or [T, {features}] unbatched"
    # x has been transposed for batch_first; the message shows the shape that the caller passed.
    shape = list(x.transpose(0, 1).shape if batch_first and batched else x.shape)
    if x.dim() not in (2 + frame_axes, 3 + frame_axes):
        raise ValueError(f"{name} takes input of shape {wanted}; got {shape}.")
    if x.shape[-1 - frame_axes] != input_size:
        built, kind = (
            (f"for {input_size} channels", "channels") if frame_axes else (f"with input_size={input_size}", "features")
        )
        raise ValueError(f"{name} was built {built}; got {x.shape[-1 - frame_axes]} {kind} in input {shape}.")
    if x.shape[0] == 0:
        raise ValueError(f"{name} needs at least one time step; got input of shape {shape}, wanted {wanted}.")
    if batched and x.shape[1] == 0:
        raise ValueError(f"{name} needs at least one row in the batch; got input of shape {shape}, wanted {wanted}.")


def _check_device_and_dtype(x: Tensor, like: Tensor, name: str) -> None:
    """`like` has the device and dtype of the layer's state."""
    if x.device != like.device:
        raise ValueError(
            f"{name} lives on {like.device}, its input on {x.device}. Move the input with x.to({str(like.device)!r}), or "
            f"the layer with layer.to({str(x.device)!r})."
        )
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} takes floating-point input; got {x.dtype}. For tokens, put an nn.Embedding before it.")
    # Autocast converts between float32 and the half types, and leaves float64 alone.
    cast = not x.is_meta and torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, like.dtype)
    if x.dtype != like.dtype and not cast:
        raise TypeError(
            f"{name} has parameters in {like.dtype}; got input in {x.dtype}. Convert the input with x.to({like.dtype}), or "
            f"the layer with layer.to({x.dtype})."
        )
