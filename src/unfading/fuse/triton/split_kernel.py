"""Launch loops whose units are divided among multiprocessors.

All programs of a launch must run at the same time, since they wait for each other: the grid is cooperative, and no larger than
the GPU. Rows that do not fit go in turns, one launch after the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unfading.errors import NoKernel
from unfading.fuse.ir.program import Program
from unfading.fuse.plan import TensorNames
from unfading.fuse.triton.emit import TritonFunction, source
from unfading.fuse.triton.emit_split import BARRIER, emit_split_backward, emit_split_forward
from unfading.fuse.triton.language import PRELUDE
from unfading.fuse.triton.launch import LaunchConstants, Launcher
from unfading.fuse.triton.launch_settings import Matrices
from unfading.fuse.triton.source import module
from unfading.fuse.triton.split_frame import COUNTER
from unfading.fuse.triton.tile_shapes import power_of_two
from unfading.fuse.triton.waiting import flag_on

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class SplitLoops:
    """The three loops of a program: infer, train and back."""

    def __init__(self, programs: Sequence[Program], names: TensorNames, matrices: Matrices):
        infer, train, back = programs
        self.functions = {
            "infer": emit_split_forward("infer", infer, names, matrices),
            "train": emit_split_forward("train", train, names, matrices),
            "back": emit_split_backward("back", back, names, matrices),
        }
        self.source = source([function.kernel for function in self.functions.values()], PRELUDE + BARRIER)
        self.launcher = Launcher(module(self.source))

    def function(self, name: str) -> TritonFunction:
        """The kernel of a loop by name."""
        return self.functions[name].kernel

    def launch(
        self,
        name: str,
        tensors: Sequence[Tensor | None],
        extent: tuple[int, int, int],
        constants: LaunchConstants,
        split: tuple[int, int, int, int],
        warps: int,
    ) -> None:
        """Run a loop on its tensors.

        Args:
            extent: models, or 0 where the tensors have no axis of models; steps; rows.
            split: the units of a program, the programs that have all units, the blocks of rows that run at the same time, and
                the entries of a chunk.
        """
        (models, T, B), (units, parts, room, chunk) = extent, split
        function = self.functions[name]
        like = next(tensor for tensor in tensors if tensor is not None)
        blocks = -(-B // constants.rows)  # of one model
        total = (models or 1) * blocks
        at_once = min(total, room)
        line = function.exchange + function.partial * power_of_two(parts)
        # What only dots read is rounded at once as these round it, so that half as much is read.
        dtype = HALVES.get(constants.precision, like.dtype) if function.for_dots else like.dtype
        entries = 2 * at_once * constants.rows * line
        summed = 2 * at_once * constants.rows * parts * units * function.summed
        try:
            exchange = like.new_empty(entries, dtype=dtype)
            products = [like.new_empty(summed)] if summed else []
        except torch.cuda.OutOfMemoryError:
            megabytes = (dtype.itemsize * entries + like.itemsize * summed) / 1e6
            raise NoKernel(
                f"{like.device} has no memory left for the {megabytes:.3g} MB through which multiprocessors with the units of "
                "one layer exchange their values"
            ) from None
        trouble = flag_on(like.device)
        own = (units, power_of_two(parts), line, chunk)
        for first in range(0, total, at_once):
            grid = (parts, min(at_once, total - first), 1)
            counters = torch.zeros(grid[1] * COUNTER, dtype=torch.int32, device=like.device)
            further: tuple[Any, ...] = (T, B, blocks, first, exchange, counters, trouble, *products)
            self.launcher.launch(
                function.kernel, tensors, grid, further, (*constants, *own), warps, models > 0, cooperative=True
            )
