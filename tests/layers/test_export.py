"""torch.export: every cell, free sizes, files that are loaded in a new process with this library and without it."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils import _pytree

import unfading
from tests.helpers.exported import CELLS, ROWS, I, built, exported, save
from tests.helpers.paths import ROOT
from tests.helpers.variants import name
from tests.user.quiet import QuietCell


def agree(program, module, **keywords):
    x = torch.randn(9, 4, I)
    got = program.module()(x, **keywords)
    with unfading.use_backend("reference"):
        want = module(x, **keywords)
    assert_close(_pytree.tree_leaves(got), _pytree.tree_leaves(want), rtol=1e-3, atol=1e-5)


def operators(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


sample = pytest.mark.parametrize("cell", [unfading.DeepTransitionCell, unfading.LSTMCell, QuietCell], ids=name)


@sample
@pytest.mark.sample(1)
def test_a_layer_is_exported_with_free_sizes(cell):
    layer = built(cell)
    program = exported(layer)
    assert sum("fused_forward" in target for target in operators(program)) == 1
    assert not any("higher_order" in target for target in operators(program))  # nothing of the planning is in the graph
    agree(program, layer)


@pytest.mark.long
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_every_cell_is_exported_with_free_sizes_lengths_layers_and_directions(cell, strict):
    layer = built(cell)
    agree(exported(layer, strict=strict), layer)
    stack = built(cell, num_layers=2, bidirectional=True, dropout=0.5).eval()
    agree(exported(stack, strict=strict, lengths=True), stack, lengths=torch.tensor([9, 1, 4, 7]))


def test_a_layer_is_exported_by_dynamo_with_lengths():
    layer = built(unfading.SiRNNCell, bidirectional=True)
    agree(exported(layer, strict=True, lengths=True), layer, lengths=torch.tensor([9, 1, 4, 7]))


def test_lengths_beyond_the_input_are_refused_when_an_exported_program_runs():
    program = exported(built(unfading.STARCell), lengths=True).module()
    with pytest.raises(ValueError, match=r"lengths must lie in 1\.\.6"):
        program(torch.ones(6, 2, I), lengths=torch.tensor([7, 1]))


# -- models -------------------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A model that reads the parts of the state by name, and returns the state."""

    def __init__(self):
        super().__init__()
        self.rnn = built(unfading.LSTMCell)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        _, state = self.rnn(x)
        _, state = self.rnn(x, state._replace(c=0.5 * state.c))
        return self.head(state.h[-1]), state


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, about the tensors of a file
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_a_model_reads_its_state_by_name_and_the_file_has_plain_tuples(strict, tmp_path):
    model = Classifier()
    program = exported(model, strict=strict)
    agree(program, model)
    assert program.module()(torch.ones(3, 2, I))[1].h.shape == (1, 2, 5)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    agree(loaded, model)
    assert type(loaded.module()(torch.ones(3, 2, I))[1]) is tuple


def test_a_state_goes_in_and_out_of_an_exported_layer():
    layer, x = built(unfading.LSTMCell), torch.randn(6, 2, I)
    with torch.no_grad():
        state = tuple(layer(x)[1])
    program = torch.export.export(layer, (x, state)).module()
    assert_close(_pytree.tree_leaves(program(x, state)), _pytree.tree_leaves(layer(x, state)))


def test_an_exported_program_can_be_trained():
    layer, x = built(unfading.GRUCell, num_layers=2), torch.randn(9, 4, I)
    program = exported(layer).module()
    program(x)[0].square().sum().backward()
    layer(x)[0].square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in program.named_parameters()}
    assert_close(gradients, {name: parameter.grad for name, parameter in layer.named_parameters()})


class SortingCell(unfading.ElmanCell):
    """h_t = tanh(sort(W x_t + h)): no kernel sorts, so the reference loop runs it."""

    def step(self, inputs, state, weights):
        return type(state)(torch.tanh(torch.sort(inputs.a + state.h).values))


def test_a_cell_that_is_not_compiled_is_exported_with_its_loop_unrolled():
    layer, x = built(SortingCell), torch.randn(4, 2, I)
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: ROWS}})
    assert sum("sort" in target for target in operators(program)) == 4
    assert_close(_pytree.tree_leaves(program.module()(x)), _pytree.tree_leaves(layer(x)))
    with pytest.raises(Exception, match="specialized it to be a constant"):
        exported(layer)


# -- in a new process ---------------------------------------------------------------------------------------------------------


def loaded(folder, imports):
    """What a new process finds: the number of files, whether the library was imported, and whether a user's file was."""
    code = f"""if True:
        import pathlib, sys
        {imports}
        files = list(pathlib.Path({str(folder)!r}).glob("*.pt2"))
        for file in files:
            x, *want = torch.load(file.with_suffix(".pt"))
            got = torch.export.load(file).module()(x)
            assert type(got[1]) is tuple, type(got[1])
            torch.testing.assert_close(torch.utils._pytree.tree_leaves(got), want, rtol=1e-3, atol=1e-5)
        print(len(files), "unfading" in sys.modules, "tests.user.quiet" in sys.modules)
    """
    return process(code)


def process(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_a_file_is_loaded_where_the_library_is_imported_and_the_cell_is_not(tmp_path):
    save(tmp_path, "auto", [QuietCell])
    assert loaded(tmp_path, "import unfading, torch") == "1 True False"


def test_a_file_of_the_reference_loop_is_loaded_without_the_library(tmp_path):
    save(tmp_path, "reference", [QuietCell])
    assert loaded(tmp_path, "import torch") == "1 False False"


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "imports"),
    [
        ("auto", "import torch, unfading"),
        ("auto", "import torch.export.pt2_archive, unfading"),
        ("reference", "import torch"),
    ],
)
def test_files_of_every_cell_are_written_and_read_in_new_processes(tmp_path, backend, imports):
    process(f"""if True:
        import pathlib
        from tests.helpers.exported import CELLS, save
        save(pathlib.Path({str(tmp_path)!r}), {backend!r}, CELLS)""")
    assert loaded(tmp_path, imports) == f"{len(CELLS)} {backend == 'auto'} False"
