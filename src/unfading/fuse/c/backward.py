"""The backward pass of a compiled loop: gradients of inputs, initial states and weights.

It runs in chunks of time. The factors of the matrix products after the loop, dy and v of every y = v W^T, are as large as all
gates of all steps. Chunk by chunk they lie in memory that is used again, and are still in the cache when the products read
them. The gradient of the state is passed from chunk to chunk as it is from step to step.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from unfading.fuse.c.emit import Factor
from unfading.fuse.c.kernel import Kernel, Tensors, named
from unfading.fuse.c.threads import team, threads_for
from unfading.fuse.ir.differentiate import Outer, Source
from unfading.fuse.ir.program import InputKind, TensorKind
from unfading.loop_options import LoopOptions

CHUNK_BYTES = 1 << 24  # of factors in one chunk, for four threads; a chunk costs half a millisecond beside its work

# Members as globals: in Python 3.11 the attribute of an enum class costs a quarter of a microsecond at every use.
STATE, NEXT, INITIAL, SEQUENCE = TensorKind.STATE, TensorKind.NEXT, TensorKind.INITIAL, TensorKind.SEQUENCE
PACKED = TensorKind.PACKED
D_INPUT, D_WEIGHT, D_INITIAL = TensorKind.D_INPUT, TensorKind.D_WEIGHT, TensorKind.D_INITIAL
SHARED, CONSTANT = InputKind.SHARED, InputKind.CONSTANT


class Backward:
    """One backward pass. `wanted` has a flag for every input, state and weight: whether its gradient is wanted."""

    def __init__(
        self,
        kernel: Kernel,
        inputs: Sequence[Tensor],
        states: Sequence[Tensor],
        weights: Sequence[Tensor],
        trajectory: Sequence[Tensor],
        saved: Tensor | None,
        options: LoopOptions,
        wanted: Sequence[bool],
    ):
        self.kernel, self.options = kernel, options
        self.inputs, self.states = [x.contiguous() for x in inputs], [state.contiguous() for state in states]
        self.weights, self.trajectory, self.saved = weights, trajectory, saved
        self.T, self.B = kernel.extent(inputs, states)
        self.widths = kernel.reverse_program.widths
        self.needed = kernel.factors
        self.packed = kernel.packed(kernel.back, weights)
        self.wanted_inputs = wanted[: len(inputs)]
        self.wanted_weights = wanted[len(inputs) + len(states) :]
        self.d_inputs: list[Tensor | None] = []
        for i, kind in enumerate(kernel.program.kinds):
            n = self.widths.get((D_INPUT, i)) if self.wanted_inputs[i] or i in kernel.always else None
            if n is None:
                self.d_inputs.append(None)
            elif kind == CONSTANT:
                self.d_inputs.append(states[0].new_zeros((1, self.B, n)))
            else:
                self.d_inputs.append(kernel.blank(states[0], (self.T, self.B, n), options))
        self.d_weights = [
            torch.zeros_like(weight, memory_format=torch.contiguous_format) if want else None
            for weight, want in zip(weights, self.wanted_weights, strict=True)
        ]

    def gradients(
        self, d_trajectory: Sequence[Tensor | None], d_final: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor], list[Tensor | None]]:
        """The gradients of inputs, initial states and weights; None for one that is not wanted."""
        d_trajectory = [None if d is None else d.contiguous() for d in d_trajectory]
        carried: list[Tensor | None] = [None if d is None else d.contiguous() for d in d_final]
        buffers: Tensors = {}
        for a, b in self._chunks():
            self._run(a, b, [None if d is None else d[a:b] for d in d_trajectory], carried, buffers)
            carried = [buffers[D_INITIAL, i] for i in range(len(self.states))]
            for i in range(len(self.states)):  # the next chunk reads these while it writes the others
                buffers[D_INITIAL, i] = buffers.pop(("spare", i), None)
        d_inputs: list[Tensor | None] = []
        for x, d, kind, want in zip(self.inputs, self.d_inputs, self.kernel.program.kinds, self.wanted_inputs, strict=True):
            if not want:
                d_inputs.append(None)
            elif d is None:
                d_inputs.append(torch.zeros_like(x))
            else:
                d_inputs.append(d.sum(1, keepdim=True) if kind == SHARED else d)
        states = [torch.zeros_like(s) if c is None else c for s, c in zip(self.states, carried, strict=True)]
        return d_inputs, states, self.d_weights

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """The first step and the end of each chunk, from the chunk that was processed last to the first."""
        options, T = self.options, self.T
        room = CHUNK_BYTES * max(1, torch.get_num_threads() // 4)
        steps = max(8, room // (max(1, self.kernel.factor_width) * self.B * self.kernel.dtype.itemsize))
        if options.reverse and options.lengths is not None:
            steps = T  # each row begins at its own time, so a chunk would have to know the position of each
        begins = range(0, T, steps)
        for a in begins if options.reverse else reversed(begins):
            yield a, min(a + steps, T)

    def _run(self, a: int, b: int, d_next: Sequence[Tensor | None], d_final: Sequence[Tensor | None], buffers: Tensors) -> None:
        """Run backwards through the steps a..b; the gradient of the state before them is left in `buffers`."""
        options, T, B, kernel = self.options, self.T, self.B, self.kernel
        own = kernel.of_chunk(options, a)
        steps = b - a
        first = T - b if options.reverse else a  # the first step of the chunk, in the order of processing
        inputs, d_inputs, held = [], [], {}
        for i, (x, d, kind) in enumerate(zip(self.inputs, self.d_inputs, kernel.program.kinds, strict=True)):
            at = slice(first, first + steps) if kind == SHARED else slice(a, b)
            at = slice(None) if kind == CONSTANT else at
            inputs.append(x[at])
            if kind == CONSTANT and d is not None:
                held[i] = torch.empty_like(d)
            d_inputs.append(held.get(i, None if d is None else d[at]))
        if options.reverse:
            initial = self.states if b == T else [part[b] for part in self.trajectory]
        else:
            initial = self.states if a == 0 else [part[a - 1] for part in self.trajectory]
        trajectory = [part[a:b] for part in self.trajectory]
        tensors = named(
            input=inputs, initial=initial, next=trajectory, saved=[None if self.saved is None else self.saved[a:b]],
            dnext=d_next, dfinal=d_final, dinput=d_inputs,
        )  # fmt: skip
        lines = steps * B if own.lengths is None else int(own.lengths.clamp(0, steps).sum())
        self._make_buffers(buffers, steps, lines)
        tensors |= buffers
        kernel.launch(kernel.back, tensors, self.weights, own, steps, B, self.packed)
        for i, part in held.items():
            self.d_inputs[i] += part  # type: ignore[operator]
        for i, d_weight in enumerate(self.d_weights):
            entries = buffers.get((D_WEIGHT, i))
            if entries is not None and d_weight is not None:
                d_weight += entries.sum(0).to(d_weight.dtype).reshape(d_weight.shape)
        for product in kernel.outer:
            self._add_product(product, tensors, lines)
        for total in kernel.totals:
            whole = self.d_weights[total.weight]
            if whole is not None:
                whole.view(-1)[total.start : total.start + total.width] += self._factor(
                    total.dy, total.width, tensors, lines
                ).sum(0)

    def _make_buffers(self, buffers: Tensors, steps: int, lines: int) -> None:
        """The memory that one chunk needs and the next uses again."""
        kernel, like = self.kernel, self.states[0]
        tiles = -(-self.B // kernel.division(steps, self.B).tile)
        for kind, i in kernel.back.pointers:
            n = self.widths.get((kind, i), 0)
            existing = buffers.get((kind, i))
            if kind == D_INITIAL:
                for name in (D_INITIAL, "spare"):
                    if buffers.get((name, i)) is None:
                        buffers[name, i] = torch.empty_like(self.states[i])
            elif kind == D_WEIGHT:
                if existing is None or len(existing) != tiles:
                    buffers[kind, i] = like.new_empty((tiles, n), dtype=torch.float64)
            elif kind == SEQUENCE or (kind == PACKED and self.options.lengths is not None):
                n = self.needed[i].width if kind == PACKED else n
                if existing is None or len(existing) < lines:
                    buffers[kind, i] = like.new_empty((lines, n))
            elif kind == PACKED:
                buffers[kind, i] = None

    def _add_product(self, product: Outer, tensors: Tensors, lines: int) -> None:
        block = product.block
        whole = self.d_weights[block.weight]
        if whole is None or lines == 0:
            return
        target = whole[block.r0 : block.r1, block.c0 : block.c1]
        a, v = self._factor(product.dy, block.width, tensors, lines), product.v
        if self.options.lengths is not None or v.kind != STATE:
            pairs = [(a, self._factor(v, block.length, tensors, lines))]
        else:
            # The state before the first step is the initial one; before any other step, it is what the previous step stored.
            before = _columns(Factor(v._replace(kind=NEXT), block.length), tensors, lines)
            initial = _columns(Factor(v._replace(kind=INITIAL), block.length), tensors, self.B)
            rest = lines - self.B
            if self.options.reverse:
                pairs = [(a[rest:], initial), (a[:rest], before[self.B :])]
            else:
                pairs = [(a[: self.B], initial), (a[self.B :], before[:rest])]
        for left, right in pairs:
            self._add_outer(*((right, left) if block.transposed else (left, right)), target, product.scale)

    def _add_outer(self, a: Tensor, b: Tensor, target: Tensor, scale: float) -> None:
        """target [n, k] += scale a^T b, for a [lines, n] and b [lines, k]."""
        lines, n = a.shape
        if lines == 0:
            return
        item = a.element_size()
        a_at, b_at, to = a.data_ptr(), b.data_ptr(), target.data_ptr()
        lda, ldb, ldc = a.stride(0), b.stride(0), target.stride(0)
        k = b.shape[1]

        threads = threads_for(lines * n * k, torch.get_num_threads())
        outer = self.kernel.products.outer
        if threads == 1:
            outer(a_at, lda, b_at, ldb, lines, n, k, to, ldc, scale)
        else:
            team().outers(threads, outer, item, a_at, lda, b_at, ldb, lines, n, k, to, ldc, scale)

    def _factor(self, source: Source, width: int, tensors: Tensors, lines: int) -> Tensor:
        """A factor as [lines, width], packed where there are lengths."""
        factor = Factor(source, width)
        if self.options.lengths is None or source.kind == SEQUENCE:
            return _columns(factor, tensors, lines)
        tensor = tensors[PACKED, self.needed.index(factor)]
        assert tensor is not None
        return tensor[:lines]


def _columns(factor: Factor, tensors: Tensors, lines: int) -> Tensor:
    """A factor as [lines, width]."""
    kind, index, start = factor.source
    tensor = tensors[kind, index]
    assert tensor is not None
    return tensor.reshape(-1, tensor.shape[-1])[:lines, start : start + factor.width]
