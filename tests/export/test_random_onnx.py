"""Random programs over the whole language of the compiler: in a Scan of ONNX they give the interpreter's result."""

from functools import cache

import numpy as np
import pytest
import torch

from tests.helpers.against_autograd import Setting, some_numbers
from tests.helpers.random_steps import some
from unfading.export.fold import folded
from unfading.export.onnx_graph import Constants, Entries, Graph
from unfading.export.onnx_stage import write_scan
from unfading.export.stage import Stage
from unfading.fuse.ir.interpret import next_states
from unfading.fuse.trace.recorder import trace

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

ROWS = 3
steps = cache(some)


def scanned(stage, tables):
    """A model of one step of a stage, from x and the states before it to the states after it."""
    constants = Constants()
    sizes, batch, inside = (
        constants.name(array) for array in (np.array([1, ROWS]), np.array([ROWS]), np.ones((1, ROWS, 1), bool))
    )
    graph = Graph(constants, "sequence", sizes, 2)
    inputs = {0: Entries("x", 2, True)}
    inputs |= {i: Entries(constants.float(table[None]), 2) for i, table in tables.items() if i in stage.tables}
    olds = [f"old{i}" for i in range(len(stage.states))]
    finals = write_scan(graph, stage, inputs, olds, inside, batch).finals
    given = [
        ("x", [1, ROWS, stage.input_size]),
        *((old, [ROWS, len(part)]) for old, part in zip(olds, stage.states, strict=True)),
    ]
    declared = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in given]
    answers = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [ROWS, len(part)])
        for name, part in zip(finals, stage.states, strict=True)
    ]
    arrays = [onnx.numpy_helper.from_array(array, name) for name, array in constants.arrays.items()]
    whole = onnx.helper.make_graph(graph.nodes, "random", declared, answers, arrays)
    model = onnx.helper.make_model(whole, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])


def check(step):
    signature = step.signature(torch.float32)
    program = trace(step.function(), signature)
    numbers = some_numbers(signature, Setting(1, ROWS))
    weights = tuple(weight.double().numpy() for weight in numbers.weights)
    states = tuple(part[0].double().numpy() for part in numbers.states)
    # Inputs behind the first are tables: of one row, which becomes a constant, or of two equal rows.
    rows = {i: x[0, :1].double().numpy() for i, x in enumerate(numbers.inputs) if i}
    names = tuple(f"h{i}" for i in range(len(states)))
    tables = {i: np.repeat(row, 1 + i % 2, axis=0) for i, row in rows.items()}
    session = scanned(folded(Stage("layer0", program, weights, states, names, tables)), rows)
    x = numbers.inputs[0].expand(1, ROWS, -1)
    given = {"x": x, **{f"old{i}": part for i, part in enumerate(numbers.states)}}
    got = session.run(None, {name: value.detach().numpy() for name, value in given.items()})
    inputs = [x[0], *(torch.from_numpy(row).expand(ROWS, -1) for row in rows.values())]
    doubles = [[t.detach().double() for t in each] for each in (inputs, numbers.states, numbers.weights)]
    for part, want in zip(got, next_states(program, *doubles), strict=True):
        assert part.shape == want.shape
        assert np.abs(part - want.numpy()).max() < 1e-4 * max(1, want.abs().max()), step


@pytest.mark.parametrize("number", range(8))
@pytest.mark.sample(2)
def test_a_random_program(number):
    check(steps(8, 8)[number])


@pytest.mark.long
@pytest.mark.parametrize("number", range(40))
def test_a_long_random_program(number):
    check(steps(40, 24)[number])
