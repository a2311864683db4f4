"""Compression of models while they are trained, as in FastGRNN (Kusupati et al. 2018): sparse matrices, rounded to 8 bits.

The steps of a run are divided evenly among its stages:

    dense        the model as it is
    threshold    iterative hard thresholding: after each update the model has only the largest entries of each matrix
    fixed        the entries that are zero stay zero, the others are trained
    rounded      the model has W = scale Q, Q int8, scale = max |W| / 127, as an exported model does

The stages threshold and fixed need `sparsity`, and rounded needs `bits`: a run with `sparsity` alone has three stages, one with
`bits` alone has two. Only weights of the last stage can be the best ones of a run.

The optimiser has a copy of the weights, which it moves with the gradient at those of the model. So in the stage threshold an
entry that the model lacks can grow until it is among the largest, and in the stage rounded small updates add up. (The authors'
code sets the weights themselves to zero. A step moves an entry by about the learning rate, so that hardly any came back.)

All of it is arithmetic on the rows of a fleet, without a branch that a GPU would have to decide. The support of the stage fixed
is not stored: an entry that is zero before an update is zero after it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.cells.sparse import stored_bytes
from unfading.layers.model import Model
from unfading.training.fleet import Fleet

LARGEST = 127  # of int8, without -128


NEVER = 2**62  # a step after the end of every run


class CompressionStages(NamedTuple):
    """The step with which each stage begins; a stage that a run does not have begins after its end."""

    threshold: int
    fixed: int
    rounded: int

    @property
    def last(self) -> int:
        """The first step of the last stage; 0 if there is only one."""
        return max((step for step in self if step != NEVER), default=0)


def stages(options: Mapping[str, Any], total: int) -> CompressionStages:
    """The stages of a run of `total` steps."""
    names = ["dense", *(["threshold", "fixed"] if "sparsity" in options else []), *(["rounded"] if "bits" in options else [])]
    if total < len(names):
        raise ValueError(f"compress: the stages {', '.join(names)} take at least one step each; got {total} steps.")
    begin = {name: total * i // len(names) for i, name in enumerate(names)}
    return CompressionStages(*(begin.get(name, NEVER) for name in CompressionStages._fields))


def kept_entries(size: int, sparsity: float) -> int:
    """How many of the entries of a matrix are not zero."""
    return max(1, size - math.floor(size * sparsity + 0.5))


class Compression:
    """The compression of a fleet.

    Args:
        fleet: the models.
        options: `Run.compress`, which the runs of a fleet share.
        stages: of each model.
        names: the parameters that are matrices.
    """

    def __init__(self, fleet: Fleet, options: Mapping[str, Any], stages: Sequence[CompressionStages], names: Sequence[str]):
        self.fleet = fleet
        self.sparsity: float | None = options.get("sparsity")
        self.sparse = [name for name in names if name.startswith("rnn.")] if self.sparsity is not None else []
        self.rounded = list(names) if "bits" in options else []
        # Before these steps nothing needs to be computed, where the host knows the step.
        self.first_threshold, self.first_fixed, self.first_rounded = (min(steps) for steps in zip(*stages, strict=True))
        device = fleet.w.device
        self.threshold_at, self.fixed_at, self.rounded_at = torch.tensor(stages, device=device).T.unsqueeze(2)  # each [E, 1]
        self.w = fleet.w.clone()  # what the optimiser moves
        self._sparse_entries = torch.zeros_like(fleet.w[:1], dtype=torch.bool)
        for name in self.sparse:
            fleet.view(self._sparse_entries, name).fill_(True)

    def movable(self, step: int | Tensor) -> Tensor | None:
        """The entries [E, N] that the step may change, not the zeros of a fixed support; None if it may change all."""
        if not self.sparse or (isinstance(step, int) and step < self.first_fixed):
            return None
        return (self.w != 0) | ~self._sparse_entries | (step < self.fixed_at)

    def apply(self, step: int | Tensor, movable: Tensor | None) -> None:
        """Compress the weights after the update with index `step`: those of the models, and from the stage fixed on all."""
        w, own = self.fleet.w, self.w
        if movable is not None:
            own.masked_fill_(~movable, 0.0)
        w.copy_(own)
        if not isinstance(step, int) or step >= self.first_threshold:
            self._threshold(step >= self.threshold_at)
        if movable is not None:
            own.copy_(torch.where(step >= self.fixed_at, w, own))
        if not isinstance(step, int) or step >= self.first_rounded:
            self._round(step >= self.rounded_at)

    def _threshold(self, now: Tensor) -> None:
        """Keep only the largest entries of each matrix, of the models [E, 1] for which it is time."""
        for name in self.sparse:
            matrix = self.fleet.view(self.fleet.w, name)
            entries = matrix.flatten(1)
            assert self.sparsity is not None
            largest = entries.abs().topk(kept_entries(entries.shape[1], self.sparsity), dim=1, sorted=False).indices
            keep = torch.zeros_like(entries, dtype=torch.bool).scatter_(1, largest, True) | ~now
            matrix.masked_fill_(~keep.view_as(matrix), 0.0)

    def _round(self, now: Tensor) -> None:
        """Round the matrices of the models [E, 1] for which it is time."""
        for name in self.rounded:
            matrix = self.fleet.view(self.fleet.w, name)
            entries = matrix.flatten(1)
            scale = entries.abs().amax(dim=1, keepdim=True) / LARGEST
            scale = torch.where(scale > 0, scale, 1.0)
            matrix.copy_(torch.where(now, torch.round(entries / scale) * scale, entries).view_as(matrix))


def compressed_size(model: Model, names: Sequence[str], bits: int | None) -> dict[str, int]:
    """The number of entries of a model's matrices, how many are not zero, and the bytes of all parameters.

    A matrix counts in the smaller of its dense and its sparse form. With `bits` its entries are int8, other parameters int16,
    as in an all-integer export; without, everything is float32.
    """
    entries = nonzeros = size = 0
    for name, parameter in model.named_parameters():
        numbers = parameter.detach().cpu().numpy()
        if name not in names:
            size += numbers.size * (4 if bits is None else 2)
            continue
        entries += numbers.size
        nonzeros += int((numbers != 0).sum())
        size += min(stored_bytes(numbers.reshape(len(numbers), -1), 4 if bits is None else bits // 8))
    return {"entries": entries, "nonzeros": nonzeros, "bytes": size}
