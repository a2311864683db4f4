"""The body of a C kernel: one step of a program, for the first m rows of a tile.

The surrounding loop (`emit.py`) defines s, the number of the step; for row r of the tile `row[r]`, its row in the batch,
`place[r]`, the position of this step in a tensor [T, B, ...], `before[r]`, that of the previous step, and `line[r]`, its line
in a sequence that is stored for after the loop; and now0, new0, ..., the state, or its gradient, before and after the step.

A step can also be written for a team of threads (`team.h`). Each member then computes its share of the first axis of every
loop, of the columns of every dot, and of the rows of every reduction, and the members meet where the next part may read what
another one computed.
"""

from collections.abc import Sequence

from unfading.fuse.c.indexing import entry_of, flatten_index, indices, plus
from unfading.fuse.c.outline import LONG, Outline
from unfading.fuse.c.schedule import StepSchedule
from unfading.fuse.ir.passes import Reset
from unfading.fuse.ir.program import (
    NUMBERS,
    REDUCTIONS,
    InputKind,
    Op,
    Program,
    Shape,
    TensorId,
    TensorKind,
    Value,
    pieces_of,
)

EXPRESSIONS: dict[Op, str] = {
    Op.NEG: "-{0}",
    Op.EXP: "exp_x({0})",
    Op.EXPM1: "expm1_x({0})",
    Op.LOG: "log_x({0})",
    Op.LOG1P: "log1p_x({0})",
    Op.TANH: "tanh_x({0})",
    Op.SIGMOID: "sigmoid_x({0})",
    Op.RELU: "({0} < 0 ? (real)0 : {0})",
    Op.ABS: "fabs_x({0})",
    Op.SQRT: "sqrt_x({0})",
    Op.RECIP: "1 / {0}",
    Op.SIGN: "(real)(({0} > 0) - ({0} < 0))",
    Op.SIN: "sin_x({0})",
    Op.COS: "cos_x({0})",
    Op.ERF: "erf_x({0})",
    Op.POWER: "pow_x({0}, {attr})",
    Op.COPY: "{0}",
    Op.STOP: "{0}",
    Op.ADD: "{0} + {1}",
    Op.SUB: "{0} - {1}",
    Op.MUL: "{0} * {1}",
    Op.DIV: "{0} / {1}",
    Op.MAX: "({0} > {1} || {0} != {0} ? {0} : {1})",
    Op.MIN: "({0} < {1} || {0} != {0} ? {0} : {1})",
    Op.GT: "(real)({0} > {1})",
    Op.GE: "(real)({0} >= {1})",
    Op.LT: "(real)({0} < {1})",
    Op.LE: "(real)({0} <= {1})",
    Op.EQ: "(real)({0} == {1})",
    Op.NE: "(real)({0} != {1})",
    Op.WHERE: "({0} != 0 ? {1} : {2})",
    Op.WITH_GRADIENT: "{0}",
}


MEET = "meet(member);"


class StepWriter:
    """Writes the lines of a step, and collects the tensors that they need."""

    def __init__(
        self,
        name: str,
        program: Program,
        schedule: StepSchedule,
        *,
        backward: bool,
        team: bool,
        resets: Sequence[Reset] = (),
    ):
        self.program, self.schedule, self.backward, self.team = program, schedule, backward, team
        self.shares: dict[tuple[str, str], int] = {}  # of a member of a team: (n, piece) -> number
        # The rows of a reduction that a thread computes.
        self.rows = "r = me; r < m; r += members" if team else "r = 0; r < m; r++"
        self.blocks = program.blocks()
        self.numbers = {block: k for k, block in enumerate(self.blocks)}
        self.pointers: dict[TensorId, None] = {}  # in order of use
        stages: list[list[tuple[Value, list[str]]]] = []
        for level in schedule.levels:
            stages.append([(values[0], self._loop(shape, values)) for shape, values in level.loops])
            stages.append([(value, self._other(value)) for value in level.rest])
        self.outline = Outline(name)
        if not team and sum(len(lines) for stage in stages for _, lines in stage) > LONG:
            # A dot is one line already.
            stages = [[(v, lines if v.op is Op.DOT else [self.outline.call(lines)]) for v, lines in stage] for stage in stages]
        self.lines = self._resets(resets)
        for stage in filter(None, stages):
            self.lines += [line for value, lines in stage for line in self._guarded(value, lines)]
            self.lines += [MEET] if team else []

    def _guarded(self, value: Value, lines: list[str]) -> list[str]:
        """Lines that only the gradient of an input needs run only where that gradient is wanted."""
        index = self.schedule.only_for.get(value.id)
        return lines if index is None else [f"if ({self.pointer(TensorKind.D_INPUT, index)}) {{", *lines, "}"]

    def optional(self) -> frozenset[int]:
        """The inputs whose gradient is stored by guarded lines only."""
        stored = {
            (index, value)
            for value, targets in self.schedule.stores.items()
            for kind, index, _ in targets
            if kind == TensorKind.D_INPUT
        }
        return frozenset(index for index, _ in stored) - {
            index for index, value in stored if value not in self.schedule.only_for
        }

    def pointer(self, kind: TensorKind, index: int) -> str:
        self.pointers[kind, index] = None
        return f"{kind}{index}"

    # -- addresses: a base for row r, declared once per loop, and an index into it ----------------------------------------

    def base(self, kind: TensorKind, i: int) -> str:
        """The base of a tensor that row r reads."""
        width = self.program.widths[kind, i]
        if kind == TensorKind.WEIGHT:
            return self.pointer(kind, i)
        if kind == TensorKind.CARRY or (kind == TensorKind.STATE and not self.backward):
            return f"now{i} + r * PAD({width})"
        if kind == TensorKind.STATE:
            after, initial = self.pointer(TensorKind.NEXT, i), self.pointer(TensorKind.INITIAL, i)
            return f"(s ? {after} + before[r] * {width} : {initial} + row[r] * {width})"
        place = "place[r]"
        if kind == TensorKind.INPUT:
            place = {InputKind.SEQUENCE: "place[r]", InputKind.SHARED: "s", InputKind.CONSTANT: "row[r]"}[self.program.kinds[i]]
        return f"{self.pointer(kind, i)} + {place} * {width}"

    def _target(self, kind: TensorKind, index: int) -> tuple[str, str]:
        """The base of a tensor that row r writes, and the assignment operator."""
        width = self.program.widths[kind, index]
        if kind == TensorKind.D_STATE:
            return f"new{index} + r * PAD({width})", "="
        if kind == TensorKind.D_WEIGHT:
            return f"sum{index}", "+="
        if kind == TensorKind.D_INPUT and self.program.kinds[index] == InputKind.CONSTANT:
            return f"held{index} + r * PAD({width})", "+="
        place = "line[r]" if kind == TensorKind.SEQUENCE else "place[r]"
        if kind == TensorKind.D_INPUT and self.program.kinds[index] == InputKind.SHARED:
            place = "(s * B + row[r])"
        return f"{self.pointer(kind, index)} + {place} * {width}", "="

    def bounds(self, n: int | str, piece: str = "V") -> tuple[str, str]:
        """The first of n entries that a thread computes, and the end, as numbers or as names that `shares` declares."""
        if not self.team:
            return "0", str(n)
        number = self.shares.setdefault((str(n), piece), len(self.shares))
        return f"from{number}", f"to{number}"

    # -- loops ------------------------------------------------------------------------------------------------------------

    def _resets(self, resets: Sequence[Reset]) -> list[str]:
        """Replace entries of the state, in place, in the rows in which a condition holds."""
        lines = []
        for condition in {reset.condition.id: reset.condition for reset in resets}.values():
            row = _LoopWriter(self, condition.shape)
            holds = EXPRESSIONS[condition.op].format(*map(row.read, condition.args))
            lines += ["for (int r = 0; r < m; r++) {", *row.bases_declared(), *(f"  {line}" for line in row.body)]
            lines.append(f"  if ({holds}) {{")
            for reset in (each for each in resets if each.condition is condition):
                loop = _LoopWriter(self, reset.state.shape)
                leaf = reset.state.leaf
                loop.write(self.base(leaf.kind, leaf.index), "=", plus(leaf.start, loop.flat), loop.read(reset.new))
                lines += ["  {", *loop.of_row(), "  }"]
            lines += ["  }", "}"]
        return [*lines, MEET] if lines and self.team else lines

    def _other(self, value: Value) -> list[str]:
        return (
            self._dot(value) if value.op is Op.DOT else self._reduction(value) if value.op in REDUCTIONS else self._join(value)
        )

    def _loop(self, shape: Shape, values: list[Value]) -> list[str]:
        loop = _LoopWriter(self, shape)
        for value in values:
            args = [loop.read(arg) for arg in value.args]
            if value.op is Op.POWER and value.number == -0.5:  # as torch computes it: pow differs at -0 and -infinity
                expression = f"1 / sqrt_x({args[0]})"
            else:
                expression = EXPRESSIONS[value.op].format(*args, attr=number_in_c(value.number) if value.op is Op.POWER else "")
            loop.body.append(f"const real v{value.id} = {expression};")
            loop.local[value.id] = f"v{value.id}"
            if value.id in self.schedule.slots:
                loop.write(f"s{self.schedule.slots[value.id]} + r * PAD({value.size})", "=", loop.flat, f"v{value.id}")
            for kind, index, start in self.schedule.stores.get(value.id, ()):
                base, assignment = self._target(kind, index)
                loop.write(base, assignment, plus(start, loop.flat), f"v{value.id}")
                if kind == TensorKind.NEXT:  # also the state that the next step reads
                    width = self.program.widths[kind, index]
                    loop.write(f"new{index} + r * PAD({width})", "=", plus(start, loop.flat), f"v{value.id}")
        return loop.written()

    def _join(self, value: Value) -> list[str]:
        """A concatenation that could not be simplified away: each part is copied to its place."""
        lines = []
        for start, _, part in pieces_of(value.args, value.axis):
            loop = _LoopWriter(self, part.shape)
            index = list(loop.index)
            index[value.axis] = plus(start, index[value.axis])
            target = f"s{self.schedule.slots[value.id]} + r * PAD({value.size})"
            loop.write(target, "=", flatten_index(value.shape, index), loop.read(part))
            lines += loop.written()
        return lines

    def _reduction(self, value: Value) -> list[str]:
        x, over = value.args[0], value.axes
        reduced = ["0" if axis in over else index for axis, index in enumerate(indices(x.shape))]
        target = f"s{self.schedule.slots[value.id]}[r * PAD({value.size}) + {flatten_index(value.shape, reduced)}]"
        loop = _LoopWriter(self, x.shape)
        entry = loop.read(x)
        outside = [axis for axis in range(len(x.shape)) if axis not in over]
        first = [f"for (int {self.rows}) {{", *loop.bases_declared()]
        if value.op is Op.SUM and outside and outside[-1] == len(x.shape) - 1 and x.shape[-1] > 1:
            # The last axis is not reduced, so whole vectors are added.
            first.append(f"  memset(&s{self.schedule.slots[value.id]}[r * PAD({value.size})], 0, sizeof(real) * {value.size});")
            return [*first, *loop.inside([*over, *outside], ["#pragma omp simd"], f"{target} += {entry};"), "}"]
        start, each = ("0", "q += {x};") if value.op is Op.SUM else ("-INFINITY", "q = {x} > q || {x} != {x} ? {x} : q;")
        simd = ["#pragma omp simd reduction(+:q)"] if value.op is Op.SUM else []
        body = ["{", f"  real q = {start};", *loop.inside(list(over), simd, each.format(x=entry)), f"  {target} = q;", "}"]
        return [*first, *_nest(x.shape, outside), *body, "}"]

    def _dot(self, value: Value) -> list[str]:
        parts = []
        for v, block in value.factors:
            k = self.numbers[block]
            if v.op is Op.LEAF:
                base, width = f"now{v.leaf.index} + {v.leaf.start}", self.program.widths[v.leaf.kind, v.leaf.index]
            else:
                base, width = f"s{self.schedule.slots[v.id]}", v.size
            parts.append(f"{{{base}, PAD({width}), m{k}, {v.size}}}")
        slot = self.schedule.slots[value.id]
        columns = ", ".join(self.bounds(f"PAD({value.size})"))
        arguments = f"parts, {len(parts)}, m, {value.size}, s{slot}, {columns}"
        return [f"{{ const Part parts[] = {{{', '.join(parts)}}}; product({arguments}); }}"]


class _LoopWriter:
    """Writes one loop over rows and features: bases of rows, then loads, then the body."""

    def __init__(self, step: StepWriter, shape: Shape):
        self.step, self.shape = step, shape
        self.index = indices(shape)
        self.flat = flatten_index(shape, self.index)
        self.bases: dict[str, str] = {}
        self.loaded: dict[str, str] = {}
        self.local: dict[int, str] = {}
        self.body: list[str] = []

    def read(self, value: Value) -> str:
        """An expression for a value at the index of the loop."""
        if value.op is Op.CONST:
            return number_in_c(value.number)
        if value.op is Op.ZERO:
            return "(real)0"
        if value.id in self.local:
            return self.local[value.id]
        base, index = self._stored(*entry_of(value, self.index[len(self.index) - len(value.shape) :]))
        if index is None:
            return base
        entry = f"{self._name(base)}[{index}]"
        if entry not in self.loaded:
            self.loaded[entry] = f"x{len(self.loaded)}"
            self.body.append(f"const real {self.loaded[entry]} = {entry};")
        return self.loaded[entry]

    def write(self, base: str, assignment: str, index: str, value: str) -> None:
        self.body.append(f"{self._name(base)}[{index}] {assignment} {value};")

    def _name(self, base: str) -> str:
        return self.bases.setdefault(base, f"b{len(self.bases)}")

    def _stored(self, value: Value, flat: str) -> tuple[str, str | None]:
        """The base and the index of an entry of a value that is no view; no index for a number."""
        if value.op in NUMBERS:
            return (number_in_c(value.number) if value.op is Op.CONST else "(real)0"), None
        if value.op is Op.LEAF:
            return self.step.base(value.leaf.kind, value.leaf.index), plus(value.leaf.start, flat)
        return f"s{self.step.schedule.slots[value.id]} + r * PAD({value.size})", flat

    def bases_declared(self) -> list[str]:
        return [f"  {_type(base)} {name} = {base};" for base, name in self.bases.items()]

    def written(self) -> list[str]:
        return ["for (int r = 0; r < m; r++) {", *self.of_row(), "}"]

    def of_row(self) -> list[str]:
        """The loop over features, for row r."""
        axes = list(range(len(self.shape)))
        return [*self.bases_declared(), *self.inside(axes, ["#pragma omp simd"], shared=self.step.team)]

    def inside(self, axes: list[int], pragma: list[str], *last: str, shared: bool = False) -> list[str]:
        """The body, and these lines after it, in loops over the axes. The pragma belongs to the innermost loop.

        If it is shared, each member of a team computes a part of the outermost loop.
        """
        nest = _nest(self.shape, axes)
        if shared:
            start, stop = self.step.bounds(self.shape[0] if self.shape else 1, "V" if len(self.shape) == 1 else "1")
            at = "i0" if self.shape else "one"
            nest[0] = f"  for (int {at} = {start}; {at} < {stop}; {at}++)"
        return [*nest[:-1], *pragma, nest[-1] + " {", *(f"    {line}" for line in (*self.body, *last)), "  }"]


def _type(base: str) -> str:
    return "double* restrict" if base.startswith("sum") else "real*"


def _nest(shape: Shape, axes: list[int]) -> list[str]:
    """Loops over these axes, outermost first; without any axis, a loop of one pass."""
    return [f"  for (int i{axis} = 0; i{axis} < {shape[axis]}; i{axis}++)" for axis in axes] or [
        "  for (int one = 0; one < 1; one++)"
    ]


def number_in_c(x: float) -> str:
    """A number as C has it, in the precision of the kernel."""
    if x != x:
        return "(real)NAN"
    if x in (float("inf"), float("-inf")):
        return "(real)INFINITY" if x > 0 else "(-(real)INFINITY)"
    return f"(real){x!r}" if x >= 0 else f"((real){x!r})"
