"""checkpoint_every gives the same results and gradients with less memory; truncated BPTT carries the state, not the graph."""

import gc
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import unfading
from tests.helpers import laws
from tests.helpers.variants import few_iterations, hidden_size, name, sampled
from tests.user.quiet import QuietCell
from unfading import catalogue

EXACT = {"rtol": 1e-12, "atol": 1e-12}
TWO_WAYS, LENGTHS = {"bidirectional": True, "num_layers": 2}, torch.tensor([7, 2, 5])


def everything(layer, x, **keywords):
    """Output, final state, and all gradients, through output and final state."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    output, state = layer(x, **keywords)
    generator = torch.Generator().manual_seed(5)
    weighted = sum((p * torch.randn(p.shape, generator=generator, dtype=p.dtype)).sum() for p in (output, *state))
    weighted.backward()
    return [output, *state, x.grad, *(p.grad for p in layer.parameters())]


CELLS = [*catalogue.cells(), QuietCell]
FORMS = {
    "one": ({}, None),
    "both-ways-lengths": ({"bidirectional": True}, LENGTHS),
    "two-ways-lengths": (TWO_WAYS, LENGTHS),
    "one-lengths": ({}, LENGTHS),
    "two-ways": (TWO_WAYS, None),
}


def forms(*short):
    params = [pytest.param(*FORMS[form], id=form, marks=[] if form in short else pytest.mark.long) for form in FORMS]
    return pytest.mark.parametrize(("form", "lengths"), params)


def checkpointing_changes_nothing(cell, form, lengths, backend):
    layer = unfading.layer(cell)(
        laws.I, hidden_size(cell), dtype=torch.float64, backend=backend, **form, **few_iterations(cell)
    )
    x = laws.random_input()
    want = everything(layer, x, lengths=lengths, start=2)
    for every in (1, 3, 7, 10):
        layer.checkpoint_every = every
        for a, b in zip(everything(layer, x, lengths=lengths, start=2), want, strict=True):
            assert_close(a, b, **EXACT)


@pytest.mark.parametrize("cell", CELLS, ids=name)
@forms("two-ways-lengths")
@pytest.mark.sample(8)
def test_checkpointing_changes_no_gradient(cell, form, lengths):
    checkpointing_changes_nothing(cell, form, lengths, "reference")


@pytest.mark.parametrize("cell", sampled(CELLS))
@forms("both-ways-lengths")
@pytest.mark.sample(3)
def test_checkpointing_changes_no_gradient_of_the_compiled_loop(cell, form, lengths):
    checkpointing_changes_nothing(cell, form, lengths, "fused")


@pytest.mark.parametrize("noise", [{"recurrent_dropout": 0.5}, {"zoneout": 0.3}], ids=str)
def test_checkpointing_recomputes_the_same_noise(noise):
    layer, x = unfading.LSTM(2, 5, dtype=torch.float64, checkpoint_every=3, **noise), laws.random_input().requires_grad_()
    torch.manual_seed(1)
    output, _ = layer(x)
    (gradient,) = torch.autograd.grad(output.sum(), x)

    def f(x):
        torch.manual_seed(1)
        return layer(x)[0].sum()

    step = 1e-6
    direction = torch.randn_like(x)
    slope = (f(x + step * direction) - f(x - step * direction)) / (2 * step)
    assert_close(slope, (gradient * direction).sum(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "noise", [{"recurrent_dropout": 0.5}, {"zoneout": 0.3}, {"recurrent_dropout": 0.3, "zoneout": 0.3}], ids=str
)
@pytest.mark.parametrize("lengths", [None, torch.tensor([7, 2, 5])], ids=["full", "lengths"])
@pytest.mark.sample(2)
def test_noise_in_segments_outlives_a_switch_to_evaluation(noise, lengths):
    """The backward pass repeats the forward pass, although the layer has been switched to eval() in between."""
    layer = unfading.GRU(
        2, 5, 2, bidirectional=True, checkpoint_every=3, learn_initial_state=True, dtype=torch.float64, **noise
    )
    x = laws.random_input()
    gradients = []
    for switch in (False, True):
        torch.manual_seed(2)
        layer.train().zero_grad()
        output, _ = layer(x, lengths=lengths)
        layer.train(not switch)
        output.square().sum().backward()
        assert layer.training != switch
        gradients.append([p.grad.clone() for p in layer.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_segments_have_second_derivatives_and_run_under_transforms():
    layer = unfading.STAR(2, 4, dtype=torch.float64, checkpoint_every=2)
    x = laws.random_input(T=5, B=1).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0].square().sum(), x)
    parameters = dict(layer.named_parameters())
    weights = list(layer.parameters())

    def second(layer):
        (first,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weights)

    segmented = second(layer)
    layer.checkpoint_every = None
    for a, b in zip(segmented, second(layer), strict=True):
        assert_close(a, b, **EXACT)
    layer.checkpoint_every = 2
    per_row = torch.func.vmap(
        torch.func.grad(lambda p, x: torch.func.functional_call(layer, p, (x,))[0].square().sum()), (None, 1)
    )(parameters, x.detach().unsqueeze(2))
    assert all(torch.isfinite(g).all() for g in per_row.values())


def test_segments_take_parameters_that_are_swapped_in():
    """functional_call outside of any transform: the recomputation uses the tensors of the forward pass."""
    layer, x = unfading.STAR(2, 4, dtype=torch.float64, checkpoint_every=2), laws.random_input()
    swapped = {name: torch.randn_like(p, requires_grad=True) for name, p in layer.named_parameters()}
    gradients = []
    for every in (None, 2):
        layer.checkpoint_every = every
        output, _ = torch.func.functional_call(layer, swapped, (x,))
        gradients.append(torch.autograd.grad(output.square().sum(), list(swapped.values())))
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b, **EXACT)


class TwoInputs(NamedTuple):
    a: Tensor
    z: Tensor


class TwoStates(NamedTuple):
    h: Tensor
    c: Tensor


class RootCell(unfading.Cell):
    """The derivative of c's step is infinite at 0; h depends neither on c nor on the weight `idle`."""

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        self.W = nn.Linear(input_size, hidden_size)
        self.idle = nn.Parameter(torch.ones(hidden_size))

    def project(self, x, start=0):
        return TwoInputs(self.W(x), x * self.idle[0])

    def weights(self):
        return (self.idle,)

    def initial_state(self, batch):
        zeros = self.idle.new_zeros(batch, self.output_size)
        return TwoStates(zeros, zeros)

    def step(self, inputs, state, weights):
        return TwoStates(torch.tanh(inputs.a + 0.5 * state.h), state.c.relu().sqrt())


def root_layer(backend):
    return unfading.Recurrent(lambda size: RootCell(size, 3), 2, dtype=torch.float64, backend=backend)


def test_an_output_without_a_gradient_adds_no_nan():
    layer, x = root_layer("reference"), laws.random_input()
    for every in (None, 2):
        layer.checkpoint_every = every
        state = TwoStates(*(torch.zeros(1, x.shape[1], 3, dtype=torch.float64, requires_grad=True) for _ in "hc"))
        output, _ = layer(x, state)
        h, c = torch.autograd.grad(output.square().sum(), state, allow_unused=True)
        assert h.any()
        assert c is None


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_the_hook_of_a_parameter_that_is_not_read_is_not_called(backend):
    layer, x = root_layer(backend), laws.random_input()
    calls = []
    layer.cells[0].idle.register_hook(calls.append)
    layer.cells[0].W.weight.register_hook(lambda gradient: 2 * gradient)
    gradients = []
    for every in (None, 2):
        layer.checkpoint_every = every
        layer.zero_grad()
        layer(x)[0].square().sum().backward()
        gradients.append(layer.cells[0].W.weight.grad)
        assert layer.cells[0].idle.grad is None
    assert_close(*gradients, **EXACT)
    assert not calls


class ClockCell(RootCell):
    """Reads no x before the third step, or none at all."""

    def __init__(self, input_size, hidden_size, first):
        super().__init__(input_size, hidden_size)
        self.first = first

    def project(self, x, start=0):
        steps = [self.W(row) if start + t >= self.first else self.W.bias.expand(len(row), -1) for t, row in enumerate(x)]
        return TwoInputs(torch.stack(steps), self.idle.expand(*x.shape[:2], -1))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("first", [0, 3, 1000])
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.sample(6)
def test_the_hook_of_the_input_is_called_if_it_is_read(backend, first, batch_first):
    form = {"dtype": torch.float64, "backend": backend, "batch_first": batch_first}
    layer = unfading.Recurrent(lambda size: ClockCell(size, 3, first), 2, **form)
    results = []
    for every in (None, 2):
        layer.checkpoint_every = every
        x = laws.random_input().transpose(0, int(batch_first)).clone().requires_grad_()
        calls = []
        x.register_hook(calls.append)
        layer(x)[0].square().sum().backward()
        results.append([x.grad, *calls])
    whole, cut = results
    assert len(whole) == (1 if first == 1000 else 2)
    assert_close(cut, whole, **EXACT)


class BareRootCell(RootCell):
    def step(self, inputs, state, weights):
        return TwoStates(torch.tanh(inputs.a + 0.5 * state.h), state.c.sqrt())


def test_a_hook_adds_no_nan():
    """c has no gradient, an infinite derivative and a hook."""
    form = {"dtype": torch.float64, "backend": "reference", "checkpoint_every": 2}
    layer = unfading.Recurrent(lambda size: BareRootCell(size, 3), 2, **form)
    x = laws.random_input()
    state = TwoStates(*(torch.zeros(1, x.shape[1], 3, dtype=torch.float64, requires_grad=True) for _ in "hc"))
    for part in state:
        part.register_hook(lambda gradient: 2 * gradient)
    h, c = torch.autograd.grad(layer(x, state)[0].square().sum(), state)
    assert h.any()
    assert not c.any()


def test_one_dropout_mask_serves_all_segments():
    layer = unfading.LSTM(2, 5, recurrent_dropout=0.5, dtype=torch.float64)
    x, outputs = laws.random_input(), []
    for every in (None, 2):
        layer.checkpoint_every = every
        torch.manual_seed(4)
        outputs.append(layer(x)[0])
    assert_close(outputs[0], outputs[1], **EXACT)


def bytes_saved(layer, x):
    """Bytes that stay alive for the backward pass, saved by autograd or held by Python, as checkpoints are.

    Each storage counts once; input, output, final state, parameters and whatever was alive before do not count.
    """
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    before = {t.untyped_storage().data_ptr() for t in _tensors()}
    gc.freeze()  # what is alive now is not looked at again: there are millions of objects in a process that runs many tests
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            output, state = layer(x)
        gc.collect()
        saved.update({t.untyped_storage().data_ptr(): t for t in _tensors()})
    finally:
        gc.unfreeze()
    skip = before | {t.untyped_storage().data_ptr() for t in (x, output, *state, *layer.parameters())}
    return sum(t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in skip)


def _tensors():
    # By type, since isinstance would load lazy proxies of other modules.
    return [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]


@pytest.mark.parametrize("T", [1000, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", [unfading.LSTM, unfading.STAR, unfading.IncrementalRNN])
@pytest.mark.sample(2)
def test_checkpointing_saves_memory(kind, T):
    layer, x = kind(2, 8), torch.randn(T, 1, 2)
    plain = bytes_saved(layer, x)
    layer.checkpoint_every = int(T**0.5)
    segmented = bytes_saved(layer, x)
    # The state at the start of every segment is counted; otherwise the test would measure nothing.
    assert segmented >= 8 * 4 * (T // layer.checkpoint_every - 1)
    assert segmented < plain / 10


def test_truncated_is_the_whole_with_the_graph_cut():
    layer, x = unfading.IncrementalRNN(2, 5, inner_steps=2, steps=6, eta=0.2, dtype=torch.float64), laws.random_input()
    with torch.no_grad():
        layer.cells[0].eta.add_(0.1 * torch.rand_like(layer.cells[0].eta))
    x.requires_grad_()
    pieces = list(unfading.truncated(layer, x, 3))
    assert [(p.start, p.stop) for p in pieces] == [(0, 3), (3, 6), (6, 7)]
    assert_close(torch.cat([p.output for p in pieces]), layer(x)[0], **EXACT)
    assert_close(pieces[-1].state.h, layer(x)[1].h, **EXACT)
    (gradient,) = torch.autograd.grad(pieces[1].output.sum(), x)
    assert gradient[3:6].abs().sum() > 0
    assert gradient[:3].abs().sum() == 0


def test_truncated_goes_on_from_a_state_and_a_start():
    layer, x = (
        unfading.SiRNN(2, 5, steps=6, eta=0.2, batch_first=True, dtype=torch.float64),
        laws.random_input().transpose(0, 1),
    )
    whole = layer(x)[0]
    _, state = layer(x[:, :2])
    pieces = list(unfading.truncated(layer, x[:, 2:], 2, state=unfading.detach(state), start=2))
    assert [(p.start, p.stop) for p in pieces] == [(2, 4), (4, 6), (6, 7)]
    assert_close(torch.cat([p.output for p in pieces], dim=1), whole[:, 2:], **EXACT)


def test_truncated_trains_a_model_between_pieces():
    model = unfading.Model(nn.Identity(), unfading.STAR(2, 8), unfading.EveryStep(8, 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    x = torch.randn(600, 8, 2)
    target = x[..., :1].tanh()
    losses = []
    for piece in unfading.truncated(model, x, 20):
        loss = (piece.output - target[piece.start : piece.stop]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_truncated_refuses_two_directions():
    with pytest.raises(ValueError, match="bidirectional"):
        unfading.truncated(unfading.STAR(2, 5, bidirectional=True), torch.randn(4, 1, 2), 2)
    with pytest.raises(ValueError, match="every must be at least 1"):
        unfading.truncated(unfading.STAR(2, 5), torch.randn(4, 1, 2), 0)


def test_a_mask_per_segment_breaks_the_dropout_law(monkeypatch):
    monkeypatch.setattr(sys.modules["unfading.backends.time_checkpointing"], "constants_of", lambda cell, x, start: {})
    laws.fails(test_one_dropout_mask_serves_all_segments)


def test_segments_that_ignore_their_length_break_the_memory_law(monkeypatch):
    module = sys.modules["unfading.backends.choose"]
    whole = module.run_in_segments
    monkeypatch.setattr(module, "run_in_segments", lambda *a: whole(*a[:-1], a[-1]._replace(checkpoint_every=1)))
    with unfading.use_backend("reference"):
        laws.fails(test_checkpointing_saves_memory, unfading.LSTM, 1000)
