"""Tests of layers side by side, under Triton's interpreter (`fuse/test_wavefront.py`) and on a GPU (`gpu/test_wavefront.py`).

Each module that imports these tests has a fixture `device`. The law: a stack gives the same output, final states and gradients
with its layers side by side as with its layers one after the other.
"""

import pytest
import torch
from torch import nn

import unfading
from tests.helpers.compiled import built
from tests.helpers.triton_laws import CELLS, agree, everything
from tests.helpers.variants import hidden_size, name, sampled
from tests.user import along_time
from unfading.backends import choose
from unfading.fuse import wavefront, wavefront_run
from unfading.fuse.plan import plan, triton_kernel
from unfading.fuse.triton.launch_settings import Gpu

# One matrix, or several; a state of one part, or of two.
SOME = [unfading.STARCell, unfading.LSTMCell]
ROUNDING = 2e-6  # of the largest entry: sums of gradients over time, in another order


@pytest.fixture(autouse=True)
def many_multiprocessors(monkeypatch):
    monkeypatch.setattr(wavefront, "gpu", lambda device: Gpu(132, 1 << 20))


@pytest.fixture
def chunks(monkeypatch):
    """Cut sequences into chunks of at least so many steps; a list of the stacks that run side by side."""
    stacks = []
    forward = wavefront_run.WavefrontRun.forward

    def counted(self, *, keep):
        stacks.append(self.stack)
        return forward(self, keep=keep)

    def cut(steps):
        monkeypatch.setattr(wavefront, "CHUNKS", 10**6)
        monkeypatch.setattr(wavefront, "LEAST_STEPS", steps)
        return stacks

    monkeypatch.setattr(wavefront_run.WavefrontRun, "forward", counted)
    return cut


@pytest.fixture
def one_by_one(monkeypatch):
    """Call a function with the layers of every stack one after the other."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(choose, "LEAST_LAYERS", 10**6)
            return function()

    return call


def stack(cell, device, **keywords):
    return built(cell, hidden_size(cell), torch.float32, num_layers=3, **keywords).to(device)


def same(layer, x, lengths, one_by_one, resets=None):
    """Both ways agree: in outputs and states exactly on a CPU, in gradients up to the order of sums."""
    torch.manual_seed(7)
    got = everything(layer, x, lengths, "fused", resets)
    torch.manual_seed(7)
    want = one_by_one(lambda: everything(layer, x, lengths, "fused", resets))
    tolerance = ROUNDING if next(layer.parameters()).device.type == "cpu" else 1e-4
    agree(got, want, tolerance)


def test_a_chunk_comes_after_those_that_it_reads():
    for layers, count in ((1, 1), (3, 5), (5, 3), (12, 16)):
        order = {place: k for k, place in enumerate(wavefront_run.diagonals(layers, count))}
        assert len(order) == layers * count
        for (layer, chunk), k in order.items():
            assert order.get((layer - 1, chunk), -1) < k
            assert order.get((layer, chunk - 1), -1) < k


@pytest.mark.parametrize("cell", sampled(CELLS, [*map(name, SOME)]))
def test_every_cell_is_the_same_side_by_side(cell, device, chunks, one_by_one):
    layer, stacks = stack(cell, device), chunks(2)
    lengths = torch.tensor([5, 1, 4])
    for own in (None, lengths):
        same(layer, torch.randn(5, 3, 3), own, one_by_one)
    plain = cell.output is unfading.Cell.output
    # Units that do not read each other occupy a GPU without a second layer.
    dense = triton_kernel(plan(layer.runners[0]).key).lanes is None
    assert len(stacks) == (2 if plain and dense else 0)


@pytest.mark.parametrize("cell", SOME, ids=name)
def test_resets_reach_every_layer(cell, device, chunks, one_by_one):
    layer, stacks = stack(cell, device, dropout=0.3, learn_initial_state=True), chunks(2)
    resets = torch.rand(5, 3) < 0.4
    for lengths in (None, torch.tensor([5, 1, 4])):
        same(layer, torch.randn(5, 3, 3), lengths, one_by_one, resets)
    assert [each.resets is not None for each in stacks] == [True, True]


@pytest.mark.parametrize("cell", SOME, ids=name)
def test_dropout_draws_the_same_masks(cell, device, chunks, one_by_one):
    layer, stacks = stack(cell, device, dropout=0.5), chunks(2)
    same(layer, torch.randn(4, 3, 3), None, one_by_one)
    assert len(stacks) == 1
    assert sum(mask is not None for mask in stacks[0].masks) == 2
    same(layer.eval(), torch.randn(4, 3, 3), None, one_by_one)
    assert not any(mask is not None for mask in stacks[1].masks)


@pytest.mark.parametrize(("steps", "T"), [(1, 3), (2, 7), (3, 6), (3, 7), (4, 8)])
@pytest.mark.sample(2)
def test_chunks_of_any_length(steps, T, device, chunks, one_by_one):
    layer, stacks = stack(unfading.STARCell, device), chunks(steps)
    same(layer, torch.randn(T, 2, 3), None, one_by_one)
    assert [b - a for a, b in stacks[0].bounds] == [steps] * (T // steps) + [T % steps] * bool(T % steps)


def test_short_sequences_run_layer_by_layer(device, chunks):
    stacks = chunks(4)
    stack(unfading.STARCell, device)(torch.randn(7, 2, 3, device=device))
    assert not stacks


def results(layer, x, state):
    output, final = layer(x, state)
    return output, *final


def test_a_state_is_passed_in_and_differentiated(device, chunks, one_by_one):
    layer, stacks = stack(unfading.LSTMCell, device, learn_initial_state=True), chunks(2)
    x = torch.randn(5, 3, 3, device=device)
    state = [torch.randn(3, 3, hidden_size(unfading.LSTMCell), device=device, requires_grad=True) for _ in "hc"]

    def gradients():
        given = results(layer, x, tuple(state))
        own = results(layer, x, None)
        loss = sum(part.square().sum() for part in (*given, *own))
        return [*given, *own, *torch.autograd.grad(loss, [*state, *layer.parameters()])]

    got = gradients()
    assert len(stacks) == 2
    for a, b in zip(got, one_by_one(gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_input_of_one_feature_is_projected_in_the_loop(device, chunks, one_by_one):
    layer = built(unfading.LSTMCell, 5, torch.float32, features=1, num_layers=3).to(device)
    stacks = chunks(2)
    same(layer, torch.randn(5, 3, 1), torch.tensor([3, 5, 1]), one_by_one)
    assert stacks[0].layers[0].plan.with_project
    assert not stacks[0].layers[1].plan.with_project


def test_a_projection_knows_the_index_of_its_first_step(device, chunks, one_by_one):
    """Step sizes that all rows share and that depend on the step, in a sequence that continues another one."""
    layer = built(unfading.IncrementalRNNCell, 5, torch.float32, num_layers=3, steps=6, eta=0.3).to(device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    stacks, x = chunks(2), torch.randn(5, 3, 3, device=device)

    def gradients():
        output, _ = layer(x, start=2)
        return [output, *torch.autograd.grad(output.square().sum(), list(layer.parameters()))]

    for got, want in zip(gradients(), one_by_one(gradients), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert stacks[0].layers[0].cell.shared


def test_without_a_gradient(device, chunks, one_by_one):
    layer, stacks = stack(unfading.LSTMCell, device), chunks(2)
    x = torch.randn(5, 3, 3, device=device)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = results(layer, x, None)
            want = one_by_one(lambda: results(layer, x, None))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    assert len(stacks) == 2


def test_frozen_parameters_have_no_gradient(device, chunks, one_by_one):
    layer, stacks = stack(unfading.STARCell, device), chunks(2)
    layer.cells[1].requires_grad_(False)
    layer.cells[2].from_input.bias.requires_grad_(False)
    x = torch.randn(5, 3, 3, device=device)

    def gradients():
        layer.zero_grad()
        layer(x)[0].square().sum().backward()
        return {key: parameter.grad for key, parameter in layer.named_parameters()}

    got, want = gradients(), one_by_one(gradients)
    assert len(stacks) == 1
    for key, d in want.items():
        assert (got[key] is None) == (d is None), key
        if d is not None:
            torch.testing.assert_close(got[key], d, rtol=1e-4, atol=1e-5)


def test_autocast(device, chunks, one_by_one):
    layer, stacks = stack(unfading.STARCell, device), chunks(2)
    x = torch.randn(5, 3, 3, device=device, requires_grad=True)
    sources = [x, *layer.parameters()]

    def gradients(twice):
        with torch.autocast(device, torch.bfloat16):
            output, _ = layer(x)
        first = torch.autograd.grad(output.square().sum(), sources, create_graph=twice)
        return [output, *first]

    for twice in (False, True):
        for got, want in zip(gradients(twice), one_by_one(lambda twice=twice: gradients(twice)), strict=True):
            assert (got - want).abs().max() <= 0.01 * want.abs().max()  # of 8 bits
    assert len(stacks) == 2


def test_dropout_has_the_precision_of_the_outputs(device, chunks):
    """Not that of an input under autocast, in which 1 / (1 - p) would be rounded to 8 bits."""
    layer, stacks = stack(unfading.STARCell, device, dropout=0.1), chunks(2)
    with torch.autocast(device, torch.bfloat16):
        layer(torch.randn(5, 3, 3, device=device).bfloat16())
    assert all(mask.dtype == torch.float32 for mask in stacks[0].masks[1:])


def test_two_runs_give_the_same_bits(device, chunks):
    layer, stacks = stack(unfading.LSTMCell, device), chunks(2)
    x = torch.randn(7, 3, 3)
    first, second = everything(layer, x, None, "fused"), everything(layer, x, None, "fused")
    assert len(stacks) == 2
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_second_derivatives_and_batches_of_gradients(device, chunks, one_by_one):
    layer, stacks = stack(unfading.STARCell, device, dropout=0.3), chunks(2)
    x = torch.randn(4, 2, 3, device=device, requires_grad=True)
    sources = [x, *layer.parameters()]

    def second():
        torch.manual_seed(7)
        output, _ = layer(x)
        first = torch.autograd.grad(output.square().sum(), sources, create_graph=True)
        return torch.autograd.grad(sum(d.square().sum() for d in first), sources, allow_unused=True)

    def batched():
        torch.manual_seed(7)
        output, _ = layer(x)
        vectors = torch.linspace(-1, 1, 2 * output.numel(), device=device).reshape(2, *output.shape)
        return torch.func.vmap(lambda vector: torch.autograd.grad(output, sources, vector))(vectors)

    for gradients in (second, batched):
        for got, want in zip(gradients(), one_by_one(gradients), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    assert len(stacks) == 2


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a.clone()

    @staticmethod
    def backward(ctx, d):
        return None


@pytest.mark.parametrize("twice", [False, True])
def test_no_gradient_arrives(twice, device, chunks):
    layer, stacks = stack(unfading.STARCell, device), chunks(2)
    x = torch.randn(5, 3, 3, device=device, requires_grad=True)
    loss = NoGradient.apply(layer(x)[0]).sum()
    assert torch.autograd.grad(loss, x, create_graph=twice, allow_unused=True) == (None,)
    assert len(stacks) == 1


def test_a_backward_pass_can_be_repeated_and_a_changed_output_is_noticed(device, chunks):
    layer, stacks = stack(unfading.STARCell, device), chunks(2)
    x = torch.randn(5, 3, 3, device=device)
    output, _ = layer(x)
    once = torch.autograd.grad(output.square().sum(), list(layer.parameters()), retain_graph=True)
    twice = torch.autograd.grad(output.square().sum(), list(layer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        output.square().sum().backward()
    output, _ = layer(x)
    loss = output.sum()
    output.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert len(stacks) == 2


class Noisy(along_time.Along):
    """Its projection draws random numbers."""

    def mixed(self, a, x, start):
        return a + torch.randn_like(a)


class Outside(along_time.Along):
    """Its projection reads a tensor with a gradient that is no parameter of it."""

    factor = torch.tensor(1.5, requires_grad=True)

    def mixed(self, a, x, start):
        return a * self.factor.to(a.device)


def test_a_gradient_of_a_tensor_from_outside_is_not_lost(device, chunks, one_by_one):
    stacks = chunks(2)
    layer = unfading.Recurrent(Outside, 3, 3, backend="fused").to(device)
    x = torch.randn(5, 2, 3, device=device)

    def gradient():
        return torch.autograd.grad(layer(x)[0].sum(), Outside.factor)[0]

    torch.testing.assert_close(gradient(), one_by_one(gradient))
    with torch.no_grad():
        before = len(stacks)
        layer(x)
    assert len(stacks) == before + 1


def along(device):
    return unfading.Recurrent(along_time.CausalConvolution, 3, 3).to(device)


def hooked(device):
    layer = stack(unfading.STARCell, device)
    layer.cells[1].from_input.register_forward_hook(lambda *_: None)
    return layer


def with_own_output(device):
    layer = stack(unfading.STARCell, device)
    layer.cells[1].output = lambda state: 2 * state[0]
    return layer


def watched(device):
    layer = stack(unfading.STARCell, device)
    layer.cells[1].W_h.register_hook(lambda d: None)
    return layer


LAYER_BY_LAYER = {
    "a projection along time": along,
    "random numbers in the projection": lambda device: unfading.Recurrent(Noisy, 3, 3).to(device),
    "a mask that is constant in time": lambda device: stack(unfading.STARCell, device, recurrent_dropout=0.5),
    "a hook of a module": hooked,
    "a hook of a parameter": watched,
    "an output of one cell": with_own_output,
    "two directions": lambda device: stack(unfading.STARCell, device, bidirectional=True),
    "segments": lambda device: stack(unfading.STARCell, device, checkpoint_every=2),
    "two layers": lambda device: built(unfading.STARCell, 5, torch.float32, num_layers=2).to(device),
    "the reference loop": lambda device: stack(unfading.STARCell, device, backend="reference"),
}


@pytest.mark.parametrize("why", LAYER_BY_LAYER)
@pytest.mark.sample(3)
def test_where_layers_run_one_after_the_other(why, device, chunks):
    layer, stacks = LAYER_BY_LAYER[why](device), chunks(2)
    output, _ = layer(torch.randn(5, 2, 3, device=device))
    output.sum().backward()
    assert not stacks


def test_a_layer_that_fills_the_gpu_runs_alone(device, chunks, monkeypatch):
    layer, stacks = stack(unfading.STARCell, device), chunks(2)
    monkeypatch.setattr(wavefront, "gpu", lambda device: Gpu(3, 1 << 20))
    with torch.no_grad():
        layer(torch.randn(4, 16, 3, device=device))
        assert len(stacks) == 1  # one block of rows of two that may be occupied
        layer(torch.randn(4, 17, 3, device=device))
        assert len(stacks) == 1


def test_the_backend_is_observed(device, chunks):
    layer, stacks = stack(unfading.STARCell, device), chunks(2)
    with choose.observe_backends() as backends:
        layer(torch.randn(4, 2, 3, device=device))
    assert len(stacks) == 1
    assert backends == {"STARCell": {"backend": "fused", "reason": None}}


def test_saved_tensors_of_the_user_are_respected(device, chunks):
    layer, stacks = stack(unfading.STARCell, device), chunks(2)
    x = torch.randn(5, 2, 3, device=device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        layer(x)
    assert not stacks
    layer(x)
    assert stacks


def test_a_module_above_trains(device, chunks):
    """A few steps of an optimiser reduce the loss, with parameters that change between the passes of two calls."""
    stacks = chunks(2)
    model = nn.Sequential(unfading.STAR(3, 5, num_layers=3)).to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    x, losses = torch.randn(4, 3, 3, device=device), []
    for _ in range(3):
        loss = (model(x)[0] - 0.3).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    assert len(stacks) == 3
