"""Every feature of a layer, for cells with one state, with two, with a table of step sizes, and for a user's own cell."""

import copy
import inspect
import os
import pickle
import pydoc
import re
import sys

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close

import unfading
from tests.user.quiet import Quiet, QuietCell
from unfading import catalogue

EXACT = {"rtol": 1e-12, "atol": 1e-12}
KINDS = {
    "STAR": unfading.STAR,
    "NRU": lambda *a, **k: unfading.NRU(*a, memory_size=4, heads=1, **k),
    "IncrementalRNN": lambda *a, **k: unfading.IncrementalRNN(*a, steps=4, inner_steps=2, eta=0.2, **k),
    "Quiet": Quiet,
}
each = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
T, B, I, H = 7, 3, 2, 5


def built(make, *arguments, **keywords):
    layer = make(I, H, *arguments, dtype=torch.float64, **keywords)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return layer


def given(*shape):
    return torch.randn(*(shape or (T, B, I)), dtype=torch.float64)


def same(a, b):
    for one, other in zip(a, b, strict=True):
        assert_close(one, other, **EXACT)


@each
@pytest.mark.sample(2)
def test_a_stack_is_one_layer_after_the_other(make):
    layer, x = built(make, 3), given()
    below = x
    for cell in layer.cells:
        below, _ = unfading.Recurrent(lambda size, cell=cell: cell, cell.input_size)(below)
    assert_close(layer(x)[0], below, **EXACT)


@each
@pytest.mark.sample(2)
def test_second_direction_is_the_first_on_the_mirrored_input(make):
    layer, x = built(make, bidirectional=True), given()
    both, state = layer(x)
    forward, backward = (unfading.Recurrent(lambda size, cell=cell: cell, I) for cell in layer.cells)
    out, end = forward(x)
    back, back_end = backward(x.flip(0))
    assert_close(both, torch.cat([out, back.flip(0)], dim=-1), **EXACT)
    same(state, [torch.cat(parts) for parts in zip(end, back_end, strict=True)])


@each
@pytest.mark.parametrize("form", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
@pytest.mark.sample(3)
def test_padded_rows_agree_with_the_rows_alone(make, form):
    layer, x = built(make, **form), given()
    lengths = torch.tensor([2, 7, 4])
    for b, length in enumerate(lengths.tolist()):
        x[length:, b] = float("nan")
    output, state = layer(x, lengths=lengths)
    states = layer.trajectory(x, lengths=lengths)
    for b, length in enumerate(lengths.tolist()):
        alone, end = layer(x[:length, b])
        assert_close(output[:length, b], alone, **EXACT)
        assert (output[length:, b] == 0).all()
        same([part[:, b] for part in state], end)
        same([part[:length, :, b] for part in states], layer.trajectory(x[:length, b]))
        assert all((part[length:, :, b] == 0).all() for part in states)


@each
@pytest.mark.sample(2)
def test_packed_input_gives_packed_output(make):
    layer, x, lengths = built(make, 2, bidirectional=True), given(), torch.tensor([2, 7, 4])
    packed, state = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    padded, end = layer(x, lengths=lengths)
    assert_close(pad_packed_sequence(packed)[0], padded, **EXACT)
    same(state, end)


@each
@pytest.mark.sample(2)
def test_batch_first_and_unbatched(make):
    layer, x = built(make, 2), given()
    output, state = layer(x)
    first = copy.deepcopy(layer)
    first.batch_first = True
    turned, end = first(x.transpose(0, 1))
    assert_close(turned, output.transpose(0, 1), **EXACT)
    same(end, state)
    alone, end = layer(x[:, 1])
    assert_close(alone, output[:, 1], **EXACT)
    same(end, [part[:, 1] for part in state])


@each
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.sample(4)
def test_state_has_torch_shapes_and_named_parts(make, bidirectional):
    layer = built(make, 2, bidirectional=bidirectional)
    _, state = layer(given())
    assert state._fields[0] == "h"
    for part, own in zip(state, layer.cells[0].initial_state(B), strict=True):
        assert part.shape == (2 * layer.directions, *own.shape)


@each
@pytest.mark.sample(2)
def test_state_and_start_continue_a_sequence(make):
    layer, x = built(make, 2), given()
    whole, end = layer(x)
    first, state = layer(x[:3])
    second, last = layer(x[3:], state, start=3)
    assert_close(torch.cat([first, second]), whole, **EXACT)
    same(last, end)
    plain, _ = layer(x[3:], tuple(state), start=3)
    assert_close(plain, second, **EXACT)


@each
@pytest.mark.sample(2)
def test_trajectory_ends_in_the_state_and_contains_the_output(make):
    layer, x = built(make, 2), given()
    output, end = layer(x)
    states = layer.trajectory(x)
    same([part[-1] for part in states], end)
    top = type(states)(*(part[:, -1] for part in states))
    assert_close(layer.cells[-1].output(top), output, **EXACT)


@each
def test_detach_cuts_the_graph(make):
    layer, x = built(make), given().requires_grad_()
    _, state = layer(x)
    cut = unfading.detach(state)
    assert type(cut) is type(state)
    assert all(not part.requires_grad for part in cut)
    layer(given(), cut)[0].sum().backward()
    assert x.grad is None


@each
@pytest.mark.sample(2)
def test_learned_initial_state(make):
    layer = built(make, 2, bidirectional=True, learn_initial_state=True)
    output, _ = layer(given())
    output.square().sum().backward()
    assert len(layer.learned_state) == 4 * len(layer.cells[0].initial_state(1))
    assert all(part.grad.abs().sum() > 0 for part in layer.learned_state)
    zero, x = layer.cells[0].initial_state(B), given()
    stacked = type(zero)(*(torch.stack([part] * 4) for part in zero))
    assert not torch.allclose(layer(x)[0], layer(x, stacked)[0])


@each
@pytest.mark.sample(2)
def test_dropout_acts_between_layers_in_training_only(make):
    layer, x = built(make, 2, dropout=0.5), given()
    assert not torch.equal(layer(x)[0], layer(x)[0])
    plain = built(make, 2)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x)[0], plain(x)[0])


def test_dropout_with_one_layer_warns():
    with pytest.warns(UserWarning, match="num_layers=1"):
        unfading.STAR(I, H, dropout=0.5)


@each
@pytest.mark.sample(1)
def test_copies_pickles_and_state_dicts_after_a_call(make):
    layer, x = built(make, 2, bidirectional=True, learn_initial_state=True), given()
    want, _ = layer(x)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(layer.state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), twin):
        assert torch.equal(other(x)[0], want)
    assert layer.float()(x.float())[0].dtype == torch.float32


@each
def test_parameters_are_created_in_their_dtype(make):
    assert all(p.dtype == torch.float64 for p in make(I, H, dtype=torch.float64).parameters())
    assert all(p.dtype == torch.bfloat16 for p in make(I, H, dtype=torch.bfloat16).parameters())
    assert torch.get_default_dtype() == torch.float32


def test_orthogonal_start_is_orthogonal_in_float64():
    W = unfading.Elman(2, 9, dtype=torch.float64).cells[0].W_h
    assert_close(W @ W.T, torch.eye(9, dtype=torch.float64), **EXACT)


def test_use_backend_applies_to_every_layer_inside_its_block(monkeypatch):
    backend, scan = sys.modules["unfading.backends.choose"], sys.modules["unfading.reference"]

    ran = []
    monkeypatch.setitem(
        backend.IMPLEMENTATIONS, "noted", lambda cell, *a, **k: (ran.append(cell), scan.reference(cell, *a, **k))[1]
    )
    layer = built(unfading.STAR, 2)
    layer(given())
    assert not ran
    named = built(unfading.STAR, backend="noted")
    named(given())
    assert ran == list(named.cells)
    ran.clear()
    with unfading.use_backend("noted"):
        layer(given())
    assert ran == list(layer.cells)
    with pytest.raises(ValueError, match="features"), unfading.use_backend("noted"):
        layer(given(T, B, I + 1))
    layer(given())
    assert len(ran) == 2


@pytest.fixture
def fresh_dynamo():
    """Dynamo counts recompilations per line of code, over all tests; each test starts at none."""
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_layer_follows_the_backend_block(monkeypatch):
    backend, scan = sys.modules["unfading.backends.choose"], sys.modules["unfading.reference"]

    def negative(cell, *arguments, **keywords):
        states, final = scan.reference(cell, *arguments, **keywords)
        return type(final)(*(-part for part in states)), final

    monkeypatch.setitem(backend.IMPLEMENTATIONS, "negative", negative)
    layer, x = built(unfading.STAR), given()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    want = compiled(x)[0]
    with unfading.use_backend("negative"):
        assert_close(compiled(x)[0], -want, **EXACT)
    assert_close(compiled(x)[0], want, **EXACT)


def test_cells_that_differ_have_a_tuple_of_states():
    sizes = iter([4, 4, 6, 6])
    net = unfading.Recurrent(lambda size: unfading.STARCell(size, next(sizes)), I, 2, bidirectional=True, dtype=torch.float64)
    x = given()
    output, state = net(x)
    assert output.shape == (T, B, 12)
    assert [tuple(s.h.shape) for s in state] == [(B, 4), (B, 4), (B, 6), (B, 6)]
    again, _ = net(x, state)
    assert not torch.equal(again, output)
    alone, end = net(x[:, 1])
    assert_close(alone, output[:, 1], **EXACT)
    assert [tuple(s.h.shape) for s in end] == [(4,), (4,), (6,), (6,)]
    assert [tuple(s.h.shape) for s in net.trajectory(x)] == [(T, B, 4), (T, B, 4), (T, B, 6), (T, B, 6)]
    with pytest.raises(ValueError, match="a tuple of 4 states"):
        net(x, state[:2])


def test_a_mixed_stack_of_kinds():
    kinds = iter([unfading.LSTMCell, unfading.NRUCell])
    net = unfading.Recurrent(lambda size: next(kinds)(size, H), I, 2)
    _, state = net(torch.randn(T, B, I))
    assert [s._fields for s in state] == [("h", "c"), ("h", "m")]


def test_layer_class_has_the_signature_and_docs_of_the_cell():
    parameters = inspect.signature(unfading.STAR).parameters
    torch_order = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"]
    assert list(parameters)[:7] == torch_order
    assert parameters["max_lag"].default is None
    assert "max_lag: longest dependency" in unfading.STAR.__doc__
    assert unfading.layer(QuietCell) is Quiet
    assert (Quiet.__module__, unfading.STAR.__module__) == ("tests.user.quiet", "unfading")


@pytest.mark.parametrize("cell", catalogue.cells(), ids=lambda cell: cell.__name__)
def test_help_of_a_layer_shows_its_equation_and_every_option(cell):
    layer = unfading.layer(cell)
    text = pydoc.plain(pydoc.render_doc(layer))
    equation = re.findall(r"^ {4}\S.*$", sys.modules[cell.__module__].__doc__, re.MULTILINE)
    assert equation
    for line in equation:
        assert line in text
    for option in inspect.signature(layer).parameters:
        assert re.search(rf"^ \|      {option}: ", text, re.MULTILINE), option
    assert layer.__doc__.startswith(inspect.getdoc(cell).split("\n")[0])


def test_repr_shows_sizes_and_options():
    layer = unfading.STAR(I, H, 2, bidirectional=True, zoneout=0.1, max_lag=9)
    assert "STAR(\n  2, 5, num_layers=2, bidirectional=True, zoneout=0.1, max_lag=9" in repr(layer)


@pytest.mark.parametrize("gradient", [True, False])
def test_a_warm_call_runs_through_at_most_10_modules(gradient):
    layer, x, modules = unfading.STAR(I, H), torch.randn(T, B, I), set()
    package = os.path.dirname(unfading.__file__)

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            modules.add(os.path.relpath(frame.f_code.co_filename, package))

    with torch.set_grad_enabled(gradient):
        layer(x)
        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            layer(x)
        finally:
            sys.setprofile(before)
    assert "layers/recurrent.py" in modules
    assert len(modules) <= 10, sorted(modules)


def test_released_forms():
    assert unfading.STAR.released(I, H).cells[0].shift == 1.0
    cell = unfading.NRU.released(I, H, 2, memory_size=16).cells[1]
    assert (cell.heads_from_input, cell.mean_over_heads, cell.memory_size) == (None, True, 16)
    with pytest.raises(ValueError, match="LSTM offers no released form"):
        unfading.LSTM.released(I, H)


def test_a_cell_may_leave_out_bias_and_the_star_before_its_options():
    class PlainCell(QuietCell):
        def __init__(self, input_size, hidden_size, factor=1.0):
            super().__init__(input_size, hidden_size)
            self.factor = factor

    layer = unfading.layer(PlainCell)
    rnn = layer(I, H, 2, factor=0.5)
    assert [cell.factor for cell in rnn.cells] == [0.5, 0.5]
    assert rnn(torch.randn(T, B, I))[0].shape == (T, B, rnn.cells[1].output_size)
    with pytest.raises(ValueError, match="PlainCell has no argument bias, so bias=False cannot be passed to it"):
        layer(I, H, bias=False)
