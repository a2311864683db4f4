"""Where the error of a model in integers arises: for each operation its distance from the same operation in float64.

Two distances are measured over all steps, relative to the size of the values: `error` is that of the integers as they run, with
all that earlier operations and steps did; `own` is that of this operation alone, on arguments that are exact but for their
rounding to int16.
"""

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unfading.export.instructions import rounded
from unfading.export.int8 import Integers
from unfading.export.quantised_model import IntegerRunner, Quantised
from unfading.export.stage import Array, StageRunner
from unfading.fuse.ir.program import Op, Value


class ErrorByValue:
    """The distances of the values of a model.

    Args:
        twin: the model in integers.
        samples: [T, B, I], as the first stage reads them.
    """

    def __init__(self, twin: Quantised, samples: Tensor):
        self.twin = twin
        self.count: Counter[tuple[int, int]] = Counter()  # by stage and id of a value
        self.cut: Counter[tuple[int, int]] = Counter()
        self.size, self.error, self.own = (defaultdict[tuple[int, int], float](float) for _ in range(3))  # sums of squares
        rows = samples.shape[1]
        exact = [StageRunner(stage.stage, rows, torch.float64) for stage in twin.stages]
        integers = [IntegerRunner(stage, rows) for stage in twin.stages]
        for x in samples:
            self._step(x.double(), exact, integers)

    def _step(self, x: Tensor, exact: list[StageRunner], integers: list[IntegerRunner]) -> None:
        entries = rounded(x.numpy(), self.twin.sample_bits)
        for i, (runner, integer) in enumerate(zip(exact, integers, strict=True)):
            values: dict[int, Array] = {}
            x = runner.push(x, lambda value, result: values.update({value.id: _with_batch(value, result)}))  # noqa: B023
            alone = IntegerRunner(integer.stage, integer.batch)
            results: dict[int, tuple[Integers, int]] = {}
            entries = integer.push(entries, lambda value, y, cut: results.update({value.id: (y, cut)}))  # noqa: B023
            for value in integer.order:
                if value.id in integer.stage.code:
                    self._note(i, alone, value, values, *results[value.id])

    def _note(self, i: int, alone: IntegerRunner, value: Value, values: dict[int, Array], result: Integers, cut: int) -> None:
        bits, key, wanted = alone.stage.bits, (i, value.id), values[value.id]
        args = [rounded(values[arg.id], bits[arg.id]) for arg in value.args]
        own = alone.run(alone.stage.code[value.id], value, args)
        unit = 2.0 ** -bits[value.id]
        self.count[key] += result.size
        self.cut[key] += cut
        self.size[key] += float(np.square(np.broadcast_to(wanted, result.shape)).sum())
        self.error[key] += float(np.square(result * unit - wanted).sum())
        self.own[key] += float(np.square(np.broadcast_to(own * unit - wanted, result.shape)).sum())

    def rows(self) -> list[dict[str, Any]]:
        """A row for each operation, in the order in which they run."""
        rows = []
        for i, stage in enumerate(self.twin.stages):
            stored = {store.value.id: store.index for store in stage.stage.program.stores}
            for value in stage.stage.program.values():
                if value.id in stage.code:
                    key = (i, value.id)
                    size = max(self.size[key], 1e-30)
                    rows.append(
                        {
                            "stage": stage.stage.name,
                            "operation": _words(value),
                            "stored": _stored(stage.stage.state_names, stored.get(value.id)),
                            "entries": value.size,
                            "bits": stage.bits[value.id],
                            "error": (self.error[key] / size) ** 0.5,
                            "own": (self.own[key] / size) ** 0.5,
                            "cut": self.cut[key],
                            "count": self.count[key],
                        }
                    )
        return rows


def _with_batch(value: Value, result: Tensor) -> Array:
    """The entries of a value with the batch in front, of size 1 if it does not depend on it; a number as [1]."""
    lead = result.dim() - len(value.shape)
    return (result if lead else result.unsqueeze(0)).numpy()


def _words(value: Value) -> str:
    if value.op is not Op.DOT:
        return str(value.op)
    return "product " + " + ".join(f"{block.length} to {block.width}" for block in value.blocks)


def _stored(names: tuple[str, ...], index: int | None) -> str:
    if index is None:
        return ""
    return f"state {names[index]}" if index < len(names) else "output"
