"""Resets: the steps from one mark to the next are a sequence of their own, in outputs and all gradients, on every backend."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import unfading
from tests.helpers.compiled import built
from tests.helpers.variants import hidden_size, name
from unfading import catalogue
from unfading.backends.choose import observe_backends
from unfading.fuse import fused
from unfading.fuse.ir.passes import resets_first
from unfading.fuse.plan import PROGRAMS, plan_or_raise

# float64: sums over segments in another order.
EXACT = {"rtol": 1e-10, "atol": 1e-10}
T, B, I = 8, 3, 3
RESETS = torch.zeros(T, B, dtype=torch.bool)
RESETS[3, 0] = RESETS[4, 0] = RESETS[0, 1] = RESETS[6, 1] = True
SOME = [unfading.STARCell, unfading.LSTMCell, unfading.IncrementalRNNCell]


def segments(marks):
    """The bounds of the sequences of one row."""
    begins = sorted({0, *marks.nonzero().flatten().tolist()})
    return list(zip(begins, [*begins[1:], len(marks)], strict=True))


def apart(layer, x, resets=RESETS, lengths=None):
    """The outputs of a layer on every sequence by itself, from the initial state, by the reference loop."""
    rows = []
    for b in range(x.shape[1]):
        end = len(x) if lengths is None else int(lengths[b])
        with unfading.use_backend("reference"):
            parts = [layer(x[a:c, b : b + 1], start=a)[0] for a, c in segments(resets[:end, b])]
        row = torch.cat(parts)
        rows.append(torch.cat([row, row.new_zeros(len(x) - end, *row.shape[1:])]))
    return torch.cat(rows, 1)


def with_gradients(layer, x, output):
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    named = {"x": x, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad((output * weight).sum(), list(named.values()), allow_unused=True)
    zero = {what: torch.zeros_like(tensor) for what, tensor in named.items()}
    pairs = zip(named, gradients, strict=True)
    return {"output": output, **{what: zero[what] if d is None else d for what, d in pairs}}


def same_as_apart(layer, backend, x=None, lengths=None):
    x = (torch.randn(T, B, I, dtype=torch.float64) if x is None else x).requires_grad_()
    with unfading.use_backend(backend), observe_backends() as ran:
        output, _ = layer(x, resets=RESETS, lengths=lengths)
    assert backend == "auto" or {each["backend"] for each in ran.values()} == {backend}
    assert_close(with_gradients(layer, x, output), with_gradients(layer, x, apart(layer, x, lengths=lengths)), **EXACT)


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("cell", catalogue.cells(), ids=name)
@pytest.mark.sample(12)
def test_every_cell_starts_anew_at_a_reset(cell, backend):
    same_as_apart(built(cell, hidden_size(cell)), backend)


@pytest.mark.parametrize("cell", catalogue.cells(), ids=name)
@pytest.mark.sample(12)
def test_every_cell_starts_anew_at_a_reset_without_gradients(cell, monkeypatch):
    """Another kernel, which reads the mask beside x, in chunks of some steps and in both directions."""
    layer = built(cell, hidden_size(cell), bidirectional=True)
    x = torch.randn(B, T, I, dtype=torch.float64).transpose(0, 1)
    for lengths in (None, torch.tensor([8, 6, 5])):
        for chunk in (fused.CHUNK_BYTES, 1500):
            monkeypatch.setattr(fused, "CHUNK_BYTES", chunk)
            with torch.no_grad(), unfading.use_backend("fused"):
                output, state = layer(x, resets=RESETS, lengths=lengths)
            with unfading.use_backend("reference"):
                want = layer(x, resets=RESETS, lengths=lengths)
            assert_close((output, tuple(state)), (want[0], tuple(want[1])), **EXACT)


def test_input_is_not_copied_for_resets_without_gradients(monkeypatch):
    """Joining the mask to x took 4 % of the time of an Elman network."""
    layer, x = unfading.Elman(I, 4), torch.randn(T, B, I)
    want = layer(x, resets=RESETS)[0].detach()
    monkeypatch.delattr(fused, "with_resets")
    with torch.no_grad():
        assert_close(layer(x, resets=RESETS)[0], want)


class WithFeature(NamedTuple):
    inner: Any
    feature: torch.Tensor


class OwnResets(unfading.STARCell):
    """A cell that resets its state by a feature of x, and may read the state from before the reset too."""

    both = False

    def project(self, x, start=0):
        return WithFeature(super().project(x, start), x[:, :, :1])

    def step(self, inputs, state, weights):
        new = super().step(inputs.inner, type(state)(torch.where(inputs.feature > 0.5, 0.5, state.h)), weights)
        return type(state)(new.h + 0.1 * state.h) if self.both else new


class ReadsBothStates(OwnResets):
    both = True


@pytest.mark.parametrize("cell", [OwnResets, ReadsBothStates], ids=name)
def test_only_a_state_that_nothing_else_reads_is_reset_in_place(cell):
    layer = built(cell, 5)
    program = PROGRAMS[plan_or_raise(layer.cells[0]).key]
    assert len(resets_first(program)[1]) == (not cell.both)
    x = torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
    same_as_apart(layer, "fused", x)
    with torch.no_grad():
        for resets in (RESETS, torch.zeros_like(RESETS)):
            assert_close(layer(x, resets=resets)[0], apart(layer, x, resets), **EXACT)
        assert_close(layer(x)[0], apart(layer, x, torch.zeros_like(RESETS)), **EXACT)


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("cell", catalogue.convolutional_cells(), ids=name)
@pytest.mark.sample(3)
def test_every_convolutional_cell_starts_anew_at_a_reset(cell, backend):
    layer = unfading.layer(cell)(I, 2, learn_initial_state=True, dtype=torch.float64)
    same_as_apart(layer, backend, torch.randn(T, B, I, 4, 5, dtype=torch.float64))


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("cell", [unfading.STARCell, unfading.LSTMCell], ids=name)
@pytest.mark.sample(2)
def test_in_both_directions_with_lengths_and_a_learned_state(cell, backend):
    layer = built(cell, 5, num_layers=2, bidirectional=True, learn_initial_state=True)
    same_as_apart(layer, backend)
    same_as_apart(layer, backend, lengths=torch.tensor([8, 6, 5]))


@pytest.mark.parametrize("every", [1, 3, 5])
@pytest.mark.sample(1)
def test_checkpointing_through_time(every):
    same_as_apart(built(unfading.LSTMCell, 5, bidirectional=True, checkpoint_every=every), "auto")


def test_a_given_state_holds_until_the_first_reset_and_no_gradient_passes_it():
    layer = built(unfading.LSTMCell, 5)
    x = torch.randn(T, B, I, dtype=torch.float64)
    state = tuple(torch.randn(1, B, 5, dtype=torch.float64, requires_grad=True) for _ in "hc")
    output, final = layer(x, state, resets=RESETS)
    assert_close(output[:3, 0], layer(x, state)[0][:3, 0])
    for part in torch.autograd.grad(sum(each.sum() for each in final), state):
        assert not part[:, :2].any()  # rows with a reset
        assert part[:, 2].all()
    assert_close(layer.trajectory(x, state, resets=RESETS).h[:, 0], output)


def test_a_reset_drops_what_is_not_finite():
    layer, x = unfading.STAR(I, 4), torch.randn(T, B, I)
    x[1, 0] = torch.inf
    x.requires_grad_()
    output, _ = layer(x, resets=RESETS)
    assert output[3:].isfinite().all()
    (gradient,) = torch.autograd.grad(output[3:].sum(), x)
    assert gradient[3:].isfinite().all()


def test_all_forms_of_input_take_resets():
    layer = built(unfading.GRUCell, 4)
    x = torch.randn(T, B, I, dtype=torch.float64)
    want, _ = layer(x, resets=RESETS)
    assert_close(layer(x[:, 0], resets=RESETS[:, 0])[0], want[:, 0])
    layer.batch_first = True
    assert_close(layer(x.transpose(0, 1), resets=RESETS.T)[0], want.transpose(0, 1))
    lengths = torch.tensor([4, 8, 6])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    got, _ = nn.utils.rnn.pad_packed_sequence(layer(packed, resets=RESETS)[0])
    layer.batch_first = False
    assert_close(got, layer(x, resets=RESETS, lengths=lengths)[0])


@pytest.mark.parametrize("noise", [{"recurrent_dropout": 0.5}, {"zoneout": 0.3}], ids=str)
def test_noise_is_drawn_as_without_resets(noise):
    layer, x = built(unfading.GRUCell, 4, **noise), torch.randn(T, B, I, dtype=torch.float64)
    outputs = []
    for backend, resets in (("reference", RESETS), ("fused", RESETS), ("reference", None)):
        torch.manual_seed(3)
        with unfading.use_backend(backend):
            outputs.append(layer(x, resets=resets)[0])
    assert_close(outputs[0], outputs[1])
    assert_close(outputs[0][:, 2], outputs[2][:, 2])  # the row without a reset


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("cell", SOME, ids=name)
@pytest.mark.sample(2)
def test_streams_and_chunks_of_time_take_their_part(cell, backend):
    layer = built(cell, 5, num_layers=2, learn_initial_state=True, backend=backend).eval()
    x = torch.randn(T, B, I, dtype=torch.float64)
    _, before = layer(x)
    want, _ = layer(x, before, resets=RESETS)
    stream = layer.stream(B, before)
    assert_close(torch.stack([stream.push(each, resets=own) for each, own in zip(x, RESETS, strict=True)]), want)
    chunks = unfading.truncated(layer, x, 3, state=before, resets=RESETS)
    assert_close(torch.cat([chunk.output for chunk in chunks]), want)
    model = unfading.Model(nn.Identity(), layer, unfading.EveryStep(5, 2).double())
    assert_close(model(x, before, resets=RESETS, truncate=3)[0], model(x, before, resets=RESETS)[0])
    assert_close(model(x, before, resets=RESETS)[0], model.head(want, None))


def test_a_stream_of_frames_takes_resets():
    layer = unfading.ConvSTAR(2, 3, dtype=torch.float64).eval()
    x = torch.randn(T, B, 2, 4, 4, dtype=torch.float64)
    stream = layer.stream(B, frame=(4, 4))
    got = torch.stack([stream.push(each, resets=own) for each, own in zip(x, RESETS, strict=True)])
    assert_close(got, layer(x, resets=RESETS)[0])


def test_transforms_compilation_and_export():
    layer, x = unfading.LSTM(I, 4, num_layers=2), torch.randn(T, B, I)
    want = layer(x, resets=RESETS)[0]
    both = torch.stack([RESETS, torch.zeros_like(RESETS)])
    batched = torch.func.vmap(lambda resets: layer(x, resets=resets)[0])(both)
    assert_close(batched, torch.stack([want, layer(x)[0]]))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert_close(compiled(x, resets=RESETS)[0], want)
    exported = torch.export.export(layer, (x,), {"resets": RESETS}).module()
    assert_close(exported(x, resets=RESETS)[0], want)
    assert_close(exported(x, resets=both[1])[0], layer(x)[0])


def test_second_derivatives():
    layer = built(unfading.GRUCell, 3)
    x = torch.randn(3, 2, I, dtype=torch.float64, requires_grad=True)
    resets = torch.tensor([[False, False], [True, False], [False, True]])
    assert torch.autograd.gradgradcheck(lambda x: layer(x, resets=resets)[0], x)


def test_a_cell_that_is_replaced_runs_with_resets():
    layer, x = unfading.STAR(I, 4), torch.randn(T, B, I)
    layer(x, resets=RESETS)
    layer.cells[0] = unfading.STARCell(I, 4)
    assert_close(layer(x, resets=RESETS)[0], apart(layer, x))


@pytest.mark.parametrize(
    ("resets", "error", "words"),
    [
        (RESETS.float(), TypeError, r"STAR's resets must be a tensor of torch\.bool; got torch\.float32\. Compare first"),
        ([[True]], TypeError, r"STAR's resets must be a tensor of torch\.bool; got list"),
        (RESETS.T, ValueError, r"STAR's resets must have shape \[8, 3\], steps and rows as in the input; got \[3, 8\]"),
        (RESETS[0], ValueError, r"STAR's resets must have shape \[8, 3\]"),
    ],
    ids=["float", "list", "transposed", "one step"],
)
def test_wrong_resets_are_refused(resets, error, words):
    with pytest.raises(error, match=words):
        unfading.STAR(I, 4)(torch.randn(T, B, I), resets=resets)


def test_wrong_resets_of_streams_and_chunks_are_refused():
    layer = unfading.STAR(I, 4)
    with pytest.raises(ValueError, match=r"push takes resets of torch\.bool \[2\], one for every row; got"):
        layer.stream(2).push(torch.ones(2, I), resets=torch.ones(2))
    with pytest.raises(ValueError, match=r"resets must mark the 8 steps of x along axis 0; got shape \[3, 8\]"):
        unfading.truncated(layer, torch.randn(T, B, I), 3, resets=RESETS.T)
