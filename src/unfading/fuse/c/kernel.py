"""A compiled step: tensors in, tensors out, the loop over time in C between them.

    trajectory, final, saved = kernel.forward(inputs, states, weights, ...)

`backward.py` goes the way back. All tensors are those of one call, on the CPU and in the kernel's precision. Nothing is kept
between calls.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.fuse.c.cache import library
from unfading.fuse.c.emit import Function, emit_backward, emit_forward, shared, source
from unfading.fuse.c.threads import run_tiles
from unfading.fuse.ir.differentiate import Reversed, differentiate
from unfading.fuse.ir.program import InputKind, Program, TensorKind

Pointer = ctypes.c_void_p
Long = ctypes.c_int64
Tensors = dict[tuple[str, int], Tensor | None]

REAL = {torch.float32: "float", torch.float64: "double"}  # the precisions that are compiled, as C calls them

ROWS = 24  # of a tile, at most: a multiple of the six rows of a product's registers, and small enough for the first cache
ADVISED = 1 << 22  # bytes from which memory is asked for in large pages: first touches cost more than the arithmetic


class Walk(NamedTuple):
    """How time is gone through: the direction, and each row's length with the order of rows by it."""

    reverse: bool
    lengths: Tensor | None
    order: Tensor | None

    @staticmethod
    def of(lengths: Tensor | None, reverse: bool) -> "Walk":
        if lengths is None:
            return Walk(reverse, None, None)
        lengths = lengths.to("cpu", torch.int64).contiguous()
        return Walk(reverse, lengths, torch.argsort(lengths, descending=True, stable=True))

    def of_piece(self, start: int) -> "Walk":
        """As a piece of time that begins at this step sees it: lengths below 0 have ended, or not yet begun."""
        return self if self.lengths is None else self._replace(lengths=self.lengths - start)


@cache
def products(dtype: torch.dtype) -> ctypes.CDLL:
    """The matrix products of a precision."""
    made = library(shared(REAL[dtype], "products.c"))
    made.pack_all.argtypes = [Pointer, Long, Pointer, Pointer]
    made.pack_all.restype = None
    made.outer.argtypes = [Pointer, Long, Pointer, Long, Long, Long, Long, Pointer, Long, ctypes.c_double]
    made.outer.restype = None
    made.packed_size.argtypes = [Long, Long]
    made.packed_size.restype = Long
    made.advise.argtypes = [Pointer, Long]
    made.advise.restype = None
    return made


class Loops(NamedTuple):
    """A program, its reverse, and the C functions of both."""

    program: Program
    reversed: Reversed
    infer: Function
    train: Function
    back: Function

    @staticmethod
    def of(program: Program, suffix: str = "") -> "Loops":
        made = differentiate(program)
        return Loops(
            program,
            made,
            emit_forward(f"infer{suffix}", program),
            emit_forward(f"train{suffix}", made.forward),
            emit_backward(f"back{suffix}", made),
        )


def compiled(programs: Sequence[Program], dtype: torch.dtype) -> "list[Kernel]":
    """The kernels of some programs, compiled together."""
    loops = [Loops.of(program, f"_{i}") for i, program in enumerate(programs)]
    functions = [function for loop in loops for function in (loop.infer, loop.train, loop.back)]
    made = library(source(REAL[dtype], functions))
    return [Kernel(loop, dtype, made) for loop in loops]


class Packed(NamedTuple):
    """Where the packed blocks of a function's matrices lie, and the memory they lie in."""

    addresses: list[int]
    memory: Tensor | None = None


class Kernel:
    """The three loops of one program, in one precision: to run, to run keeping what the gradient needs, and back."""

    def __init__(self, loops: "Loops", dtype: torch.dtype, made: ctypes.CDLL):
        self.program, self.reverse_program = loops.program, loops.reversed.reverse
        self.outer, self.totals = loops.reversed.outer, loops.reversed.totals
        self.infer, self.train, self.back = loops.infer, loops.train, loops.back
        self.dtype = dtype
        self.entries = {}
        for function in (self.infer, self.train, self.back):
            entry = getattr(made, function.name)
            entry.argtypes = [Pointer, Long, Long, Long, Long, Long, ctypes.c_int, Pointer, Pointer]
            entry.restype = ctypes.c_int
            self.entries[function.name] = entry
        self.specs: dict[str, Any] = {}  # what is packed for each function, and where it comes to lie
        self.products = products(dtype)
        self.product = ctypes.cast(self.products.product, Pointer).value
        widths = loops.reversed.forward.widths
        self.states = [n for (kind, _), n in sorted(widths.items()) if kind == TensorKind.NEXT]
        self.saved = widths.get((TensorKind.SAVED, 0), 0)
        # Gradients of inputs that the loop or the products after it need, wanted or not.
        factors = [product.dy for product in self.outer] + [total.dy for total in self.totals]
        read = {factor.index for factor in factors if factor.kind == TensorKind.D_INPUT}
        self.always = (set(range(len(self.program.kinds))) - self.back.optional) | read
        self.work = sum(block.length * block.width for block in self.program.blocks()) + 16 * sum(self.states)

    def forward(
        self,
        inputs: Sequence[Tensor],
        states: Sequence[Tensor],
        weights: Sequence[Tensor],
        walk: Walk,
        *,
        keep: bool,
        packed: "Packed | None" = None,
        first: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """The states after every step [T, B, n], the final ones [B, n], and what the gradient needs, if it is to be kept.

        `first`, where given, is memory for the first part of the states.
        """
        T, B = self.extent(inputs, states)
        trajectory = [] if first is None else [first]
        trajectory += [self.blank(states[0], (T, B, n), walk) for n in self.states[len(trajectory) :]]
        final = [state.new_empty((B, n)) for state, n in zip(states, self.states, strict=True)]
        saved = self.advised(states[0].new_empty((T, B, self.saved))) if keep and self.saved else None
        tensors = named(input=inputs, initial=states, next=trajectory, final=final, saved=[saved])
        self.launch(self.train if keep else self.infer, tensors, weights, walk, T, B, packed)
        return trajectory, final, saved

    def launch(
        self,
        function: Function,
        tensors: Tensors,
        weights: Sequence[Tensor],
        walk: Walk,
        T: int,
        B: int,
        packed: "Packed | None" = None,
    ) -> None:
        held: list[Tensor | None] = []
        for kind, i in function.pointers:
            tensor = weights[i] if kind == TensorKind.WEIGHT else tensors[kind, i]
            held.append(tensor if tensor is None or kind in WRITTEN else tensor.contiguous())
        packed = packed or self.packed(function, weights)
        self.call(
            function, [*(None if tensor is None else tensor.data_ptr() for tensor in held), *packed.addresses], walk, T, B
        )

    def call(self, function: Function, addresses: Sequence[int | None], walk: Walk, T: int, B: int) -> None:
        """Run a loop on tensors given by address."""
        entry = self.entries[function.name]
        array = (Pointer * (1 + len(addresses)))(self.product, *addresses)
        tile = self.tile(B)
        order = None if walk.order is None else walk.order.data_ptr()
        lengths = None if walk.lengths is None else walk.lengths.data_ptr()

        def run(first: int, last: int) -> None:
            if entry(array, T, B, tile, first, last, walk.reverse, order, lengths):
                raise MemoryError(f"no memory for the buffers of a fused step over {tile} rows.")

        run_tiles(run, -(-B // tile), T * B * self.work)

    def packed(self, function: Function, weights: Sequence[Tensor]) -> "Packed":
        """The blocks of the matrices as products read them, in memory that lives as long as what is returned."""
        specs = self.specs.get(function.name)
        if specs is None:
            specs = self.specs[function.name] = _pack_specs(function, [weight.shape for weight in weights], self.products)
        array, starts, size, used = specs
        held = {i: weights[i].detach().contiguous() for i in used}
        to = weights[0].new_empty(size) if size else None
        if to is None:
            return Packed([])
        addresses = (Pointer * len(weights))(*(held[i].data_ptr() if i in held else None for i in range(len(weights))))
        self.products.pack_all(array, len(function.blocks), addresses, to.data_ptr())
        first, item = to.data_ptr(), to.element_size()
        return Packed([first + start * item for start in starts], to)

    def tile(self, B: int) -> int:
        """Rows of a tile: near ROWS, the same for all tiles, at least one tile for each thread."""
        tiles = max(-(-B // ROWS), min(B, torch.get_num_threads()))
        return -(-B // tiles)

    def extent(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[int, int]:
        T = next((len(x) for x, kind in zip(inputs, self.program.kinds, strict=True) if kind != InputKind.CONSTANT), 0)
        return T, states[0].shape[0]

    def blank(self, like: Tensor, shape: tuple[int, ...], walk: Walk) -> Tensor:
        """Memory for a sequence; with lengths it begins as zeros, for what lies past a row's end is not written."""
        made = self.advised(like.new_empty(shape))
        return made if walk.lengths is None else made.zero_()

    def advised(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        if size >= ADVISED:
            self.products.advise(tensor.data_ptr(), size)
        return tensor


WRITTEN = frozenset(
    [
        *(TensorKind.NEXT, TensorKind.FINAL, TensorKind.SAVED, TensorKind.SEQUENCE, TensorKind.PACKED),
        *(TensorKind.D_INPUT, TensorKind.D_INITIAL, TensorKind.D_WEIGHT),
    ]
)


def named(**groups: Sequence[Tensor | None]) -> Tensors:
    return {(kind, i): tensor for kind, group in groups.items() for i, tensor in enumerate(group)}


def _pack_specs(function: Function, shapes: Sequence[torch.Size], products: ctypes.CDLL) -> Any:
    """Per block: weight, first entry, steps down and right, length, width, and where it comes to lie."""
    numbers, starts, size = [], [], 0
    for block in function.blocks:
        columns = shapes[block.weight][1]
        down, right = (columns, 1) if block.transposed else (1, columns)
        numbers += [block.weight, block.r0 * columns + block.c0, down, right, block.length, block.width, size]
        starts.append(size)
        size += (products.packed_size(block.length, block.width) + 15) // 16 * 16
    return (Long * len(numbers))(*numbers), starts, size, {block.weight for block in function.blocks}
