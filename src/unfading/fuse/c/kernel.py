"""The compiled loops of a program on the CPU.

    trajectory, final, saved = kernel.forward(inputs, states, weights, options, keep=True)

`backward.py` runs the backward pass. All tensors are on the CPU and in the precision of the kernel. A kernel stores nothing
between two calls.
"""

import ctypes
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfading.errors import NoKernel
from unfading.fuse.c.cache import library
from unfading.fuse.c.emit import CFunction, emit_backward, emit_forward, factors, shared, source
from unfading.fuse.c.threads import Division, by_rows, divide, team, threads_for
from unfading.fuse.ir.differentiate import Reversed, differentiate
from unfading.fuse.ir.program import InputKind, Program, TensorKind
from unfading.loop_options import LoopOptions

Pointer = ctypes.c_void_p
Long = ctypes.c_int64
Tensors = dict[tuple[str, int], Tensor | None]

REAL = {torch.float32: "float", torch.float64: "double"}  # the precisions that are compiled, and their names in C

PACKING = 16  # multiply-adds that take as long as packing an entry of a matrix
ADVISED = 1 << 22  # bytes from which memory is requested in large pages: first touches cost more than the arithmetic

# Members as globals: in Python 3.11 the attribute of an enum class costs a quarter of a microsecond at every use.
WEIGHT, CONSTANT = TensorKind.WEIGHT, InputKind.CONSTANT


@cache
def products(dtype: torch.dtype) -> ctypes.CDLL:
    """The matrix products of a precision."""
    functions = library(shared(REAL[dtype], "products.c"))
    functions.pack_all.argtypes = [Pointer, Long, Pointer, Pointer, Long, Long]
    functions.pack_all.restype = None
    functions.outer.argtypes = [Pointer, Long, Pointer, Long, Long, Long, Long, Pointer, Long, ctypes.c_double]
    functions.outer.restype = None
    functions.packed_size.argtypes = [Long, Long]
    functions.packed_size.restype = Long
    functions.advise.argtypes = [Pointer, Long]
    functions.advise.restype = None
    return functions


class CLoops(NamedTuple):
    """A program, its reverse program, and the C functions of both."""

    program: Program
    reversed: Reversed
    infer: CFunction  # runs the loop
    train: CFunction  # runs it, and saves what the gradient needs
    back: CFunction  # runs backwards through it

    @staticmethod
    def of(program: Program, suffix: str = "") -> "CLoops":
        both = differentiate(program)
        return CLoops(
            program,
            both,
            emit_forward(f"infer{suffix}", program),
            emit_forward(f"train{suffix}", both.forward),
            emit_backward(f"back{suffix}", both),
        )

    def for_teams(self) -> list[CFunction]:
        """The same functions for teams of threads."""
        return [
            emit_forward(self.infer.name, self.program, team=True),
            emit_forward(self.train.name, self.reversed.forward, team=True),
            emit_backward(self.back.name, self.reversed, team=True),
        ]


def compiled(programs: Sequence[Program], dtype: torch.dtype) -> "list[Kernel]":
    """The kernels of some programs, compiled into one library."""
    loops = [CLoops.of(program, f"_{i}") for i, program in enumerate(programs)]
    functions = [function for loop in loops for function in (loop.infer, loop.train, loop.back)]
    shared_library = library(source(REAL[dtype], functions))
    return [Kernel(loop, dtype, shared_library) for loop in loops]


class Packed(NamedTuple):
    """The addresses of the packed blocks of a function's matrices, and the memory that holds them."""

    addresses: list[int]
    memory: Tensor | None = None


class Kernel:
    """The three loops of one program in one precision: infer, train and back."""

    def __init__(self, loops: CLoops, dtype: torch.dtype, functions: ctypes.CDLL):
        self.loops, self.program, self.reverse_program = loops, loops.program, loops.reversed.reverse
        self.outer, self.totals = loops.reversed.outer, loops.reversed.totals
        self.has_gradient = loops.reversed.has_gradient()
        self.infer, self.train, self.back = loops.infer, loops.train, loops.back
        self.dtype = dtype
        self.entries = {}
        for function in (self.infer, self.train, self.back):
            entry = getattr(functions, function.name)
            entry.argtypes = [Pointer, Long, Long, Long, Long, Long, ctypes.c_int, Pointer, Pointer]
            entry.restype = ctypes.c_int
            self.entries[function.name] = entry
        self.specs: dict[str, Any] = {}  # for each function, which blocks are packed and where
        self.products = products(dtype)
        self.product = ctypes.cast(self.products.product, Pointer).value
        widths = loops.reversed.forward.widths
        self.states = [n for (kind, _), n in sorted(widths.items()) if kind == TensorKind.NEXT]
        self.saved = widths.get((TensorKind.SAVED, 0), 0)
        self.factors = factors(self.outer, self.totals)
        stored = [n for (kind, _), n in self.reverse_program.widths.items() if kind == TensorKind.SEQUENCE]
        self.factor_width = sum(factor.width for factor in self.factors) + sum(stored)
        # Gradients of inputs that the loop or the products after it need, wanted or not.
        sources = [product.dy for product in self.outer] + [total.dy for total in self.totals]
        read = {source.index for source in sources if source.kind == TensorKind.D_INPUT}
        self.always = (set(range(len(self.program.kinds))) - self.back.optional) | read
        # Imported here, since that module imports this one.
        from unfading.fuse.c.backward import Backward

        self._backward = Backward
        entries = sum(block.length * block.width for block in self.program.blocks())
        self.work = entries + 16 * sum(self.states)
        self.size = entries * dtype.itemsize

    @cached_property
    def team_entries(self) -> dict[str, Any]:
        """The entries of the functions for teams, compiled when one is first needed; empty where they cannot be compiled.

        Long steps have none: their functions would take minutes to compile.
        """
        if any(function.long for function in self.loops[2:]):
            return {}
        try:
            functions = library(source(REAL[self.dtype], self.loops.for_teams()))
        except NoKernel:
            return {}
        return {name: ctypes.cast(getattr(functions, name), Pointer).value for name in self.entries}

    @staticmethod
    def options(lengths: Tensor | None, reverse: bool) -> LoopOptions:
        """The options of a call as the loops take them: lengths on the CPU, and the rows ordered by them."""
        if lengths is None:
            return LoopOptions(None, reverse)
        lengths = lengths.to("cpu", torch.int64).contiguous()
        return LoopOptions(lengths, reverse, order=torch.argsort(lengths, descending=True, stable=True))

    @staticmethod
    def of_chunk(options: LoopOptions, start: int) -> LoopOptions:
        """The options for a chunk of time that begins at step `start`. A row with a length below 0 has no step in it."""
        return options if options.lengths is None else options._replace(lengths=options.lengths - start)

    def forward(
        self,
        inputs: Sequence[Tensor],
        states: Sequence[Tensor],
        weights: Sequence[Tensor],
        options: LoopOptions,
        *,
        keep: bool,
        packed: "Packed | None" = None,
        first: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """The states after every step [T, B, n], the final states [B, n], and, with `keep`, what the gradient needs.

        `options` are those of `Kernel.options`. `first` is memory for the first part of the trajectory; without it, new memory.
        """
        T, B = self.extent(inputs, states)
        trajectory = [] if first is None else [first]
        trajectory += [self.blank(states[0], (T, B, n), options) for n in self.states[len(trajectory) :]]
        final = [state.new_empty((B, n)) for state, n in zip(states, self.states, strict=True)]
        saved = self.advised(states[0].new_empty((T, B, self.saved))) if keep and self.saved else None
        tensors = named(input=inputs, initial=states, next=trajectory, final=final, saved=[saved])
        self.launch(self.train if keep else self.infer, tensors, weights, options, T, B, packed)
        return trajectory, final, saved

    def backward(
        self,
        gradients: tuple[Sequence[Tensor | None], Sequence[Tensor | None]],
        arguments: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
        stored: tuple[Sequence[Tensor], Tensor | None],
        options: LoopOptions,
        wanted: Sequence[bool],
    ) -> tuple[list[Tensor | None], list[Tensor], list[Tensor | None]]:
        """Gradients of inputs, initial states and weights, from those of the trajectory and of the final states.

        Args:
            arguments: inputs, states and weights of forward.
            stored: the trajectory and what forward saved.
            wanted: for every input, state and weight, whether its gradient is wanted; else it is None.
        """
        return self._backward(self, *arguments, *stored, options, wanted).gradients(*gradients)

    def launch(
        self,
        function: CFunction,
        tensors: Tensors,
        weights: Sequence[Tensor],
        options: LoopOptions,
        T: int,
        B: int,
        packed: "Packed | None" = None,
    ) -> None:
        """Run a loop on tensors by kind and number."""
        held: list[Tensor | None] = []
        for kind, i in function.pointers:
            tensor = weights[i] if kind == WEIGHT else tensors[kind, i]
            held.append(tensor if tensor is None or kind in WRITTEN else tensor.contiguous())
        packed = packed or self.packed(function, weights)
        self.call(
            function, [*(None if tensor is None else tensor.data_ptr() for tensor in held), *packed.addresses], options, T, B
        )

    def call(self, function: CFunction, addresses: Sequence[int | None], options: LoopOptions, T: int, B: int) -> None:
        """Run a loop on tensors given by address."""
        array = (Pointer * (1 + len(addresses)))(self.product, *addresses)
        tile, threads, together = self.division(T, B)
        order = None if options.order is None else options.order.data_ptr()
        lengths = None if options.lengths is None else options.lengths.data_ptr()
        entry = self.entries[function.name]
        if threads == 1:
            failed = entry(array, T, B, tile, 0, -(-B // tile), options.reverse, order, lengths)
        else:
            entry = entry if together == 1 else self.team_entries[function.name]
            failed = team().loops(threads, entry, array, T, B, tile, together, options.reverse, order, lengths)
        if failed:
            raise MemoryError(f"there is no memory for the buffers of a fused step over {tile} batch rows.")

    def packed(self, function: CFunction, weights: Sequence[Tensor]) -> "Packed":
        """The blocks of the matrices in the layout that products read."""
        specs = self.specs.get(function.name)
        if specs is None:
            specs = self.specs[function.name] = _pack_specs(function, [weight.shape for weight in weights], self.products)
        array, starts, size, used = specs
        held = {i: weights[i].detach().contiguous() for i in used}
        to = weights[0].new_empty(size) if size else None
        if to is None:
            return Packed([])
        addresses = (Pointer * len(weights))(*(held[i].data_ptr() if i in held else None for i in range(len(weights))))
        threads = threads_for(PACKING * size, torch.get_num_threads())
        if threads == 1:
            self.products.pack_all(array, len(function.blocks), addresses, to.data_ptr(), 0, 1)
        else:
            team().packs(threads, self.products.pack_all, array, len(function.blocks), addresses, to.data_ptr())
        first, item = to.data_ptr(), to.element_size()
        return Packed([first + start * item for start in starts], to)

    def division(self, T: int, B: int) -> Division:
        """How a loop over T steps of B rows is divided among threads."""
        division = divide(T, B, self.work, self.size, torch.get_num_threads())
        return division if division.together == 1 or self.team_entries else by_rows(B, division.threads)

    def extent(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[int, int]:
        """T and B."""
        T = next((len(x) for x, kind in zip(inputs, self.program.kinds, strict=True) if kind != CONSTANT), 0)
        return T, states[0].shape[0]

    def blank(self, like: Tensor, shape: tuple[int, ...], options: LoopOptions) -> Tensor:
        """Memory for a sequence. With lengths it is zeroed, since nothing is written past a row's end."""
        memory = self.advised(like.new_empty(shape))
        return memory if options.lengths is None else memory.zero_()

    def advised(self, tensor: Tensor) -> Tensor:
        """The tensor, in large pages if it is large."""
        size = tensor.numel() * tensor.element_size()
        if size >= ADVISED:
            self.products.advise(tensor.data_ptr(), size)
        return tensor


# The kinds that a loop writes to. Their memory must be contiguous already.
WRITTEN = frozenset(
    [
        *(TensorKind.NEXT, TensorKind.FINAL, TensorKind.SAVED, TensorKind.SEQUENCE, TensorKind.PACKED),
        *(TensorKind.D_INPUT, TensorKind.D_INITIAL, TensorKind.D_WEIGHT),
    ]
)


def named(**groups: Sequence[Tensor | None]) -> Tensors:
    """The tensors of every group by kind and number."""
    return {(kind, i): tensor for kind, group in groups.items() for i, tensor in enumerate(group)}


def _pack_specs(function: CFunction, shapes: Sequence[torch.Size], products: ctypes.CDLL) -> Any:
    """For each block: weight, first entry, strides down and right, length, width, and its place in the packed memory."""
    numbers, starts, size = [], [], 0
    for block in function.blocks:
        columns = shapes[block.weight][1]
        down, right = (columns, 1) if block.transposed else (1, columns)
        numbers += [block.weight, block.r0 * columns + block.c0, down, right, block.length, block.width, size]
        starts.append(size)
        size += (products.packed_size(block.length, block.width) + 15) // 16 * 16
    return (Long * len(numbers))(*numbers), starts, size, {block.weight for block in function.blocks}
