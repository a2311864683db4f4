"""The reverse of a program: from the gradient of the states after a step to that of all the step read.

What the reverse reads of the forward pass: the inputs and states, which are there; the outputs of nonlinear functions that
are costly to compute again, and dots, which are *saved*; everything else is computed again. Gradients of matrices leave
the loop: for y = dot(v, W) the reverse stores v and dy at every step, and dW = sum over t of dy_t^T v_t is one matrix
product after the loop.
"""

from itertools import pairwise
from typing import NamedTuple

from unfading.fuse.ir.builder import Builder
from unfading.fuse.ir.program import Block, NotFusable, Program, Store, Value
from unfading.fuse.ir.rules import RULES

# What is saved rather than computed again, unless it comes at once of what is there anyway.
COSTLY = frozenset(["exp", "expm1", "log", "log1p", "tanh", "sigmoid", "relu", "sin", "cos", "erf", "power", "sqrt", "amax"])


class Source(NamedTuple):
    """A sequence of row vectors for a matrix product: entries from `start` on of a tensor."""

    kind: str  # state (before the step), next, input, saved, dinput or sequence
    index: int  # type: ignore[assignment]
    start: int


class Outer(NamedTuple):
    """A gradient made after the loop: W[block] += scale * sum over t and rows of dy^T v (turned for a transposed block)."""

    block: Block
    dy: Source
    v: Source
    scale: float


class Total(NamedTuple):
    """A gradient made after the loop: entries from `start` on of a weight, the sum over t and rows of dy."""

    weight: int
    start: int
    dy: Source
    width: int


class Reversed(NamedTuple):
    forward: Program  # with stores of kind saved
    reverse: Program
    outer: tuple[Outer, ...]
    totals: tuple[Total, ...]


def differentiate(program: Program, *, save_light: bool = True) -> Reversed:
    """The forward program with what it must save, its reverse, and the matrix products left for after the loop.

    Args:
        save_light: save also what is made of a few inputs and weights alone; a GPU has it sooner again than from memory.
    """
    b = Builder()
    forward = _Forward(b, program, save_light)
    gradients: dict[int, list[Value]] = {}
    own_dots: set[int] = set()  # gradients that are products of one reader each, and may be joined with others
    for store in program.stores:
        carried = b.leaf("carry", store.index, store.start, store.start + store.value.size)
        gradients.setdefault(store.value.id, []).append(carried)

    stores: list[Store] = []
    outer: list[tuple[Block, Value, Value]] = []
    for value in reversed(program.values()):
        if value.op in ("const", "zero"):
            continue
        d = _total(b, gradients.pop(value.id, []), own_dots)
        if d is None or d.is_zero:
            continue
        d = b.expand(d, value.shape)
        if value.op == "leaf":
            stores.append(Store(f"d{value.attr.kind}", value.attr.index, value.attr.start, d))
        elif value.op == "dot":
            for v, block in zip(value.args, value.attr, strict=True):
                outer.append((block, d, forward.values[v.id]))
                dv = b.dot([(d, block._replace(transposed=not block.transposed))])
                gradients.setdefault(v.id, []).append(dv)
                own_dots.add(dv.id)
        else:
            if value.op not in RULES:
                raise NotFusable(f"no derivative of {value.op}")
            x = [forward.values[arg.id] for arg in value.args]
            for arg, dx in zip(value.args, RULES[value.op](b, value, x, forward.values[value.id], d), strict=True):
                if dx is not None and not dx.is_zero:
                    gradients.setdefault(arg.id, []).append(dx)
                    own_dots.discard(dx.id)  # passed on as it is: others may read it too

    stores, products, totals = _after_the_loop(_apart(b, program, stores), outer, program.kinds)
    return forward.finished(Program(tuple(stores), _widths(program, stores), program.kinds), products, totals)


class _Forward:
    """The values of the forward program, as the reverse gets at them."""

    def __init__(self, b: Builder, program: Program, save_light: bool):
        self.b = b
        self.program = program
        self.saved: list[Value] = []
        self.values: dict[int, Value] = {}
        stored = {store.value.id: store for store in program.stores}
        there: set[int] = set()  # values the reverse has without reading anything that was saved for it, or an input
        light: set[int] = set()  # made of a few inputs and weights alone
        for value in program.values():
            if all(arg.id in light for arg in value.args) and (value.op != "leaf" or _is_light(value)):
                light.add(value.id)
            at_once = bool(value.args) and all(arg.id in there for arg in value.args)
            if value.op == "leaf":
                self.values[value.id] = b.leaf(*value.attr)
                if value.attr.kind != "input":
                    there.add(value.id)
            elif value.op in ("const", "zero"):
                self.values[value.id] = b.const(value.attr) if value.op == "const" else b.zero(())
                there.add(value.id)
            elif (store := stored.get(value.id)) is not None and store.value.shape == (value.size,):
                self.values[value.id] = b.leaf("next", store.index, store.start, store.start + value.size)
                there.add(value.id)
            elif (value.op == "dot" and not _is_short(value)) or (
                value.op in COSTLY and not at_once and (save_light or value.id not in light)
            ):
                leaf = b.leaf("saved", len(self.saved), 0, value.size)
                self.saved.append(value)
                self.values[value.id] = b.reshape(leaf, value.shape)
            else:
                self.values[value.id] = b.rebuilt(value, [self.values[arg.id] for arg in value.args])
                if value.op in COSTLY or not at_once:
                    continue
                there.add(value.id)

    def finished(self, reverse: Program, outer: tuple[Outer, ...], totals: tuple[Total, ...]) -> Reversed:
        """Save only what the reverse turned out to read, as parts of one tensor."""
        used = sorted(reverse.reads("saved") | {p.v.index for p in outer if p.v.kind == "saved"})
        starts, width = {}, 0
        stores = list(self.program.stores)
        for k in used:
            starts[k] = width
            stores.append(Store("saved", 0, width, self.saved[k]))
            width += self.saved[k].size
        for value in reverse.values():
            if value.op == "leaf" and value.attr.kind == "saved":
                leaf = value.attr
                start = starts[leaf.index]
                value.attr = leaf._replace(index=0, start=start + leaf.start, stop=start + leaf.stop)
        widths = dict(self.program.widths) | ({("saved", 0): width} if used else {})
        forward = self.program._replace(stores=tuple(stores), widths=widths)
        outer = tuple(
            p._replace(v=Source("saved", 0, starts[p.v.index] + p.v.start)) if p.v.kind == "saved" else p for p in outer
        )
        return Reversed(forward, reverse._replace(widths=reverse.widths | widths), outer, totals)


def _is_short(dot: Value) -> bool:
    """A dot of a few inputs is made again for less than it costs to keep."""
    return all(arg.op == "leaf" and arg.attr.kind == "input" and arg.size <= 16 for arg in dot.args)


def _is_light(leaf: Value) -> bool:
    return bool(leaf.attr.kind == "weight" or (leaf.attr.kind == "input" and leaf.size == 1))


def _apart(b: Builder, program: Program, stores: list[Store]) -> list[Store]:
    """Gradients of pieces of a tensor that overlap, summed; pieces of inputs and states that nothing reads, zero."""
    out = []
    tensors = {(store.kind, store.index): None for store in stores} | {
        ("dstate", index): None for kind, index in program.widths if kind == "state"
    }
    for kind, index in tensors:
        pieces = [store for store in stores if (store.kind, store.index) == (kind, index)]
        edges = {0, program.widths[kind[1:], index]} if kind != "dweight" else set()
        edges |= {edge for piece in pieces for edge in (piece.start, piece.start + piece.value.size)}
        for start, stop in pairwise(sorted(edges)):
            here = [piece for piece in pieces if piece.start < stop and start < piece.start + piece.value.size]
            total = b.zero((stop - start,))
            for piece in here:
                total = b.map("add", total, b.slice(piece.value, 0, start - piece.start, stop - piece.start))
            if here or kind != "dweight":
                out.append(Store(kind, index, start, total))
    return out


def _total(b: Builder, parts: list[Value], own_dots: set[int]) -> Value | None:
    """The sum of the gradients that reach a value; products of the same width are joined to one."""
    dots = [part for part in parts if part.op == "dot" and part.id in own_dots]
    rest = [part for part in parts if not (part.op == "dot" and part.id in own_dots)]
    if dots:
        rest.insert(0, b.dot([pair for dot in dots for pair in zip(dot.args, dot.attr, strict=True)]))
    total: Value | None = None
    for part in rest:
        total = part if total is None else b.map("add", total, part)
    return total


def _after_the_loop(
    stores: list[Store], outer: list[tuple[Block, Value, Value]], kinds: tuple[str, ...]
) -> tuple[list[Store], tuple[Outer, ...], tuple[Total, ...]]:
    """Where the products after the loop find their factors: in a sequence that exists, or in one stored for them."""
    places: dict[int, Source] = {}
    for store in stores:
        if store.kind == "dinput" and kinds[store.index] == "sequence":
            places.setdefault(store.value.id, Source("dinput", store.index, store.start))
    sequences: list[Store] = []
    ends: list[int] = []  # of each sequence

    def source(value: Value, beside: Source | None = None) -> Source:
        """Where a value lies; one that must be stored is put beside another, if that is the last of its sequence."""
        leaf = value.attr if value.op == "leaf" else None
        if leaf and (leaf.kind in ("state", "next", "saved") or (leaf.kind == "input" and kinds[leaf.index] == "sequence")):
            return Source(leaf.kind, leaf.index, leaf.start)
        if value.id not in places:
            if beside is None or beside.kind != "sequence" or ends[beside.index] != beside.start:
                beside = Source("sequence", len(ends), 0)
                ends.append(0)
            places[value.id] = beside
            sequences.append(Store("sequence", beside.index, beside.start, value))
            ends[beside.index] += value.size
        return places[value.id]

    products: list[Outer] = []
    for block, dy, v in sorted(outer, key=lambda product: (product[0].weight, product[2].id, product[0])):
        (a, dy), (b, v) = _scale(dy), _scale(v)
        last = products[-1] if products else None
        follows = last is not None and last.block._replace(r0=last.block.r1, r1=block.r1) == block
        beside = last.dy._replace(start=last.dy.start + last.block.width) if last is not None and follows else None
        products.append(Outer(block, source(dy, beside), source(v), a * b))
    # The gradient of a bias is the sum of what is stored for its matrix.
    totals: list[Total] = []
    rest = []
    for store in sorted(stores, key=lambda store: store[:3]):
        if store.kind == "dweight" and store.value.id in places:
            new = Total(store.index, store.start, places[store.value.id], store.value.size)
            if totals and _next_to(totals[-1]) == (new.weight, new.start, new.dy):
                totals[-1] = totals[-1]._replace(width=totals[-1].width + new.width)
            else:
                totals.append(new)
        else:
            rest.append(store)
    return [*rest, *sequences], _joined(products), tuple(totals)


def _next_to(total: Total) -> tuple[int, int, Source]:
    return total.weight, total.start + total.width, total.dy._replace(start=total.dy.start + total.width)


def _scale(value: Value) -> tuple[float, Value]:
    """A number taken out of a factor."""
    if value.op == "mul" and (number := value.args[0].constant) is not None:
        return number, value.args[1]
    return 1.0, value


def _joined(products: list[Outer]) -> tuple[Outer, ...]:
    """Rows of one matrix whose dy are neighbours in one tensor: one product in the place of an LSTM's four."""
    out: list[Outer] = []
    for product in sorted(products, key=lambda p: (p.block.weight, p.block.transposed, p.v, p.block.c0, p.dy, p.block.r0)):
        if out and not product.block.transposed:
            last, new = out[-1], product
            neighbours = (last.dy._replace(start=last.dy.start + last.block.width), last.v, last.scale) == new[1:]
            if neighbours and last.block._replace(r0=last.block.r1, r1=new.block.r1) == new.block:
                out[-1] = last._replace(block=last.block._replace(r1=new.block.r1))
                continue
        out.append(product)
    return tuple(out)


def _widths(program: Program, stores: list[Store]) -> dict[tuple[str, int], int]:
    widths = {}
    for kind, index in program.widths:
        if kind == "next":
            widths["carry", index] = widths["dstate", index] = program.widths[kind, index]
    for store in stores:
        if store.kind == "sequence":
            widths["sequence", store.index] = widths.get(("sequence", store.index), 0) + store.value.size
        elif store.kind != "dstate":
            widths[store.kind, store.index] = program.widths[store.kind[1:], store.index]
    return widths
