"""The programs of the operators in graphs of torch.compile and torch.export.

A graph names a program by its whole text. An exported graph is loaded in processes that have never traced the cell, and there
the text is all that is known of it.
"""

from collections import Counter
from functools import cache

import torch
from torch import Tensor

from unfading.fuse.ir.program import Block, InputKind, TensorKind
from unfading.fuse.ir.serialise import from_text, to_text
from unfading.fuse.plan import NAMES, PROGRAMS, TensorNames
from unfading.torch_state import constant_when_compiled

_texts: dict[str, str] = {}  # the text of a program by its key, and the reverse
_keys: dict[str, str] = {}


@constant_when_compiled
def text_of(key: str) -> str:
    """The text of the program with this key."""
    if key not in _texts:
        text = to_text(PROGRAMS[key])
        _texts[key], _keys[text] = text, key
    return _texts[key]


def key_of(text: str) -> str:
    """The key of the program with this text, which may have been traced in another process."""
    if text not in _keys:
        program = from_text(text)
        key = program.key()
        PROGRAMS.setdefault(key, program)
        # The names that the cell used are not in the text: names are written into the source of a kernel.
        counts = Counter(kind for kind, _ in program.widths)
        kinds = (TensorKind.INPUT, TensorKind.STATE, TensorKind.WEIGHT)
        NAMES.setdefault(key, TensorNames(*([f"{kind}{i}" for i in range(counts[kind])] for kind in kinds)))
        _keys[text] = key
    return _keys[text]


def check_arguments(
    key: str, inputs: list[Tensor], states: list[Tensor], weights: list[Tensor], lengths: Tensor | None, models: int
) -> None:
    """Raise ValueError unless the tensors have the sizes of the program: a kernel reads memory by them."""
    program, lead = PROGRAMS[key], int(models > 0)
    wanted, blocks = _needed(key)
    given = [len(tensors) for tensors in (inputs, states, weights)]
    if given != wanted:
        raise ValueError(f"the fused loop takes {wanted} inputs, states and weights; got {given}.")
    timed = next(x for x, kind in zip(inputs, program.kinds, strict=True) if kind != InputKind.CONSTANT)
    T, B = timed.shape[lead], states[0].shape[lead]
    axes = {InputKind.SEQUENCE: (T, B), InputKind.SHARED: (T, 1), InputKind.CONSTANT: (1, B)}
    shapes: list[tuple[int, ...]] = [(*axes[kind], program.widths[TensorKind.INPUT, i]) for i, kind in enumerate(program.kinds)]
    shapes += [(B, program.widths[TensorKind.STATE, i]) for i in range(len(states))]
    first = states[0]
    for tensor, shape in zip((*inputs, *states), shapes, strict=True):
        if tensor.shape[lead:] != shape:
            raise ValueError(f"the fused loop takes a tensor of shape {list(shape)}; got {list(tensor.shape[lead:])}.")
    for i, weight in enumerate(weights):
        if weight.shape[lead:].numel() != program.widths[TensorKind.WEIGHT, i]:
            raise ValueError(f"weight {i} of the fused loop is another than the one it was exported with.")
    for block in blocks:
        size = weights[block.weight].shape[lead:]
        if len(size) != 2 or block.r1 > size[0] or block.c1 > size[1]:
            raise ValueError(f"weight {block.weight} of the fused loop has shape {list(size)}, which has no block {block}.")
    for tensor in (*inputs, *states, *weights):
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise ValueError(
                f"the fused loop takes tensors of one dtype on one device; got {tensor.dtype} on {tensor.device} "
                f"and {first.dtype} on {first.device}."
            )
    if lengths is not None:
        _check_lengths(lengths, T, B, lead)


@cache
def _needed(key: str) -> tuple[list[int], list[Block]]:
    """How many inputs, states and weights a program has, and the blocks of the weights that it multiplies with."""
    numbers = Counter(kind for kind, _ in PROGRAMS[key].widths)
    return [numbers[kind] for kind in (TensorKind.INPUT, TensorKind.STATE, TensorKind.WEIGHT)], PROGRAMS[key].blocks()


def _check_lengths(lengths: Tensor, T: int, B: int, lead: int) -> None:
    if lengths.dtype != torch.int64 or lengths.shape[lead:] != (B,):
        raise ValueError(f"lengths must be an int64 tensor of shape [{B}]; got {lengths.dtype} {list(lengths.shape[lead:])}.")
    # On a GPU the host would have to wait for the values.
    if not lengths.is_cuda and ((lengths < 1) | (lengths > T)).any():
        raise ValueError(f"lengths must lie in 1..{T}, the steps of the input; got {lengths.tolist()}.")
