"""A compiled step, called for one step at a time. All addresses are prepared; a call fills in those of x and the output."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from unfading.cells.base import Cell
from unfading.fuse.c.threads import by_rows
from unfading.fuse.fused import Inference, bind_inputs
from unfading.fuse.ir.program import InputKind, TensorKind
from unfading.fuse.plan import plan_or_raise
from unfading.reference import constants_of, projected

AHEAD = 256  # steps for which inputs that do not depend on x are computed at once

# Members as globals: in Python 3.11 the attribute of an enum class costs a quarter of a microsecond at every use.
INPUT, NEXT = TensorKind.INPUT, TensorKind.NEXT


class OneStep:
    """One cell, its packed weights, and its state in two buffers that are used in turn."""

    def __init__(self, cell: Cell):
        self.cell, self.plan = cell, plan_or_raise(cell)
        self.inference = Inference(self.plan, cell, cell.weights())
        self.kernel, self.direct = self.inference.kernel, self.inference.direct
        self.local = self.plan.local
        self.shared = [i for i, kind in enumerate(self.plan.signature.kinds) if kind == InputKind.SHARED]

    def begin(self, state: Any) -> None:
        """Start from a state, and prepare all addresses."""
        kernel, function = self.kernel, self.kernel.infer
        self.kind = type(state)
        self.batch = state[0].shape[0]
        first = [part.detach().clone(memory_format=torch.contiguous_format) for part in state]
        self.buffers = [first, [torch.empty_like(part) for part in first]]
        self.after = [torch.empty_like(part) for part in first]  # the state as an output of the step
        self.at = {pointer: k for k, pointer in enumerate(function.pointers, start=1)}
        self.arrays = []
        for before, final in (self.buffers, self.buffers[::-1]):
            known = {(TensorKind.INITIAL, i): part for i, part in enumerate(before)} | {
                (TensorKind.FINAL, i): part for i, part in enumerate(final)
            }
            known |= {(TensorKind.NEXT, i): part for i, part in enumerate(self.after)}
            known |= {(TensorKind.WEIGHT, i): weight for i, weight in enumerate(self.inference.weights)}
            addresses = [known[p].data_ptr() if p in known else None for p in function.pointers]
            all_addresses = (kernel.product, *addresses, *self.inference.packed.addresses)
            self.arrays.append((ctypes.c_void_p * len(all_addresses))(*all_addresses))
        tile = by_rows(self.batch, 1).tile
        self.rest = (1, self.batch, tile, 0, -(-self.batch // tile), 0, None, None)
        self.constants = constants_of(self.cell, first[0].new_zeros(1, self.batch, self.cell.input_size), 0)
        self.turn = 0
        self.table: list[Tensor] = []
        self.table_start = 0

    def state(self) -> Any:
        """A copy of the present state."""
        return self.kind(*(part.clone() for part in self.buffers[self.turn]))

    def reset(self, rows: Tensor, initial: Any) -> None:
        """Set some rows of the state, given as bool [B], to those of another state."""
        for part, new in zip(self.buffers[self.turn], initial, strict=True):
            part[rows] = new[rows]

    def push(self, x: Tensor, index: int) -> Tensor:
        """Run step number `index` on x [B, I]; return the output."""
        array = self.arrays[self.turn]
        held = self._inputs(x, index)
        for i, tensor in held:
            array[self.at[INPUT, i]] = tensor.data_ptr()
        output = self.after[0]
        if self.direct:
            output = torch.empty_like(output)
            array[self.at[NEXT, 0]] = output.data_ptr()
        if self.kernel.entries[self.kernel.infer.name](array, *self.rest):
            raise MemoryError("there is no memory for the buffers of a fused step.")
        self.turn = 1 - self.turn
        return output if self.direct else self.cell.output(self.kind(*self.after)).clone()

    def _inputs(self, x: Tensor, index: int) -> list[tuple[int, Tensor]]:
        """The inputs that the loop reads, with their numbers."""
        if not self.plan.with_project:
            x = x.unsqueeze(0)
            leaves = bind_inputs(self.plan, self.cell, x, index, projected(self.cell, x, index, self.constants))
            return [(i, leaf.contiguous()) for i, leaf in enumerate(leaves) if (INPUT, i) in self.at]
        held = [(0, x.contiguous())] if (INPUT, 0) in self.at else []
        if self.shared:
            offset = index - self.table_start
            if not self.table or not 0 <= offset < AHEAD:
                blank = x.new_zeros(AHEAD, 1, self.cell.input_size)
                self.table = [t.contiguous() for t in bind_inputs(self.plan, self.cell, blank, index)]
                self.table_start, offset = index, 0
            held += [(i, self.table[i][offset]) for i in self.shared if (INPUT, i) in self.at]
        return held
