"""torch.compile gives the results of the layer in every mode, in one graph per mode."""

from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import unfading
from tests.helpers.variants import few_iterations, hidden_size, name
from tests.user.quiet import QuietCell
from unfading import catalogue

EXACT = {"rtol": 1e-11, "atol": 1e-11}
I, B = 3, 2


class Inputs(NamedTuple):
    a: torch.Tensor


class State(NamedTuple):
    h: torch.Tensor


class SortingCell(unfading.Cell):
    """h_t = tanh(sort(W x_t + h)): no kernel sorts, so the reference loop runs it."""

    def __init__(self, input_size, hidden_size, **options):
        super().__init__(input_size, hidden_size)
        self.W = nn.Linear(input_size, hidden_size)

    def project(self, x, start=0):
        return Inputs(self.W(x))

    def weights(self):
        return ()

    def initial_state(self, batch):
        return State(self.W.weight.new_zeros(batch, self.output_size))

    def step(self, inputs, state, weights):
        return State(torch.tanh(torch.sort(inputs.a + state.h).values))


CELLS = [*catalogue.cells(), QuietCell, SortingCell]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def fresh_dynamo():
    """Dynamo counts recompilations per line of code, over all tests; each test starts at none."""
    torch._dynamo.reset()


def built(cell, **keywords):
    layer = unfading.layer(cell)(I, hidden_size(cell), dtype=torch.float64, **few_iterations(cell), **keywords)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return layer


def agree(compiled, layer, x, **keywords):
    got = compiled(x, **keywords)
    with unfading.use_backend("reference"):
        want = layer(x, **keywords)
    assert type(got[1]) is type(want[1])
    assert_close(got[0], want[0], **EXACT)
    assert_close(tuple(got[1]), tuple(want[1]), **EXACT)


def in_every_mode(cell, backend, **keywords):
    """Agreement with and without gradients, in inference mode and with frozen weights; once more without a compilation."""
    layer, x = built(cell), torch.randn(3, B, I, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for again in (False, True):
        with torch._dynamo.config.patch(error_on_recompile=again):
            for mode in (nullcontext, torch.no_grad, torch.inference_mode):
                with mode():
                    agree(compiled, layer, x, **keywords)
            layer.requires_grad_(False)
            agree(compiled, layer, x, **keywords)
            layer.requires_grad_(True)


@pytest.mark.parametrize("cell", [unfading.IncrementalRNNCell, QuietCell, SortingCell], ids=name)
@pytest.mark.sample(1)
def test_compiled_layers_agree_in_every_mode_and_compile_once_for_each(cell):
    in_every_mode(cell, "eager")


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS, ids=name)
@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 1])], ids=["whole", "lengths"])
def test_so_do_all_cells_with_lengths_and_without(cell, lengths):
    in_every_mode(cell, "aot_eager", lengths=lengths)


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_so_do_stacks_in_both_directions_with_dropout_in_evaluation(cell):
    layer = built(cell, num_layers=2, bidirectional=True, dropout=0.5, batch_first=True).eval()
    x, lengths = torch.randn(B, 4, I, dtype=torch.float64), torch.tensor([2, 4])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for mode in (nullcontext, torch.no_grad, torch.inference_mode):
        with mode():
            agree(compiled, layer, x)
            agree(compiled, layer, x, lengths=lengths)


def test_training_and_evaluation_compile_one_graph_each():
    layer, x, graphs = built(unfading.STARCell, zoneout=0.3), torch.randn(4, B, I, dtype=torch.float64), []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=counting)
    for _ in range(3):
        layer.train()
        compiled(x)[0].sum().backward()
        layer.eval()
        with torch.no_grad():
            agree(compiled, layer, x)
    assert len(graphs) == 2


def test_gradients_with_some_weights_frozen():
    layer, x = built(unfading.GRUCell, num_layers=2), torch.randn(4, B, I, dtype=torch.float64)
    layer.cells[0].requires_grad_(False)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    gradients = []
    for run in (layer, compiled):
        layer.zero_grad()
        run(x)[0].square().sum().backward()
        assert all(parameter.grad is None for parameter in layer.cells[0].parameters())
        gradients.append([parameter.grad for parameter in layer.cells[1].parameters()])
    assert_close(*gradients, **EXACT)


class IdleCell(unfading.STARCell):
    """With a weight that the step does not read."""

    def __init__(self, input_size, hidden_size, **options):
        super().__init__(input_size, hidden_size, **options)
        self.idle = nn.Parameter(torch.eye(hidden_size))

    def weights(self):
        return (super().weights(), self.idle)

    def step(self, inputs, state, weights):
        return super().step(inputs, state, weights[0])


def test_what_a_step_does_not_read_has_no_gradient():
    layer, x = built(IdleCell), torch.randn(4, B, I, dtype=torch.float64)
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x)[0].sum().backward()
    assert [key for key, parameter in layer.named_parameters() if parameter.grad is None] == ["cells.0.idle"]
    program = torch.export.export(layer, (x,)).module()
    program(x)[0].sum().backward()
    assert [key for key, parameter in program.named_parameters() if parameter.grad is None] == ["cells.0.idle"]


def test_without_a_gradient_nothing_is_saved_for_one():
    layer, x, graphs = built(unfading.LSTMCell), torch.randn(4, B, I, dtype=torch.float64), []

    def recording(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer.requires_grad_(False), fullgraph=True, backend=recording)
    compiled(x)
    (loop,) = [node for node in graphs[0].graph.nodes if "fused_forward" in str(node.target)]
    assert loop.args[6] is False


@pytest.mark.parametrize("transform", ["vmap", *(pytest.param(name, marks=pytest.mark.long) for name in ("grad", "jvp"))])
def test_transforms_inside_a_compiled_function(transform):
    layer, x = built(unfading.STARCell), torch.randn(4, B, I, dtype=torch.float64)
    layer(x)

    def output(x):
        return layer(x)[0]

    functions = {
        "vmap": lambda x: torch.func.vmap(output, in_dims=1)(x.unsqueeze(2)),
        "grad": torch.func.grad(lambda x: output(x).square().sum()),
        "jvp": lambda x: torch.func.jvp(output, (x,), (torch.ones_like(x),)),
    }
    function = functions[transform]
    assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x), **EXACT)


@pytest.mark.long
def test_inductor_in_every_mode():
    layer, x = built(unfading.STARCell), torch.randn(4, B, I, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True)
    for mode in (nullcontext, torch.no_grad, torch.inference_mode):
        with mode():
            agree(compiled, layer, x)
    compiled(x)[0].square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
