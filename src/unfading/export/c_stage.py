"""A stage as a C function: loops over the entries of its values, in the order of `fuse/c/schedule.py`.

The arithmetic, in float32 or in integers, is a parameter: it gives the type of an entry, the expression of an operation and
the lines of a matrix product.
"""

from typing import NamedTuple, Protocol

from unfading.export.stage import Stage
from unfading.fuse.c.indexing import entry_of, flatten_index, indices, plus
from unfading.fuse.c.schedule import StepSchedule, schedule
from unfading.fuse.ir.program import NUMBERS, REDUCTIONS, Op, Shape, TensorKind, Value, pieces_of


class CTable(NamedTuple):
    """A table by the index of the step as an array of C."""

    array: str
    entry: str  # the type of an entry
    read: str = "{}"  # the expression of an entry


class Arithmetic(Protocol):
    """How numbers are stored and computed in C."""

    entry: str  # the type of an entry

    def buffers(self, stage: Stage) -> list[str]:
        """Declarations of further buffers of a stage."""

    def number(self, value: Value) -> str:
        """A constant."""

    def vector(self, stage: Stage, index: int) -> str:
        """The name of the array of a weight that is read entry by entry."""

    def table(self, stage: Stage, index: int) -> CTable:
        """The table that is input `index`."""

    def expression(self, value: Value, args: list[str], place: str) -> str:
        """An elementwise operation on the entries of its arguments; `place` is that of its own entry."""

    def parameters(self) -> list[str]:
        """Further parameters of the function of a stage, behind the states."""

    def converted(self, value: Value, text: str, target: Value) -> str:
        """An entry of a value as an entry of another that holds it."""

    def stored(self, stage: Stage, value: Value, text: str, index: int) -> str:
        """An entry of a value as an entry of tensor `index` of the state after the step."""

    def product(self, stage: Stage, value: Value, factors: list[str], target: str) -> list[str]:
        """The lines of a dot, from the buffers of its factors to a buffer."""

    def reduction(self, value: Value) -> tuple[str, str, str, str]:
        """Type and start of the accumulator of a reduction, the line for an entry {x}, and the entry that is stored."""


class StageWriter:
    """The C function of one stage: `stage(input0, tables ..., states ..., output)`."""

    def __init__(self, stage: Stage, arithmetic: Arithmetic):
        self.stage, self.arithmetic = stage, arithmetic
        self.plan: StepSchedule = schedule(stage.program)
        self.tables = {i: arithmetic.table(stage, i) for i in sorted(stage.tables)}
        self.has_output = stage.output == len(stage.states)
        lines: list[str] = []
        for level in self.plan.levels:
            for shape, values in level.loops:
                lines += self._loop(shape, values)
            for value in level.rest:
                lines += self._other(value)
        self.body = lines

    @property
    def scratch(self) -> int:
        """The entries of all buffers of the function."""
        return sum(self.plan.sizes) + sum(len(part) for part in self.stage.states)

    def source(self) -> list[str]:
        """The function."""
        stage, entry = self.stage, self.arithmetic.entry
        buffers = [f"{entry} s{i}[{size}];" for i, size in enumerate(self.plan.sizes)]
        buffers += [f"{entry} next{i}[{len(part)}];" for i, part in enumerate(stage.states)]
        buffers += self.arithmetic.buffers(stage)
        copies = [f"memcpy(state{i}, next{i}, sizeof next{i});" for i in range(len(stage.states))]
        lines = [f"  {line}" for line in (*buffers, *self.body, *copies)]
        unused = [] if any("input0" in line for line in self.body) else ["  (void)input0;"]
        return [f"static void {stage.name}({', '.join(self.parameters())})", "{", *unused, *lines, "}"]

    def parameters(self) -> list[str]:
        entry = self.arithmetic.entry
        read = [f"const {entry} *input0", *(f"const {table.entry} *input{i}" for i, table in self.tables.items())]
        states = [f"{entry} *state{i}" for i in range(len(self.stage.states))]
        return [*read, *states, *self.arithmetic.parameters(), *([f"{entry} *output"] if self.has_output else [])]

    # -- one operation ----------------------------------------------------------------------------------------------------

    def _loop(self, shape: Shape, values: list[Value]) -> list[str]:
        index = indices(shape)
        flat = flatten_index(shape, index)
        local: dict[int, str] = {}
        body = []
        for value in values:
            args = [local.get(arg.id) or self._entry(arg, index) for arg in value.args]
            expression = self.arithmetic.expression(value, args, flat)
            if expression not in local.values():  # a copy of a local value needs no variable
                body.append(f"const {self.arithmetic.entry} v{value.id} = {expression};")
                expression = f"v{value.id}"
            local[value.id] = expression
            if value.id in self.plan.slots:
                body.append(f"s{self.plan.slots[value.id]}[{flat}] = {expression};")
            for kind, tensor, start in self.plan.stores.get(value.id, ()):
                assert kind is TensorKind.NEXT
                name = "output" if tensor == len(self.stage.states) else f"next{tensor}"
                entry = self.arithmetic.stored(self.stage, value, expression, tensor)
                body.append(f"{name}[{plus(start, flat)}] = {entry};")
        return _nested(shape, range(len(shape)), body)

    def _entry(self, value: Value, index: list[str]) -> str:
        """An entry of a value, which lies in a buffer."""
        if value.op in NUMBERS:
            return self.arithmetic.number(value)
        source, flat = entry_of(value, index[len(index) - len(value.shape) :])
        if source.op in NUMBERS:
            return self.arithmetic.number(source)
        text = f"{self._buffer(source)}[{self._at(source, flat)}]"
        is_table = source.op is Op.LEAF and source.leaf.kind is TensorKind.INPUT and source.leaf.index in self.tables
        return self.tables[source.leaf.index].read.format(text) if is_table else text

    def _buffer(self, value: Value) -> str:
        if value.op is not Op.LEAF:
            return f"s{self.plan.slots[value.id]}"
        kind, index = value.leaf.kind, value.leaf.index
        return self.arithmetic.vector(self.stage, index) if kind is TensorKind.WEIGHT else f"{kind}{index}"

    def _at(self, value: Value, flat: str) -> str:
        return plus(value.leaf.start, flat) if value.op is Op.LEAF else flat

    def _other(self, value: Value) -> list[str]:
        target = f"s{self.plan.slots[value.id]}"
        if value.op is Op.DOT:
            factors = []
            for arg in value.args:
                offset = self._at(arg, "0")
                factors.append(self._buffer(arg) if offset == "0" else f"{self._buffer(arg)} + {offset}")
            return self.arithmetic.product(self.stage, value, factors, target)
        if value.op in REDUCTIONS:
            return self._reduction(value, target)
        lines = []
        for start, _, part in pieces_of(value.args, value.axis):
            index = indices(part.shape)
            entry = self.arithmetic.converted(part, self._entry(part, index), value)
            index[value.axis] = plus(start, index[value.axis])
            lines += _nested(part.shape, range(len(part.shape)), [f"{target}[{flatten_index(value.shape, index)}] = {entry};"])
        return lines

    def _reduction(self, value: Value, target: str) -> list[str]:
        x, over = value.args[0], value.axes
        index = indices(x.shape)
        place = flatten_index(value.shape, ["0" if axis in over else at for axis, at in enumerate(index)])
        kind, start, each, result = self.arithmetic.reduction(value)
        each = each.format(x=self._entry(x, index))
        inner = [f"{kind} q = {start};", *_nested(x.shape, over, [each]), f"{target}[{place}] = {result};"]
        return _nested(x.shape, [axis for axis in range(len(x.shape)) if axis not in over], inner)


def _nested(shape: Shape, axes: "range | list[int] | tuple[int, ...]", body: list[str]) -> list[str]:
    """The body in loops over these axes, outermost first; in a block of its own without any."""
    lines = ["{", *(f"  {line}" for line in body), "}"]
    for axis in reversed(list(axes)):
        if lines[0] == "{":
            lines[0] = f"for (int i{axis} = 0; i{axis} < {shape[axis]}; i{axis}++) {{"
        else:
            lines = [f"for (int i{axis} = 0; i{axis} < {shape[axis]}; i{axis}++)", *(f"  {line}" for line in lines)]
    return lines
