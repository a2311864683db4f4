"""A stage of an exported model as nodes of ONNX: one `Scan` over time, and before it what does not depend on the state."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from unfading.export.onnx_graph import Entries, Graph, cut
from unfading.export.stage import Stage
from unfading.fuse.ir.program import NUMBERS, Op, TensorKind, Value


class Scanned(NamedTuple):
    """The results of a loop over time."""

    output: str  # [T, B, n]
    finals: list[str]  # of each state, [B, n]


class _Writer:
    """The values of a stage's program in a graph."""

    def __init__(self, graph: Graph, stage: Stage, inputs: Mapping[int, Entries], states: Sequence[Entries] = ()):
        self.graph, self.stage = graph, stage
        self.sources = {TensorKind.INPUT: inputs, TensorKind.STATE: dict(enumerate(states))}
        self.results: dict[int, Entries] = {}

    def write(self, value: Value) -> None:
        """Write a value, after its arguments."""
        if value.op is Op.LEAF:
            self.results[value.id] = self._leaf(value)
        elif value.op in NUMBERS:
            number = value.number if value.op is Op.CONST else 0.0
            self.results[value.id] = Entries(self.graph.constants.float(number))
        else:
            args = [self.results[arg.id] for arg in value.args]
            self.results[value.id] = self.graph.value(value, args, self.stage.weights)

    def _leaf(self, value: Value) -> Entries:
        kind, index, start, stop = value.leaf
        if kind is TensorKind.WEIGHT:
            return Entries(self.graph.constants.float(self.stage.weights[index].reshape(-1)[start:stop]))
        source = self.sources[kind][index]
        if (start, stop) == (0, self.stage.program.widths[kind, index]):
            return source
        return source._replace(name=cut(self.graph, source.name, start, stop, -1))

    def stored(self, index: int) -> str:
        """The name of a stored tensor, with all axes in front in full."""
        stores = sorted((store for store in self.stage.program.stores if store.index == index), key=lambda store: store.start)
        pieces = []
        for store in stores:
            piece = self.graph.full(self.results[store.value.id], store.value.shape)
            if len(store.value.shape) != 1:
                flat = self.graph.constants.int([0] * self.graph.lead + [store.value.size])
                piece = self.graph.add("Reshape", piece, flat)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else self.graph.add("Concat", *pieces, axis=-1)


def write_stateless(graph: Graph, stage: Stage, inputs: Mapping[int, Entries]) -> str:
    """Write a stage without a state; return the name of its output."""
    writer = _Writer(graph, stage, inputs)
    for value in stage.program.values():
        writer.write(value)
    return writer.stored(stage.output)


def write_scan(
    graph: Graph, stage: Stage, inputs: Mapping[int, Entries], states: Sequence[str], inside: str, batch: str
) -> Scanned:
    """Write a layer in one direction.

    Args:
        graph: the graph around the loop.
        stage: the layer.
        inputs: of the program, [T, B, n] or [T, 1, n].
        states: before the first step, [B, n].
        inside: whether a row has a step, bool [T, B, 1]; its state stays the same where it has not.
        batch: the number of rows, int64 [1].
    """
    from onnx import TensorProto, helper

    before = _Writer(graph, stage, inputs)
    body = Graph(graph.constants, f"{stage.name}/step", batch, 1)
    olds = [f"{stage.name}/step/{name}" for name in stage.state_names]
    loop = _Writer(body, stage, {}, [Entries(old, 1, True) for old in olds])
    declared = [
        helper.make_tensor_value_info(old, TensorProto.FLOAT, ["B", len(part)])
        for old, part in zip(olds, stage.states, strict=True)
    ]
    sequences = [inside]
    declared.append(helper.make_tensor_value_info(f"{stage.name}/step/inside", TensorProto.BOOL, ["B", 1]))
    order = stage.program.values()
    sequential = _sequential(order)
    read = {arg.id for value in order if value.id in sequential for arg in value.args}
    read |= {store.value.id for store in stage.program.stores}
    for value in order:
        if value.id in sequential:
            loop.write(value)
            continue
        before.write(value)
        entries = before.results[value.id]
        if entries.lead and value.id in read:
            name = f"{stage.name}/step/input{len(sequences)}"
            rows = "B" if entries.full else 1
            declared.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, *value.shape]))
            sequences.append(entries.name)
            entries = Entries(name, 1, entries.full)
        loop.results[value.id] = entries
    news = [loop.stored(i) for i in range(len(olds))]
    output = news[0] if stage.output == 0 else loop.stored(stage.output)
    mask = f"{stage.name}/step/inside"
    results = [body.add("Where", mask, new, old) for new, old in zip(news, olds, strict=True)]
    results.append(body.add("Identity", output))
    widths = [*map(len, stage.states), stage.output_size]
    answers = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", n]) for name, n in zip(results, widths, strict=True)
    ]
    step = helper.make_graph(body.nodes, f"{stage.name}/step", declared, answers)
    names = [*(f"{stage.name}/final_{name}" for name in stage.state_names), f"{stage.name}/output"]
    graph.add("Scan", *states, *sequences, outputs=names, body=step, num_scan_inputs=len(sequences))
    return Scanned(names[-1], names[:-1])


def _sequential(order: Sequence[Value]) -> set[int]:
    """The values that depend on the state."""
    dependent: set[int] = set()
    for value in order:
        is_state = value.op is Op.LEAF and value.leaf.kind is TensorKind.STATE
        if is_state or any(arg.id in dependent for arg in value.args):
            dependent.add(value.id)
    return dependent
