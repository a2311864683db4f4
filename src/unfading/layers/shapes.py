"""The door of a layer: every form of input that torch.nn takes becomes [T, B, I] with lengths, and goes out as it came.

The state that callers hold is one of the cells' NamedTuple with parts [layers * directions, B, n], or, where the cells of a
stack differ, a tuple of states, one per layer and direction; inside it is a list of states with parts [B, n].
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from unfading.errors import check_count
from unfading.lengths import zero_past
from unfading.torch_state import traced


class Sequences(NamedTuple):
    """What came in, in the one layout of the library."""

    x: Tensor  # [T, B, I], zeros past each row's end
    lengths: Tensor | None  # [B] int64
    batched: bool
    packed: PackedSequence | None


def enter(
    x: Tensor | PackedSequence,
    lengths: Tensor | None,
    start: int,
    name: str,
    input_size: int,
    *,
    batch_first: bool,
    like: Tensor,
) -> Sequences:
    """Check what came and bring it to [T, B, I]. `like` has the dtype and device of the layer's own state."""
    check_count("start", start, least=0)
    packed = None
    if isinstance(x, PackedSequence):
        if lengths is not None:
            raise ValueError("a PackedSequence carries its own lengths; got lengths= beside it. Leave one of them out.")
        packed = x
        x, lengths = pad_packed_sequence(packed)
    elif not isinstance(x, Tensor):
        raise TypeError(f"{name} takes a Tensor or a PackedSequence; got {type(x).__name__}.")
    elif batch_first and x.dim() == 3:
        x = x.transpose(0, 1)
    _check_tensor(x, name, input_size, batch_first, like)
    batched = x.dim() == 3
    if not batched:
        if lengths is not None:
            raise ValueError("lengths= needs a batch; got unbatched input. Cut the sequence to its length instead.")
        x = x.unsqueeze(1)
    if lengths is not None:
        lengths = _checked_lengths(lengths, x)
        # Before any arithmetic, so that whatever stands in the padding, NaN included, reaches neither output nor gradient.
        x = zero_past(x, lengths)
    return Sequences(x, lengths, batched, packed)


def leave(output: Tensor, sequences: Sequences, *, batch_first: bool) -> Tensor | PackedSequence:
    """Output [T, B, n] in the form in which the input came."""
    packed = sequences.packed
    if packed is not None:
        if packed.sorted_indices is not None:
            output = output.index_select(1, packed.sorted_indices)
        rows = torch.arange(output.shape[1])
        there = rows < packed.batch_sizes.unsqueeze(1)
        data = output[there.to(output.device)]
        return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    if not sequences.batched:
        return output.squeeze(1)
    return output.transpose(0, 1) if batch_first else output


def enter_state(state: Any, initial: list[Any], name: str, *, stacked: bool, batched: bool) -> list[Any]:
    """One state per layer and direction from what the caller gave, held to the shapes of the cells' own initial states."""
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


def leave_state(states: list[Any], *, stacked: bool, batched: bool, axis: int) -> Any:
    """The states of all layers and directions as the caller sees them; `axis` is 0, or 1 where time stands in front."""
    if not batched:
        states = [type(state)(*(part.squeeze(axis) for part in state)) for state in states]
    if not stacked:
        return tuple(states)
    return type(states[0])(*(torch.stack(part, dim=axis) for part in zip(*states, strict=True)))


def _checked_parts(state: Any, own: Any, name: str, front: list[int], batched: bool) -> list[Tensor]:
    """The parts of a given state, each with its batch axis; wanted is the cell's `own` shape behind the axes in `front`."""
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


def _check_tensor(x: Tensor, name: str, input_size: int, batch_first: bool, like: Tensor) -> None:
    wanted = f"[{'B, T' if batch_first else 'T, B'}, {input_size}], or [T, {input_size}] unbatched"
    # transpose(0, 1) has been done for batch_first, so the message turns it back.
    shape = list(x.shape if not batch_first or x.dim() != 3 else x.transpose(0, 1).shape)
    if x.dim() not in (2, 3):
        raise ValueError(f"{name} takes input of shape {wanted}; got {shape}.")
    if x.shape[-1] != input_size:
        raise ValueError(f"{name} was built with input_size={input_size}; got {x.shape[-1]} features in input {shape}.")
    if x.shape[0] == 0:
        raise ValueError(f"{name} needs at least one time step; got input of shape {shape}, wanted {wanted}.")
    if x.dim() == 3 and x.shape[1] == 0:
        raise ValueError(f"{name} needs at least one row in the batch; got input of shape {shape}, wanted {wanted}.")
    if x.device != like.device:
        raise ValueError(
            f"{name} lives on {like.device}, its input on {x.device}. Move the input with x.to({str(like.device)!r}), or "
            f"the layer with layer.to({str(x.device)!r})."
        )
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} takes floating-point input; got {x.dtype}. For tokens, put an nn.Embedding before it.")
    # Autocast casts to and from float32 and the half types; float64 it leaves as it is.
    cast = torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, like.dtype)
    if x.dtype != like.dtype and not cast:
        raise TypeError(
            f"{name} has parameters in {like.dtype}; got input in {x.dtype}. Convert the input with x.to({like.dtype}), or "
            f"the layer with layer.to({x.dtype})."
        )


def _checked_lengths(lengths: Tensor, x: Tensor) -> Tensor:
    T, B = x.shape[:2]
    if not isinstance(lengths, Tensor) or lengths.dtype != torch.int64:
        got = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"lengths must be an int64 tensor of shape [{B}]; got {got}. Use torch.as_tensor(lengths).long().")
    if lengths.shape != (B,):
        raise ValueError(f"lengths must have one entry per row, shape [{B}]; got {list(lengths.shape)}.")
    # Values that are traced or batched by a transform cannot be looked at, and are taken on trust.
    if not traced():
        wrong = lengths[(lengths < 1) | (lengths > T)]
        if len(wrong):
            raise ValueError(f"lengths must lie in 1..{T}, the steps of the input; got {int(wrong[0])}.")
    return lengths.to(x.device)
