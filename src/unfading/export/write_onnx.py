"""`unfading.export.onnx`: a model as a file for ONNX runtimes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unfading.errors import check_flag
from unfading.export.model_stages import Exported, exported
from unfading.export.onnx_graph import Constants, Entries, Graph
from unfading.export.onnx_stage import write_scan, write_stateless
from unfading.export.stage import Stage
from unfading.export.write_c import check_finite
from unfading.files.atomic import write_atomically
from unfading.layers.model import Model
from unfading.layers.recurrent import Recurrent
from unfading.tasks.base import EveryStep, MeanOverTime, PooledOverTime
from unfading.tasks.scaling import Scale

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

OPSET, IR = 18, 8  # of 2022; a newer one would add nothing that is used
LARGEST = 2**31 - 2**20  # bytes of constants; a file of ONNX cannot have more than 2 GiB
TAKEN = frozenset(["x", "lengths", "start", "output"])


def onnx(model: Model | Recurrent, path: Path | str, *, scale: Scale | None = None, overwrite: bool = False) -> "ModelProto":
    """Write a model as an ONNX file, in float32, for any number of steps and rows. Needs the package `onnx`.

    Each layer and direction is one `Scan`. The inputs of the file are `x`, and with defaults `lengths` (int64 [B], in 1..T),
    `initial_h` and so on by the names of the cell's state, and `start` where the model depends on the index of the step. The
    outputs are `output` and the final state `h` and so on, in the shapes of the layer. Returns the ONNX model.

    Args:
        model: the model, or a recurrent layer; written as it runs in evaluation.
        path: the file to write.
        scale: mean and spread of the normalisation (x - mean) / spread of samples, which becomes a part of the file.
        overwrite: replace a file that exists.
    """
    path = Path(path)
    check_flag("overwrite", overwrite)
    check_new_file(path, "ONNX", overwrite=overwrite)
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise ValueError(
            "export to ONNX needs the package onnx, which is not installed. Get it with: pip install 'unfading[onnx]'"
        ) from None
    stages = exported(model, scale, stream=False)
    check_finite(stages)
    result = _Writer(model, stages).model()
    path.parent.mkdir(parents=True, exist_ok=True)
    check_new_file(path, "ONNX", overwrite=overwrite)
    write_atomically(path, result.SerializeToString())
    return result


def check_new_file(path: Path, target: str, *, overwrite: bool = False) -> None:
    """Raise ValueError, naming the target, if a file that must not be replaced exists at the path, or a folder."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; the export to {target} writes one file. Name a file.")
    if not overwrite and (path.exists() or path.is_symlink()):
        raise ValueError(f"{path} exists. Name another file, or remove it (in Python: overwrite=True).")


class _Writer:
    """The graph of a whole model, from its input to its output and final state."""

    def __init__(self, model: Model | Recurrent, stages: Exported):
        self.whole = model if isinstance(model, Model) else None
        self.rnn = model if isinstance(model, Recurrent) else model.rnn
        self.stages = stages
        self.layers = [stage for stage in stages.stages if stage.states]
        self.constants = Constants()
        self.defaults: dict[str, Any] = {}  # arrays of the inputs that may be left out
        self.inputs: list[ValueInfoProto] = []
        self.outputs: list[ValueInfoProto] = []
        self.graph = Graph(self.constants, "sequence", "sizes", 2)

    def model(self) -> "ModelProto":
        """The ONNX model."""
        from onnx import helper, numpy_helper

        output, finals = self._layers(self._sequence())
        self._output(output)
        self._final_states(finals)
        arrays = {**self.constants.arrays, **self.defaults}
        size = sum(array.nbytes for array in arrays.values())
        if size > LARGEST:
            raise ValueError(f"the model has {size} bytes of weights, and a file of ONNX holds {LARGEST}; make it smaller.")
        initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
        graph = helper.make_graph(self.graph.nodes, self.stages.name, self.inputs, self.outputs, initializers)
        return helper.make_model(
            graph,
            producer_name="unfading",
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR,
        )

    # -- inputs ---------------------------------------------------------------------------------------------------------------

    def _input(self, name: str, axes: Sequence[str | int], default: Any = None, *, whole_number: bool = False) -> str:
        from onnx import TensorProto, helper

        kind = TensorProto.INT64 if whole_number else TensorProto.FLOAT
        self.inputs.append(helper.make_tensor_value_info(name, kind, axes))
        if default is not None:
            self.defaults[name] = default
        return name

    def _sequence(self) -> str:
        """The input of the first layer, [T, B, I]; and the sizes that all need.

        What is past a row's end reaches no state and no output, so it may be anything.
        """
        g, constants, tokens = self.graph, self.constants, self.stages.tokens
        batch_first = self.rnn.batch_first
        axes: list[str | int] = ["B", "T"] if batch_first else ["T", "B"]
        if tokens is not None:
            x = g.add("Gather", constants.float(tokens), self._input("x", axes, whole_number=True))
        else:
            x = self._input("x", [*axes, self.stages.input_size])
            x = g.add("Transpose", x, perm=[1, 0, 2]) if batch_first else x
        self.steps = g.add("Shape", x, start=0, end=1)
        self.batch = g.add("Shape", x, start=1, end=2)
        g.add("Concat", self.steps, self.batch, axis=0, outputs=[g.sizes])
        # A default beyond every T: all rows have all steps.
        lengths = self._input("lengths", ["B_lengths"], np.array([2**63 - 1]), whole_number=True)
        self.lengths = g.add("Expand", g.add("Min", lengths, self.steps), self.batch)
        zero, one = constants.int(0), constants.int(1)
        self.index = g.add("Range", zero, g.add("Squeeze", self.steps), one)
        column = g.add("Unsqueeze", self.index, constants.int([1]))
        self.inside = g.add("Unsqueeze", g.add("Less", column, self.lengths), constants.int([2]))
        if any(stage.tables for stage in self.stages.stages):
            self.index = g.add("Add", self.index, self._input("start", [], np.array(0), whole_number=True))
        if not self.stages.stages[0].states:
            x = write_stateless(g, self.stages.stages[0], self._inputs(self.stages.stages[0], x))
        return x

    def _inputs(self, stage: Stage, x: str) -> dict[int, Entries]:
        """The inputs of a stage: x, and rows of its tables by the index of the step."""
        g, inputs = self.graph, {0: Entries(x, 2, True)}
        for i, table in stage.tables.items():
            row = g.add("Min", self.index, self.constants.int(len(table) - 1))
            rows = g.add("Gather", self.constants.float(table), row)
            inputs[i] = Entries(g.add("Unsqueeze", rows, self.constants.int([1])), 2)
        return inputs

    def _zero_past(self, x: str) -> str:
        return self.graph.add("Where", self.inside, x, self.constants.float(0.0))

    # -- layers ---------------------------------------------------------------------------------------------------------------

    def _layers(self, x: str) -> tuple[str, list[list[str]]]:
        """The output of the last layer, and the final state of every layer and direction."""
        finals, states = [], self._initial_states()
        for depth in range(self.rnn.num_layers):
            sides = []
            for direction in range(self.rnn.directions):
                i = depth * self.rnn.directions + direction
                side, final = self._direction(self.layers[i], x, states[i], reverse=direction == 1)
                sides.append(side)
                finals.append(final)
            x = sides[0] if len(sides) == 1 else self.graph.add("Concat", *sides, axis=2)
        return x, finals

    def _direction(self, stage: Stage, x: str, states: list[str], *, reverse: bool) -> tuple[str, list[str]]:
        """One layer in one direction. Inputs by the index of the step are read in the order of processing."""
        x = self._reversed(x) if reverse else x
        output, finals = write_scan(self.graph, stage, self._inputs(stage, x), states, self.inside, self.batch)
        return self._zero_past(self._reversed(output) if reverse else output), finals

    def _reversed(self, x: str) -> str:
        """Each row's own steps in reverse order."""
        return self.graph.add("ReverseSequence", x, self.lengths, time_axis=0, batch_axis=1)

    # -- states, in the form of the layer -------------------------------------------------------------------------------------

    def _state_name(self, name: str, i: int) -> str:
        """The name of a part of the state as an output; `i` counts layers and directions."""
        name = f"state_{name}" if name in TAKEN else name
        return name if self.rnn.stacked_state else f"{name}_{self.layers[i].name}"

    def _initial_states(self) -> list[list[str]]:
        """The states before the first step, [B, n], by layer and direction."""
        g, states = self.graph, []
        if self.rnn.stacked_state:
            for part, field in enumerate(self.layers[0].state_names):
                default = np.stack([stage.states[part] for stage in self.layers])[:, None].astype(np.float32)
                name = f"initial_{self._state_name(field, 0)}"
                stacked = self._input(name, [len(self.layers), f"B_{field}", default.shape[2]], default)
                rows = [g.add("Gather", stacked, self.constants.int(i)) for i in range(len(self.layers))]
                states.append(rows)
            states = [list(parts) for parts in zip(*states, strict=True)]
        else:
            for i, stage in enumerate(self.layers):
                names = [f"initial_{self._state_name(field, i)}" for field in stage.state_names]
                defaults = [part[None].astype(np.float32) for part in stage.states]
                given = zip(names, defaults, strict=True)
                states.append([self._input(name, [f"B_{name}", part.shape[1]], part) for name, part in given])
        return [
            [self._rows(part, len(start)) for part, start in zip(each, stage.states, strict=True)]
            for each, stage in zip(states, self.layers, strict=True)
        ]

    def _rows(self, state: str, size: int) -> str:
        """A state with one row for each row of the batch."""
        return self.graph.add("Expand", state, self.graph.add("Concat", self.batch, self.constants.int([size]), axis=0))

    def _final_states(self, finals: list[list[str]]) -> None:
        """Declare the final states as outputs."""
        g, fields = self.graph, self.layers[0].state_names
        if self.rnn.stacked_state:
            for field, parts, start in zip(fields, zip(*finals, strict=True), self.layers[0].states, strict=True):
                rows = [g.add("Unsqueeze", part, self.constants.int([0])) for part in parts]
                self._declare(self._state_name(field, 0), g.add("Concat", *rows, axis=0), [len(rows), "B", len(start)])
            return
        for i, (stage, final) in enumerate(zip(self.layers, finals, strict=True)):
            for field, part, start in zip(stage.state_names, final, stage.states, strict=True):
                self._declare(self._state_name(field, i), part, ["B", len(start)])

    # -- output ---------------------------------------------------------------------------------------------------------------

    def _declare(self, name: str, value: str, axes: Sequence[str | int]) -> None:
        from onnx import TensorProto, helper

        self.graph.add("Identity", value, outputs=[name])
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, axes))

    def _output(self, x: str) -> None:
        """Declare the output: of the head, or of the last layer."""
        if self.whole is None:
            batch_first = self.rnn.batch_first
            x = self.graph.add("Transpose", x, perm=[1, 0, 2]) if batch_first else x
            self._declare("output", x, [*(["B", "T"] if batch_first else ["T", "B"]), self.rnn.output_size])
            return
        head, stage = self.whole.head, self.stages.stages[-1]
        if isinstance(head, EveryStep):
            self._declare("output", write_stateless(self.graph, stage, {0: Entries(x, 2, True)}), ["T", "B", stage.output_size])
            return
        rows = self._mean(x) if isinstance(head, MeanOverTime) else self._last(x)
        if isinstance(head, PooledOverTime):
            rows = self.graph.add("Concat", rows, self._mean(x), self._largest(x), axis=1)
        after = Graph(self.constants, "head", self.batch, 1)
        answer = write_stateless(after, stage, {0: Entries(rows, 1, True)})
        self.graph.nodes += after.nodes
        self._declare("output", answer, ["B", stage.output_size])

    def _mean(self, x: str) -> str:
        """The mean over each row's own steps."""
        from onnx import TensorProto

        g = self.graph
        count = g.add("Cast", g.add("Unsqueeze", self.lengths, self.constants.int([1])), to=TensorProto.FLOAT)
        return g.add("Div", g.add("ReduceSum", x, self.constants.int([0]), keepdims=0), count)

    def _largest(self, x: str) -> str:
        """The maximum over each row's own steps."""
        g, zero = self.graph, self.constants.int(0)
        steps = g.add("Range", zero, g.add("Squeeze", g.add("Shape", x, start=0, end=1)), self.constants.int(1))
        own = g.add("Less", g.add("Unsqueeze", steps, self.constants.int([1])), self.lengths)
        lowest = self.constants.float(-np.inf)
        of_own = g.add("Where", g.add("Unsqueeze", own, self.constants.int([2])), x, lowest)
        return g.add("ReduceMax", of_own, self.constants.int([0]), keepdims=0)

    def _last(self, x: str) -> str:
        """The output at each row's last step."""
        g, one = self.graph, self.constants.int([1])
        rows = g.add("Range", self.constants.int(0), g.add("Squeeze", self.batch), self.constants.int(1))
        places = [g.add("Unsqueeze", place, one) for place in (g.add("Sub", self.lengths, one), rows)]
        return g.add("GatherND", x, g.add("Concat", *places, axis=1))
