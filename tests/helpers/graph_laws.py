"""Tests of recorded loops, for a replacement on a CPU (`backends/test_cuda_graph`) and for CUDA graphs (`gpu/test_graph`).

Each test takes the fixture `device`, where layers run. Chunks have at most four steps, so that short sequences have several.
"""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import unfading
from tests.helpers.compiled import built, everything
from tests.helpers.variants import name
from tests.user.along_time import CausalConvolution, Cumsum, NormOverTime, Statistics
from tests.user.quiet import QuietCell
from unfading.backends.choose import choose
from unfading.backends.cuda_graph import backend as graph
from unfading.backends.cuda_graph import capture, chunks
from unfading.backends.cuda_graph.backend import graph_if_possible, graph_refusal
from unfading.cells.base import in_frame
from unfading.fuse.fused import runnable
from unfading.reference import scan

# float64: the same operations; sums over chunks in another order.
EXACT = 1e-12
T, B = 11, 5  # 4 + 4 + 2 + 1


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 4)


@pytest.fixture
def recordings(device, monkeypatch):
    """A list that grows with every recording."""
    recorded, record = [], capture.CapturedGraph.__init__

    def recording(self, *given):
        recorded.append(given)
        record(self, *given)

    monkeypatch.setattr(capture.CapturedGraph, "__init__", recording)
    return recorded


def agree(got, want, tolerance=EXACT):
    """None equals a gradient of zeros; a gradient that cancels to zero is as exact as the terms of its sum."""
    assert got.keys() == want.keys()
    assert all(value is None or value.isfinite().all() for value in want.values()), "the reference is not finite"
    floor = max(value.abs().max().item() for value in want.values() if value is not None) / 1000
    assert floor > 0
    for what, reference in want.items():
        value = got[what]
        if reference is None or value is None:
            assert all(each is None or not each.any() for each in (reference, value)), what
            continue
        scale, error = max(reference.abs().max().item(), floor), (value - reference).abs().max().item()
        assert error <= tolerance * scale, f"{what}: off by {error} at a scale of {scale}"


def given(device, T=T, B=B, dtype=torch.float64):
    return torch.randn(T, B, 3, dtype=dtype).to(device)


def lengths_on(device):
    return torch.tensor([11, 1, 4, 8, 5], device=device)


def same_as_the_reference(layer, device, tolerance=EXACT):
    layer, x = layer.to(device), given(device)
    for lengths in (None, lengths_on(device)):
        agree(everything(layer, x, "graph", lengths), everything(layer, x, "reference", lengths), tolerance)


@pytest.mark.parametrize("cell", [unfading.LSTMCell, unfading.IncrementalRNNCell, QuietCell], ids=name)
@pytest.mark.sample(1)
def test_resets_are_recorded(cell, device):
    layer, x = built(cell, 5, bidirectional=True, learn_initial_state=True).to(device), given(device)
    for share in (0.3, 0.0):
        resets = torch.rand(T, B) < share
        for lengths in (None, lengths_on(device)):
            agree(*(everything(layer, x, backend, lengths, resets) for backend in ("graph", "reference")))


@pytest.mark.parametrize(
    "noise", [{"recurrent_dropout": 0.5}, {"zoneout": 0.3}, {"recurrent_dropout": 0.3, "zoneout": 0.3}], ids=str
)
@pytest.mark.sample(1)
def test_noise_is_that_of_the_reference(noise, device):
    layer = built(unfading.GRUCell, 5, bidirectional=True, **noise)
    same_as_the_reference(layer, device)
    same_as_the_reference(layer.eval(), device)


@pytest.mark.parametrize("cell", [CausalConvolution, Cumsum, NormOverTime, Statistics], ids=name)
@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.sample(2)
def test_a_projection_along_time_is_not_cut(cell, every, device):
    layer = unfading.Recurrent(cell, 3, bidirectional=True, checkpoint_every=every, dtype=torch.float64)
    same_as_the_reference(layer, device)


def checkpointed():
    for every in (1, 3, 6, 20):
        for cell in (unfading.LSTMCell, unfading.IncrementalRNNCell, QuietCell):
            short = every == 3 or cell is unfading.LSTMCell
            yield pytest.param(cell, every, id=f"{every}-{name(cell)}", marks=[] if short else pytest.mark.long)


@pytest.mark.parametrize(("cell", "every"), [*checkpointed()])
@pytest.mark.sample(3)
def test_with_checkpoints(cell, every, device):
    same_as_the_reference(built(cell, 5, num_layers=2, bidirectional=True, checkpoint_every=every), device)


@pytest.mark.parametrize("cell", [unfading.LSTMCell, unfading.IncrementalRNNCell, QuietCell], ids=name)
def test_states_handed_in_learnt_and_carried_on(cell, device):
    layer = built(cell, 5, learn_initial_state=True).to(device)
    same_as_the_reference(layer, device)
    x, results = given(device), []
    for backend in ("graph", "reference"):
        layer.zero_grad()
        with unfading.use_backend(backend):
            first, state = layer(x[:6], start=2)
            second, state = layer(x[6:], state, start=8)
        (first.square().sum() + second.square().sum() + sum(part.sum() for part in state)).backward()
        results.append({n: p.grad.clone() for n, p in layer.named_parameters()} | {"first": first, "second": second})
    agree(*results)


def test_the_length_asks_for_no_new_recording(device, recordings):
    layer = built(unfading.STARCell, 5, backend="graph").to(device)
    for T in (*range(1, 14), 100):
        layer(given(device, T))[0].sum().backward()
    assert len(recordings) == 2 * 3  # chunks of 4, 2 and 1 steps, forward and backward
    with torch.no_grad():
        for T in (7, 100):
            layer(given(device, T))
    assert len(recordings) == 2 * 3 + 3  # without a gradient there is no backward pass
    layer(given(device, 7))
    assert len(recordings) == 2 * 3 + 3


def test_many_calls_under_way(device):
    """Forward and backward passes in any order, through all results or a part of them; no call changes another."""
    layer = built(unfading.LSTMCell, 5, num_layers=2).to(device)
    xs = [given(device).requires_grad_() for _ in range(3)]

    def run(x):
        output, state = layer(x)
        return [output, *state]

    def gradients(results, x):
        total = sum(part.square().sum() for part in results)
        return torch.autograd.grad(total, [x, *layer.parameters()], retain_graph=True)

    with unfading.use_backend("reference"):
        want = [run(x) for x in xs]
    with unfading.use_backend("graph"):
        got = [run(x) for x in xs]
    for i, parts in [(1, slice(3)), (2, slice(1)), (0, slice(1, 2)), (1, slice(3))]:
        first, second = ((*results[i], *gradients(results[i][parts], xs[i])) for results in (got, want))
        for a, b in zip(first, second, strict=True):
            assert_close(a, b, rtol=EXACT, atol=EXACT)


def test_what_was_returned_stays_as_it_is(device):
    cell = unfading.LSTMCell(3, 5).double().to(device)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            results = [graph.graph(cell, given(device), cell.initial_state(B), cell.weights()) for _ in range(2)]
            copies = [[part.clone() for parts in each for part in parts] for each in results]
            graph.graph(cell, given(device), cell.initial_state(B), cell.weights())
        for each, before in zip(results, copies, strict=True):
            assert all(map(torch.equal, [part for parts in each for part in parts], before))
        assert not torch.equal(results[0][1].h, results[1][1].h)


def test_one_layer_twice_in_one_graph(device):
    layer = unfading.layer(unfading.STARCell)(5, 5, dtype=torch.float64).to(device)
    x, results = torch.randn(T, B, 5, dtype=torch.float64).to(device), []
    for backend in ("graph", "reference"):
        with unfading.use_backend(backend):
            output = layer(layer(x)[0])[0]
        results.append(dict(enumerate(torch.autograd.grad(output.square().sum(), list(layer.parameters())))))
    agree(*results)


def test_second_derivatives(device):
    layer, x = built(unfading.LSTMCell, 3).to(device), given(device, 6, 2).requires_grad_()
    results = []
    for backend in ("graph", "reference"):
        with unfading.use_backend(backend):
            output, state = layer(x, lengths=torch.tensor([6, 3], device=device))
        (first,) = torch.autograd.grad(output.square().sum() + state.c.sum(), x, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), [x, *layer.parameters()])
        results.append(dict(enumerate([first, *second])))
    agree(*results)


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient(quiet, device):
    layer, x = built(unfading.LSTMCell, 5, bidirectional=True).to(device), given(device)
    with quiet():  # what is recorded inside is used outside too
        got, _ = layer(x) if choose(layer.cells[0], "auto") is graph_if_possible else (None, None)
        with unfading.use_backend("graph"):
            got, state = layer(x)
    with unfading.use_backend("reference"):
        want, final = layer(x)
    for a, b in zip((got, *state), (want, *final), strict=True):
        assert_close(a, b, rtol=EXACT, atol=EXACT)
    same_as_the_reference(layer, device)


@pytest.mark.parametrize("cell", [unfading.LSTMCell, unfading.EquilibriumRNNCell, QuietCell], ids=name)
def test_autocast(cell, device):
    layer, x = built(cell, 8, torch.float32).to(device), given(device, dtype=torch.float32)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        got, want = (everything(layer, x, backend) for backend in ("graph", "reference"))
    agree({"output": got["output"]}, {"output": want["output"]}, 1e-5)
    # The reference stores the cast matrix and sums its gradient in bfloat16, which has eight bits; a recording in float32.
    agree(got, want, 5e-2)
    plain = everything(layer, x, "graph")
    agree(plain, everything(layer, x, "reference"), 1e-4)
    assert cell is not unfading.LSTMCell or not torch.equal(plain["output"], got["output"])


def test_a_changed_option_is_noticed(device, recordings):
    layer, x = built(unfading.STARCell, 5, backend="graph").to(device), given(device)
    before, count = layer(x)[0], len(recordings)
    layer.cells[0].shift = 1.0
    assert not torch.equal(layer(x)[0], before)
    assert len(recordings) == 2 * count
    same_as_the_reference(layer, device)


def test_training_and_evaluation_are_kept_both(device, recordings):
    layer, x = built(unfading.STARCell, 5, torch.float32, zoneout=0.2, backend="graph").to(device), given(device, 4).float()
    for _ in range(3):
        layer.train()(x)[0].sum().backward()
        layer.eval()(x)
    assert len(recordings) == 4


def test_few_kinds_of_call_are_kept(device, recordings, monkeypatch):
    layer = built(unfading.STARCell, 5, backend="graph").to(device)
    outputs = [layer(given(device, 4, batch))[0] for batch in range(1, graph.STORED + 3)]
    assert len(recordings) == 2 * (graph.STORED + 2)
    outputs[0].sum().backward()  # the call itself holds its recordings
    layer(given(device, 4, graph.STORED + 2))
    assert len(recordings) == 2 * (graph.STORED + 2)
    layer(given(device, 4, 1))  # its recordings were dropped
    assert len(recordings) == 2 * (graph.STORED + 3)
    monkeypatch.setattr(graph, "MOST", graph.STORED + 4)
    with unfading.use_backend("auto"):
        if choose(layer.cells[0], "auto") is graph_if_possible:
            for batch in (20, 21, 22):
                layer(given(device, 4, batch))
            assert len(recordings) == 2 * (graph.STORED + 4)


def test_a_large_call_of_a_compiled_step_is_not_recorded(device, recordings, monkeypatch):
    cell, x = unfading.ConvSTARCell(2, 3).to(device), torch.randn(5, 2, 2, 6, 4, device=device)
    state, inputs_of_a_chunk = in_frame(cell.initial_state(2), (6, 4)), 2 * (chunks.CHUNK * 2 * 3 * 6 * 4)
    monkeypatch.setattr(graph, "LARGEST_INPUTS", 4 * inputs_of_a_chunk - 1)  # a byte less than they have
    got = graph_if_possible(cell, x, state, cell.weights(), plan=runnable(cell, 2))
    assert not recordings
    want, _ = scan(cell, cell.project(x), state, cell.weights())
    assert_close(got[0].h, want.h, rtol=1e-4, atol=1e-5)
    graph_if_possible(cell, x, state, cell.weights())  # the reference loop is
    assert recordings


def test_forgotten_recordings_are_made_again(device, recordings):
    layer, x = built(unfading.STARCell, 5, backend="graph").to(device), given(device)
    before, count = layer(x)[0], len(recordings)
    graph.forget(layer.cells[0])
    assert torch.equal(layer(x)[0], before)
    assert len(recordings) == 2 * count


def test_hooks_on_what_is_saved_see_no_recording(device):
    layer, x, saved = built(unfading.STARCell, 5, backend="graph").to(device), given(device), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(1), t)[1], lambda t: t):
        first = layer(x)[0]
        count = len(saved)
        second = layer(x)[0]
    assert len(saved) == 2 * count
    assert torch.equal(first, second)
    checked = torch.utils.checkpoint.checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)
    assert_close(
        torch.autograd.grad(checked.sum(), list(layer.parameters())), torch.autograd.grad(first.sum(), list(layer.parameters()))
    )


# -- unusual steps ------------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    a: torch.Tensor


class Weights(NamedTuple):
    U: torch.Tensor
    idle: torch.Tensor


class State(NamedTuple):
    h: torch.Tensor
    before: torch.Tensor


class OwnCell(unfading.Cell):
    """A cell with a given step over two parts of equal shape."""

    def __init__(self, step):
        super().__init__(3, 3)
        self.U, self.idle = nn.Parameter(0.5 * torch.randn(3, 3)), nn.Parameter(torch.ones(3))
        self.how = step

    def project(self, x, start=0):
        return Inputs(x)

    def weights(self):
        return Weights(self.U, self.idle)

    def initial_state(self, batch):
        return State(self.U.new_zeros(batch, 3), self.U.new_ones(batch, 3))

    def step(self, inputs, state, weights):
        return self.how(self, inputs.a, state, weights.U)


def own(step, device, backend="graph"):
    return unfading.Recurrent(lambda size: OwnCell(step), 3, backend=backend, dtype=torch.float64).to(device)


def test_a_step_may_hand_its_state_on(device):
    """Parts change places, and a part is an input: the result of one chunk must not be overwritten while it is read."""
    same_as_the_reference(own(lambda cell, a, s, U: State(s.before, s.h + a), device), device)
    same_as_the_reference(own(lambda cell, a, s, U: State(a, s.h), device), device)
    same_as_the_reference(own(lambda cell, a, s, U: State(s.before + a @ U, s.h), device), device)
    same_as_the_reference(own(lambda cell, a, s, U: State(torch.tensor(0.5) * a, 2 * s.before), device), device)


def test_a_weight_that_is_not_used_has_no_gradient(device):
    layer = own(lambda cell, a, s, U: State(s.before + a @ U, s.h), device)
    layer(given(device))[0].sum().backward()
    assert layer.cells[0].idle.grad is None
    assert layer.cells[0].U.grad is not None


REFUSED = {
    "looks at a value": lambda cell, a, s, U: State(a, s.h) if s.h.sum() > 0 else State(a + 1, s.h),
    "a shape that depends on values": lambda cell, a, s, U: State(a + a[a > 0].sum(), s.h),
    "draws random numbers": lambda cell, a, s, U: State(a + torch.randn_like(a), s.h),
    "not an argument of step": lambda cell, a, s, U: State(a @ cell.U, s.h),
    "copies numbers from the host": lambda cell, a, s, U: State(a * torch.tensor([1.0, 2.0, 3.0], device=a.device), s.h),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_step_that_cannot_be_recorded_says_why_and_runs_all_the_same(reason, device, recordings):
    layer, x = own(REFUSED[reason], device), given(device)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"OwnCell cannot run as CUDA graphs: .*{reason}.*graph_laws.py") as caught:
            layer(x)
        assert "backend='auto' runs the reference loop" in str(caught.value)
    assert not recordings
    assert reason in graph_refusal(layer.cells[0])
    layer.backend = "auto"
    torch.manual_seed(1)
    output = layer(x)[0]
    assert choose(layer.cells[0], "auto") is not graph_if_possible
    torch.manual_seed(1)
    layer.backend = "reference"
    assert_close(output, layer(x)[0], rtol=EXACT, atol=EXACT)


def test_a_failed_attempt_draws_no_noise_of_its_own(device):
    results = []
    torch.manual_seed(2)
    layer = unfading.Recurrent(lambda size: OwnCell(REFUSED["looks at a value"]), 3, zoneout=0.5, dtype=torch.float64).to(
        device
    )
    x = given(device)
    for backend in ("auto", "reference"):
        torch.manual_seed(1)
        with unfading.use_backend(backend):
            results.append([layer(x)[0], torch.rand(3, device=device)])
    assert "looks at a value" in graph_refusal(layer.runners[0])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, rtol=EXACT, atol=EXACT)


def test_a_step_that_is_wrong_says_so_as_by_the_reference(device):
    for backend in ("graph", "reference"):
        with pytest.raises(ValueError, match="step must keep the shapes of its state"):
            own(lambda cell, a, s, U: State(a[:, :2], s.h), device, backend)(given(device))


def test_a_failure_to_record_is_remembered(device, monkeypatch):
    layer, x, tried = own(lambda cell, a, s, U: State(a @ U + s.h, s.h), device, "auto"), given(device), []

    def fail(self, *given):
        tried.append(given)
        raise capture.NotGraphable("recording it failed: a stone in the way")

    monkeypatch.setattr(capture.CapturedGraph, "__init__", fail)
    with unfading.use_backend("reference"):
        want = layer(x)[0]
    layer.backend = "graph"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a stone in the way"):
            layer(x)
    layer.backend = "auto"
    for _ in range(2):
        assert_close(layer(x)[0], want, rtol=EXACT, atol=EXACT)
    assert len(tried) == 1


def test_what_surrounds_a_call_may_refuse_it(device):
    layer, x = own(lambda cell, a, s, U: State(a @ U + s.h, s.h), device), given(device)
    tangent = torch.randn_like(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        layer(torch.autograd.forward_ad.make_dual(x, tangent))
    with pytest.raises(RuntimeError, match=r"transform of torch\.func"):
        torch.func.vmap(lambda x: layer(x)[0])(x.unsqueeze(0))
    with (
        pytest.warns(UserWarning, match="Anomaly"),
        pytest.raises(RuntimeError, match="anomaly"),
        torch.autograd.detect_anomaly(),
    ):
        layer(x)
    with pytest.raises(RuntimeError, match="recording the operations"), torch.utils.flop_counter.FlopCounterMode(display=False):
        layer(x)
    layer.backend = "auto"
    output = torch.func.vmap(lambda x: layer(x)[0])(x.unsqueeze(0))[0]
    assert_close(output, layer(x)[0], rtol=EXACT, atol=EXACT)
