"""The reverse of a program: from the gradient of the states after a step to that of all the step read.

What the reverse reads of the forward pass: the inputs and states, which are there; the outputs of nonlinear functions that
are costly to compute again, and dots, which are *saved*; everything else is computed again. Gradients of matrices leave
the loop: for y = dot(v, W) the reverse stores v and dy at every step, and dW = sum over t of dy_t^T v_t is one matrix
product after the loop.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from unfading.fuse.build import Builder
from unfading.fuse.program import Block, NotFusable, Program, Store, Value

# What is saved rather than computed again, unless it comes at once of what is there anyway.
COSTLY = frozenset("exp expm1 log log1p tanh sigmoid relu sin cos erf power sqrt amax".split())


class Source(NamedTuple):
    """A sequence of row vectors for a matrix product: entries from `start` on of a tensor."""

    kind: str  # state (before the step), next, input, dinput or sequence
    index: int
    start: int


class Outer(NamedTuple):
    """A gradient to be made after the loop: W[block] += sum over t and rows of dy^T v (turned round for a transposed block)."""

    block: Block
    dy: Source
    v: Source


class Reversed(NamedTuple):
    forward: Program  # with stores of kind saved
    reverse: Program
    outer: tuple[Outer, ...]


Adjoints = Sequence[Value | None]
Rule = Callable[[Builder, Value, Sequence[Value], Value, Value], Adjoints]


def _unary(derivative: Callable[[Builder, Value, Value, Value], Value]) -> Rule:
    """A rule from `derivative(b, x, y, dy)`."""
    return lambda b, value, x, y, d: [derivative(b, x[0], y, d)]


def _both(d_first: Callable[..., Value], d_second: Callable[..., Value]) -> Rule:
    """A rule for y = f(a, c) from `d(b, a, c, y, dy)` for each argument."""
    return lambda b, value, x, y, d: [d_first(b, *x, y, d), d_second(b, *x, y, d)]


def _larger(sign: str) -> Rule:
    """max and min: the whole to the larger, half to each where both are equal."""

    def part(b: Builder, mine: Value, other: Value, d: Value) -> Value:
        return b.map("where", b.map(sign, mine, other), d, b.map("where", b.map("eq", mine, other), b.map("mul", 0.5, d), 0.0))

    return _both(lambda b, a, c, y, d: part(b, a, c, d), lambda b, a, c, y, d: part(b, c, a, d))


def _spread(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    """amax: shared evenly by all that are largest."""
    largest = b.map("eq", x[0], b.expand(y, x[0].shape))
    count = b.reduce("sum", largest, value.attr)
    return [b.map("mul", largest, b.map("div", d, count))]


def _expand(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    own = x[0].shape
    front = len(value.shape) - len(own)
    axes = [i for i, size in enumerate(value.shape) if i < front or (own[i - front] == 1 and size != 1)]
    return [b.reshape(b.reduce("sum", d, axes), own)]


def _permute(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    return [b.permute(d, tuple(sorted(range(len(value.attr)), key=value.attr.__getitem__)))]


def _slice(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    axis, start, stop = value.attr
    shape = x[0].shape

    def zeros(n: int) -> list[Value]:
        return [b.zero(shape[:axis] + (n,) + shape[axis + 1 :])] if n else []

    return [b.cat([*zeros(start), d, *zeros(shape[axis] - stop)], axis)]


def _cat(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    out, start = [], 0
    for piece in x:
        stop = start + piece.shape[value.attr]
        out.append(b.slice(d, value.attr, start, stop))
        start = stop
    return out


def _nothing(b: Builder, value: Value, x: Sequence[Value], y: Value, d: Value) -> Adjoints:
    return [None] * len(x)


RULES: dict[str, Rule] = {
    "neg": _unary(lambda b, x, y, d: b.map("neg", d)),
    "copy": _unary(lambda b, x, y, d: d),
    "exp": _unary(lambda b, x, y, d: b.map("mul", d, y)),
    "expm1": _unary(lambda b, x, y, d: b.map("mul", d, b.map("add", y, 1.0))),
    "log": _unary(lambda b, x, y, d: b.map("div", d, x)),
    "log1p": _unary(lambda b, x, y, d: b.map("div", d, b.map("add", x, 1.0))),
    "tanh": _unary(lambda b, x, y, d: b.map("mul", d, b.map("sub", 1.0, b.map("mul", y, y)))),
    "sigmoid": _unary(lambda b, x, y, d: b.map("mul", d, b.map("mul", y, b.map("sub", 1.0, y)))),
    "relu": _unary(lambda b, x, y, d: b.map("where", b.map("gt", y, 0.0), d, 0.0)),
    "abs": _unary(lambda b, x, y, d: b.map("mul", d, b.map("sign", x))),
    "sqrt": _unary(lambda b, x, y, d: b.map("div", b.map("mul", 0.5, d), y)),
    "recip": _unary(lambda b, x, y, d: b.map("neg", b.map("mul", d, b.map("mul", y, y)))),
    "sin": _unary(lambda b, x, y, d: b.map("mul", d, b.map("cos", x))),
    "cos": _unary(lambda b, x, y, d: b.map("neg", b.map("mul", d, b.map("sin", x)))),
    "erf": _unary(
        lambda b, x, y, d: b.map("mul", 1.1283791670955126, b.map("mul", d, b.map("exp", b.map("neg", b.map("mul", x, x)))))
    ),
    "power": lambda b, value, x, y, d: [
        b.map("mul", d, b.map("mul", value.attr, b.map("power", x[0], attr=value.attr - 1)))
    ],
    "add": _both(lambda b, a, c, y, d: d, lambda b, a, c, y, d: d),
    "sub": _both(lambda b, a, c, y, d: d, lambda b, a, c, y, d: b.map("neg", d)),
    "mul": _both(lambda b, a, c, y, d: b.map("mul", d, c), lambda b, a, c, y, d: b.map("mul", d, a)),
    "div": _both(
        lambda b, a, c, y, d: b.map("div", d, c),
        lambda b, a, c, y, d: b.map("neg", b.map("div", b.map("mul", d, y), c)),
    ),
    "max": _larger("gt"),
    "min": _larger("lt"),
    "where": lambda b, value, x, y, d: [None, b.map("where", x[0], d, 0.0), b.map("where", x[0], 0.0, d)],
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne", "sign", "stop"), _nothing),
    "amax": _spread,
    "sum": lambda b, value, x, y, d: [b.expand(d, x[0].shape)],
    "expand": _expand,
    "reshape": lambda b, value, x, y, d: [b.reshape(d, x[0].shape)],
    "permute": _permute,
    "slice": _slice,
    "cat": _cat,
}


def differentiate(program: Program) -> Reversed:
    """The forward program with what it must save, its reverse, and the matrix products left for after the loop."""
    b = Builder()
    forward = _Forward(b, program)
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

    stores, products = _after_the_loop(_apart(b, program, stores), outer, program.kinds)
    return forward.finished(Program(tuple(stores), _widths(program, stores), program.kinds), products)


class _Forward:
    """The values of the forward program, as the reverse gets at them."""

    def __init__(self, b: Builder, program: Program):
        self.b = b
        self.program = program
        self.saved: list[Value] = []
        self.values: dict[int, Value] = {}
        stored = {store.value.id: store for store in program.stores}
        there: set[int] = set()  # values the reverse has without reading anything that was saved for it, or an input
        for value in program.values():
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
            elif value.op == "dot" or (value.op in COSTLY and not at_once):
                leaf = b.leaf("saved", len(self.saved), 0, value.size)
                self.saved.append(value)
                self.values[value.id] = b.reshape(leaf, value.shape)
            else:
                self.values[value.id] = b.rebuilt(value, [self.values[arg.id] for arg in value.args])
                if value.op in COSTLY or not at_once:
                    continue
                there.add(value.id)

    def finished(self, reverse: Program, outer: tuple[Outer, ...]) -> Reversed:
        """Save only what the reverse turned out to read, as parts of one tensor."""
        used = sorted(reverse.reads("saved"))
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
        return Reversed(forward, reverse._replace(widths=reverse.widths | widths), outer)


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
) -> tuple[list[Store], tuple[Outer, ...]]:
    """Where the products after the loop find their factors: in a sequence that exists, or in one stored for them."""
    stores = list(stores)
    places: dict[int, Source] = {}
    for store in stores:
        if store.kind == "dinput" and kinds[store.index] == "sequence":
            places.setdefault(store.value.id, Source("dinput", store.index, store.start))

    def source(value: Value) -> Source:
        leaf = value.attr if value.op == "leaf" else None
        if leaf and (leaf.kind in ("state", "next") or (leaf.kind == "input" and kinds[leaf.index] == "sequence")):
            return Source(value.attr.kind, value.attr.index, value.attr.start)
        if value.id not in places:
            places[value.id] = Source("sequence", sum(store.kind == "sequence" for store in stores), 0)
            stores.append(Store("sequence", places[value.id].index, 0, value))
        return places[value.id]

    products = [Outer(block, source(dy), source(v)) for block, dy, v in outer]
    return stores, _joined(products)


def _joined(products: list[Outer]) -> tuple[Outer, ...]:
    """Rows of one matrix whose dy are neighbours in one tensor: one product in the place of an LSTM's four."""
    out: list[Outer] = []
    for product in sorted(products, key=lambda p: (p.block.weight, p.block.transposed, p.v, p.block.c0, p.dy, p.block.r0)):
        if out and not product.block.transposed:
            last, new = out[-1], product
            neighbours = last.dy._replace(start=last.dy.start + last.block.width) == new.dy and last.v == new.v
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
            widths["sequence", store.index] = store.value.size
        elif store.kind != "dstate":
            widths[store.kind, store.index] = program.widths[store.kind[1:], store.index]
    return widths
