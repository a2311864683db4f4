"""Kernels that compute every pixel by itself: the stages of a step with convolutions, in C or in Triton.

A tensor of a stage is [pixels, channels]. All values of one width are computed in one loop over the channels of a pixel. A
weight that is read entry by entry is the same for all pixels; the gradient of one is written for every pixel, and summed
afterwards.
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from unfading.fuse.c.cache import library
from unfading.fuse.c.emit import function_names, shared
from unfading.fuse.c.emit_step import EXPRESSIONS, number_in_c
from unfading.fuse.c.kernel import REAL
from unfading.fuse.c.threads import on_threads, threads_for
from unfading.fuse.frames import triton_pixels
from unfading.fuse.frames.pixel_groups import Group, groups
from unfading.fuse.ir.program import NUMBERS, Op, Program, TensorId, TensorKind, Value
from unfading.fuse.plan import target_of

WORK = 32  # multiply-adds that take as long as one entry of a stage


class PixelKernel:
    """A program of one stage, or the reverse of one."""

    def __init__(self, program: Program, dtype: torch.dtype, target: str):
        self.program, self.groups, self.dtype, self.target = program, groups(program), dtype, target
        read = {(value.leaf.kind, value.leaf.index) for g in self.groups for value in g.values if value.op is Op.LEAF}
        self.address: int | None = None  # of the compiled function
        self.read: list[TensorId] = sorted(read)
        self.written: list[TensorId] = sorted({(store.kind, store.index) for store in program.stores})
        self.tensors: list[TensorId] = [*self.read, *(tensor for tensor in self.written if tensor not in read)]

    def __call__(self, tensors: Mapping[TensorId, Tensor], pixels: int) -> None:
        """Run on tensors [pixels, channels] and flat weights, by kind and number. All are contiguous."""
        if not self.groups:
            return
        if self.target == "triton":
            triton_pixels.launch(self, tensors, pixels)
            return
        if self.address is None:
            self.address = _compiled(self.source(), self.dtype)
        array = (ctypes.c_int64 * (1 + len(self.tensors)))(pixels, *(tensors[tensor].data_ptr() for tensor in self.tensors))
        entries = pixels * sum(group.width * len(group.stores) for group in self.groups)
        on_threads(self.address, array, threads_for(WORK * entries, torch.get_num_threads()))

    def source(self) -> str:
        """The function in C."""
        lines = ["int pixels(const int64_t* call, int me, int members) {"]
        lines += [f"  real* {kind}{index} = (real*)call[{i}];" for i, (kind, index) in enumerate(self.tensors, start=1)]
        lines.append("  for (int64_t r = call[0] * me / members; r < call[0] * (me + 1) / members; r++) {")
        for group in self.groups:
            lines += [f"    {line}" for line in _loop(group, self.program.widths)]
        return "\n".join([*lines, "  }", "  return 0;", "}"])


@cache
def _compiled(text: str, dtype: torch.dtype) -> int:
    """The address of a compiled function. Raises NoCompiler where that fails."""
    real = REAL[dtype]
    functions = library("\n".join([shared(real, "step.h"), function_names(real), text]))
    address = ctypes.cast(functions.pixels, ctypes.c_void_p).value
    assert address is not None
    _libraries.append(functions)
    return address


_libraries: list[ctypes.CDLL] = []  # held, so that the addresses of their functions stay valid


def _loop(group: Group, widths: Mapping[TensorId, int]) -> list[str]:
    bases: dict[TensorId, str] = {}

    def entry(kind: TensorKind, index: int, start: int, size: int) -> str:
        base = bases.setdefault((kind, index), f"b{len(bases)}")
        return f"{base}[{start} + i]" if size == group.width else f"{base}[{start}]"

    names: dict[int, str] = {}
    body = []
    for value in group.values:
        if value.op in NUMBERS:
            names[value.id] = number_in_c(value.number) if value.op is Op.CONST else "(real)0"
        elif value.op is Op.EXPAND:
            names[value.id] = names[value.args[0].id]
        else:
            names[value.id] = f"v{value.id}"
            if value.op is Op.LEAF:
                expression = entry(value.leaf.kind, value.leaf.index, value.leaf.start, value.size)
            else:
                expression = in_c(value, [names[arg.id] for arg in value.args])
            body.append(f"const real v{value.id} = {expression};")
    stores = [f"{entry(s.kind, s.index, s.start, s.value.size)} = {names[s.value.id]};" for s in group.stores]
    pointers = []
    for (kind, index), base in bases.items():
        offset = "" if kind == TensorKind.WEIGHT else f" + r * {widths[kind, index]}"
        pointers.append(f"real* {base} = {kind}{index}{offset};")
    loop = ["#pragma omp simd", f"for (int i = 0; i < {group.width}; i++) {{", *(f"  {line}" for line in (*body, *stores)), "}"]
    return ["{", *pointers, *loop, "}"]


def in_c(value: Value, args: Sequence[str]) -> str:
    """An elementwise operation in C."""
    if value.op is Op.POWER and value.number == -0.5:  # as torch computes it: pow differs at -0 and -infinity
        return f"1 / sqrt_x({args[0]})"
    return EXPRESSIONS[value.op].format(*args, attr=number_in_c(value.number) if value.op is Op.POWER else "")


class PixelKernels(NamedTuple):
    """The kernels of one stage."""

    infer: PixelKernel
    train: PixelKernel  # also stores what the reverse reads
    back: PixelKernel


def check_compiles(kernels: Sequence[PixelKernels], dtype: torch.dtype) -> None:
    """Compile the kernels for the CPU now. Raises NoCompiler where that fails."""
    for of_stage in kernels:
        for kernel in of_stage:
            if kernel.groups:
                _compiled(kernel.source(), dtype)


def target_for(tensor: Tensor) -> str:
    """The kind of kernel for a tensor."""
    target = target_of(tensor.device)
    assert target is not None
    return target
